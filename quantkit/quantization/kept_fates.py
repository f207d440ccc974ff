"""Choose for each linear of a converted source the scheme that represents its values exactly, or dense."""

from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.errors import CheckpointError, first_of
from quantkit.model.structure import Structure
from quantkit.packing.schemes import Scheme
from quantkit.quantization.nesting import nested_scheme, why_not_nested
from quantkit.quantization.plan import Plan
from quantkit.recipes.recipe import Fate

SCALES_OF_SCALES = "its scales have scales of their own"


def kept_fates(checkpoint: Checkpoint, structure: Structure) -> dict[str, Fate]:
    """Return the fate of each linear by module: the scheme that represents its grid exactly, and no method.

    Unquantized linears stay dense, and so do the head and linears of `structure.kept` if no scheme fits them.
    Any other raises `CheckpointError`, and so does a source without any grid.
    """
    fates: dict[str, Fate] = {}
    refused: dict[str, str] = {}
    for name, linear in structure.linears.items():
        tensors = [checkpoint.tensors.get(f"{one}.weight") for one in linear.stored]
        found = [kept_fate(tensor) for tensor in tensors]
        reasons = [fate for fate in found if isinstance(fate, str)]
        fates[name] = Fate(None, None, reasons[0]) if reasons else _same(found)
        if reasons and any(tensor is not None and tensor.stored_as for tensor in tensors):
            refused[name] = reasons[0]
    refused = {
        name: reason
        for name, reason in refused.items()
        if name not in structure.kept and structure.linears[name].kind != "lm_head"
    }
    if refused:
        raise CheckpointError(
            f"{first_of(map(repr, refused))} cannot be converted exactly: {next(iter(refused.values()))}. "
            "`quantkit quantize` reads the same source and rounds to a format of your choice."
        )
    if not any(fate.scheme for fate in fates.values()):
        raise CheckpointError(
            f"{checkpoint.directory}: no linear is stored with codes and scales, so there is nothing to "
            "convert. `quantkit quantize` packs it."
        )
    return fates


def kept_table(checkpoint: Checkpoint, structure: Structure) -> Fate | str:
    """Choose the scheme that represents the stored values of the token embedding exactly, without a method.

    Returns the reason as text if there is none.
    """
    if isinstance(structure.table, str):
        return structure.table
    return kept_fate(checkpoint.tensors[f"{structure.table.stored[0]}.weight"])


def dense_share(checkpoint: Checkpoint, planned: Plan) -> dict[str, str]:
    """Return the low-bit tensors of the source that the output stores dense, with their stored format."""
    copied = {task.source.name for shard in planned.shards for task in shard.tasks if task.scheme is None}
    return {
        name: tensor.stored_as
        for name, tensor in checkpoint.tensors.items()
        if tensor.stored_as is not None and name in copied
    }


def kept_fate(tensor: StoredTensor | None) -> Fate | str:
    """Choose the scheme that represents the stored values of a matrix; return the reason if none does.

    `tensor` is None for a head that shares the embedding's weights.
    """
    if tensor is None:
        return "its weights are the embedding's"
    if tensor.stored_as is None:
        return f"plain {tensor.dtype} in the source"
    spec = tensor.grid_spec
    reason = SCALES_OF_SCALES if spec is None else why_not_nested(spec)
    if spec is None or reason is not None:
        return f"tensor {tensor.name!r} is {tensor.stored_as}: {reason}"
    return Fate(nested_scheme(spec), None, f"{tensor.stored_as} in the source")


def _same(fates: list[Fate | str]) -> Fate:
    """Return the fate of a linear from those of its matrices: dense, with the reason, if schemes differ."""
    schemes: set[Scheme | None] = {fate.scheme for fate in fates if isinstance(fate, Fate)}
    first = fates[0]
    assert isinstance(first, Fate)
    if len(schemes) > 1:
        names = ", ".join(sorted(map(str, schemes)))
        return Fate(None, None, f"its matrices are of several schemes: {names}")
    return first
