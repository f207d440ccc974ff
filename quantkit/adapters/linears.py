"""Linears of a packed checkpoint that a LoRA changes: their tensors, methods and merged weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from quantkit.adapters.merged_checkpoint import MergedCheckpoint
from quantkit.adapters.places import Places
from quantkit.calibrate.methods import METHODS, Method, method_named
from quantkit.calibrate.summaries import DEFAULT_METHOD
from quantkit.checkpoint.lora_adapter import DENSE_REMEDY, LoraAdapter
from quantkit.checkpoint.model_record import ModelRecord
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.errors import CheckpointError, FormatError, naming
from quantkit.model.experts import MATRICES
from quantkit.model.names import ExpertPart
from quantkit.model.split_experts import CutTensor
from quantkit.model.structure import ONE_OUTPUT, ROUTER, Structure
from quantkit.packing.tensor import PackedTensor
from quantkit.quantization.requantize import requantize
from quantkit.targets.packed_source import StoredMatrix

#: Factor that a relative error may differ by from that in the manifest, and the largest that is not in one.
SLACK, UNKNOWN_ERROR = 1.05, 0.5
_MADE_OF = (
    "Give the model that it was made of as --source, or use --from-packed, which loses most of the adapter."
)
OTHER_SCALE = (
    "its global scale changed, as the one that it had does not reach the merged weights; engines take one "
    "for q, k and v, and one for gate and up, and may misread the others"
)
_OTHER = "The adapter is of another model. Give the packed directory that it was trained on."


@dataclass(frozen=True)
class Merged:
    """Matrix that the adapter changes: a linear, or one of an expert.

    module    name of the linear, or of the parameter of fused experts
    tensor    its tensor in the packed checkpoint
    method    the method that rounds it; None for a dense one
    stored    name of the method that rounded it before; None if unknown
    original  name of its tensor in the original model; None to add to the dequantized weight
    part      its place in the parameter of experts; None for a linear
    """

    module: str
    tensor: StoredTensor
    method: Method | None
    stored: str | None = None
    original: str | None = None
    part: ExpertPart | None = None

    @property
    def name(self) -> str:
        """Return the name of the linear, or of the matrix of an expert, such as `mlp.experts.3.gate`."""
        if self.part is None:
            return self.module
        owner, _, leaf = self.module.rpartition(".")
        return f"{owner}.{self.part.expert}.{MATRICES[leaf][self.part.part]}"

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Return the tensors in the files that change."""
        if isinstance(self.tensor, StoredMatrix):
            return tuple(self.tensor.parts.values())
        return (self.tensor.as_stored,)

    @property
    def source(self) -> str:
        """Return the name of the tensor to which the adapter is added."""
        return self.original or self.tensor.name

    def delta(self, lora: LoraAdapter) -> torch.Tensor:
        """Return the change of the matrix by `lora`, float32 [N, K]."""
        if self.part is None:
            return lora.delta(self.module)
        a, b = lora.of_expert(self.module, self.part.expert)
        own = self.part.spec.split(b, self.module.rpartition(".")[2], 0)[self.part.part]
        return lora.factors[self.module].scaling * (own @ a)


def find_linears(
    lora: LoraAdapter,
    view: Checkpoint,
    structure: Structure,
    record: ModelRecord,
    original: tuple[Checkpoint, Structure] | None,
) -> list[Merged]:
    """Return the linears and matrices of experts that the adapter `lora` changes.

    Their methods take no data. Raises `CheckpointError` for an unknown linear, and for one that cannot be
    merged. `view`, `structure` and `record` are the packed checkpoint's, `original` the one it was made of,
    or None.
    """
    search = _Search(lora, view, structure, record, original)
    return [one for module in lora.factors for one in search.matrices(module)]


