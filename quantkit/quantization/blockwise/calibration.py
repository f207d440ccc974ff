"""Calibration of a run: samples, decoder, tasks, and the work files they fill.

`quantization/blockwise/block_tasks.py` lists the tasks of each block, and
`quantization/blockwise/pipeline.py` runs them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.calibrate.data.samples import Samples
from quantkit.checkpoint.output.directory import OutputDirectory
from quantkit.checkpoint.output.work_files import Followed, WorkFiles
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.model.blocks import Decoder
from quantkit.model.distributed import Ranks
from quantkit.model.parts import OUTSIDE_DECODER, Parts
from quantkit.progress import Advance
from quantkit.quantization.blockwise.block_tasks import BlockTasks, block_tasks, needs_data, work_bytes
from quantkit.quantization.blockwise.calibration_data import read_samples, sample_shape
from quantkit.quantization.blockwise.input_ranges import Ranges, Wanted, bind_task, measure
from quantkit.quantization.blockwise.pipeline import compute_dtype, quantize_blocks
from quantkit.quantization.plan import Plan
from quantkit.workers import cpu_workers, working


@dataclass(frozen=True, eq=False)
class Calibration:
    """Samples, decoder and tasks of a run with calibration data, by block.

    `seed` is that of its random numbers, `work_bytes` bound the size of its work files.
    """

    samples: Samples
    seed: int
    decoder: Decoder
    blocks: tuple[BlockTasks, ...]
    work_bytes: int

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, planned: Plan, options: CalibrationOptions, device: torch.device
    ) -> "Calibration | None":
        """Create the calibration of a plan; None if no method needs data.

        Every check that can refuse a run is made here, before any work.
        """
        found = blocks_with_data(checkpoint, planned, options, device)
        if found is None:
            return None
        decoder, blocks = found
        samples = read_samples(checkpoint, options, decoder.embedding_rows)
        if not samples.beside:
            _refuse_without_images(blocks, decoder.parts)
        decoder.check_runs(samples.tokens[:1], samples.beside[0] if samples.beside else None)
        size = work_bytes(blocks, samples, decoder.hidden_size)
        return cls(samples, options.seed, decoder, blocks, size)

    @property
    def source_bytes(self) -> int:
        """Return the source bytes of the tensors that are quantized with data."""
        return sum(task.source.nbytes for block in self.blocks for task in block.tasks.values())

    @property
    def changed(self) -> frozenset[str]:
        """Return the dense tensors that differ from the source, because scales are folded into them."""
        return frozenset(task.source.name for block in self.blocks for task in block.changed.values())

    @property
    def work_files(self) -> tuple[str, ...]:
        """Return the names of all work files."""
        return tuple(name for block in self.blocks for name in (block.filename, block.hidden_filename))

    @property
    def quantized_files(self) -> tuple[str, ...]:
        """Return the names of the work files from which shards copy tensors."""
        return tuple(block.filename for block in self.blocks if block.tasks)

    def to_dict(self) -> dict[str, Any]:
        """Return the data on which the written bytes depend, as JSON values."""
        return {"tokens_sha256": self.samples.digest, "shape": list(self.samples.tokens.shape)}


def blocks_with_data(
    checkpoint: Checkpoint, planned: Plan, options: CalibrationOptions, device: torch.device
) -> tuple[Decoder, tuple[BlockTasks, ...]] | None:
    """Return the decoder of a plan and the tasks of its blocks; None if no method needs data.

    Reads headers only. `plan` and `quantize` both call this function, so that both refuse unused options of
    calibration, missing sources, and linears that no block runs.
    """
    if not needs_data(planned):
        if options.sources is not None and planned.allocation is None:
            raise UsageError(
                "calibration data was given, but no method of the recipe takes any. Leave it out, or choose "
                "one that does, such as --method gptq (`quantkit methods` lists them), "
                "or a budget, such as --bits-per-weight."
            )
        return None
    sample_shape(checkpoint, options)
    decoder = Decoder(checkpoint, device, compute_dtype(checkpoint, device))
    return decoder, tuple(block_tasks(planned, decoder, str(checkpoint.config.get("model_type"))))


def _refuse_without_images(blocks: Sequence[BlockTasks], parts: Parts) -> None:
    """Raise `UsageError` for methods with data on modules that run for images only."""
    if parts.outside != OUTSIDE_DECODER:
        return
    for block in blocks:
        name = next((name for name, task in block.tasks.items() if task.needs), None)
        if name is not None and not block.is_head and f"{block.name}." not in parts:
            raise UsageError(
                f"{block.name} does not run on text, so methods with data have no inputs for it. Give "
                "--calibration a .jsonl file whose rows name images, or a method without data, such as "
                f"--rule '{block.name}*=int8::mse'."
            )


def calibrate(
    shards: Sequence[str],
    calibration: Calibration,
    output: OutputDirectory | None,
    out: Path,
    ranks: Ranks,
    report: Advance,
) -> None:
    """Fill the work files, unless all `shards` are done. Only the first rank has an `output`."""

    def done() -> list[str] | None:
        assert output is not None
        if output.complete or all(map(output.is_done, shards)):
            return None
        return [name for name in calibration.work_files if output.is_done(name)]

    finished = ranks.broadcast(done)
    if finished is None:
        return
    files: WorkFiles = Followed(out, finished) if output is None else output
    decoder = calibration.decoder
    # One worker on a GPU: the passes of several would compete for its memory.
    lanes = max(1, cpu_workers() // ranks.on_host) if decoder.device.type == "cpu" else 1
    with working(lanes, "quantize") as workers:
        blocks, samples = calibration.blocks, calibration.samples
        quantize_blocks(blocks, decoder, files, samples, workers, lanes, ranks, report)


def measure_scales(
    calibration: Calibration,
    planned: Plan,
    output: OutputDirectory | None,
    out: Path,
    ranks: Ranks,
    report: Advance,
) -> tuple[Calibration, Plan]:
    """Return `calibration` and `planned` with static scales, measured unless all shards are done.

    Only the first rank has an `output`; its measurement is sent to all ranks.
    """
    wanted = Wanted.of(planned, calibration.decoder.expert_part)

    def measured() -> dict[str, Any] | None:
        assert output is not None
        if output.complete or all(output.is_done(shard.filename) for shard in planned.shards):
            return None
        decoder = calibration.decoder
        lanes = cpu_workers() if decoder.device.type == "cpu" else 1
        with working(lanes, "measure inputs") as workers:
            return asdict(measure(decoder, calibration.samples, wanted, workers, out, report))

    sent = ranks.broadcast(measured) if wanted else None
    if sent is None:
        return calibration, planned
    found = Ranges(**sent)

    def bound(block: BlockTasks) -> BlockTasks:
        return replace(block, tasks={name: bind_task(task, found) for name, task in block.tasks.items()})

    shards = tuple(
        replace(shard, tasks=tuple(bind_task(task, found) for task in shard.tasks))
        for shard in planned.shards
    )
    blocks = tuple(map(bound, calibration.blocks))
    warnings = (*planned.warnings, *found.warnings)
    return replace(calibration, blocks=blocks), replace(planned, shards=shards, warnings=warnings)


def discard_work(output: OutputDirectory, names: Sequence[str]) -> None:
    """Remove the work files `names` after the shards are complete."""
    for name in names:
        if output.is_done(name):
            output.discard(name)
