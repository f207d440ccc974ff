"""Merge a LoRA adapter into a packed checkpoint: only what it changes is rounded again.

s B A is added to the weight W of the original model, and the sum is rounded to the scheme that the linear
has. All other tensors are copied bit for bit. Rounding the sum with the dequantized weight instead loses most
of an adapter: it is smaller than half a step of the grid, and the weight is on the grid.
`checkpoint/lora_adapter.py` reads the adapter, and `eval/adapted.py` measures what rounding cost.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit.calibrate.methods import METHODS, Method, method_named
from quantkit.calibrate.summaries import DEFAULT_METHOD
from quantkit.checkpoint.hub.repository import locate
from quantkit.checkpoint.lora_adapter import LoraAdapter
from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest
from quantkit.checkpoint.model_record import Measured, ModelRecord
from quantkit.checkpoint.output.atomic_write import hash_file
from quantkit.checkpoint.output.directory import Mode, OutputDirectory, late_names
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor, TensorSpec
from quantkit.devices import pick_device
from quantkit.errors import CheckpointError, FormatError, QuantkitError, UsageError, first_of, naming
from quantkit.eval.adapted import compare, read_windows
from quantkit.memory import enough_memory
from quantkit.model.structure import Structure
from quantkit.packing.tensor import PackedTensor
from quantkit.planning import open_structure
from quantkit.progress import Advance, Progress, counting
from quantkit.progress_bar import reporting
from quantkit.quantization.requantize import requantize
from quantkit.quantization.run_record import versions
from quantkit.quantization.side_files import check_side_files
from quantkit.recipes.recipe import Recipe
from quantkit.runtime.saved_model import read_record
from quantkit.targets.packed_source import StoredMatrix, open_packed
from quantkit.verification.check_output import finish_checked

if TYPE_CHECKING:
    from quantkit.eval.metrics import TextMetrics

#: Factor that a relative error may differ by from that in the manifest, and the largest that is not in one.
SLACK, UNKNOWN_ERROR = 1.05, 0.5
_MADE_OF = (
    "Give the model that it was made of as --source, or use --from-packed, which loses most of the adapter."
)
OTHER_SCALE = (
    "its global scale changed, as the one that it had does not reach the merged weights; engines take one "
    "for q, k and v, and one for gate and up, and may misread the others"
)
#: Bytes that are copied at a time.
COPIED_BYTES = 8 << 20
_OTHER = "The adapter is of another model. Give the packed directory that it was trained on."


@dataclass(frozen=True)
class MergeResult:
    """Merged checkpoint: its directory, and by linear the method that rounded it and the relative error.

    `copied` is the number of tensors left as they are. `text` compares it with the packed model and the
    adapter beside it, None without a text. `unchecked` is the reason if the result was not run, `notes` are
    for the user.
    """

    directory: Path
    methods: Mapping[str, str | None]
    relative_errors: Mapping[str, float]
    copied: int
    text: "TextMetrics | None" = None
    unchecked: str | None = None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        kl = "" if self.text is None else f", KL {self.text.kl_mean:.2g} nats"
        merged, copied = len(self.methods), self.copied
        return f"MergeResult({str(self.directory)!r}, {merged} linears merged, {copied} tensors copied{kl})"


@dataclass(frozen=True)
class _Merged:
    """A linear that the adapter changes: its tensor, and the method that rounds it, None for a dense one."""

    module: str
    tensor: StoredTensor
    method: Method | None
    #: Its tensor in the original model; None to add to the dequantized weight.
    original: str | None = None

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Return the tensors in the files that change."""
        if isinstance(self.tensor, StoredMatrix):
            return tuple(self.tensor.parts.values())
        return (self.tensor.as_stored,)


