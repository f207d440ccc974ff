"""Linears of a packed checkpoint that a LoRA changes: their tensors, methods and merged weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.adapters.merged_checkpoint import MergedCheckpoint
from quantkit.calibrate.methods import METHODS, Method, method_named
from quantkit.calibrate.summaries import DEFAULT_METHOD
from quantkit.checkpoint.lora_adapter import LoraAdapter
from quantkit.checkpoint.model_record import ModelRecord
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.errors import CheckpointError, FormatError, naming
from quantkit.model.structure import Structure
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
    """Linear that the adapter changes.

    module    its name
    tensor    its tensor in the packed checkpoint
    method    the method that rounds it; None for a dense one
    stored    name of the method that rounded it before; None if unknown
    original  name of its tensor in the original model; None to add to the dequantized weight
    """

    module: str
    tensor: StoredTensor
    method: Method | None
    stored: str | None = None
    original: str | None = None

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


def find_linears(
    lora: LoraAdapter,
    view: Checkpoint,
    structure: Structure,
    record: ModelRecord,
    original: tuple[Checkpoint, Structure] | None,
) -> list[Merged]:
    """Return the linears that the adapter `lora` changes, with methods that take no data.

    Raises `CheckpointError` for an unknown linear.
    `view`, `structure` and `record` are the packed checkpoint's, `original` the one it was made of, or None.
    """
    matrices = {one.module: one for one in view.tensors.values() if isinstance(one, StoredMatrix)}
    found = []
    for module in lora.factors:
        linear = structure.linears.get(module)
        if linear is None or linear.kind not in ("linear", "lm_head"):
            raise CheckpointError(
                f"{lora.tensors.shards[0]}: {module!r} is no linear of {view.directory} that has a tensor of "
                f"its own; expected a name such as {next(iter(structure.linears))!r}. {_OTHER}"
            )
        tensor = matrices.get(module) or view.tensors.get(f"{linear.stored[0]}.weight")
        if tensor is None:
            raise CheckpointError(
                f"{view.directory}: {module!r} has no tensor of its own, as it is tied to the embedding, "
                "which the adapter would change too. Train an adapter without it."
            )
        if lora.shape(module) != tensor.shape:
            raise CheckpointError(
                f"{lora.tensors.shards[0]}: the factors of {module!r} are for {list(lora.shape(module))}, "
                f"and {view.directory} has {list(tensor.shape)}. {_OTHER}"
            )
        layer = record.layers.get(module)
        stored = None if layer is None else layer.method
        method = method_without_data(tensor, stored) if isinstance(tensor, StoredMatrix) else None
        name = None if original is None else _name_in(*original, module, tensor, view.directory)
        found.append(Merged(module, tensor, method, stored, name))
    return found


def _name_in(
    original: Checkpoint, structure: Structure, module: str, tensor: StoredTensor, packed: Path
) -> str:
    """Return the name of the tensor of `module` in the original model."""
    linear = structure.linears.get(module)
    name = f"{linear.stored[0]}.weight" if linear is not None and linear.stored else None
    found = original.tensors.get(name or "")
    if name is None or found is None or found.shape != tensor.shape:
        shape = "no such linear" if found is None else f"{list(found.shape)}"
        raise CheckpointError(
            f"{original.directory}: {module!r} is {list(tensor.shape)} in {packed}, and here {shape}. "
            f"{_MADE_OF}"
        )
    return name


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
        tensor, delta = one.tensor, self.lora.delta(one.module).to(self.device)
        with naming(repr(one.module)):
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
        for one in found:
            if one.original is None or not isinstance(one.tensor, StoredMatrix):
                continue
            weight = self._original(one.original)
            lost = float((weight - self.packed(one.tensor).dequantize()).double().square().sum())
            error = lost / max(float(weight.double().square().sum()), torch.finfo(torch.float32).tiny)
            layer = self.record.layers.get(one.module)
            expected = None if layer is None else layer.relative_error
            if error <= (UNKNOWN_ERROR if expected is None else SLACK * expected):
                continue
            known = "" if expected is None else f", and the manifest says {expected:.3g}"
            raise CheckpointError(
                f"{self.view.directory}: {one.module!r} and {one.original!r} of the original differ by "
                f"{error:.3g} of the sum of squares{known}: other weights were rounded, as by methods that "
                f"scale inputs. {_MADE_OF}"
            )

    def base(self) -> Checkpoint:
        """Return the checkpoint to whose weights the adapter is added."""
        return self.view if self.original is None else self.original[0]

    def with_adapter(self, found: Sequence[Merged]) -> MergedCheckpoint:
        """Return `base` with the changes of the linears `found`."""
        return MergedCheckpoint.of(self.base(), self.lora, {one.source: one.module for one in found})

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
