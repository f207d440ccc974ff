"""Convert a low-bit checkpoint to quantkit's schemes without changing any weight.

`quantization/nesting.py` finds a scheme that holds all values of a stored grid, and checks every row that is
written. All other steps are as in `quantizing.py`, without recipes, methods and calibration.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quantkit.checkpoint.hub.repository import locate
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.model_record import Measured, ModelRecord
from quantkit.checkpoint.open_source import exactly, open_source
from quantkit.checkpoint.output.directory import Mode, OutputDirectory
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError, first_of
from quantkit.memory import enough_memory
from quantkit.model.prefixes import read_names
from quantkit.packing.packings import PACKINGS, PackingName
from quantkit.progress import Progress, counting
from quantkit.progress_bar import reporting
from quantkit.quantization.kept_fates import dense_share, kept_fates, kept_table
from quantkit.quantization.kept_scales import KeptScales, kept_scales
from quantkit.quantization.plan import Plan, plan_of
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantization.run_record import model_record, versions
from quantkit.quantization.side_files import check_side_files
from quantkit.quantizing import OnPlan, QuantizeResult, files_to_write, source_bytes, write_output
from quantkit.recipes.recipe import Fate, Recipe

#: Stands in the manifest in place of a recipe.
CONVERTED = {"convert": "codes and scales of the source"}


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion. Fields have the meaning of the same names in `QuantizeOptions`."""

    max_shard_bytes: int = QuantizeOptions.max_shard_bytes
    allow_auto_map: bool = False
    resume: bool = False
    overwrite: bool = False
    check: bool = True
    #: True to store the token embedding unpacked, so that other tools can read it.
    dense_embeddings: bool = False
    #: The packing of schemes that can have it; others are packed as "bits".
    packing: PackingName = "bits"
    #: True to leave out how linears round their inputs, and the static scales of inputs, keys and values.
    without_activations: bool = False


def convert(
    source: str | Path,
    out: str | Path,
    options: ConvertOptions = ConvertOptions(),
    *,
    progress: Progress | bool | None = None,
    on_plan: OnPlan | None = None,
) -> QuantizeResult:
    """Write the codes and scales of `source`, a low-bit checkpoint, as the packed checkpoint `out`.

    Every weight of `out` equals the weight of `source` bit by bit in float32; each is compared when written.
    The token embedding is packed too, unless `dense_embeddings`. Other tensors are stored unpacked: in
    float32 if the source has them packed. Static scales of inputs, keys and values are those of `source`,
    unless `without_activations` leaves them out.

    `progress(done_bytes, all_bytes, tensor)` is called as source bytes are processed (by default a bar
    in a terminal or notebook, none with False), and `on_plan` once before any tensor is written. Raises
    `CheckpointError` with the name of a tensor whose values fit no scheme; `QuantkitError` for every other
    refusal.
    """
    with enough_memory(str(source)), reporting(progress, "converting") as shown:
        located = locate(source)
        checkpoint, planned = plan(located.directory, options)
        device = torch.device("cpu")
        names, expected = files_to_write(checkpoint, planned, None)
        run = {
            **CONVERTED,
            "source": checkpoint.fingerprint(),
            "max_shard_bytes": options.max_shard_bytes,
            "dense_embeddings": options.dense_embeddings,
            "packing": options.packing,
            "without_activations": options.without_activations,
            "versions": versions(),
        }
        mode = Mode.of(options.resume, options.overwrite)
        with OutputDirectory.open(
            Path(out), checkpoint.directory, mode, run, expected, names=names
        ) as output:
            if on_plan is not None:
                on_plan(checkpoint, planned)

            def record(measured: Mapping[str, Measured]) -> ModelRecord:
                return replace(
                    model_record(located, planned, Recipe(), measured, None), recipe=dict(CONVERTED)
                )

            report = counting(source_bytes(planned, None), shown)
            unchecked = write_output(checkpoint, planned, output, device, report, None, record, options.check)
            measured = ModelRecord.from_manifest(read_manifest(output.path)).measured
    return QuantizeResult(Path(out), planned, measured, unchecked)


def plan(directory: Path, options: ConvertOptions = ConvertOptions()) -> tuple[Checkpoint, Plan]:
    """Open the source, a directory or a file, and plan its conversion. Reads headers only."""
    checkpoint = exactly(open_source(directory, allow_auto_map=options.allow_auto_map))
    checkpoint, structure = read_names(checkpoint)
    checkpoint = check_side_files(checkpoint)
    fates = _packed(kept_fates(checkpoint, structure), options.packing)
    table = "--dense-embeddings" if options.dense_embeddings else kept_table(checkpoint, structure)
    found = table if isinstance(table, Fate) else None
    scales = KeptScales({}, {}) if options.without_activations else kept_scales(checkpoint, structure, fates)
    planned = plan_of(
        checkpoint,
        structure,
        scales.with_activations(fates),
        found,
        max_shard_bytes=options.max_shard_bytes,
        kv_scales=bool(scales.states),
    )
    dense = dense_share(checkpoint, planned)
    reasons: dict[str, list[str]] = {}
    for name in dense:
        is_table = name == structure.embedding and isinstance(table, str)
        reasons.setdefault(str(table) if is_table else "it is no linear that can be packed", []).append(name)
    notes = [*scales.notes(), *_without_rounding(checkpoint, scales)]
    for reason, names in reasons.items():
        notes.append(f"{first_of(names)}, {dense[names[0]]} in the source, is stored as float32: {reason}.")
    return checkpoint, replace(scales.bind(planned), notes=(*planned.notes, *notes))


def _without_rounding(checkpoint: Checkpoint, scales: KeptScales) -> Iterator[str]:
    """Yield a note on linears whose inputs the source rounds and the result does not."""
    if checkpoint.activations.are_rounded and not scales.inputs:
        where = checkpoint.activations.settings.where
        yield f"by {where} linears of the source round their inputs. Those of the result do not."
    elif scales.dynamic:
        linears = first_of(scales.dynamic, kind="linears")
        yield f"the source rounds the inputs of {linears} by dynamic scales, and the result does not."


def _packed(fates: Mapping[str, Fate], packing: PackingName) -> dict[str, Fate]:
    """Return `fates` with `packing` in each scheme that can have it; raise `UsageError` if none can."""
    found = {}
    for name, fate in fates.items():
        found[name], one = fate, fate.scheme
        if one is not None and PACKINGS[packing].why_not(one.format, one.planes) is None:
            found[name] = replace(fate, scheme=replace(one, packing=packing))
    if packing != "bits" and found == fates:
        formats = sorted({fate.scheme.format.name for fate in fates.values() if fate.scheme is not None})
        raise UsageError(
            f"--packing {packing} is for no linear of this source: they become {', '.join(formats)}."
        )
    return found
