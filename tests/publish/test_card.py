"""Model cards: nothing in them that was not measured or read, and front matter as the hub reads it."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import example, given, settings

import quantkit
from quantkit.bench.figures import Cell, Load, Machine, Memory, Percentiles, Serving, Speed, Spread, to_json
from quantkit.checkpoint.engines import SGLANG, VLLM
from quantkit.checkpoint.manifest import MANIFEST_NAME, manifest_bytes, read_manifest
from quantkit.checkpoint.model_record import LayerRecord, ModelRecord
from quantkit.errors import CheckpointError, UsageError
from quantkit.eval.eval_options import EvalOptions
from quantkit.eval.evaluate import evaluate_many
from quantkit.eval.paired import compare
from quantkit.eval.results import EvalReport, NoiseFloor
from quantkit.eval.tasks import TaskMetrics
from quantkit.publish import card as card_module
from quantkit.publish.card import make_card
from quantkit.publish.carried import carried_metadata
from quantkit.publish.measurements import (
    Accuracy,
    Measurements,
    Plot,
    plots_beside,
    plots_of,
    read_measurements,
)
from quantkit.quantization.plan_warnings import Note
from quantkit.report.document import Figure
from quantkit.report.eval_plots import figures
from quantkit.report.eval_report import document, write_report

from ..fuzz.guard import bounded
from ..test_escaping import NAMES, line, only_text
from .conftest import SOURCE

MACHINE = Machine("cpu", "a CPU", 2, 1e10, "0.1.0", "2.13.0", "5.23.0")
CELL = Cell(1, 8, "eager", Spread(1, 1, 1), Spread(8, 8, 8), 0.01, 0.02, Spread(77, 76, 78), None, None)


def speed_of(model: Path | str, format: str = "int4") -> Speed:
    name = Path(model).name
    memory = Memory(10, 20, 30)
    return Speed(
        name, str(model), format, "bfloat16", 9, 1.0, None, memory, MACHINE, (CELL,), 8, 5, "random", ()
    )


def serving_of(model: Path | str, format: str = "int4") -> Serving:
    load = Load(2.0, Percentiles(0.1, 0.2, 0.3), Percentiles(0.01, 0.02, 0.03), Percentiles(1, 2, 3), 1.5, 30)
    return Serving(
        Path(model).name, str(model), format, "bfloat16", "sdpa", MACHINE, (load,), 8, 0, (16, 256), (8, 64)
    )


@pytest.fixture(scope="module")
def evaluated(packed: Path) -> str:
    """What `eval --json` writes of `packed`."""
    found = quantkit.evaluate(
        packed, against=SOURCE, texts=[SOURCE.parent / "stories.txt"], window=64, max_windows=2, device="cpu"
    )
    return found.to_json()


@pytest.fixture
def evaluation(evaluated: str, tmp_path: Path) -> Path:
    """That in a file of the test's own."""
    path = tmp_path / "eval.json"
    path.write_text(evaluated)
    return path


def test_a_card_without_measurements_says_so(packed: Path) -> None:
    card = make_card(packed, Measurements())
    parsed = ModelCard(card.markdown())
    assert parsed.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["quantkit", "compressed-tensors", "int4"],
    }
    assert parsed.text.count("Nothing was measured.") == 2
    assert "# stories260K int4\n" in parsed.text
    assert "| int4 g32 bfloat16 | mse | 30 | 4.522 |\n| dense | - | 6 | - |" in parsed.text
    assert "4.522 bits per weight in packed linears, 13.875 in the whole model." in parsed.text
    assert 'from_pretrained("tiny-int4")' in parsed.text
    assert [note.partition(":")[0] for note in card.notes] == [
        "the card names no base model",
        "the card names no license",
        "the card does not say where to get quantkit",
    ]
    assert (
        "`pip install .` at the root of its repository. Its distribution is called `quantkit-lowbit`"
        in parsed.text
    )