def merge(
    packed: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    source: str | Path | None = None,
    from_packed: bool = False,
    text: str | Path | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    check: bool = True,
    progress: Progress | bool | None = None,
) -> MergeResult:
    """Merge the LoRA in the directory `adapter` into the packed directory `packed`, and write `out`.

    The adapter is added to the weights of `source`, by default the model that the manifest names, or with
    `from_packed` to the dequantized weights, which loses most of it. Each linear is rounded to the scheme and
    by the method that it has; for a method with data, which calibration would have to be repeated for, one
    without is used, and `notes` say so. With `text`, a file of UTF-8, the result is compared with the packed
    model and PEFT's adapter beside it.

    `progress(done_bytes, all_bytes, tensor)` is called as tensors are written. Raises `CheckpointError` for
    an adapter of another model or kind, a directory that is not packed, and another original than it was made
    of; `QuantkitError` for every other refusal. Nothing was written then, or `resume=True` continues.
    """
    mode = Mode.of(resume, overwrite)
    target = pick_device(device)
    with enough_memory(str(packed)), reporting(progress, "merging") as shown:
        lora = LoraAdapter.open(Path(adapter))
        view, structure = open_packed(Path(packed))
        windows = None if text is None else read_windows(Path(packed), Path(text))
        files = _open(Path(packed))
        record = read_record(Path(packed))
        original = None if from_packed else _original(record, source, files.directory)
        found, notes = _find(lora, view, structure, record, original)
        digests = {path.name: hash_file(path) for path in lora.files}
        weights = _Weights(view, lora, original, record, target)
        run = {
            "merge": {
                "adapter": digests,
                "base": lora.base,
                "original": None if original is None else original[0].fingerprint(),
            },
            "source": files.fingerprint(),
            "device": target.type,
            "versions": versions(),
        }
        names = [*(path.name for path in files.shards), *late_names(files.side_files)]
        expected = files.nbytes + files.side_bytes
        report = counting(files.nbytes, shown)
        weights.check(found)
        with OutputDirectory.open(Path(out), files.directory, mode, run, expected, names=names) as output:
            measured = _write(files, weights, found, output, report)
            merged = _record(record, files, found, measured)
            measured = {one.module: measured[one.module] for one in found if one.module in measured}
            unchecked = finish_checked(
                output,
                {name: tensor.file.name for name, tensor in files.tensors.items()},
                files.nbytes,
                files.config,
                files.side_files,
                merged,
                target if check else None,
                files.check_unchanged,
                merge={"base": lora.base, "from_packed": from_packed, "linears": sorted(measured)},
            )
    compared = None
    if windows is not None:
        compared = compare(Path(packed), Path(adapter), Path(out), windows, target)
    changed = {part.name for one in found for part in one.parts}
    return MergeResult(
        Path(out),
        {one.module: None if one.method is None else one.method.name for one in found},
        {name: one.relative_error for name, one in measured.items()},
        len(files.tensors) - len(changed),
        compared,
        unchecked,
        (*notes, *(f"{name}: {one.note}" for name, one in measured.items() if one.note is not None)),
    )


def _open(directory: Path) -> Checkpoint:
    """Open the files of a packed directory, without the manifest, which is rewritten."""
    source = Checkpoint.open(directory)
    side = tuple(path for path in source.side_files if path.name != MANIFEST_NAME)
    return check_side_files(replace(source, side_files=side))


def _original(record: ModelRecord, given: str | Path | None, packed: Path) -> tuple[Checkpoint, Structure]:
    """Open the original model of the directory `packed`, rotated if that is: `given`, else by its `record`.

    Raises `UsageError` if it is not known or not there.
    """
    where = record.source if given is None else given
    if where is None or (given is None and record.source_kind != "hub" and not Path(where).exists()):
        named = "names no original" if where is None else f"names {where}, which is not there"
        raise UsageError(
            f"{packed}: the manifest {named}; expected the model that it was made of, as the adapter "
            "is added to that. Name it with --source, or use --from-packed, which loses most of the adapter."
        )
    try:
        recipe = Recipe.from_dict(record.recipe)
    except QuantkitError:  # Of a conversion, which has none.
        recipe = Recipe()
    return open_structure(locate(where).directory, recipe, allow_auto_map=True)


def _find(
    lora: LoraAdapter,
    view: Checkpoint,
    structure: Structure,
    record: ModelRecord,
    original: tuple[Checkpoint, Structure] | None,
) -> tuple[list[_Merged], tuple[str, ...]]:
    """Return the linears that the adapter `lora` changes, and notes; `CheckpointError` for an unknown linear.

    `view`, `structure` and `record` are the packed checkpoint's, `original` the one it was made of, or None.
    """
    matrices = {one.module: one for one in view.tensors.values() if isinstance(one, StoredMatrix)}
    found, replaced = [], dict[str, list[str]]()
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
        method = None
        if isinstance(tensor, StoredMatrix):
            layer = record.layers.get(module)
            stored = None if layer is None else layer.method
            method = _method_for(tensor, stored)
            if method.name != stored:
                replaced.setdefault(f"{stored or 'no known method'} to {method.name}", []).append(module)
        name = None if original is None else _name_in(*original, module, tensor, view.directory)
        found.append(_Merged(module, tensor, method, name))
    notes = []
    if record.source is None:
        notes.append(f"{view.directory} has no manifest, so the methods that rounded it are not known")
    for change, modules in replaced.items():
        before, _, after = change.rpartition(" to ")
        notes.append(
            f"{first_of(modules)} was rounded by {before} before, and is by {after} now, which takes no "
            "calibration data"
        )
    return found, tuple(notes)


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


