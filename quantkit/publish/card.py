"""The model card of a packed checkpoint: what it is, how it is stored, what was measured, how to run it.

Figures come from the files that `eval` and `bench` write, and from nowhere else. The front matter is that of
https://huggingface.co/docs/hub/model-cards: with `base_model` and `base_model_relation` the hub lists the
model as a quantization of its base.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from quantkit.about import DISTRIBUTION, requirement
from quantkit.bench.figures import Serving, Speed, read_benchmark
from quantkit.bench.report import (
    SERVING_RULES,
    machine_text,
    models_table,
    serving_settings,
    serving_table,
    speed_table,
)
from quantkit.errors import UsageError
from quantkit.eval.document import Block, Bullets, Command, Document, Figure, Section, Table, Text
from quantkit.eval.report import TASK_EXPLANATION, floor_label, task_table
from quantkit.eval.tasks import TaskMetrics
from quantkit.files import from_json, os_error_text
from quantkit.model.notes import fused_sets
from quantkit.model.record import LayerRecord, ModelRecord
from quantkit.model.saved import NO_MANIFEST, read_record
from quantkit.publish.carried import carried_metadata

#: An image of a report: its caption, and its name, which leads nowhere else.
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([\w\-]+)\.png\)")
_Measured = TypeVar("_Measured", bound=Speed | Serving)


@dataclass(frozen=True)
class Accuracy:
    """What `eval` measured on one text; the fields that compare are None without a reference."""

    text: str
    tokens: int
    perplexity: float | None
    reference_perplexity: float | None
    kl_mean: float | None
    kl_mean_se: float | None
    same_top1: float | None


@dataclass(frozen=True)
class Measurements:
    """What was measured of a model, and how: nothing at all, if so.

    `tasks` are the metrics of the model by its name, and with a noise floor those of the original in another
    dtype by what tables call that. Of `speed` and `serving` the first is the model, the others the original.
    """

    accuracy: tuple[Accuracy, ...] = ()
    tasks: tuple[tuple[str, tuple[TaskMetrics, ...]], ...] = ()
    accuracy_how: str = ""
    speed: tuple[Speed, ...] = ()
    serving: tuple[Serving, ...] = ()


@dataclass(frozen=True)
class Plot:
    """A plot of what `part`, `eval` or `bench`, measured: its name without ending, caption and PNG."""

    part: str
    name: str
    caption: str
    png: bytes


@dataclass(frozen=True)
class Card:
    """A card: its front matter, its text, and what the user should know of what is missing."""

    front_matter: Mapping[str, Any]
    document: Document
    notes: tuple[str, ...] = field(default=())

    def markdown(self) -> str:
        """README.md."""
        import yaml

        front = yaml.safe_dump(dict(self.front_matter), sort_keys=False, allow_unicode=True)
        return f"---\n{front}---\n\n{self.document.markdown()}"


def read_measurements(
    directory: Path, evaluation: Path | None, benchmarks: Sequence[Path] = ()
) -> Measurements:
    """What a file of `eval` and files of `bench` have of the model in `directory`.

    `UsageError` for other files, for files that are about other models only, and for two files of `bench`
    with the same kind of figures.
    """
    found = Measurements() if evaluation is None else _evaluated(directory, evaluation)
    files = [(path, read_benchmark(path)) for path in benchmarks]
    return replace(
        found,
        speed=_with_original(directory, [(path, one.speed) for path, one in files]),
        serving=_with_original(directory, [(path, one.serving) for path, one in files]),
    )


def _with_original(
    directory: Path, files: Sequence[tuple[Path, tuple[_Measured, ...] | None]]
) -> tuple[_Measured, ...]:
    """The model in `directory` and the original, of the one file that has figures of a kind, if one has."""
    having = [(path, figures) for path, figures in files if figures is not None]
    if not having:
        return ()
    path, figures = having[0]
    if len(having) > 1:
        raise UsageError(f"{path} and {having[1][0]} have figures of the same kind. Give one of the two.")
    own = next((one for one in figures if _is_model(directory, one.model)), None)
    if own is None:
        raise _other_model(directory, path, [one.model for one in figures])
    # The original has no packed format.
    return (own, *(one for one in figures if one.format == "dense" and one is not own))


def plots_beside(evaluation: Path | None, benchmarks: Sequence[Path] = ()) -> tuple[Plot, ...]:
    """The plots of the reports that `eval` and `bench` wrote beside their figures, as they show them."""
    found = []
    parts = [("bench", path) for path in benchmarks]
    for part, path in parts if evaluation is None else [("eval", evaluation), *parts]:
        text = path.with_suffix(".md")
        if not text.is_file():
            continue
        for caption, name in _IMAGE.findall(text.read_text(encoding="utf-8")):
            if (text.parent / f"{name}.png").is_file():
                found.append(
                    Plot(part, f"{part}-{name}", caption, (text.parent / f"{name}.png").read_bytes())
                )
    return tuple(found)


def make_card(
    directory: Path,
    measurements: Measurements,
    plots: Sequence[Plot] = (),
    *,
    repo: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
) -> Card:
    """The card of the packed checkpoint in `directory`, which will be `repo` on the hub.

    `base_model` (a hub id) is by default the source, if the manifest says that it was a hub id; `license` is
    what the README.md in `directory`, a copy of the source's, says. Nothing is asked of the hub, and no file
    outside of `directory` is read.
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
    front |= {"library_name": "transformers", "pipeline_tag": "text-generation", **carried}
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
        Section("How to run it", tuple(_running(record, name))),
    )
    return Card(front, Document(name, sections), tuple(notes))