def test_a_card_says_where_quantkit_was_installed_from(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "quantkit-lowbit @ git+https://a.b/quantkit@c0"
    monkeypatch.setattr(card_module, "requirement", lambda: source)
    card = make_card(packed, Measurements())
    assert f"`pip install '{source}'`" in card.markdown()
    assert not any("where to get quantkit" in note for note in card.notes)


README = b"""---
license: mit
license_name: x
language:
- en
- no
tags: [other]
datasets: [y]
---
# The original
"""


@pytest.fixture
def copied(packed: Path, tmp_path: Path) -> Path:
    """`packed` with the source's README.md, as `quantize` copies it."""
    directory = Path(shutil.copytree(packed, tmp_path / "tiny-int4"))
    (directory / "README.md").write_bytes(README)
    return directory


def test_the_front_matter_names_base_license_and_tags(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_module, "requirement", lambda: "quantkit-lowbit")
    card = make_card(copied, Measurements(), base_model="org/base", repo="me/tiny")
    front = yaml.safe_load(card.markdown().split("---\n")[1])
    assert front["base_model"] == "org/base" and front["base_model_relation"] == "quantized"
    assert (front["license"], front["license_name"]) == ("mit", "x")
    assert front["language"] == ["en", "no"]
    assert front["tags"] == ["quantkit", "compressed-tensors", "int4"] and "datasets" not in front
    assert card.notes == ()
    assert "`org/base`, quantized with quantkit" in card.markdown()
    assert "`vllm serve me/tiny`" in card.markdown()
    other = make_card(copied, Measurements(), base_model="org/base", license="apache-2.0")
    assert other.front_matter["license"] == "apache-2.0" and "license_name" not in other.front_matter


@pytest.mark.parametrize("name", ["two words", "a/b/c", "org/-x", "", "org/" + 100 * "x"])
def test_names_that_no_repository_can_have(packed: Path, name: str) -> None:
    for asked in ({"repo": name}, {"base_model": name}):
        with pytest.raises(UsageError, match=f"'{name}' is no repository id: .* such as org/name"):
            make_card(packed, Measurements(), **asked)


@pytest.mark.parametrize(
    ("front", "expected"),
    [
        ("license: mit\n", {"license": "mit"}),
        ("license: mit # a comment\nlanguage: no\n", {"license": "mit", "language": "no"}),
        ("license_name: a\nlicense: [mit]\n", {"license": ["mit"], "license_name": "a"}),
        ("language:\n  - en\n\n  - de\nlicense: x\n", {"license": "x", "language": ["en", "de"]}),
        ("model-index:\n- license: other\nlicense: x\n", {"license": "x"}),
        ("license: {a: b}\nlanguage: [[en]]\n", {}),
        ("license: [\nlanguage: en\n", {"language": "en"}),
        ("license: &a [*a]\n", {}),
        ('license: ""\nlanguage: [en, ""]\n', {}),
        ("license: " + "[" * 4000 + "\n", {}),
        ("license: " + "x" * 5000 + "\n", {}),
        ('license: "\\e[31m"\n', {}),
        ("", {}),
    ],
)
def test_what_is_carried_over_from_a_card(tmp_path: Path, front: str, expected: dict[str, Any]) -> None:
    assert carried_metadata(tmp_path) == {}
    (tmp_path / "README.md").write_text(f"---\n{front}---\n# A model\nlicense: none\n")
    assert carried_metadata(tmp_path) == expected


def test_a_card_that_is_elsewhere_or_no_text(tmp_path: Path) -> None:
    place = tmp_path / "packed"
    place.mkdir()
    (tmp_path / "README.md").write_bytes(README)
    (place / "README.md").symlink_to(tmp_path / "README.md")
    assert carried_metadata(place) == {}
    (place / "README.md").unlink()
    os.mkfifo(place / "README.md")
    assert carried_metadata(place) == {}
    (place / "README.md").unlink()
    (place / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    assert carried_metadata(place) == {}


def with_source(directory: Path, **values: Any) -> None:
    """Have the manifest say another source."""
    manifest = {**read_manifest(directory), **values}
    for key in [key for key, value in values.items() if value is None]:
        del manifest[key]
    (directory / MANIFEST_NAME).write_bytes(manifest_bytes(manifest))


def test_the_source_is_what_the_manifest_says_it_was(copied: Path) -> None:
    manifest = read_manifest(copied)
    assert (manifest["source"], manifest["source_kind"]) == (str(SOURCE), "directory")
    # As earlier versions wrote it, and as a directory with such a name is written.
    for kind in (None, "directory"):
        with_source(copied, source="org/name", source_kind=kind, source_commit=None)
        card = make_card(copied, Measurements())
        assert "base_model" not in card.front_matter
        assert "org/name was no hub id" in card.notes[0]
    with_source(copied, source="org/name", source_kind="hub", source_commit="1" * 40)
    assert make_card(copied, Measurements()).front_matter["base_model"] == "org/name"


@pytest.mark.parametrize("source", ["models/x", "../x", "/etc", "other", "~/x"])
@pytest.mark.parametrize("kind", [None, "directory", "hub"])
def test_no_source_is_asked_and_no_file_of_it_is_read(
    copied: Path, source: str, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.chdir(copied.parent)
    for name in ("models/x", "other"):
        (copied.parent / name).mkdir(parents=True)
        (copied.parent / name / "README.md").write_text("---\nlicense: stolen\n---\n")
    with_source(
        copied, source=str(copied.parent / "other") if source == "other" else source, source_kind=kind
    )
    if kind == "hub" and source != "models/x":
        with pytest.raises(CheckpointError, match="expected a hub id"):
            make_card(copied, Measurements())
        return
    # That looks for the files of the installed package in each folder of sys.path.
    monkeypatch.setattr(card_module, "requirement", lambda: None)
    # This sees every connection, and every file that is opened or listed.
    with bounded(copied, 60):
        card = make_card(copied, Measurements())
    assert card.front_matter["license"] == "mit"
    assert card.front_matter.get("base_model") == ("models/x" if kind == "hub" else None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source_kind": "url"}, "'source_kind' is 'url'; expected"),
        ({"source_kind": 3}, "'source_kind' is int; expected str"),
        (
            {"source_kind": "hub", "source": "../x"},
            "'source' is '../x' and 'source_kind' 'hub'; expected a",
        ),
        ({"source_commit": "main"}, "'source_commit' is 'main'; expected 40 hex digits"),
    ],
)
def test_a_source_that_is_none(copied: Path, values: dict[str, Any], message: str) -> None:
    with_source(copied, **values)
    with pytest.raises(CheckpointError) as caught:
        make_card(copied, Measurements())
    assert message in str(caught.value)


def test_a_manifest_that_changed_is_refused(copied: Path) -> None:
    text = (copied / MANIFEST_NAME).read_text()
    assert '"source_bytes": ' in text
    (copied / MANIFEST_NAME).write_text(text.replace('"source_bytes": ', '"source_bytes": 1'))
    with pytest.raises(CheckpointError, match=f"{MANIFEST_NAME} has changed since it was written.* again"):
        make_card(copied, Measurements())


def test_figures_are_those_of_the_files(packed: Path, evaluation: Path, tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    dense = speed_of(SOURCE, "dense")
    bench.write_text(to_json([speed_of("other/fp6"), dense, speed_of(packed)]))
    found = read_measurements(packed, evaluation, [bench])
    assert [one.label for one in found.speed] == ["tiny-int4", "stories260K"]
    (text,) = json.loads(evaluation.read_text())["texts"].values()
    assert (found.accuracy[0].perplexity, found.accuracy[0].kl_mean) == (text["perplexity"], text["kl_mean"])
    shown = make_card(packed, found).markdown()
    assert f"| stories.txt | 126 | {text['perplexity']:.6g} | {text['reference_perplexity']:.6g} |" in shown
    assert "77 (76 to 78)" in shown and "other" not in shown
    assert "Nothing was measured." not in shown
    data = json.loads(evaluation.read_text())
    task = {"task": "piqa", "metric": "acc", "items": 200, "accuracy": 0.615, "accuracy_se": 0.0345}
    evaluation.write_text(json.dumps({**data, "tasks": [task]}))
    again = read_measurements(packed, evaluation)
    assert "| piqa | acc | 200 | 61.50 % ± 3.45 |" in make_card(packed, again).markdown()
    evaluation.write_text(json.dumps(data))
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"version": 1, "reports": [json.loads(evaluation.read_text())]}))
    assert read_measurements(packed, report).accuracy == found.accuracy


