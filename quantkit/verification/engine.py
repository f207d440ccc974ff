"""Predict how an inference engine loads a packed checkpoint, from config.json and headers alone."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.checkpoint.compressed_tensors import compressed_tensors_format, input_arguments
from quantkit.checkpoint.engine_support import support
from quantkit.checkpoint.engines import Engine, Support, asked_engine, installed_beside
from quantkit.checkpoint.quantization_config import Assignment, QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError, first_of
from quantkit.model.model_class import why_no_class
from quantkit.packing.packings import PACKINGS
from quantkit.quantization.plan import Plan
from quantkit.quantization.plan_warnings import reader_notes
from quantkit.runtime.parallel_plan import Cut, TensorParallelPlan
from quantkit.runtime.saved_model import read_record, record_of
from quantkit.runtime.tensor_parallel import plan_of_checkpoint
from quantkit.verification.readers import stored_assignments

#: Numbers of GPUs among which engines are asked to divide a model.
RANKS = (1, 2, 4, 8)
#: Columns of a group that Marlin takes, the kernel of engines for integers.
MARLIN_GROUPS = (32, 64, 128)
#: Linears of whose heads an engine gives every rank one, the same to several if there are fewer.
_REPLICATED = ("k_proj", "v_proj")


@dataclass(frozen=True)
class EngineLayer:
    """A linear in an engine.

    `shape` is [N, K] of each of its `matrices`. `scheme` is None for a dense linear. `reads` is the class of
    the engine that reads the linear; None if it is dense or no class reads it.
    """

    kind: str
    shape: tuple[int, int]
    matrices: int
    scheme: str | None
    reads: str | None


@dataclass(frozen=True)
class EngineReport:
    """Report on how an engine loads a packed checkpoint.

    `layers` are its linears by module. `refusals` are the reasons, with remedies, why the engine cannot load
    the checkpoint or would misread it. `tensor_parallel` maps each of `RANKS` to the reason why that many
    GPUs cannot divide the model, or to None if they can. It is empty if this is unknown.
    """

    engine: str
    version: str
    layers: Mapping[str, EngineLayer]
    refusals: tuple[str, ...]
    tensor_parallel: Mapping[int, str | None]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"ok": not self.refusals, **asdict(self)}


def engine_report(directory: Path, engine: Engine, version: str) -> EngineReport:
    """Return how `version` of `engine` loads a packed checkpoint. Reads headers, no weights.

    Raises `CheckpointError` if `directory` is not a packed checkpoint, or if a part of it is missing or has
    another dtype or shape.
    """
    record = read_record(directory)
    checkpoint = Checkpoint.open(directory, strict=True)
    section = checkpoint.config["quantization_config"]
    layers, unknown = dict(record.layers), why_no_class(checkpoint.config, directory)
    if unknown is None:
        layers |= record_of(checkpoint).layers
    assignments = stored_assignments(section, layers)
    refusals = why_refused(engine, version, checkpoint.config, assignments, record.needs_quantkit)
    portable = QuantizationConfig.from_dict(section).container == "compressed-tensors"
    notes, ranks = [installed_beside(engine, version)], {}
    if portable:
        notes += _cautions(engine, assignments)
        ranks = {} if unknown else _ranks(plan_of_checkpoint(checkpoint), assignments)
        if not ranks:
            reason = unknown or "transformers has no tensor-parallel plan for this class"
            notes.append(f"among how many GPUs {engine.name} divides it is not known: {reason}.")
    return EngineReport(
        engine.name,
        version,
        {
            a.module: EngineLayer(
                a.kind,
                a.shape,
                len(a.stored),
                None if a.scheme is None else str(a.scheme.for_columns(a.shape[1])),
                next(iter(row.classes), None) if portable and (row := _row(engine, a)) else None,
            )
            for a in assignments
        },
        refusals,
        ranks,
        tuple(filter(None, notes)),
    )


def for_engine(planned: Plan, asked: str) -> Plan:
    """Check `planned` for the engine and version in `asked`, such as that of `--engine`; add notes on it.

    Raises `UsageError` with the reasons if that engine cannot load a linear of the result, or misreads it.
    """
    engine, version = asked_engine(asked)
    config = planned.model_config
    refused = why_refused(engine, version, config, planned.assignments, planned.not_portable)
    if refused:
        raise UsageError(f"--engine {asked}: {' '.join(refused)}")
    notes = (
        f"{engine.name} {version} has a class for each linear of the result.",
        *_cautions(engine, planned.assignments),
        installed_beside(engine, version),
    )
    return replace(planned, notes=(*planned.notes, *filter(None, notes)))


def why_refused(
    engine: Engine,
    version: str,
    config: Mapping[str, Any],
    assignments: Sequence[Assignment],
    needs_quantkit: Sequence[str],
) -> tuple[str, ...]:
    """Return the reasons, with remedies, why `version` of `engine` cannot load linears or misreads them.

    `config` is config.json, whose `quantization_config` describes `assignments`. `needs_quantkit` lists the
    reasons why only quantkit can read the checkpoint, if any.
    """
    section = config["quantization_config"]
    if QuantizationConfig.from_dict(section).container != "compressed-tensors":
        return (_not_portable(engine, needs_quantkit),)
    names = {engine.name, f"{engine.name} {version}"}
    refused = (note.text for note in reader_notes(config, assignments) if names & set(note.cannot))
    return (*refused, *_misread(engine, section, assignments))


def _row(engine: Engine, a: Assignment) -> Support | None:
    """Return the table row of `engine` for the storage of a packed linear; None for a dense linear."""
    if a.scheme is None:
        return None
    row = compressed_tensors_format(a.scheme, a.shape[1])
    return support(engine, row.stored_as(a.module, a.kind, a.scheme, a.shape))


def _cautions(engine: Engine, assignments: Sequence[Assignment]) -> Iterator[str]:
    """Yield a sentence for each caution on linears that `engine` reads, with the names of the first.

    A caution is of the class that reads them, or says that Marlin does not take their group size.
    """
    found: dict[str, list[str]] = {}
    for a in assignments:
        row = _row(engine, a)
        if row is not None and row.caution:
            found.setdefault(f"{row.classes[0]} of {engine.name} {row.caution}", []).append(a.module)
        size = None if a.scheme is None else a.scheme.for_columns(a.shape[1]).group_size
        integers = row is not None and row.format == "pack-quantized" and not row.bits
        if integers and isinstance(size, int) and size not in MARLIN_GROUPS:
            text = (
                f"Marlin takes groups of {', '.join(map(str, MARLIN_GROUPS))} or whole rows, not of {size}: "
                f"whether {engine.name} has another kernel for them depends on the GPU, and was not tried"
            )
            found.setdefault(text, []).append(a.module)
    for text, names in found.items():
        yield f"{text}: {first_of(names)}."


def _misread(engine: Engine, section: Mapping[str, Any], assignments: Sequence[Assignment]) -> Iterator[str]:
    """Yield a message if config.json makes `engine` read linears in another scheme than they have."""
    groups: Any = section.get("config_groups")
    ignored: Any = section.get("ignore")
    if not (
        isinstance(groups, dict)
        and isinstance(ignored, list)
        and all(isinstance(one, dict) and isinstance(one.get("targets"), list) for one in groups.values())
    ):
        yield "config.json has no config_groups and ignore as in compressed-tensors. Restore config.json."
        return
    wrong = []
    for a in assignments:
        # What engines call experts depends on the model.
        if a.experts:
            continue
        seen = None if _matches(a.module, ignored) else _group_of(a, groups.values())
        found = (
            None if seen is None else (seen.get("format"), seen.get("weights"), seen.get("input_activations"))
        )
        expected = None
        if a.scheme is not None:
            row = compressed_tensors_format(a.scheme, a.shape[1])
            inputs = input_arguments(a.scheme.activations)
            expected = (row.stored.name, row.arguments(a.scheme, a.shape[1]), inputs)
        if found != expected:
            wrong.append(
                (a.module, "dense" if found is None else found[0], "packed" if expected else "dense")
            )
    if wrong:
        _, seen_as, stored_as = wrong[0]
        yield (
            f"{engine.name} would take {first_of(module for module, _, _ in wrong)} to be {seen_as}, by "
            f"config_groups and ignore of config.json, and the file has it {stored_as}, or in another "
            "scheme. Restore config.json, or quantize the model again."
        )


def _group_of(a: Assignment, groups: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the group that matches a linear by name or else (except heads) by class; None if none does."""
    by_class = None
    for group in groups:
        if _matches(a.module, group["targets"]):
            return group
        if "Linear" in group["targets"] and not a.head:
            by_class = group
    return by_class


