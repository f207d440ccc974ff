"""Export a packed directory: the same values in the layout of another tool.

`targets/` has a file for each target, which plans everything from headers and scales. This module writes the
output like any other, and reads it back. It compares what the target format's reader returns with the source.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.output.directory import Mode, OutputDirectory, late_names
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.errors import CheckpointError, unknown_name
from quantkit.memory import enough_memory
from quantkit.progress import Advance, Progress, counting
from quantkit.progress_bar import reporting
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantization.run_record import versions
from quantkit.quantization.side_files import check_side_files
from quantkit.targets.packed_source import PIECE, open_packed
from quantkit.targets.table import TARGETS
from quantkit.targets.target import ExportPlan


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export. Fields have the meaning of the same names in `QuantizeOptions`."""

    max_shard_bytes: int = QuantizeOptions.max_shard_bytes
    resume: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class ExportResult:
    """Finished export: its directory, files and bytes; `stored` says how each packed tensor is stored there.
    `readers` are tools, with their version, that were tried with such files; `notes` are for the user.
    """

    directory: Path
    to: str
    readers: tuple[str, ...]
    files: tuple[str, ...]
    output_bytes: int
    stored: Mapping[str, str]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"ExportResult({str(self.directory)!r}, {self.to}, {len(self.stored)} tensors)"


def export(
    packed: str | Path,
    out: str | Path,
    to: str,
    options: ExportOptions = ExportOptions(),
    *,
    progress: Progress | bool | None = None,
) -> ExportResult:
    """Write the weights of the packed directory `packed` to `out`, in the layout `to`, a name of `TARGETS`.

    Every weight is read back from the written files and compared, bit by bit in float32. Holds a few matrices
    in memory. `progress(done_bytes, all_bytes, tensor)` is called as the source is written and compared.

    Raises `CheckpointError`, naming the linear, before any file is written where the target does not have its
    values; `UsageError` for an unknown target, and `QuantkitError` for every other refusal.
    """
    if to not in TARGETS:
        raise unknown_name("target", to, TARGETS)
    directory = Path(packed)
    with enough_memory(str(packed)), reporting(progress, "exporting") as shown:
        checkpoint, structure = open_packed(directory)
        checkpoint = check_side_files(checkpoint)
        planned = TARGETS[to].plan(checkpoint, structure, options.max_shard_bytes)
        specs = [spec for file in planned.files for spec in file.specs]
        size = sum(spec.nbytes for spec in specs)
        run = {
            "export": to,
            "source": checkpoint.fingerprint(),
            "max_shard_bytes": options.max_shard_bytes,
            "versions": versions(),
        }
        names = [file.name for file in planned.files]
        report = counting(2 * checkpoint.nbytes, shown)
        mode = Mode.of(options.resume, options.overwrite)
        late, expected = late_names(checkpoint.side_files), size + checkpoint.side_bytes
        with OutputDirectory.open(
            Path(out), checkpoint.directory, mode, run, expected, names=names + late
        ) as output:
            _write(checkpoint, planned, output, report)
            output.finish(
                {spec.name: file.name for file in planned.files for spec in file.specs},
                size,
                planned.config,
                checkpoint.side_files,
                {"export": {"to": to, "source": str(checkpoint.directory), "versions": versions()}},
                lambda: _prove(checkpoint, planned, output, report),
            )
    return ExportResult(Path(out), to, planned.readers, tuple(names), size, planned.stored, planned.notes)


def _write(checkpoint: Checkpoint, planned: ExportPlan, output: OutputDirectory, report: Advance) -> None:
    for file in planned.files:
        if output.complete or output.is_done(file.name):
            report(sum(source.stored_bytes for job in file.jobs for source in job.sources), file.name)
            continue
        with output.shard(file.name, file.specs, {"format": "pt"}, file.header) as written:
            for job in file.jobs:
                for name, tensor, offset in job.chunks(checkpoint):
                    written.write(name, tensor, offset)
                for source in job.sources:
                    report(source.stored_bytes, source.name)


def _prove(
    checkpoint: Checkpoint, planned: ExportPlan, output: OutputDirectory, report: Advance
) -> dict[str, Any]:
    """Compare all written values with those of the source; `CheckpointError` for the first that differs."""
    checkpoint.check_unchanged()
    result = planned.read([output.path / file.name for file in planned.files])
    missing = sorted(checkpoint.tensors.keys() ^ result.tensors.keys())
    if missing:
        raise _differs(output.path, missing[0], "is in the source or in the result only")
    for name, tensor in checkpoint.tensors.items():
        _compare(checkpoint, result, tensor, output.path)
        report(tensor.stored_bytes, name)
    return {}


def _compare(checkpoint: Checkpoint, result: Checkpoint, tensor: StoredTensor, path: Path) -> None:
    name, rows = tensor.name, tensor.shape[0] if tensor.shape else 1
    if result.tensors[name].shape != tensor.shape:
        raise _differs(path, name, f"has shape {result.tensors[name].shape}, not {tensor.shape}")
    step = max(1, PIECE * rows // max(1, tensor.elements))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        expected, found = (one.read(name, start, stop).float() for one in (checkpoint, result))
        if not torch.equal(found, expected):
            at = (found != expected).nonzero()[0].tolist()
            values = f"{found[tuple(at)].item()!r}, not {expected[tuple(at)].item()!r}"
            raise _differs(path, name, f"has at {[start + at[0], *at[1:]]} the value {values}")


def _differs(path: Path, name: str, how: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: tensor {name!r} {how}: the export does not have the values of the source, and stays "
        "unfinished. That is a fault of quantkit or of the disk: please report it with config.json."
    )