def test_tasks_with_a_reference_are_shown_as_in_the_report(packed: Path, tmp_path: Path) -> None:
    text = SOURCE.parent / "stories.txt"
    report = quantkit.evaluate(packed, against=SOURCE, texts=[text], window=64, max_windows=1, device="cpu")
    reference = [True, True, False, True]

    def metrics(correct: list[bool]) -> TaskMetrics:
        paired = compare(correct, reference)
        return TaskMetrics("piqa", "acc", 4, sum(correct) / 4, 0.25, paired)

    floor = NoiseFloor("bfloat16", report.texts, (metrics([True, True, True, True]),))
    report = replace(report, tasks=(metrics([False, False, True, True]),), noise_floor=floor)
    path = tmp_path / "eval.json"
    path.write_text(report.to_json())
    shown = make_card(packed, read_measurements(packed, path)).markdown().splitlines()
    rows = [line for line in document([report]).markdown().splitlines() if line.startswith("| piqa ")]
    assert [line for line in shown if line.startswith("| piqa ")] == rows
    assert rows[0].endswith(
        "| tiny-int4 | 4 | 50.00 % ± 25.00 | 75.00 % | -25.00 ± 47.87 | 1, 2 (75.00 %) | 1 |"
    )
    assert "| noise floor: stories260K in bfloat16 | 4 | 100.00 %" in rows[1]
    assert any("McNemar" in line for line in shown)
    # As it was written before tasks had a noise floor.
    data = report.to_dict()
    del data["noise_floor"]["tasks"]
    path.write_text(json.dumps(data))
    older = make_card(packed, read_measurements(packed, path)).markdown().splitlines()
    assert [line for line in older if line.startswith("| piqa ")] == rows[:1]


