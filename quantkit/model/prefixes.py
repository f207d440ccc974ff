"""A checkpoint under the names of its model, where a file has others for the same tensors.

Wrappers of training leave their names before or within those of parameters: data parallelism `module.`,
torch.compile `_orig_mod.`, PEFT `base_model.model.`, FSDP `_fsdp_wrapped_module.`. And where lm_head and the
embedding share their weights, a file may have them as either; behind this module they are the embedding's.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.model.structure import Structure, read_structure

#: What wrappers put within names, a part of its own.
_WITHIN = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
#: A part of the names of weights that an adapter is beside.
_UNMERGED = ".base_layer."


def read_names(checkpoint: Checkpoint) -> tuple[Checkpoint, Structure]:
    """`checkpoint` under the names of its model, with a note if the file has others, and its structure.

    `CheckpointError` as from `read_structure`.
    """
    try:
        structure = read_structure(checkpoint)
    except CheckpointError:
        found = _without_wrapper(checkpoint)
        if found is None:
            raise
        checkpoint, structure, taken = found
        parts = " and ".join(map(repr, taken.values()))
        note = f"{parts} was taken off the names of the tensors: the model does not have it"
        checkpoint = replace(checkpoint, notes=(*checkpoint.notes, note))
    if structure.tied_head is None:
        return checkpoint, structure
    stored, embedding = structure.tied_head
    renamed = _renamed(checkpoint, {stored: embedding})
    note = f"{stored} is stored as {embedding}, to which it is tied"
    renamed = replace(renamed, notes=(*renamed.notes, note))
    return renamed, read_structure(renamed)


def wrapper(checkpoint: Checkpoint) -> dict[str, str]:
    """What hides the names of a model's tensors, by a pattern that finds it; empty if nothing is known to."""
    found = _without_wrapper(checkpoint)
    return {} if found is None else found[2]


def _without_wrapper(checkpoint: Checkpoint) -> tuple[Checkpoint, Structure, dict[str, str]] | None:
    """The first renaming that gives all parameters of the model a tensor, and what it takes off, by pattern.

    `CheckpointError` for an adapter that was not merged.
    """
    for names, taken in _candidates(list(checkpoint.tensors)):
        if len(set(names.values())) == len(names):
            renamed = _renamed(checkpoint, names)
            try:
                return renamed, read_structure(renamed), taken
            except CheckpointError:
                continue
    if any(_UNMERGED in name for name in checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.directory} has an adapter beside its weights ({_UNMERGED.strip('.')}). "
            "Merge it with PEFT's merge_and_unload(), and save that."
        )
    return None


def _candidates(names: list[str]) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Renamings: without the parts of wrappers, then without each prefix that all names share as well."""
    parts = sorted({match[0] for name in names for match in _WITHIN.finditer(name)})
    if parts:
        yield {name: _WITHIN.sub("", name) for name in names}, {re.escape(part): part for part in parts}
    first, last = min(names), max(names)
    shared = first[
        : next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    ]
    for end in (match.end() for match in re.finditer(r"\.", shared)):
        others = {match[0] for name in names for match in _WITHIN.finditer(name[end:])}
        taken = {f"^{re.escape(shared[:end])}": shared[:end], **{re.escape(one): one for one in others}}
        yield {name: _WITHIN.sub("", name[end:]) for name in names}, taken


def _renamed(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        new = names.get(name, name)
        tensors[new] = replace(tensor, name=new)
    return replace(checkpoint, tensors=tensors)
