"""Write the model card of a packed checkpoint: description, storage, measurements and usage.

Figures come only from the files that `eval` and `bench` write (`measurements.py`). The front matter follows
https://huggingface.co/docs/hub/model-cards: with `base_model` and `base_model_relation` the hub lists the
model as a quantization of its base.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from quantkit import escaping
from quantkit.about import DISTRIBUTION, requirement
from quantkit.checkpoint.engines import TRANSFORMERS, VLLM
from quantkit.checkpoint.manifest import MANIFEST_NAME
from quantkit.checkpoint.model_record import LayerRecord, ModelRecord
from quantkit.checkpoint.safetensors_header import read_json
from quantkit.checkpoint.source import CONFIG_NAME
from quantkit.errors import UsageError
from quantkit.escaping import Code, Prose
from quantkit.eval.tasks import TaskMetrics
from quantkit.publish.carried import carried_metadata
from quantkit.publish.measurements import Accuracy, Measurements, Plot
from quantkit.publish.usage import Usage, snippet, tag_of, usage_of
from quantkit.quantization.plan_warnings import readers_beside
from quantkit.report.bench_report import (
    SERVING_RULES,
    machine_text,
    models_table,
    serving_settings,
    serving_table,
    speed_table,
)
from quantkit.report.document import Block, Bullets, Command, Document, Figure, Section, Table, Text
from quantkit.report.tables import (
    TASK_EXPLANATION,
    error_text,
    number_text,
    percent_text,
    points_text,
    task_table,
)
from quantkit.runtime.saved_model import NO_MANIFEST, read_record
from quantkit.verification.readers import stored_notes


@dataclass(frozen=True)
class Card:
    """Card: its front matter, its text, and notes for the user on missing parts."""

    front_matter: Mapping[str, Any]
    document: Document
    notes: tuple[str, ...] = field(default=())

    def markdown(self) -> str:
        """Return the text of README.md."""
        return f"---\n{escaping.yaml(self.front_matter)}---\n\n{self.document.markdown()}"


def make_card(
    directory: Path,
    measurements: Measurements,
    plots: Sequence[Plot] = (),
    *,
    repo: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
) -> Card:
    """Make the card of the packed checkpoint in `directory`, to be uploaded as `repo`.

    `base_model` (a hub id) is by default the source, if the manifest has it as a hub id. `license` is by
    default the one in README.md of `directory`, a copy of the source's. Does not contact the hub, and reads
    no file outside of `directory`.
    """
    for name in (repo, base_model):
        if name is not None:
            check_repo_id(name)
    record = read_record(directory)
    base = base_model or record.hub_source
    if base is not None:
        check_repo_id(base)
    carried = carried_metadata(directory)
    if license is not None:
        carried = {"license": license, **{k: v for k, v in carried.items() if not k.startswith("license")}}
    notes = [NO_MANIFEST] if record.source is None else []
    if base is None:
        why = "there is no manifest" if record.source is None else f"{record.source} was no hub id"
        notes.append(
            f"the card names no base model: {why}. With --base-model ORG/NAME the hub lists the model as a "
            "quantization of it."
        )
    if "license" not in carried:
        notes.append("the card names no license: the source's card has none or is not here. Give --license.")
    if requirement() is None:
        notes.append(
            "the card does not say where to get quantkit: this one was installed from a local directory. "
            f"Installed with `pip install '{DISTRIBUTION} @ git+https://...'`, it writes that address."
        )
    front: dict[str, Any] = {}
    if base is not None:
        front = {"base_model": base, "base_model_relation": "quantized"}
    usage = usage_of(directory)
    front |= {"library_name": "transformers", **tag_of(usage), **carried}
    front["tags"] = [
        "quantkit",
        *([record.container] if not record.needs_quantkit else []),
        *_formats(record),
    ]
    name = repo or directory.resolve().name
    sections = (
        Section("What it is", tuple(_introduction(record, base))),
        Section("How it is stored", tuple(_storage(record))),
        Section("Accuracy", (*_accuracy_blocks(measurements), *_images(plots, "eval"))),
        Section("Speed and memory", (*_speed_blocks(measurements), *_images(plots, "bench"))),
        Section("How to run it", tuple(_running(record, directory, usage, name))),
    )
    return Card(front, Document(_title(record, repo, base, name), sections), tuple(notes))


def _title(record: ModelRecord, repo: str | None, base: str | None, name: str) -> str:
    """Return the name of the repository, else that of the original with the formats, else `name`."""
    if repo is not None:
        return repo.rpartition("/")[2]
    original = base or record.source
    if original is None:
        return name
    return " ".join((PurePath(original).name.removesuffix(".gguf") or name, *_formats(record)))


def check_repo_id(name: str) -> None:
    """Raise `UsageError` for an invalid repository name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(f"{name!r} is no repository id: {error} Give one such as org/name.") from error


def _formats(record: ModelRecord) -> list[str]:
    return list(
        dict.fromkeys(layer.scheme.partition(" ")[0] for layer in record.layers.values() if layer.scheme)
    )


def _introduction(record: ModelRecord, base: str | None) -> Iterator[Block]:
    packed = [layer for layer in record.layers.values() if layer.scheme is not None and layer.matrices]
    quantkit = " ".join(filter(None, ("quantkit", record.versions.get("quantkit"))))
    how = (
        f", quantized with {quantkit} to {', '.join(_formats(record))}: "
        f"{sum(layer.matrices for layer in packed)} matrices in {len(packed)} linears."
    )
    yield Text((Code(base) if base is not None else "A model", how))
    if record.calibration is not None:
        yield Text(f"Calibrated on {record.calibration}.")