def test_latency_under_load_is_shown_as_in_the_report(packed: Path, tmp_path: Path) -> None:
    serve, bench = tmp_path / "serve.json", tmp_path / "bench.json"
    serve.write_text(to_json([serving_of("other/fp6"), serving_of(packed), serving_of(SOURCE, "dense")]))
    bench.write_text(to_json([speed_of(packed)]))
    (tmp_path / "serve.md").write_text("![Latency against load.](load.png)\n")
    (tmp_path / "load.png").write_bytes(b"load")
    for files in ([serve], [bench, serve]):
        found = read_measurements(packed, None, files)
        assert [one.label for one in found.serving] == ["tiny-int4", "stories260K"]
        assert len(found.speed) == len(files) - 1
        shown = make_card(packed, found, plots_beside(None, files)).markdown()
        assert (
            "| tiny-int4 | 2 | 100 ms | 200 ms | 300 ms | 10 ms | 30 ms | 1 s | 2 s | 3 s | 1.5 | 30 |"
            in shown
        )
        assert "8 requests per rate, seed 0; prompts of 16 to 256 tokens, answers of 8 to 64;" in shown
        assert "![Latency against load.](bench-load.png)" in shown and "fp6" not in shown
        assert shown.count("Nothing was measured.") == 1
        assert ("77 (76 to 78)" in shown) == (bench in files)
    with pytest.raises(UsageError, match=r"serve\.json and .*serve\.json have figures of the same kind"):
        read_measurements(packed, None, [serve, bench, serve])
    serve.write_text(to_json([serving_of("other/fp6")]))
    with pytest.raises(UsageError, match=r"serve\.json is about other/fp6, not .*tiny-int4"):
        read_measurements(packed, None, [bench, serve])


