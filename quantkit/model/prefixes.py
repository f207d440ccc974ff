"""Remove wrapper prefixes from the tensor names of a checkpoint.

Training wrappers leave their names before or inside parameter names: data parallelism `module.`,
torch.compile `_orig_mod.`, PEFT `base_model.model.`, FSDP `_fsdp_wrapped_module.`. A file may also store a
tied weight as lm_head; it gets the name of the embedding.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.model.names import as_matrices
from quantkit.model.split_experts import with_cuts
from quantkit.model.structure import Structure, read_structure

#: Names that wrappers insert as a path component.
_WITHIN = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
#: Path component of base weights next to an unmerged adapter.
_UNMERGED = ".base_layer."


def read_names(checkpoint: Checkpoint) -> tuple[Checkpoint, Structure]:
    """Return `checkpoint` under the names of its model, with a note if names were changed, and its structure.

    Linears are read as [N, K], even if a class stores [K, N]. Fused experts are read as separate matrices
    with names of their own. Raises `CheckpointError` for an unknown architecture, a parameter without tensor,
    or a tensor of another shape than in the config.
    """
    try:
        structure = read_structure(checkpoint)
    except CheckpointError:
        unwrapped = _without_wrapper(checkpoint)
        if unwrapped is None:
            raise
        checkpoint, structure, removed = unwrapped
        parts = " and ".join(map(repr, removed.values()))
        note = f"{parts} was taken off the names of the tensors: the model does not have it"
        checkpoint = replace(checkpoint, notes=(*checkpoint.notes, note))
    if structure.tied_head is not None:
        checkpoint, structure = _with_tied_head(checkpoint, *structure.tied_head)
    transposed = (linear for linear in structure.linears.values() if linear.transposed)
    names = [f"{name}.weight" for linear in transposed for name in linear.stored]
    checkpoint = as_matrices(checkpoint, names)
    cuts, row_cuts = structure.cuts, structure.row_cuts
    if not cuts and not row_cuts:
        return checkpoint, structure
    split = with_cuts(checkpoint, {**cuts, **row_cuts})
    return split, replace(read_structure(split), cuts=cuts, row_cuts=row_cuts)


def _with_tied_head(checkpoint: Checkpoint, stored: str, embedding: str) -> tuple[Checkpoint, Structure]:
    """Rename the tensor `stored`, a head tied to the embedding, to `embedding`; add a note.

    Returns the renamed checkpoint and its structure.
    """
    renamed = _renamed(checkpoint, {stored: embedding})
    note = f"{stored} is stored as {embedding}, to which it is tied"
    renamed = replace(renamed, notes=(*renamed.notes, note))
    return renamed, read_structure(renamed)


def wrapper(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the wrapper prefixes in tensor names, by the regex that removes each; empty without wrapper."""
    unwrapped = _without_wrapper(checkpoint)
    return {} if unwrapped is None else unwrapped[2]


def _without_wrapper(checkpoint: Checkpoint) -> tuple[Checkpoint, Structure, dict[str, str]] | None:
    """Return the first renaming that gives each parameter a tensor; None without one.

    The result is the renamed checkpoint, its structure, and the removed parts by regex. Raises
    `CheckpointError` for an unmerged adapter.
    """
    for names, removed in _candidates(list(checkpoint.tensors)):
        if len(set(names.values())) == len(names):
            renamed = _renamed(checkpoint, names)
            try:
                return renamed, read_structure(renamed), removed
            except CheckpointError:
                continue
    if any(_UNMERGED in name for name in checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.directory} has an adapter beside its weights ({_UNMERGED.strip('.')}). "
            "Merge it with PEFT's merge_and_unload(), and save that."
        )
    return None


def _candidates(names: list[str]) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Yield attempts to remove wrappers: new by old name, and the removed text by the regex that removes it.

    The first only removes wrapper parts; the others also remove a prefix that all `names` share.
    """
    parts = sorted({match[0] for name in names for match in _WITHIN.finditer(name)})
    if parts:
        yield {name: _WITHIN.sub("", name) for name in names}, {re.escape(part): part for part in parts}
    first, last = min(names), max(names)
    shared = first[
        : next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    ]
    for end in (match.end() for match in re.finditer(r"\.", shared)):
        parts_inside = {match[0] for name in names for match in _WITHIN.finditer(name[end:])}
        removed = {
            f"^{re.escape(shared[:end])}": shared[:end],
            **{re.escape(one): one for one in parts_inside},
        }
        yield {name: _WITHIN.sub("", name[end:]) for name in names}, removed


def _renamed(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        new = names.get(name, name)
        tensors[new] = replace(tensor, name=new)
    return replace(checkpoint, tensors=tensors)
