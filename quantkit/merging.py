"""Merge a LoRA adapter into a packed checkpoint: only what it changes is rounded again.

s B A is added to the weight W of the original model, and the sum is rounded to the scheme that the linear
has, by its method. All other tensors are copied bit for bit. Rounding the sum with the dequantized weight
instead loses most of an adapter: it is smaller than half a step of the grid, and the weight is on the grid.
`adapters/repeat_methods.py` repeats methods with data, `eval/adapted.py` measures what rounding cost.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit.adapters.linears import Merged, MergedWeights, find_linears
from quantkit.adapters.places import Places
from quantkit.adapters.repeat_methods import Repeated, repeat_methods, with_note
from quantkit.calibrate.data.samples import described_names
from quantkit.calibrate.data.texts import BUNDLED_NAME, given_texts
from quantkit.checkpoint.hub.repository import locate
from quantkit.checkpoint.lora_adapter import LoraAdapter
from quantkit.checkpoint.manifest import MANIFEST_NAME, MERGE, read_manifest
from quantkit.checkpoint.model_record import Measured, ModelRecord, float32_bytes
from quantkit.checkpoint.output.atomic_write import hash_file
from quantkit.checkpoint.output.directory import Mode, OutputDirectory, late_names
from quantkit.checkpoint.relative_paths import place_of, with_relative_paths
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor, TensorSpec
from quantkit.devices import pick_device
from quantkit.errors import QuantkitError, UsageError
from quantkit.eval.adapted import Comparison, compare, read_windows
from quantkit.files import size_text
from quantkit.memory import enough_memory, free_memory
from quantkit.model.distributed import Ranks
from quantkit.model.structure import Structure
from quantkit.planning import open_structure
from quantkit.progress import Advance, Progress, counting
from quantkit.progress_bar import reporting
from quantkit.quantization.blockwise.calibration import calibrate, discard_work
from quantkit.quantization.run_record import versions
from quantkit.quantization.side_files import check_side_files
from quantkit.recipes.recipe import Recipe
from quantkit.runtime.saved_model import read_record
from quantkit.targets.packed_source import open_packed
from quantkit.verification.check_output import finish_checked

if TYPE_CHECKING:
    from quantkit.eval.metrics import TextMetrics
    from quantkit.eval.text import TextWindows

#: Bytes that are copied at a time.
COPIED_BYTES = 8 << 20


@dataclass(frozen=True)
class MergeResult:
    """Merged checkpoint: its directory, and by linear the method that rounded it and the relative error.

    `copied` is the number of tensors left as they are. `after` compares it with the original and the adapter,
    at 16 bits or more. `before` compares the packed model, with the adapter beside it, with the same. `text`
    compares it with that packed model. They are None if not measured. `unchecked` is the reason if the result
    was not run, `notes` are for the user.
    """

    directory: Path
    methods: Mapping[str, str | None]
    relative_errors: Mapping[str, float]
    copied: int
    text: "TextMetrics | None" = None
    unchecked: str | None = None
    notes: tuple[str, ...] = ()
    before: "TextMetrics | None" = None
    after: "TextMetrics | None" = None

    def __repr__(self) -> str:
        kl = "" if self.text is None else f", KL {self.text.kl_mean:.2g} nats"
        if self.before is not None and self.after is not None:
            kl = f", KL {self.before.kl_mean:.2g} nats before, {self.after.kl_mean:.2g} after"
        merged, copied = len(self.methods), self.copied
        return f"MergeResult({str(self.directory)!r}, {merged} linears merged, {copied} tensors copied{kl})"


def merge(
    packed: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    source: str | Path | None = None,
    from_packed: bool = False,
    calibration: str | Path | Iterable[Any] | None = None,
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
    by the method that it has. Methods with data are calibrated on the samples that the manifest names, or on
    `calibration`, texts as `quantize` takes them. `notes` say which linears another method rounded, and why.

    KL is measured on `text`, a file of UTF-8. Without one it is measured on a part of the bundled text, if
    that is possible and `check` is True; PEFT computes the adapter beside the packed model.

    `progress(done_bytes, all_bytes, tensor)` is called as tensors are rounded and written. Raises
    `CheckpointError` for an adapter of another model or kind, a directory that is not packed, and another
    original than it was made of; `QuantkitError` for every other refusal. Nothing was written then, or
    `resume=True` continues.
    """
    mode = Mode.of(resume, overwrite)
    target = pick_device(device)
    with enough_memory(str(packed)), reporting(progress, "merging") as shown:
        view, structure = open_packed(Path(packed))
        lora = LoraAdapter.open(Path(adapter), Places(view).fused)
        files = _open(Path(packed))
        record = read_record(Path(packed))
        windows, skipped = _windows(files, record, text, target, check)
        if source is None and not from_packed:
            _refuse_merged(files.directory)
        original = None if from_packed else _original(record, source, files.directory)
        found = find_linears(lora, view, structure, record, original)
        weights = MergedWeights(view, lora, original, record, target)
        weights.check(found)
        repeated = repeat_methods(found, weights, files, structure, given_texts(calibration))
        run = _run_record(lora, files, original, repeated, target)
        expected, names = files.nbytes + files.side_bytes, [path.name for path in files.shards]
        rounded_bytes = 0
        if repeated.calibration is not None:
            expected += repeated.calibration.work_bytes
            names += repeated.calibration.work_files
            rounded_bytes = repeated.calibration.source_bytes
        names += late_names(files.side_files)
        report = counting(files.nbytes + rounded_bytes, shown)
        with OutputDirectory.open(Path(out), files.directory, mode, run, expected, names=names) as output:
            measured = _write(files, weights, repeated, output, report)
            merged = _record(record, files, repeated.linears, measured, output.path)
            measured = {name: measured[name] for name in lora.factors if name in measured}
            described = None if repeated.calibration is None else repeated.calibration.samples.description
            facts = {"base": lora.base, "from_packed": from_packed, "linears": sorted(measured)}
            unchecked = finish_checked(
                output,
                {name: tensor.file.name for name, tensor in files.tensors.items()},
                files.nbytes,
                files.config,
                files.side_files,
                merged,
                target if check else None,
                files.check_unchanged,
                **{MERGE: {**facts, "calibration": described}},
            )
    compared, notes = None, repeated.notes
    if windows is not None:
        whole = None if original is None else weights.with_adapter(found)
        compared, skipped = _compared(
            Path(packed), Path(adapter), Path(out), windows, target, whole, required=text is not None
        )
    if compared is not None and text is None and BUNDLED_NAME in (record.calibration or ""):
        notes = (*notes, "KL was measured on the text of the calibration; --text FILE takes another")
    changed = {part.name for one in found for part in one.parts}
    notes = (*notes, *(f"{name}: {one.note}" for name, one in measured.items() if one.note is not None))
    return MergeResult(
        Path(out),
        {one.module: None if one.method is None else one.method.name for one in repeated.linears},
        {name: one.relative_error for name, one in measured.items()},
        len(files.tensors) - len(changed),
        None if compared is None else compared.beside,
        unchecked,
        notes if skipped is None else (*notes, skipped),
        None if compared is None else compared.before,
        None if compared is None else compared.after,
    )