def _storage(record: ModelRecord) -> Iterator[Block]:
    kinds: dict[tuple[str, str], list[LayerRecord]] = {}
    for layer in record.layers.values():
        kinds.setdefault((layer.scheme or "dense", layer.method or "-"), []).append(layer)
    rows = [
        (*kind, str(len(layers)), number_text(_mean_bits(layers), ".3f"))
        for kind, layers in sorted(kinds.items(), key=lambda item: -len(item[1]))
    ]
    yield Table(("format", "method", "linears", "bits per weight"), rows, frozenset({"format", "method"}))
    linears, model = record.bits_per_weight["linears"], record.bits_per_weight["model"]
    packed = "" if linears is None else f"{linears:.3f} bits per weight in packed linears, "
    bits = (
        f"{packed}{model:.3f} in the whole model. Every stored bit counts: words, padding, scales and "
        "zero-points."
    )
    more = " has the recipe, the error of each layer and the hash of each file."
    yield Text(bits if record.source is None else (bits, " ", Code(MANIFEST_NAME), more))


def _mean_bits(layers: Sequence[LayerRecord]) -> float | None:
    """Return the bits per weight over all packed linears; None without packed linears."""
    known = [
        (layer.bits_per_weight, layer.matrices * math.prod(layer.shape))
        for layer in layers
        if layer.bits_per_weight is not None
    ]
    return sum(bits * count for bits, count in known) / sum(count for _, count in known) if known else None


def _accuracy_blocks(measurements: Measurements) -> Iterator[Block]:
    if not (measurements.accuracy or measurements.tasks):
        yield Text("Nothing was measured.")
        return
    if measurements.accuracy:
        yield _texts_table(measurements.accuracy)
    if any(one.paired for _, tasks in measurements.tasks for one in tasks):
        yield task_table(measurements.tasks)
        yield Text(TASK_EXPLANATION)
    elif measurements.tasks:
        yield _tasks_table(measurements.tasks[0][1])
    yield Text(measurements.accuracy_how)


def _tasks_table(tasks: Sequence[TaskMetrics]) -> Table:
    """Return the table of accuracies for a model without a reference."""
    rows = [
        (one.task, one.metric, str(one.items), percent_text(one.accuracy) + points_text(one.accuracy_se))
        for one in tasks
    ]
    return Table(("task", "metric", "items", "right"), rows, frozenset({"task", "metric"}))


def _texts_table(texts: Sequence[Accuracy]) -> Table:
    rows = [
        (
            one.text,
            str(one.tokens),
            number_text(one.perplexity, ".6g"),
            number_text(one.reference_perplexity, ".6g"),
            number_text(one.kl_mean, ".3g") + error_text(one.kl_mean_se),
            percent_text(one.same_top1),
        )
        for one in texts
    ]
    headings = ("text", "tokens", "perplexity", "the original's", "KL mean, nats", "same top-1")
    return Table(headings, rows, frozenset({"text"}))


def _images(plots: Sequence[Plot], part: str) -> Iterator[Block]:
    return (Figure(plot.name, plot.caption, plot.png, "") for plot in plots if plot.part == part)


def _speed_blocks(measurements: Measurements) -> Iterator[Block]:
    speed, serving = measurements.speed, measurements.serving
    if speed:
        yield models_table(speed)
        yield speed_table(speed)
        yield Text(
            f"{machine_text(speed[0].machine)} Medians of {speed[0].repeats} repetitions with the smallest "
            "and the largest."
        )
    if serving:
        yield serving_table(serving)
        yield Text(f"{machine_text(serving[0].machine)} {serving_settings(serving)}")
        yield Bullets(SERVING_RULES)
    if not (speed or serving):
        yield Text("Nothing was measured.")


def _running(record: ModelRecord, directory: Path, usage: Usage | None, name: str) -> Iterator[Block]:
    source = requirement()
    how = (
        (Code(f"pip install '{source}'"),)
        if source
        else (Code("pip install ."), " at the root of its repository")
    )
    called = (". Its distribution is called ", Code(DISTRIBUTION), "; the package index has a ")
    yield Text(("Install quantkit first: ", *how, *called, Code("quantkit"), " that is not it."))
    yield Command(snippet(usage, name))
    if record.needs_quantkit:
        yield Text(f"Only quantkit reads this checkpoint: {record.needs_quantkit[0]}.")
        return
    notes = stored_notes(read_json(directory / CONFIG_NAME), record.layers)
    # Without a transformers class, the readers are unknown.
    readers = () if notes is None or record.recipe.get("model_free") else readers_beside(notes)
    kept = "With quantkit the weights stay packed."
    bullets: list[Prose] = [kept]
    if TRANSFORMERS.name in readers:
        without = Code("pip install transformers compressed-tensors")
        bullets.append(
            (
                "Without quantkit, after ",
                without,
                ", the program loads it too if its first line is left out, and makes the weights dense.",
            )
        )
    if VLLM.name in readers:
        vllm = Code(f"vllm serve {shlex.quote(name)}")
        bullets.append(("It is a compressed-tensors checkpoint: ", vllm, f", tried with {VLLM}."))
    yield Bullets([*bullets, *(note.text for note in notes or ())])
