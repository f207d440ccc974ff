"""The token embedding as a packed table, which a head that is tied to it has too."""

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
    """The fate of the token embedding where the recipe packs it; `UsageError` where that cannot be."""
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
    """The structure and fates with the token embedding among the linears, and a tied head that has its table.

    A head that is packed in a scheme of its own is stored apart.
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
    """Warning where nothing but the packed token embedding keeps other tools from reading the result."""
    table = next((name for name, linear in linears.items() if linear.kind == "embedding"), None)
    if table is None or len(not_portable) > 1:
        return ()
    return (
        f"only quantkit reads this, for {table} is packed. Leave --embeddings out, or convert with "
        "--dense-embeddings, for a checkpoint of which `quantkit plan` names other readers.",
    )
