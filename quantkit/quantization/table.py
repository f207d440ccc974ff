"""Pack the token embedding as a table, which a tied head shares."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.model.structure import Linear, Structure
from quantkit.recipes.recipe import Fate, Recipe

HEAD_KEPT = "no --lm-head or rule for it"


def asked_table(
    checkpoint: Checkpoint, structure: Structure, recipe: Recipe, fates: Mapping[str, Fate]
) -> Fate | None:
    """Return the fate of the token embedding if the recipe packs it, else None.

    Raises `UsageError` if the embedding cannot be packed as the recipe requires.
    """
    if recipe.embeddings is None or recipe.embeddings.keep:
        return None
    table = structure.table
    if isinstance(table, str):
        raise UsageError(f"the embedding cannot be packed: {table}. Leave --embeddings out.")
    head = next((name for name, linear in structure.linears.items() if linear.kind == "lm_head"), None)
    if structure.tied and head is not None and fates[head].scheme is None and fates[head].reason != HEAD_KEPT:
        raise UsageError(
            f"{head} is {fates[head].reason}, but has the weights of {table.module}, which --embeddings "
            "packs. Drop the rule, or leave --embeddings out."
        )
    return recipe.embeddings_fate(checkpoint.tensors[f"{table.stored[0]}.weight"].torch_dtype)


def with_table(
    structure: Structure, fates: Mapping[str, Fate], table: Fate
) -> tuple[Structure, Mapping[str, Fate]]:
    """Add the token embedding to the linears, and a tied head that has no scheme of its own.

    Such a head uses the packed table; one with a scheme is stored separately. `table` is the fate of the
    embedding. Returns the structure and the fates with them.
    """
    assert isinstance(structure.table, Linear)
    module = structure.table.module
    linears = {module: structure.table, **structure.linears}
    fates = {module: table, **fates}
    for name, linear in structure.linears.items():
        if structure.tied and linear.kind == "lm_head" and fates[name].scheme is None:
            linears[name] = replace(linear, stored=())
            fates[name] = Fate(table.scheme, None, f"the table of {module}")
    dense = {name: reason for name, reason in structure.dense.items() if name != structure.embedding}
    return replace(structure, linears=linears, dense=dense), fates


def packed_table(linears: Mapping[str, Linear], not_portable: Sequence[str]) -> tuple[str, ...]:
    """Return a warning if only the packed token embedding keeps other tools from reading the result."""
    table = next((name for name, linear in linears.items() if linear.kind == "embedding"), None)
    if table is None or len(not_portable) > 1:
        return ()
    return (
        f"only quantkit reads this, for {table} is packed. Leave --embeddings out, or convert with "
        "--dense-embeddings, for a checkpoint of which `quantkit plan` names other readers.",
    )