def _method_for(matrix: StoredMatrix, stored: str | None) -> Method:
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


def _write(
    files: Checkpoint, weights: "_Weights", found: list[_Merged], output: OutputDirectory, report: Advance
) -> dict[str, Measured]:
    """Write all files, with the merged linears `found` in place of the packed ones; return their errors."""
    if output.complete:
        report(files.nbytes, "")
        return ModelRecord.from_manifest(read_manifest(output.path)).measured
    by_part = {part.location: at for at, one in enumerate(found) for part in one.parts}
    details: dict[str, Any] = {}
    for path in files.shards:
        tensors = [tensor for tensor in files.tensors.values() if tensor.file == path]
        changed = sorted({by_part[tensor.location] for tensor in tensors if tensor.location in by_part})
        if output.is_done(path.name):
            report(sum(tensor.nbytes for tensor in tensors), path.name)
        else:
            specs = [TensorSpec(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
            with output.shard(path.name, specs, {"format": "pt"}) as file:
                sums = {}
                for one in (found[at] for at in changed):
                    parts, sums[one.module] = weights.merged(one)
                    # Other writers than quantkit may have put parts of a matrix in several files.
                    for part, data in parts:
                        if part.file == path:
                            file.write(part.name, data.cpu())
                            report(part.nbytes, one.module)
                for tensor in tensors:
                    if tensor.location not in by_part:
                        for data, offset in files.pieces(tensor.name, COPIED_BYTES):
                            file.write(tensor.name, data, offset)
                        report(tensor.nbytes, tensor.name)
                file.detail["layers"] = sums
        details |= output.details(path.name)["layers"]
    return {name: Measured.of(detail) for name, detail in details.items()}


@dataclass(frozen=True)
class _Weights:
    """Sources of merged weights: packed directory, adapter, and optionally the original model."""

    view: Checkpoint
    lora: LoraAdapter
    original: tuple[Checkpoint, Structure] | None
    record: ModelRecord
    device: torch.device

    def merged(self, one: _Merged) -> tuple[list[tuple[StoredTensor, torch.Tensor]], dict[str, Any]]:
        """Return the tensors of a merged linear, and its errors in the form of `Measured.of`."""
        tensor, delta = one.tensor, self.lora.delta(one.module).to(self.device)
        with naming(repr(one.module)):
            if not isinstance(tensor, StoredMatrix):
                return _dense(tensor, self.view.read(tensor.name).to(self.device, torch.float32) + delta)
            assert one.method is not None
            before = self._packed(tensor)
            weight = before.dequantize() if one.original is None else self._original(one.original)
            after, squared = requantize(before, weight + delta, one.method)
        parts = {part: value.cpu() for part, value in after.parts()}
        shared = (one.part("global_scale") for one in (before, after))
        stays = torch.equal(*(torch.ones(1) if one is None else one.cpu() for one in shared))
        return [
            (stored, tensor.stored.to_file(part, parts[part])) for part, stored in tensor.parts.items()
        ], {"squared": squared, "note": None if stays else OTHER_SCALE}

    def check(self, found: list[_Merged]) -> None:
        """Raise `CheckpointError` unless the packed weights are roundings of the original ones."""
        for one in found:
            if one.original is None or not isinstance(one.tensor, StoredMatrix):
                continue
            weight = self._original(one.original)
            lost = float((weight - self._packed(one.tensor).dequantize()).double().square().sum())
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

    def _packed(self, matrix: StoredMatrix) -> PackedTensor:
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


def _record(
    record: ModelRecord, files: Checkpoint, found: list[_Merged], measured: Mapping[str, Measured]
) -> ModelRecord:
    """Return the record of the merged checkpoint: of merged linears their new method and error."""
    layers = dict(record.layers)
    for one in found:
        layer, error = layers.get(one.module), measured[one.module].relative_error if one.method else None
        if layer is not None:
            method = None if one.method is None else one.method.name
            layers[one.module] = replace(
                layer,
                method=method,
                relative_error=error,
                reason=f"{layer.reason}, merged with a LoRA",
                note=measured[one.module].note,
                output_error=None,
                damping=None,
                expert_tokens=None,
                block_error=None,
            )
    merged = replace(record, layers=layers, versions=versions())
    if record.source is not None:
        return merged
    return replace(merged, source=str(files.directory), source_kind="directory", source_bytes=files.nbytes)