def check_repo_id(name: str) -> None:
    """`UsageError` for what no repository of the hub can be called."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(f"{name!r} is no repository id: {error} Give one such as org/name.") from error


def _is_model(directory: Path, model: str) -> bool:
    return Path(model).resolve() == directory.resolve() or Path(model).name == directory.resolve().name


def _other_model(directory: Path, path: Path, models: Sequence[str]) -> UsageError:
    return UsageError(
        f"{path} is about {', '.join(models) or 'no model'}, not {directory}. Give the file that was "
        "measured of it."
    )


def _evaluated(directory: Path, path: Path) -> Measurements:
    """The figures of report.json or of eval.json for the model in `directory`, and how they were taken."""
    try:
        data = json.loads(path.read_bytes())
        reports = data.get("reports", [data])
        models = [report["model"] for report in reports]
        own = next((one for one in reports if _is_model(directory, one["model"])), None)
        if own is None:
            raise _other_model(directory, path, models)
        rows = tuple(from_json(Accuracy, {**metrics, "text": text}) for text, metrics in own["texts"].items())
        tasks = [(Path(own["model"]).name, own["tasks"])]
        floor = own.get("noise_floor")
        if floor is not None:
            # Of older files it is on texts alone.
            tasks.append((floor_label(own["against"], floor["dtype"]), floor.get("tasks", ())))
        answers = tuple(
            (label, tuple(from_json(TaskMetrics, one) for one in metrics))
            for label, metrics in tasks
            if metrics
        )
        how = (
            f"Windows of {own['window']} tokens, activations in {own['dtype']} on {own['device']}; quantkit "
            f"{own['quantkit_version']}, torch {own['torch']}, transformers {own['transformers']}."
        )
    except OSError as error:
        raise UsageError(f"cannot read {path}: {os_error_text(error)}. Check the path.") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} is not what `quantkit eval` writes ({type(error).__name__}: {error}). Give its "
            "report.json or the file of --json."
        ) from error
    return Measurements(rows, answers, how)


def _formats(record: ModelRecord) -> list[str]:
    return list(dict.fromkeys(layer.scheme.split()[0] for layer in record.layers.values() if layer.scheme))


def _introduction(record: ModelRecord, base: str | None) -> Iterator[Block]:
    packed = [layer for layer in record.layers.values() if layer.scheme is not None]
    of = f"`{base}`" if base is not None else "A language model"
    yield Text(
        f"{of}, quantized with {' '.join(filter(None, ('quantkit', record.versions.get('quantkit'))))} to "
        f"{', '.join(_formats(record))}: {sum(layer.matrices for layer in packed)} matrices in "
        f"{len(packed)} linears."
    )
    if record.calibration is not None:
        yield Text(f"Calibrated on {record.calibration}.")


def _storage(record: ModelRecord) -> Iterator[Block]:
    kinds: dict[tuple[str, str], list[LayerRecord]] = {}
    for layer in record.layers.values():
        kinds.setdefault((layer.scheme or "dense", layer.method or "-"), []).append(layer)
    rows = [
        (*kind, str(len(layers)), _shown(_mean_bits(layers), ".3f"))
        for kind, layers in sorted(kinds.items(), key=lambda item: -len(item[1]))
    ]
    yield Table(("format", "method", "linears", "bits per weight"), rows, frozenset({"format", "method"}))
    linears, model = record.bits_per_weight["linears"], record.bits_per_weight["model"]
    packed = "" if linears is None else f"{linears:.3f} bits per weight in packed linears, "
    more = " `quantkit_manifest.json` has the recipe, the error of each layer and the hash of each file."
    yield Text(
        f"{packed}{model:.3f} in the whole model. Every stored bit counts: words, padding, scales and "
        f"zero-points.{'' if record.source is None else more}"
    )


def _mean_bits(layers: Sequence[LayerRecord]) -> float | None:
    """Bits per weight of all weights together; None for dense ones."""
    weights = [layer.matrices * math.prod(layer.shape) for layer in layers]
    bits = [layer.bits_per_weight for layer in layers if layer.bits_per_weight is not None]
    if not bits:
        return None
    return sum(b * n for b, n in zip(bits, weights, strict=True)) / sum(weights)


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
    """What was answered right, of a model without a reference."""
    rows = [
        (one.task, one.metric, str(one.items), f"{100 * one.accuracy:.2f} %" + _error_points(one.accuracy_se))
        for one in tasks
    ]
    return Table(("task", "metric", "items", "right"), rows, frozenset({"task", "metric"}))


def _texts_table(texts: Sequence[Accuracy]) -> Table:
    rows = [
        (
            one.text,
            str(one.tokens),
            _shown(one.perplexity, ".6g"),
            _shown(one.reference_perplexity, ".6g"),
            _shown(one.kl_mean, ".3g") + _error(one.kl_mean_se),
            "-" if one.same_top1 is None else f"{100 * one.same_top1:.2f} %",
        )
        for one in texts
    ]
    headings = ("text", "tokens", "perplexity", "the original's", "KL mean, nats", "same top-1")
    return Table(headings, rows, frozenset({"text"}))


def _error(value: float | None) -> str:
    return "" if value is None else f" ± {value:.1g}"


def _error_points(value: float | None) -> str:
    return "" if value is None else f" ± {100 * value:.2f}"


def _images(plots: Sequence[Plot], part: str) -> Iterator[Block]:
    return (Figure(plot.name, plot.caption, plot.png, "") for plot in plots if plot.part == part)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


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


def _running(record: ModelRecord, name: str) -> Iterator[Block]:
    source = requirement()
    how = f"`pip install '{source}'`" if source else "`pip install .` at the root of its repository"
    yield Text(
        f"Install quantkit first: {how}. Its distribution is called `{DISTRIBUTION}`; the package index has "
        "a `quantkit` that is not it."
    )
    yield Command(
        "import quantkit\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n'
        'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))"
    )
    if record.needs_quantkit:
        yield Text(f"Only quantkit reads this checkpoint: {record.needs_quantkit[0]}.")
        return
    split = [
        members
        for members in fused_sets({name: layer.scheme for name, layer in record.layers.items()})
        if len(set(members.values())) > 1
    ]
    if split:
        yield Text(
            "It is a compressed-tensors checkpoint, but vLLM and SGLang cannot load it: they fuse linears "
            f"that differ here, such as {' and '.join(split[0])}."
        )
        return
    yield Bullets(
        [
            "With quantkit the weights stay packed. Without it transformers loads the checkpoint too, and "
            "makes the weights dense when it runs.",
            f"It is a compressed-tensors checkpoint: `vllm serve {name}`, as far as vLLM has its formats.",
        ]
    )