@dataclass(frozen=True)
class _Search:
    """Packed checkpoint, its original and an adapter; arguments as for `find_linears`."""

    lora: LoraAdapter
    view: Checkpoint
    structure: Structure
    record: ModelRecord
    original: tuple[Checkpoint, Structure] | None

    @cached_property
    def _packed(self) -> dict[str, StoredMatrix]:
        """Return the packed matrices by module; of experts, any."""
        return {one.module: one for one in self.view.tensors.values() if isinstance(one, StoredMatrix)}

    @cached_property
    def _places(self) -> Places:
        return Places(self.view)

    @cached_property
    def _original_places(self) -> Places:
        assert self.original is not None
        return Places(self.original[0])

    def matrices(self, module: str) -> list[Merged]:
        """Return the matrices of a linear or a parameter of fused experts of the adapter."""
        linear, factors = self.structure.linears.get(module), self.lora.factors[module]
        kinds = ("linear", "lm_head") if factors.experts is None else ("experts",)
        if linear is None and factors.experts is None:
            return [self._small(module)]
        if linear is None or linear.kind not in kinds:
            raise self._unknown(module)
        if factors.experts is not None:
            return self._experts(module)
        if factors.of_parameter and linear.transposed:
            raise CheckpointError(
                f"{self._file}: {module!r} is stored transposed, and 'target_parameters' names its weight, "
                f"so that its factors are swapped. {DENSE_REMEDY}"
            )
        tensor = self._packed.get(module) or self.view.tensors.get(f"{linear.stored[0]}.weight")
        if tensor is None:
            raise CheckpointError(
                f"{self.view.directory}: {module!r} has no tensor of its own, as it is tied to the "
                "embedding, which the adapter would change too. Train an adapter without it."
            )
        self._check_shape(module, tensor.shape)
        name = None
        if self.original is not None:
            known = self.original[1].linears.get(module)
            stored = f"{known.stored[0]}.weight" if known is not None and known.stored else None
            name = self._in_original(module, stored, tensor)
        return [self._merged(module, tensor, name)]

    def _small(self, module: str) -> Merged:
        """Return a linear that is always dense: a router, or one with one output."""
        stored = self._places.weight(module)
        if stored is None or self.structure.dense.get(stored) not in (ROUTER, ONE_OUTPUT):
            raise self._unknown(module)
        tensor = self.view.tensors[stored]
        self._check_shape(module, tensor.shape)
        name = None
        if self.original is not None:
            name = self._in_original(module, self._original_places.weight(module), tensor)
        return Merged(module, tensor, None, None, name)

    def _experts(self, parameter: str) -> list[Merged]:
        """Return the matrices of all experts in a fused parameter."""
        known, leaf = self._places.matrices(parameter), parameter.rpartition(".")[2]
        count, halves = self.lora.factors[parameter].experts, len(MATRICES[leaf])
        found = []
        for (expert, index), (stored, part) in known.items():
            tensor = self.view.tensors[stored]
            rows, columns = tensor.shape
            self._check_shape(parameter, (halves * rows, columns))
            if isinstance(tensor, CutTensor):
                raise CheckpointError(
                    f"{self.view.directory}: {parameter!r} is dense, with all experts in one tensor; "
                    f"expected packed ones, or a tensor for each matrix. {DENSE_REMEDY}"
                )
            name = None
            if self.original is not None:
                name, _ = self._original_places.matrices(parameter).get((expert, index), (None, None))
                name = self._in_original(parameter, name, tensor)
            found.append(self._merged(parameter, tensor, name, part))
        assert count is not None and len(found) == halves * count, f"{parameter} has {len(found)} matrices"
        return found

    def _merged(
        self, module: str, tensor: StoredTensor, original: str | None, part: ExpertPart | None = None
    ) -> Merged:
        layer = self.record.layers.get(module)
        stored = None if layer is None else layer.method
        method = method_without_data(tensor, stored) if isinstance(tensor, StoredMatrix) else None
        return Merged(module, tensor, method, stored, original, part)

    def _check_shape(self, module: str, shape: tuple[int, ...]) -> None:
        if self.lora.shape(module) != shape:
            raise CheckpointError(
                f"{self._file}: the factors of {module!r} are for {list(self.lora.shape(module))}, and "
                f"{self.view.directory} has {list(shape)}. {_OTHER}"
            )

    def _in_original(self, module: str, name: str | None, tensor: StoredTensor) -> str:
        """Return `name`, that of a tensor of `module` in the original; raise if it differs from `tensor`."""
        assert self.original is not None
        found = self.original[0].tensors.get(name or "")
        if name is None or found is None or found.shape != tensor.shape:
            shape = "no such linear" if found is None else f"{list(found.shape)}"
            raise CheckpointError(
                f"{self.original[0].directory}: {module!r} is {list(tensor.shape)} in "
                f"{self.view.directory}, and here {shape}. {_MADE_OF}"
            )
        return name

    def _unknown(self, module: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file}: {module!r} is no linear of {self.view.directory} that has a tensor of its own; "
            f"expected a name such as {next(iter(self.structure.linears))!r}. {_OTHER}"
        )

    @property
    def _file(self) -> Path:
        return self.lora.tensors.shards[0]