def _matches(name: str, patterns: Iterable[object]) -> bool:
    """Return True if a name is one of `patterns`, or matches one that starts with `re:`."""
    return any(
        one == name or (isinstance(one, str) and one.startswith("re:") and re.match(one[3:], name))
        for one in patterns
    )


def _not_portable(engine: Engine, reasons: Sequence[str]) -> str:
    more = f" (one of {len(reasons)} linears)" if len(reasons) > 1 else ""
    why = f": {reasons[0]}{more}" if reasons else ""
    package = engine.name.lower()
    tried = engine.plugin_tried
    plugin = (
        f" With quantkit beside {engine.name}, its plug-in runs this: tried with {tried}." if tried else ""
    )
    return (
        f"{engine.name} alone has no quant_method 'quantkit', and compressed-tensors cannot express "
        f"this{why}. Choose formats and group sizes that it has: --bits-per-weight with --engine {package} "
        f"does.{plugin}"
    )


def _ranks(plan: TensorParallelPlan, assignments: Sequence[Assignment]) -> dict[int, str | None]:
    """Return by number of `RANKS` why as many GPUs cannot divide the model; None if they can.

    `plan` has the cuts that transformers makes. {} if it has none.
    """
    if not plan.cuts:
        return {}
    by_module = {a.module: a for a in assignments}
    cuts = [_in_engine(cut, by_module.get(cut.name)) for cut in plan.cuts]
    return {
        ranks: next((reason for cut in cuts if (reason := _why_not(cut, ranks)) is not None), None)
        for ranks in RANKS
    }