def _refuse_merged(packed: Path) -> None:
    """Raise `UsageError` if an adapter was merged into `packed`, which its original lacks."""
    if MERGE in read_manifest(packed):
        raise UsageError(
            f"{packed}: an adapter was merged into it already, which the original that its manifest names "
            "lacks; expected a directory that `quantize` wrote. Name the model with that adapter in 16 bits "
            "by --source, or use --from-packed, which loses most of the new one."
        )


def _run_record(
    lora: LoraAdapter,
    files: Checkpoint,
    original: tuple[Checkpoint, Structure] | None,
    repeated: Repeated,
    device: torch.device,
) -> dict[str, Any]:
    """Return the JSON values of everything that determines the written bytes."""
    one = repeated.calibration
    return {
        **({} if one is None else {"calibration": one.to_dict()}),
        "merge": {
            "adapter": {path.name: hash_file(path) for path in lora.files},
            "base": lora.base,
            "original": None if original is None else original[0].fingerprint(),
        },
        "source": files.fingerprint(),
        "device": device.type,
        "versions": versions(),
    }


def _windows(
    files: Checkpoint, record: ModelRecord, text: str | Path | None, device: torch.device, check: bool
) -> "tuple[TextWindows | None, str | None]":
    """Return the text to measure KL on, and a note if there should be one and is none.

    Raises `QuantkitError` for a `text` that cannot be scored.
    """
    if text is not None:
        return read_windows(files.directory, Path(text)), None
    if not check:
        return None, None
    try:
        windows = read_windows(files.directory, None)
    except QuantkitError as error:
        return None, f"KL was not measured: {error}"
    needed, free = 2 * float32_bytes(files.nbytes, record.layers), free_memory(device)
    if needed > free:
        return None, (
            f"KL was not measured: that takes about {size_text(needed)} of memory, and {size_text(free)} is "
            "free"
        )
    return windows, None