def test_files_about_other_models_are_refused(packed: Path, evaluation: Path, tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text(to_json([speed_of("other/fp6")]))
    with pytest.raises(UsageError, match=r"bench\.json is about other/fp6, not .*tiny-int4"):
        read_measurements(packed, None, [bench])
    edited = {**json.loads(evaluation.read_text()), "model": "other/fp6"}
    evaluation.write_text(json.dumps(edited))
    with pytest.raises(UsageError, match=r"eval\.json is about other/fp6, not .*tiny-int4"):
        read_measurements(packed, evaluation)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("accuracy", None, "accuracy is None"),
        ("items", 1.5, "items is 1.5"),
        ("items", True, "items is True"),
        ("accuracy_se", "0.1", "accuracy_se is '0.1'"),
        ("paired", {"gained": 3}, "missing"),
        ("paired", [], "is no Paired"),
    ],
)
def test_figures_that_are_no_numbers_are_refused(
    packed: Path, evaluation: Path, key: str, value: Any, message: str
) -> None:
    data = json.loads(evaluation.read_text())
    task = {"task": "piqa", "metric": "acc", "items": 200, "accuracy": 0.615, "accuracy_se": None}
    evaluation.write_text(json.dumps({**data, "tasks": [{**task, key: value}]}))
    with pytest.raises(UsageError, match="is not what `quantkit eval` writes") as raised:
        read_measurements(packed, evaluation)
    assert message in str(raised.value)


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"reports": 3}', '{"model": "a/tiny-int4"}'])
def test_other_files_are_refused(packed: Path, tmp_path: Path, content: str) -> None:
    path = tmp_path / "eval.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="is not what `quantkit eval` writes"):
        read_measurements(packed, path)


def test_plots_are_those_of_the_report(packed: Path, tmp_path: Path) -> None:
    for name in ("memory", "unrelated"):
        (tmp_path / f"{name}.png").write_bytes(name.encode())
    (tmp_path / "bench.md").write_text("![Memory.](memory.png)\n![x](../up.png)\n![gone](gone.png)\n")
    plots = plots_beside(tmp_path / "eval.json", [tmp_path / "bench.json"])
    assert [(plot.name, plot.caption, plot.png) for plot in plots] == [("bench-memory", "Memory.", b"memory")]
    assert "![Memory.](bench-memory.png)" in make_card(packed, Measurements(), plots).markdown()