def _in_engine(cut: Cut, a: Assignment | None) -> Cut:
    """Return `cut` with the units that ranks of an engine must keep whole: groups and words of the file.

    `a` is the packed linear. `cut` is unchanged for a dense linear, or if ranks divide rows.
    """
    if a is None or a.scheme is None or cut.axis == "rows":
        return cut
    row = compressed_tensors_format(a.scheme, a.shape[1])
    arguments = row.arguments(a.scheme, a.shape[1])
    # A row of one group is a group too: engines look for a scale for every so many columns of a share.
    group = arguments["group_size"] or arguments.get("block_structure", (1, 1))[1]
    word = row.stored.codes_per_element
    word = word or PACKINGS[a.scheme.packing].codes_per_cut(a.scheme.format, a.scheme.planes)
    units = {f"groups of {group}": group, f"words of {word} codes": word}
    return replace(cut, units={name: unit for name, unit in units.items() if unit > 1})


def _why_not(cut: Cut, ranks: int) -> str | None:
    """Return why `ranks` GPUs cannot divide a matrix; None if they can."""
    head = next((size for unit, size in cut.units.items() if unit.startswith("heads")), None)
    if head is not None and cut.name.rpartition(".")[2] in _REPLICATED:
        heads = cut.length // head
        if ranks % heads == 0:
            ranks = min(ranks, heads)
    return cut.why_not(ranks)
