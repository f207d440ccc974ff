"""Converting a checkpoint that is packed already: the same values, exactly, in quantkit's schemes.

`quantization/nesting.py` says which scheme has the values of a grid, and proves it of every row that is
written. The rest is as in `quantizing.py`, without recipes, methods and calibration.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quantkit.checkpoint.hub.repository import locate
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.model_record import Measured, ModelRecord
from quantkit.checkpoint.open_source import exactly, open_source
from quantkit.checkpoint.output.directory import Mode, OutputDirectory
from quantkit.checkpoint.source import Checkpoint
from quantkit.memory import enough_memory
from quantkit.model.prefixes import read_names
from quantkit.progress import Progress, counting
from quantkit.quantization.kept_fates import dense_share, kept_fates, kept_table
from quantkit.quantization.plan import Plan, plan_of
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantization.run_record import model_record, versions
from quantkit.quantization.side_files import check_side_files
from quantkit.quantizing import OnPlan, QuantizeResult, files_to_write, source_bytes, write_output
from quantkit.recipes.recipe import Fate, Recipe

#: What the run and the manifest say in place of a recipe.
CONVERTED = {"convert": "codes and scales of the source"}


@dataclass(frozen=True)
class ConvertOptions:
    """What a run does with its output, as the fields of the same names of `QuantizeOptions`."""

    max_shard_bytes: int = QuantizeOptions.max_shard_bytes
    allow_auto_map: bool = False
    resume: bool = False
    overwrite: bool = False
    check: bool = True
    #: Whether the token embedding is stored as numbers, which tools other than quantkit can read.
    dense_embeddings: bool = False

    @property
    def mode(self) -> Mode:
        """The state that the output directory may be in; `UsageError` if the options exclude each other."""
        return QuantizeOptions(resume=self.resume, overwrite=self.overwrite).mode


def convert(
    source: str | Path,
    out: str | Path,
    options: ConvertOptions = ConvertOptions(),
    *,
    progress: Progress | None = None,
    on_plan: OnPlan | None = None,
) -> QuantizeResult:
    """Write the packed checkpoint `out` with the codes and scales of `source`, a low-bit checkpoint.

    Every weight of the result is that of the source, bit by bit in float32, which is compared while it is
    written. So is the token embedding, unless `dense_embeddings`. Other tensors are stored as numbers:
    float32 where the source has them packed.

    `progress(done_bytes, all_bytes, tensor)` is called as the source is dealt with, and `on_plan` once before
    any tensor is written. Raises `CheckpointError`, naming the tensor, where no scheme has its values, and
    `QuantkitError` for every other refusal.
    """
    with enough_memory(str(source)):
        located = locate(source)
        checkpoint, planned = plan(located.directory, options)
        device = torch.device("cpu")
        names, expected = files_to_write(checkpoint, planned, None)
        run = {
            **CONVERTED,
            "source": checkpoint.fingerprint(),
            "max_shard_bytes": options.max_shard_bytes,
            "dense_embeddings": options.dense_embeddings,
            "versions": versions(),
        }
        with OutputDirectory.open(
            Path(out), checkpoint.directory, options.mode, run, expected, names=names
        ) as output:
            if on_plan is not None:
                on_plan(checkpoint, planned)

            def record(measured: Mapping[str, Measured]) -> ModelRecord:
                return replace(
                    model_record(located, planned, Recipe(), measured, None), recipe=dict(CONVERTED)
                )

            report = counting(source_bytes(planned, None), progress)
            unchecked = write_output(checkpoint, planned, output, device, report, None, record, options.check)
            measured = ModelRecord.from_manifest(read_manifest(output.path)).measured
    return QuantizeResult(Path(out), planned, measured, unchecked)


def plan(directory: Path, options: ConvertOptions = ConvertOptions()) -> tuple[Checkpoint, Plan]:
    """The source in `directory`, or in a file, and what converting it would write. Reads headers only."""
    checkpoint = exactly(open_source(directory, allow_auto_map=options.allow_auto_map))
    checkpoint, structure = read_names(checkpoint)
    checkpoint = check_side_files(checkpoint)
    fates = kept_fates(checkpoint, structure)
    table = "--dense-embeddings" if options.dense_embeddings else kept_table(checkpoint, structure)
    found = table if isinstance(table, Fate) else None
    planned = plan_of(checkpoint, structure, fates, found, max_shard_bytes=options.max_shard_bytes)
    dense = dense_share(checkpoint, planned)
    reasons: dict[str, list[str]] = {}
    for name in dense:
        is_table = name == structure.embedding and isinstance(table, str)
        reasons.setdefault(str(table) if is_table else "it is no linear that can be packed", []).append(name)
    notes = []
    for reason, (name, *others) in reasons.items():
        more = f" and {len(others)} more" if others else ""
        notes.append(f"{name}{more}, {dense[name]} in the source, is stored as float32: {reason}.")
    return checkpoint, replace(planned, notes=(*planned.notes, *notes))