def method_without_data(matrix: StoredMatrix, stored: str | None) -> Method:
    """Return the stored method if it takes no data and can be applied, else the first that can."""
    names = [stored or DEFAULT_METHOD, DEFAULT_METHOD, *METHODS]
    methods = [method_named(name) for name in names if all(one in METHODS for one in name.split(","))]
    usable = [one for one in methods if not one.needs_data and not one.lacks(matrix.scheme)]
    if not usable:
        raise FormatError(f"{matrix.module!r}: no method without data rounds to {matrix.scheme}.")
    try:
        usable[0].check(matrix.scheme)
    except FormatError as error:
        raise FormatError(f"{matrix.module!r} cannot be rounded again: {error}") from error
    return usable[0]


@dataclass(frozen=True)
class MergedWeights:
    """Sources of merged weights: packed directory, adapter, and optionally the original model."""

    view: Checkpoint
    lora: LoraAdapter
    original: tuple[Checkpoint, Structure] | None
    record: ModelRecord
    device: torch.device

    def merged(self, one: Merged) -> tuple[list[tuple[StoredTensor, torch.Tensor]], dict[str, Any]]:
        """Return the tensors of a merged linear, and its errors in the form of `Measured.of`."""
        tensor, delta = one.tensor, one.delta(self.lora).to(self.device)
        with naming(repr(one.name)):
            if not isinstance(tensor, StoredMatrix):
                return _dense(tensor, self.view.read(tensor.name).to(self.device, torch.float32) + delta)
            assert one.method is not None
            before = self.packed(tensor)
            weight = before.dequantize() if one.original is None else self._original(one.original)
            after, squared = requantize(before, weight + delta, one.method)
        parts = {part: value.cpu() for part, value in after.parts()}
        shared = (one.part("global_scale") for one in (before, after))
        stays = torch.equal(*(torch.ones(1) if one is None else one.cpu() for one in shared))
        return [
            (stored, tensor.stored.to_file(part, parts[part])) for part, stored in tensor.parts.items()
        ], {"squared": squared, "note": None if stays else OTHER_SCALE}

    def check(self, found: list[Merged]) -> None:
        """Raise `CheckpointError` unless the packed weights are roundings of the original ones."""
        sums: dict[str, list[float]] = {}
        for one in found:
            if one.original is not None and isinstance(one.tensor, StoredMatrix):
                weight = self._original(one.original)
                lost = (weight - self.packed(one.tensor).dequantize()).double().square().sum()
                total = sums.setdefault(one.module, [0.0, 0.0])
                total[0] += float(lost)
                total[1] += float(weight.double().square().sum())
        originals = {one.module: one.original for one in reversed(found)}
        for module, (lost_of_all, norm) in sums.items():
            error = lost_of_all / max(norm, torch.finfo(torch.float32).tiny)
            layer = self.record.layers.get(module)
            expected = None if layer is None else layer.relative_error
            if error <= (UNKNOWN_ERROR if expected is None else SLACK * expected):
                continue
            known = "" if expected is None else f", and the manifest says {expected:.3g}"
            raise CheckpointError(
                f"{self.view.directory}: {module!r} and {originals[module]!r} of {self.base().directory} "
                f"differ by {error:.3g} of the sum of squares{known}: other weights were rounded, as by "
                f"methods that scale inputs. {_MADE_OF}"
            )

    def base(self) -> Checkpoint:
        """Return the checkpoint to whose weights the adapter is added."""
        return self.view if self.original is None else self.original[0]

    def with_adapter(self, found: Sequence[Merged]) -> MergedCheckpoint:
        """Return `base` with the changes of the linears `found`."""
        deltas = {one.source: partial(one.delta, self.lora) for one in found}
        return MergedCheckpoint.of(self.base(), deltas)

    def packed(self, matrix: StoredMatrix) -> PackedTensor:
        """Read a packed matrix [N, K]."""
        return matrix.packed(self.view.read_stored, 0, matrix.shape[0]).to(self.device)

    def _original(self, name: str) -> torch.Tensor:
        """Read an original weight, float32 [N, K]."""
        assert self.original is not None
        return self.original[0].read(name).to(self.device, torch.float32)


def _dense(
    tensor: StoredTensor, weight: torch.Tensor
) -> tuple[list[tuple[StoredTensor, torch.Tensor]], dict[str, Any]]:
    """Return the merged dense linear `weight` [N, K] in the file's dtype, [K, N] if the file has it so.

    Also returns, as "squared", the squared rounding error and the squared weights, summed.
    """
    stored = tensor.as_stored
    rounded = weight.to(stored.torch_dtype)
    squared = [float(one.double().square().sum()) for one in (weight - rounded.float(), weight)]
    return [(stored, rounded if stored is tensor else rounded.T.contiguous())], {"squared": squared}
