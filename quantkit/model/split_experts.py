"""Read fused experts, stored in one tensor, as separate matrices [N, K].

    stored                                    read as
    mlp.experts.gate_up_proj [E, H, 2I]       mlp.experts.0.gate_proj.weight [I, H], ...0.up_proj.weight, ...
    mlp.experts.down_proj [E, I, H]           mlp.experts.0.down_proj.weight [H, I], ...

So planning, streaming and calibration see the same as in checkpoints with separate experts.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quantkit.checkpoint.low_bit.grid import GridSpec, StoredGrid
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import Read, StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quantkit.model.conversions import RowsTensor
    from quantkit.model.experts import ExpertsSpec
    from quantkit.model.names import Renamed


@dataclass(frozen=True, kw_only=True)
class CutTensor(StoredTensor):
    """Matrix `index` of `expert` in the fused tensor `source`, which holds `parts` matrices per expert.

    `spec` is the layout in the file. The offset is that of the matrix if it is one range of the file, and is
    not read otherwise. If its rows are no ranges of the file, the whole expert is read, unless the source is
    low-bit and stored by rows.
    """

    source: StoredTensor
    spec: "ExpertsSpec"
    expert: int
    index: int
    parts: int

    @classmethod
    def from_source(
        cls, name: str, source: StoredTensor, spec: "ExpertsSpec", expert: int, index: int, parts: int
    ) -> "CutTensor":
        """Return matrix `index` of the `parts` that `source` has of `expert`, called `name`."""
        _, *sizes = source.shape
        rows, columns = reversed(sizes) if spec.transposed else sizes
        found = cls(
            *(name, source.dtype, (rows // parts, columns), source.file, source.offset),
            source=source,
            spec=spec,
            expert=expert,
            index=index,
            parts=parts,
        )
        is_range = type(source) is StoredTensor and not spec.transposed and not found._alternates
        offset = source.offset + (expert * parts + index) * found.stored_bytes
        return replace(found, offset=offset, whole=not is_range and found.grid_spec is None)

    @property
    def _alternates(self) -> bool:
        """Return True if rows of this matrix alternate with rows of the other matrices of the expert."""
        return self.spec.interleaved and self.parts > 1

    @property
    def stored_bytes(self) -> int:
        """Return the stored bytes of this matrix: its share of the bytes of the source."""
        return self.source.stored_bytes // (self.source.shape[0] * self.parts)

    @property
    def stored_as(self) -> str | None:
        """Return the low-bit format of the source; None for floats."""
        return self.source.stored_as

    def values(self, read: Read, start: int, stop: int) -> "torch.Tensor":
        """Read rows `[start, stop)`."""
        grid = self.grid(read, start, stop)
        if grid is not None:
            return grid.values().to(self.torch_dtype)
        if not self.whole:
            return read(self, start, stop)
        (expert,) = self.source.values(read, self.expert, self.expert + 1)
        rows = self.spec.rows(expert)
        own = rows[self.index :: self.parts] if self._alternates else rows.chunk(self.parts)[self.index]
        return own[start:stop].contiguous()

    @property
    def grid_spec(self) -> GridSpec | None:
        """Return the grid of the source; None unless rows of the source are rows of the matrices."""
        found = self.source.grid_spec
        if found is None or found.matrices is None or found.transposed != self.spec.transposed:
            return None
        rows, columns = self.shape
        return replace(
            found,
            shape=(rows, columns),
            matrices=None,
            transposed=False,
            group_rows=self._group_rows(found),
        )

    def _group_rows(self, found: GridSpec) -> int:
        """Return the rows that share a scale; 1 if a block of the source has rows of two matrices."""
        size, rows = found.group_rows, self.shape[0]
        if size >= found.shape[0]:
            return rows
        if self._alternates:
            return size // self.parts if size % self.parts == 0 else 1
        return size if self.parts == 1 or rows % size == 0 else 1

    def grid(self, read: Read, start: int, stop: int) -> StoredGrid | None:
        """Read codes and scales of rows `[start, stop)`; None if the source has no grid, as floats."""
        spec, step = self.grid_spec, self.parts if self._alternates else 1
        if spec is None:
            return None
        rows = self.shape[0]
        first = self.expert * self.parts * rows + (0 if step > 1 else self.index * rows)
        found = self.source.grid(read, first + start * step, first + stop * step)
        assert found is not None
        own = slice(self.index if step > 1 else 0, None, step)
        zeros, biases, divisor = (
            None if one is None else one[own] for one in (found.zeros, found.biases, found.global_scale)
        )
        return StoredGrid(spec, found.codes[own], found.scales[own], zeros, biases, divisor, found.groups)


def with_cuts(checkpoint: Checkpoint, cuts: "Mapping[str, CutTensor | RowsTensor]") -> Checkpoint:
    """Return `checkpoint` with `cuts`, by name, in place of the tensors that they are slices of.

    The whole tensors can still be read, for experts that stay dense.
    """
    by_source: dict[str, dict[str, StoredTensor]] = {}
    for name, cut in cuts.items():
        by_source.setdefault(cut.source.name, {})[name] = cut
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        tensors |= by_source.get(name, {name: tensor})
    uncut = {cut.source.name: cut.source for cut in cuts.values()}
    return replace(checkpoint, tensors=tensors, uncut={**checkpoint.uncut, **uncut})


def cuts_of(
    modules: "Mapping[str, nn.Module]", tensors: Mapping[str, StoredTensor], places: "Mapping[str, Renamed]"
) -> dict[str, CutTensor]:
    """Return the matrices of all fused experts in `modules`, by their new names.

    `places` are the places of the stored tensors in the model. Left out are experts that cannot be packed,
    and experts that transformers does not only stack or transpose when it loads them.
    """
    from quantkit.model.experts import ExpertsSpec, find_spec, is_fused_experts

    of_parameter: dict[str, list[StoredTensor]] = {}
    for stored, place in places.items():
        of_parameter.setdefault(place.parameter, []).append(tensors[stored])
    cuts: dict[str, CutTensor] = {}
    for name, module in modules.items():
        spec = find_spec(module) if is_fused_experts(module) else None
        if not isinstance(spec, ExpertsSpec):
            continue
        found: dict[str, CutTensor] | None = {}
        for leaf in spec.parameters:
            shape = tuple(module._parameters[leaf].shape)  # type: ignore[union-attr]
            parts = of_parameter.get(f"{name}.{leaf}", [])
            some = _cuts_of_parameter(f"{name}.{leaf}", spec, shape, parts, places)
            found = None if found is None or some is None else found | some
        cuts |= found or {}
    return cuts


@dataclass(frozen=True)
class StackedMatrix:
    """One matrix of experts in a stacked tensor [E, ...]: its index, and shape and leaf of the tensor."""

    leaf: str
    shape: tuple[int, ...]
    spec: "ExpertsSpec"
    expert: int
    index: int
    parts: int
    name: str

    @classmethod
    def of_cut(cls, cut: CutTensor) -> "StackedMatrix":
        """Return the `StackedMatrix` of a `CutTensor`."""
        leaf, name = cut.source.name.rpartition(".")[2], ".".join(cut.name.rsplit(".", 3)[1:])
        return cls(leaf, cut.source.shape, cut.spec, cut.expert, cut.index, cut.parts, name)

    @classmethod
    def of_fused(cls, leaf: str, matrices: int, shape: tuple[int, int]) -> "Iterator[StackedMatrix]":
        """Yield the places of `matrices`, [N, K] each, in the parameter `leaf` that transformers stacks."""
        from quantkit.model.experts import MATRICES, ExpertsSpec
        from quantkit.model.names import own_name

        parts, (rows, columns) = len(MATRICES[leaf]), shape
        whole = (matrices // parts, parts * rows, columns)
        for expert, index in itertools.product(range(whole[0]), range(parts)):
            name = own_name("", expert, leaf, index).removeprefix(".")
            yield cls(leaf, whole, ExpertsSpec(), expert, index, parts, name)


def cuts_alike(
    sets: Iterable[Sequence[StackedMatrix]], others: Iterable[StoredTensor]
) -> dict[str, CutTensor]:
    """Return the matrices of fused experts among `others`, by new name.

    `others` with the tensor names and shapes of one of `sets` are cut, such as experts of extra prediction
    heads, which the model class lacks.
    """
    stored: dict[str, dict[str, StoredTensor]] = {}
    for tensor in others:
        stem, _, leaf = tensor.name.rpartition(".")
        stored.setdefault(stem, {})[leaf] = tensor
    layouts = {frozenset((one.leaf, one.shape) for one in matrices): matrices for matrices in sets}
    found: dict[str, CutTensor] = {}
    for (stem, tensors), (sizes, matrices) in itertools.product(stored.items(), layouts.items()):
        if not sizes <= {(leaf, tensor.shape) for leaf, tensor in tensors.items()}:
            continue
        for one in matrices:
            name, source = f"{stem}.{one.name}", tensors[one.leaf]
            found[name] = CutTensor.from_source(name, source, one.spec, one.expert, one.index, one.parts)
    return found


def _cuts_of_parameter(
    parameter: str,
    spec: "ExpertsSpec",
    shape: tuple[int, ...],
    stored: Sequence[StoredTensor],
    places: "Mapping[str, Renamed]",
) -> dict[str, CutTensor] | None:
    """Return the matrices in `parameter`, of `shape` [E, ...] and made of `stored`, by their new names.

    `spec` is its layout in the model, `places` where the stored tensors go. None if a stored tensor cannot be
    sliced into matrices, or there are none.
    """
    from quantkit.model.experts import MATRICES
    from quantkit.model.names import own_name

    owner, _, leaf = parameter.rpartition(".")
    cuts = {}
    for tensor in stored:
        as_stored = _spec_in_file(spec, tensor, shape, places[tensor.name])
        if as_stored is None:
            return None
        stem, _, last = tensor.name.rpartition(".")
        parts = len(MATRICES[leaf]) if len(stored) == 1 else 1
        for expert, index in itertools.product(range(shape[0]), range(parts)):
            place = index if parts > 1 else places[tensor.name].part
            name = own_name(stem if last == leaf else owner, expert, leaf, place)
            cuts[name] = CutTensor.from_source(name, tensor, as_stored, expert, index, parts)
    return cuts or None


def _spec_in_file(
    spec: "ExpertsSpec", tensor: StoredTensor, shape: tuple[int, ...], place: "Renamed"
) -> "ExpertsSpec | None":
    """Return the layout in the file of `tensor`, which goes to `place` in a parameter of `shape` [E, ...].

    `spec` is the parameter's layout in the model. None if `tensor` cannot be sliced into matrices.
    """
    if place.own or len(place.operations) > 1:
        return None
    (operation,) = place.operations or (None,)
    kind = "" if operation is None else type(operation).__name__
    same, turned = tensor.shape == shape, tensor.shape == (shape[0], shape[2], shape[1])
    # Some versions transpose only tensors of another shape than the parameter, others all.
    turns = kind == "Transpose" and turned and not (same and operation.check_dims)
    if turns:
        return replace(spec, transposed=not spec.transposed)
    if same and kind == "Interleave" and not spec.transposed:
        return replace(spec, interleaved=not spec.interleaved)
    # One tensor of all gates, and one of all ups.
    half = kind == "Concatenate" and tensor.shape == (shape[0], shape[1] // 2, shape[2])
    fits = (same and kind in ("", "Transpose")) or (half and not spec.transposed and not spec.interleaved)
    return spec if fits else None