def _compared(
    packed: Path,
    adapter: Path,
    merged: Path,
    windows: "TextWindows",
    device: torch.device,
    original: Checkpoint | None,
    *,
    required: bool,
) -> tuple[Comparison | None, str | None]:
    """Compare the models on `windows`; return a note if a part was not possible.

    Errors are raised if the comparison is `required`.
    """
    try:
        found = compare(packed, adapter, merged, windows, device, original)
    except Exception as error:
        # The merged checkpoint is complete, and PEFT or memory may fail in their own ways.
        if required:
            raise
        return None, f"KL was not measured: {error}"
    why = None if found.why_not is None else f"KL from the original was not measured: {found.why_not}"
    return found, why


def _open(directory: Path) -> Checkpoint:
    """Open the files of a packed directory, without the manifest, which is rewritten."""
    source = Checkpoint.open(directory)
    side = tuple(path for path in source.side_files if path.name != MANIFEST_NAME)
    return check_side_files(replace(source, side_files=side))


def _original(record: ModelRecord, given: str | Path | None, packed: Path) -> tuple[Checkpoint, Structure]:
    """Open the original model of the directory `packed`, rotated if that is: `given`, else by its `record`.

    Raises `UsageError` if it is not known or not there.
    """
    named = None if record.source is None else str(place_of(record.source, record.relative_paths, packed))
    # A hub id may be the name of a directory here.
    named = record.source if record.source_kind == "hub" else named
    where = named if given is None else given
    if where is None or (given is None and record.source_kind != "hub" and not Path(where).exists()):
        found = "names no original" if where is None else f"names {where}, which is not there"
        raise UsageError(
            f"{packed}: the manifest {found}; expected the model that it was made of, as the adapter "
            "is added to that. Name it with --source, or use --from-packed, which loses most of the adapter."
        )
    try:
        recipe = Recipe.from_dict(record.recipe)
    except QuantkitError:  # Of a conversion, which has none.
        recipe = Recipe()
    return open_structure(locate(where).directory, recipe, allow_auto_map=True)