def test_how_to_run_what_others_cannot(packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "fp6"
    quantkit.quantize(SOURCE, own, format="fp6")
    card = make_card(own, Measurements())
    assert "Only quantkit reads this checkpoint: " in card.markdown() and "vllm" not in card.markdown()
    assert card.front_matter["tags"] == ["quantkit", "fp6-e2m3"]
    split = tmp_path / "split"
    quantkit.quantize(SOURCE, split, format="int4", group_size=32, rules=("*q_proj=int8", "*down_proj=keep"))
    text = make_card(split, Measurements()).markdown()
    assert "vLLM and SGLang cannot load this: they fuse these linears" in text and "vllm serve" not in text
    groups = tmp_path / "groups"
    quantkit.quantize(SOURCE, groups, format="fp8", group_size=4)
    text = make_card(groups, Measurements()).markdown()
    assert f"{VLLM} and {SGLANG} cannot load fp8 with scales per group: " in text and "vllm serve" not in text
    assert "Without quantkit, after `pip install transformers compressed-tensors`, the program loads" in text


def test_the_original_is_not_measured_as_the_model(packed: Path, tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text(to_json([replace(speed_of(packed), format="dense")]))
    assert len(read_measurements(packed, None, [bench]).speed) == 1


def record_of(name: str) -> ModelRecord:
    """A packed model with `name` wherever its manifest has a text."""
    layers = {
        f"{name}.q_proj": LayerRecord("linear", (4, 8), 1, f"{name} g32", name, 4.5, 0.01, name),
        f"{name}.k_proj": LayerRecord("linear", (4, 8), 1, "int4", name, 4.5, 0.01, name, note=name),
    }
    bits = {"linears": 4.5, "model": 6.0}
    return ModelRecord(
        name, 100, name, (), bits, {"quantkit": name}, {}, layers, {name: name}, 0, calibration=name
    )


@pytest.mark.parametrize("alone", [False, True])
def test_nothing_but_text_comes_of_any_name_in_a_card(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    @settings(max_examples=60, deadline=None)
    @given(NAMES)
    @example("\ud800")
    def check(name: str) -> None:
        record = record_of(name)
        record = replace(record, needs_quantkit=(name,) if alone else ())
        monkeypatch.setattr(card_module, "read_record", lambda directory: record)
        monkeypatch.setattr(card_module, "carried_metadata", lambda directory: {"license": name})
        monkeypatch.setattr(card_module, "read_json", lambda path: {})
        monkeypatch.setattr(card_module, "stored_notes", lambda config, layers: (Note(name),))
        found = Measurements(
            (Accuracy(name, 9, 1.0, 1.0, 1.0, 1.0, 1.0),),
            ((name, (TaskMetrics(name, name, 4, 0.5, 0.25, None),)),),
            name,
            (replace(speed_of(name or "x", name), label=name),),
            (replace(serving_of(name or "x", name), label=name),),
        )
        plots = [Plot("eval", "eval-kl", name, b""), Plot("bench", "bench-load", name, b"")]
        # Bytes, as file names are, whatever is half a character in the others.
        directory = os.fsdecode(name.replace("\0", "").encode(errors="surrogatepass"))
        card = make_card(Path(directory or "x"), found, plots)
        front, text = card.markdown().split("\n---\n", 1)
        formats = dict.fromkeys([f"{name} g32".partition(" ")[0], "int4"])
        assert yaml.safe_load(front)["tags"][1 if alone else 2 :] == list(formats)
        texts = only_text(text)
        assert not line(name) or sum(line(name) in one for one in texts) >= 8
        card.markdown().encode()

    check()


def test_captions_are_read_as_they_were_written(tmp_path: Path) -> None:
    caption = "KL of *a* & <b> `c` #1 _x_, 1|2 [3]"
    (tmp_path / "eval.md").write_text(Figure("kl", caption, b"", "").markdown())
    (tmp_path / "kl.png").write_bytes(b"kl")
    (plot,) = plots_beside(tmp_path / "eval.json")
    assert plot.caption == caption.replace("[", "(").replace("]", ")")


def test_the_title_is_a_name(packed: Path) -> None:
    titles = {
        None: "stories260K int4",
        "org/name-int4": "name-int4",
    }
    for repo, title in titles.items():
        assert f"\n# {title}\n" in make_card(packed, Measurements(), repo=repo).markdown()
    text = make_card(packed, Measurements(), base_model="Qwen/Qwen3-0.6B").markdown()
    assert "\n# Qwen3-0.6B int4\n" in text


def test_plots_are_of_this_model_alone(packed: Path, tmp_path: Path) -> None:
    """The plots of a report on several models have all of them."""
    other = Path(shutil.copytree(packed, tmp_path / "other"))
    options = EvalOptions(
        texts=(SOURCE.parent / "stories.txt",), against=SOURCE, window=32, max_windows=2, noise_floor=True
    )
    reports = evaluate_many([packed, other], options)
    write_report(tmp_path / "both", reports)
    plots, note = plots_of(packed, tmp_path / "both" / "report.json")
    assert note is None and [plot.name for plot in plots] == ["eval-kl", "eval-kl-histogram"]
    drawn, _ = figures([reports[0]])
    assert [plot.png for plot in plots] == [figure.png for figure in drawn]
    beside = {plot.name: plot.png for plot in plots_beside(tmp_path / "both" / "report.json")}
    assert beside["eval-kl"] != plots[0].png
    # What is read back has all figures that were written.
    again = EvalReport.from_dict(json.loads(reports[0].to_json()))
    assert again.texts == reports[0].texts and again.noise_floor == reports[0].noise_floor
    (tmp_path / "both" / "old.json").write_text(json.dumps({"reports": [{"model": str(packed)}] * 2}))
    plots, note = plots_of(packed, tmp_path / "both" / "old.json")
    assert plots == () and note is not None and "has no figures to draw (KeyError" in note
