"""Select the schemes that an engine reads, among those of an allocation."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantkit.checkpoint.compressed_tensors import compressed_tensors_format, why_not_compressed_tensors
from quantkit.checkpoint.engine_support import support
from quantkit.checkpoint.engines import Engine, LayerKind
from quantkit.errors import UsageError
from quantkit.model.structure import Linear
from quantkit.packing.schemes import Scheme


@dataclass(frozen=True)
class _Stored:
    """Storage of a linear: format and arguments of compressed-tensors.

    `alone` if the engine reads it only in a checkpoint that has no other format.
    """

    format: str
    arguments: str
    alone: bool


def readable(
    engine: Engine, groups: Sequence[Sequence[Linear]], schemes: Mapping[str, Sequence[Scheme]]
) -> list[frozenset[int]]:
    """Return for each group the indices of the schemes that `engine` reads.

    `schemes` are the candidates by module. Raises `UsageError` for a group without a readable scheme.
    """
    found: list[dict[int, _Stored]] = []
    for group in groups:
        row = {}
        for number in range(len(schemes[group[0].module])):
            stored = {_stored(engine, linear, schemes[linear.module][number]) for linear in group}
            # An engine has one class for a group, which takes its matrices to be stored in one way.
            if len(stored) == 1 and (one := stored.pop()) is not None:
                row[number] = one
        found.append(row)
    # Experts that are read alone decide for all.
    formats = {one.format for row in found for one in row.values() if one.alone}
    left = [
        frozenset(number for number, one in row.items() if not formats or one.format in formats)
        for row in found
    ]
    for group, numbers in zip(groups, left, strict=True):
        if not numbers:
            raise UsageError(
                f"{engine.name} reads none of the formats to choose from for {group[0].module}. Name others "
                f"with --formats, or decide on it with a rule, such as --rule '{group[0].module}=int8'."
            )
    return left


def expressible(group: Sequence[Linear], schemes: Mapping[str, Sequence[Scheme]]) -> frozenset[int]:
    """Return the indices of the schemes that compressed-tensors can express for every linear of a group.

    Returns all indices if there is none: only quantkit reads the group then.
    """
    every = frozenset(range(len(schemes[group[0].module])))
    found = frozenset(
        number
        for number in every
        if all(
            why_not_compressed_tensors(
                schemes[linear.module][number], linear.shape[1], experts=linear.kind == "experts"
            )
            is None
            for linear in group
        )
    )
    return found or every


def _stored(engine: Engine, linear: Linear, scheme: Scheme) -> _Stored | None:
    """Return the storage of a linear in `scheme`; None if `engine` does not read it."""
    (rows, columns), experts = linear.shape, linear.kind == "experts"
    kind: LayerKind = "experts" if experts else "linear"
    if why_not_compressed_tensors(scheme, columns, experts=experts) is not None:
        return None
    row = compressed_tensors_format(scheme, columns)
    read = support(engine, row.stored_as(linear.module, kind, scheme, (rows, columns)))
    arguments = json.dumps(row.arguments(scheme, columns))
    return _Stored(row.stored.name, arguments, read.alone) if read.classes else None