def _write(
    files: Checkpoint, weights: MergedWeights, repeated: Repeated, output: OutputDirectory, report: Advance
) -> dict[str, Measured]:
    """Write all files, with the merged linears in place of the packed ones; return their errors."""
    calibration, shards = repeated.calibration, [path.name for path in files.shards]
    if output.complete:
        report(files.nbytes + (0 if calibration is None else calibration.source_bytes), "")
        return ModelRecord.from_manifest(read_manifest(output.path)).measured
    if calibration is not None:
        calibrate(shards, calibration, output, output.path, Ranks(), report)
    rounded = _Rounded.of(output, repeated, weights, shards)
    found = repeated.linears
    by_part = {part.location: at for at, one in enumerate(found) for part in one.parts}
    for path in files.shards:
        tensors = [tensor for tensor in files.tensors.values() if tensor.file == path]
        changed = sorted({by_part[tensor.location] for tensor in tensors if tensor.location in by_part})
        if output.is_done(path.name):
            report(sum(tensor.nbytes for tensor in tensors), path.name)
        else:
            specs = [TensorSpec(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
            with output.shard(path.name, specs, {"format": "pt"}) as file:
                details: list[tuple[str, Mapping[str, Any]]] = []
                for one in (found[at] for at in changed):
                    parts, detail = rounded.parts(one)
                    details.append((one.module, detail))
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
                file.detail["layers"] = _summed(details)
    if calibration is not None:
        discard_work(output, calibration.work_files)
    every = (one for path in files.shards for one in output.details(path.name)["layers"].items())
    return {name: Measured.of(detail) for name, detail in _summed(every).items()}


def _summed(details: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Add up the `details` of the matrices of each module."""
    found: dict[str, dict[str, Any]] = {}
    for module, detail in details:
        before = found.get(module)
        if before is None:
            found[module] = {**detail}
        # Those of work files are of all matrices already.
        elif "output" not in detail:
            pairs = zip(before["squared"], detail["squared"], strict=True)
            note = before.get("note") or detail.get("note")
            found[module] = {"squared": [sum(pair) for pair in pairs], "note": note}
    return found


@dataclass(frozen=True)
class _Rounded:
    """Merged linears: those of a calibration in its work files, others rounded when they are asked for.

    calibrated  the work files, if any
    details     manifest entries of the linears in them, by module
    """

    weights: MergedWeights
    calibrated: Checkpoint | None
    details: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(
        cls, output: OutputDirectory, repeated: Repeated, weights: MergedWeights, shards: Sequence[str]
    ) -> "_Rounded":
        """Open the work files in `output`, unless all `shards` are written."""
        if repeated.calibration is None or all(map(output.is_done, shards)):
            return cls(weights, None, {})
        names = repeated.calibration.quantized_files
        found = {module: one for name in names for module, one in output.details(name)["layers"].items()}
        details = {module: with_note(one, module in repeated.rescaled) for module, one in found.items()}
        return cls(weights, Checkpoint.of_files([output.path / name for name in names]), details)

    def parts(self, one: Merged) -> tuple[list[tuple[StoredTensor, torch.Tensor]], Mapping[str, Any]]:
        """Return the tensors of a linear, and its errors in the form of `Measured.of`."""
        if self.calibrated is None or one.module not in self.details:
            return self.weights.merged(one)
        return [(part, self.calibrated.read(part.name)) for part in one.parts], self.details[one.module]


def _record(
    record: ModelRecord,
    files: Checkpoint,
    found: Sequence[Merged],
    measured: Mapping[str, Measured],
    out: Path,
) -> ModelRecord:
    """Return the record of the merged checkpoint `out`: of merged linears their new method and error."""
    layers = dict(record.layers)
    for one in {one.module: one for one in found}.values():
        layer, error = layers.get(one.module), measured[one.module].relative_error if one.method else None
        calibrated = dict(vars(measured[one.module]))
        del calibrated["relative_error"]
        if layer is not None:
            method = None if one.method is None else one.method.name
            layers[one.module] = replace(
                layer,
                method=method,
                relative_error=error,
                reason=f"{layer.reason}, merged with a LoRA",
                **calibrated,
            )
    merged = replace(record, layers=layers, versions=versions())
    if record.source is None:
        source = str(files.directory)
        merged = replace(merged, source=source, source_kind="directory", source_bytes=files.nbytes)

    def found_at(name: str) -> Path:
        return place_of(name, record.relative_paths, files.directory)

    return with_relative_paths(merged, described_names(record.calibration), out, found_at)
