"""Read fused experts that are stored in one tensor for all as matrices [N, K] of their own.

    stored                                    read as
    mlp.experts.gate_up_proj [E, H, 2I]       mlp.experts.0.gate_proj.weight [I, H], ...0.up_proj.weight, ...
    mlp.experts.down_proj [E, I, H]           mlp.experts.0.down_proj.weight [H, I], ...

So plan, stream and calibration see what other checkpoints store. `SplitCheckpoint` reads no more than it is
asked for where a matrix is a range of the file, and what the tensor has of one expert otherwise.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import Read, StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quantkit.checkpoint.low_bit.grid import GridSpec, StoredGrid
    from quantkit.model.experts import ExpertsSpec
    from quantkit.model.names import Renamed


@dataclass(frozen=True, kw_only=True)
class GridRows(StoredTensor):
    """A matrix of experts on a grid: rows `first`, `first + step`, ... of all rows of `source`.

    `whole` if the rows of the grid are not those of the matrix, which is then read with all of its expert.
    """

    source: StoredTensor
    first: int
    step: int

    @property
    def stored_bytes(self) -> int:
        """Its share of the bytes of `source`."""
        return self.source.stored_bytes * self.elements // self.source.elements

    @property
    def stored_as(self) -> str | None:
        """The format of `source`."""
        return self.source.stored_as

    @property
    def grid_spec(self) -> "GridSpec | None":
        """The grid of `source`, of this matrix alone; None if its rows are not those of the matrix."""
        spec = self.source.grid_spec
        if spec is None or self.whole:
            return None
        return replace(spec, shape=(self.shape[0], self.shape[1]), matrices=None, transposed=False)

    @property
    def location(self) -> tuple[Path, int, int]:
        """Where the bytes of `source` are, and which of its rows this has."""
        return self.file, self.offset + self.first, self.stored_bytes

    def grid(self, read: Read, start: int, stop: int) -> "StoredGrid | None":
        """Codes and scales of rows `[start, stop)`."""
        spec = self.grid_spec
        first = self.first + start * self.step
        found = self.source.grid(read, first, self.first + (stop - 1) * self.step + 1)
        if spec is None or found is None:
            return None

        def every(part: "torch.Tensor | None") -> "torch.Tensor | None":
            return None if part is None else part[:: self.step]

        return replace(
            found,
            spec=spec,
            codes=found.codes[:: self.step],
            scales=found.scales[:: self.step],
            zeros=every(found.zeros),
            biases=every(found.biases),
            global_scale=every(found.global_scale),
        )

    def values(self, read: Read, start: int, stop: int) -> "torch.Tensor":
        """Rows `[start, stop)`, rounded once, from float32."""
        found = self.grid(read, start, stop)
        assert found is not None, "a matrix without rows of its own is read whole"
        return found.values().to(self.torch_dtype)


@dataclass(frozen=True)
class Cut:
    """Matrix `index` of `expert` in a stored tensor: `spec` says how the file has it.

    A tensor with one matrix of each expert has `index` None.
    """

    source: StoredTensor
    spec: "ExpertsSpec"
    parameter: str
    expert: int
    index: int | None

    def of(self, whole: "torch.Tensor") -> "torch.Tensor":
        """Return the view of the matrix [N, K] in what the file has of its expert."""
        if self.index is None:
            return self.spec.rows(whole)
        return self.spec.matrix(whole, self.parameter, self.index)

    def tensor(self, name: str) -> StoredTensor:
        """Return the matrix as a tensor called `name`; its offset counts if it is a range of the file."""
        from quantkit.model.experts import MATRICES

        if self.source.grid_spec is not None:
            return self._on_grid(name, self.source.grid_spec)
        _, *sizes = self.source.shape
        rows, columns = reversed(sizes) if self.spec.transposed else sizes
        count = 1 if self.index is None else len(MATRICES[self.parameter])
        found = replace(self.source, name=name, shape=(rows // count, columns))
        place = self.expert * count + (self.index or 0)
        is_range = not self.spec.transposed and (count == 1 or not self.spec.interleaved)
        return replace(found, offset=self.source.offset + place * found.nbytes, whole=not is_range)

    def _on_grid(self, name: str, spec: "GridSpec") -> "GridRows":
        from quantkit.model.experts import MATRICES

        count = 1 if self.index is None else len(MATRICES[self.parameter])
        # Of a grid, rows are outputs or, where only the file is turned, inputs.
        turned = self.spec.transposed != spec.transposed
        total, columns = spec.shape[::-1] if turned else spec.shape
        rows, index = total // count, self.index or 0
        interleaved = self.spec.interleaved and count > 1
        first = self.expert * spec.shape[0] + (index if interleaved else index * rows)
        return GridRows(
            name,
            self.source.dtype,
            (rows, columns),
            self.source.file,
            self.source.offset,
            whole=turned,
            source=self.source,
            first=first,
            step=count if interleaved else 1,
        )


@dataclass(frozen=True)
class SplitCheckpoint(Checkpoint):
    """Checkpoint `inner` in which matrices of experts have names of their own.

    Tensors of `inner` can still be read by their names there.
    """

    inner: Checkpoint | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> "torch.Tensor":
        assert self.inner is not None
        cut = self.cuts.get(name)
        if cut is None:
            return self.inner.read(name, start, stop)
        if not self.tensors[name].whole:
            return super().read(name, start, stop)
        (expert,) = self.inner.read(cut.source.name, cut.expert, cut.expert + 1)
        return cut.of(expert)[start:stop].contiguous()

    def fingerprint(self, *, of_copies: bool = False) -> str:
        """That of `inner`."""
        assert self.inner is not None
        return self.inner.fingerprint(of_copies=of_copies)


def split_experts(checkpoint: Checkpoint, cuts: Mapping[str, Cut]) -> SplitCheckpoint:
    """Return `checkpoint` with the matrices of `cuts`, by their new names, in place of their sources."""
    by_source: dict[str, list[str]] = {}
    for name, cut in cuts.items():
        by_source.setdefault(cut.source.name, []).append(name)
    # A checkpoint of another kind makes tensors as they are read: a matrix is no range of its files.
    is_plain = type(checkpoint) is Checkpoint
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        found = {one: cuts[one].tensor(one) for one in by_source.get(name, ())}
        tensors |= {one: replace(cut, whole=cut.whole or not is_plain) for one, cut in found.items()}
        if not found:
            tensors[name] = tensor
    fields = {name: getattr(checkpoint, name) for name in Checkpoint.__dataclass_fields__}
    return SplitCheckpoint(**{**fields, "tensors": tensors, "inner": checkpoint, "cuts": dict(cuts)})


def cuts_of(
    modules: "Mapping[str, nn.Module]", tensors: Mapping[str, StoredTensor], places: "Mapping[str, Renamed]"
) -> dict[str, Cut]:
    """Return the cuts of all experts of `modules` that are stored in one tensor for all, by their new names.

    `places` are those of the stored tensors in the model. Experts that cannot be packed, or of which
    transformers changes the tensors in other ways, have none.
    """
    from quantkit.model.experts import ExpertsSpec, find_spec, is_fused_experts

    of_parameter: dict[str, list[StoredTensor]] = {}
    for stored, place in places.items():
        of_parameter.setdefault(place.parameter, []).append(tensors[stored])
    cuts: dict[str, Cut] = {}
    for name, module in modules.items():
        spec = find_spec(module) if is_fused_experts(module) else None
        if not isinstance(spec, ExpertsSpec):
            continue
        found: dict[str, Cut] | None = {}
        for leaf in spec.parameters:
            shape = tuple(module._parameters[leaf].shape)  # type: ignore[union-attr]
            parts = of_parameter.get(f"{name}.{leaf}", [])
            some = _cuts_of_parameter(f"{name}.{leaf}", spec, shape, parts, places)
            found = None if found is None or some is None else found | some
        cuts |= found or {}
    return cuts


def _cuts_of_parameter(
    parameter: str,
    spec: "ExpertsSpec",
    shape: tuple[int, ...],
    stored: Sequence[StoredTensor],
    places: "Mapping[str, Renamed]",
) -> dict[str, Cut] | None:
    """Return the cuts of a parameter of this shape that is made of `stored`; None if that cannot be cut."""
    from quantkit.model.experts import MATRICES
    from quantkit.model.names import own_name

    owner, _, leaf = parameter.rpartition(".")
    cuts = {}
    for tensor in stored:
        as_stored = _spec_in_file(spec, tensor, shape, places[tensor.name])
        if as_stored is None:
            return None
        stem, _, last = tensor.name.rpartition(".")
        alone = len(stored) > 1
        for expert, part in itertools.product(range(shape[0]), range(1 if alone else len(MATRICES[leaf]))):
            name = own_name(
                stem if last == leaf else owner, expert, leaf, places[tensor.name].part if alone else part
            )
            cuts[name] = Cut(tensor, as_stored, leaf, expert, None if alone else part)
    return cuts or None


def _spec_in_file(
    spec: "ExpertsSpec", tensor: StoredTensor, shape: tuple[int, ...], place: "Renamed"
) -> "ExpertsSpec | None":
    """Return how the file has what becomes a parameter of this shape; None if that cannot be cut."""
    if place.own or len(place.operations) > 1:
        return None
    (operation,) = place.operations or (None,)
    kind = "" if operation is None else type(operation).__name__
    same, turned = tensor.shape == shape, tensor.shape == (shape[0], shape[2], shape[1])
    # Some turn what has another shape than the parameter, others everything.
    turns = kind == "Transpose" and turned and not (same and operation.check_dims)
    if turns:
        return replace(spec, transposed=not spec.transposed)
    if same and kind == "Interleave" and not spec.transposed:
        return replace(spec, interleaved=not spec.interleaved)
    # One tensor of all gates and one of all ups.
    half = kind == "Concatenate" and tensor.shape == (shape[0], shape[1] // 2, shape[2])
    fits = (same and kind in ("", "Transpose")) or (half and not spec.transposed and not spec.interleaved)
    return spec if fits else None
