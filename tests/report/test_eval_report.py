"""Reports: verdicts, tables, files, and what is said when there is no plot."""

import builtins
import hashlib
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from quantkit.errors import OutputError, UsageError
from quantkit.eval.metrics import KL_EDGES, TextMetrics
from quantkit.eval.models import Versions
from quantkit.eval.own_text import Continuations, TextPair, Written
from quantkit.eval.paired import compare
from quantkit.eval.rating import VERDICTS, verdict, verdict_line
from quantkit.eval.results import EvalReport, NoiseFloor
from quantkit.eval.sizes import Sizes
from quantkit.eval.tasks import TaskMetrics
from quantkit.report import eval_report as report_module
from quantkit.report.eval_report import document, write_report


def text(kl: float | None, excess: float | None = None, top1: float = 0.9) -> TextMetrics:
    compared = kl is not None
    excess = kl if excess is None else excess
    return TextMetrics(
        perplexity=20 * math.exp(excess or 0.0),
        reference_perplexity=20.0 if compared else None,
        excess=excess,
        kl_mean=kl,
        kl_p99=10 * kl if compared else None,
        same_top1=top1 if compared else None,
        tokens=1023,
        windows=1,
        nll=3.0,
        reference_nll=3.0 if compared else None,
        excess_se=None,
        kl_mean_se=0.01 if compared else None,
        kl_median=kl,
        kl_median_se=0.001 if compared else None,
        kl_p95=5 * kl if compared else None,
        kl_p95_se=0.02 if compared else None,
        kl_p99_se=None,
        kl_max=kl,
        rms_dp=0.02 if compared else None,
        rms_dp_se=None,
        kl_histogram=tuple(range(len(KL_EDGES) + 1)) if compared else None,
    )


def report(label: str = "model", linears: float | None = 4.125, **texts: TextMetrics) -> EvalReport:
    compared = all(metrics.kl_mean is not None for metrics in texts.values())
    return EvalReport(
        model=f"/models/{label}",
        against="/models/original" if compared else None,
        texts=texts,
        sizes=Sizes(linears, 5.0, 14_500_000, "int4 g128 bfloat16", "mse"),
        reference_sizes=Sizes(None, 16.0, 55_000_000, "dense"),
        dtype="float32",
        window=1024,
        stride=512,
        max_windows=1,
        batch=2,
        device="cpu",
        versions=Versions("0.1.0", "2.13.0", "5.23.0"),
        seconds=1.5,
        reference_seconds=1.0,
        notes=("window 2048 was cut to 1024, the positions that the model has",),
        label=label,
    )


@pytest.mark.parametrize(
    ("kl", "excess", "word"),
    [
        (0.0, 0.0, "indistinguishable"),
        (0.001, -0.0004, "indistinguishable"),
        (0.001, 0.02, "close"),
        (0.03, 0.02, "close"),
        (0.2, 0.2, "degraded"),
        (0.2, 0.7, "unusable"),
        (5.0, 4.5, "unusable"),
        (5.0, -0.1, "unusable"),
    ],
)
def test_the_worse_figure_decides(kl, excess, word):
    found = verdict(report(a=text(kl, excess)))
    assert found is not None and found.word == word
    assert f": {word} (" in verdict_line(report(a=text(kl, excess)))


def test_the_worst_text_decides():
    found = verdict(report(good=text(0.001), bad=text(0.3, top1=0.61)))
    assert found is not None and found.word == "degraded"
    assert "61.0 %" in verdict_line(report(good=text(0.001), bad=text(0.3, top1=0.61)))


def test_verdicts_get_worse_and_the_last_always_holds():
    limits = [(v.kl_mean, v.excess) for v in VERDICTS]
    assert limits == sorted(limits) and limits[-1] == (math.inf, math.inf)


def test_no_verdict_without_a_reference():
    assert verdict(report(a=text(None))) is None
    assert "not compared" in verdict_line(report(a=text(None)))


@pytest.mark.parametrize(
    ("excess", "change"),
    [
        (0.01, "+1 %"),
        (-0.01, "-1 %"),
        (0.68, "+97 %"),
        (0.692, "x2"),
        (1.20783, "x3.35"),
        (5.0, "x148"),
        (800.0, "xe^800"),
    ],
)
def test_the_change_of_perplexity_is_readable_at_every_size(excess, change):
    row = text(6.0)
    row = TextMetrics(**{**row.to_dict(), "excess": excess, "perplexity": None})
    assert f"changes by {change}." in verdict_line(report(a=row))


@pytest.fixture
def unhashed(monkeypatch):
    """The models of these reports are not on any disk."""
    monkeypatch.setattr(report_module, "hashes", lambda model: {"config.json": "0" * 64})


def with_tasks(found: EvalReport, correct: list[bool]) -> EvalReport:
    reference = [True, True, False, True]
    metrics = TaskMetrics("piqa", "acc", 4, sum(correct) / 4, 0.2, compare(correct, reference))
    again = TaskMetrics("piqa", "acc", 4, 0.5, 0.2, compare([True, True, False, False], reference))
    floor = NoiseFloor("bfloat16", {name: text(0.0004) for name in found.texts}, (again,))
    return replace(found, tasks=(metrics,), noise_floor=floor, reference_logits=12_000_000)


def test_a_report_is_written_with_tables_and_plots(tmp_path, unhashed):
    reports = [
        with_tasks(
            report("int8", 8.03, **{"books.txt": text(0.0), "docs.txt": text(0.002)}),
            [True, True, False, True],
        ),
        with_tasks(
            report("binary|x", 1.125, **{"books.txt": text(5.0, top1=0.05), "docs.txt": text(4.0)}),
            [False, False, True, True],
        ),
    ]
    files = write_report(tmp_path / "out", reports, "quantkit eval int8 --report out")
    names = ["report.md", "report.html", "report.json"]
    plots = ["kl.png", "kl-histogram.png", "tasks.png"]
    assert [file.name for file in files] == names + plots
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files[3:])
    markdown = files[0].read_text(encoding="utf-8")
    lines = markdown.splitlines()
    assert "int8: indistinguishable" in markdown and r"binary|x: unusable" in markdown
    assert "cut to 1024" in markdown and "windows of 1024, 512 apart" in markdown
    assert "took 12.00 MB on disk at a time" in markdown
    assert "quantkit eval int8 --report out" in lines
    assert r"| binary\|x | unusable | int4 g128 bfloat16 | mse | 1.125 | 5.000 | 14.50 MB | 0.264x |" in lines
    assert "| original | original | dense | - | - | 16.000 | 55.00 MB | 1.00x |" in lines
    assert lines[0] == "# Accuracy of int8, binary|x beside original" and re.match(
        r"\d{1,2} \w+ 20\d\d, \w", lines[2]
    )
    rows = [line for line in lines if line.startswith("| noise floor: original in bfloat16 ")]
    assert len(rows) == 2 and "| 0.0004 ± 0.01 |" in rows[0]
    assert len([line for line in lines if line.startswith("| original | 20 |")]) == 2
    (task,) = (line for line in lines if line.startswith(r"| piqa | acc | binary\|x |"))
    assert task.endswith("| 4 | 50.00 % ± 20.00 | 75.00 % | -25.00 ± 47.87 | 1, 2 (75.00 %) | 1 |")
    (floor,) = (
        line for line in lines if line.startswith("| piqa | acc | noise floor: original in bfloat16 |")
    )
    assert floor.endswith("| 4 | 50.00 % ± 20.00 | 75.00 % | -25.00 ± 25.00 | 0, 1 (25.00 %) | 1 |")
    assert lines.index(floor) > lines.index(task)
    page = files[1].read_text(encoding="utf-8")
    assert page.count("<svg") == 3 and not re.search(r"https?:|<img|<script|src=", page)
    content = json.loads(files[2].read_text(), parse_constant=pytest.fail)
    assert content["version"] == 1 and content["command"] == "quantkit eval int8 --report out"
    assert content["sha256"].keys() == {"/models/int8", "/models/binary|x", "/models/original"}
    assert content["reports"][1]["texts"]["books.txt"]["kl_mean"] == 5.0
    assert content["reports"][1]["tasks"][0]["paired"]["lost"] == 2
    assert content["reports"][1]["noise_floor"]["dtype"] == "bfloat16"
    assert content["reports"][1]["noise_floor"]["tasks"][0]["paired"]["lost"] == 1


def test_the_command_and_the_hashes_are_of_the_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    found = report_module.hashes(tmp_path)
    assert found == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in ("config.json", "model.safetensors")
    }


def test_a_missing_matplotlib_is_said_in_the_report(tmp_path, monkeypatch, unhashed):
    real = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    files = write_report(tmp_path, [report(a=text(0.1))])
    assert [file.name for file in files] == ["report.md", "report.html", "report.json"]
    assert "pip install 'matplotlib>=3.9'" in files[0].read_text(encoding="utf-8")


def test_without_a_reference_there_is_no_plot_and_no_column_for_it():
    made = document([report(a=text(None))])
    assert not made.figures
    assert "not compared with a reference" in made.markdown()
    assert "KL mean |" not in made.markdown() and "| model | perplexity |" in made.markdown()


def test_tasks_alone_make_a_report():
    made = document([with_tasks(report(), [True, True, True, True])])
    assert [figure.name for figure in made.figures] == ["tasks"]
    assert "perplexity" not in made.markdown()


def with_texts(one: EvalReport, pairs: tuple[TextPair, ...]) -> EvalReport:
    counts, greedy = Continuations(20.4, 0.25, 0.125), Continuations(30.2, 0.0, 0.5)
    return replace(
        one,
        own_text={"sampled": Written(counts, counts, pairs), "greedy": Written(greedy, counts, pairs[:1])},
    )


def test_texts_stand_beside_the_original_s():
    pairs = (
        TextPair("Once", " upon <script>alert(1)</script>", " upon | a\ntime", 2),
        TextPair("He", "x" * 401, "x" * 401, None),
    )
    one = with_texts(report("int2", a=text(0.1)), pairs)
    made = document([one, report("int4", a=text(0.01))])
    markdown, page = made.markdown(), made.html()
    assert markdown.count("## Texts that they write") == page.count("Texts that they write") == 1
    lines = markdown.splitlines()
    at = lines.index("| model | written | tokens | ended | repeated |")
    assert lines[at + 2 : at + 6] == [
        "| int2 | sampled | 20 | 25.00 % | 12.50 % |",
        "| int2 | greedy | 30 | 0.00 % | 50.00 % |",
        "| original | sampled | 20 | 25.00 % | 12.50 % |",
        "| original | greedy | 20 | 25.00 % | 12.50 % |",
    ]
    at = lines.index("1 text of int2 beside original's, greedy:")
    assert lines[at + 2] == "| beginning | original | int2 |" and lines[at + 4].startswith("| 1. Once |")
    at = lines.index("2 texts of int2 beside original's, sampled:") + 2
    assert lines[at + 2].startswith("| 1. Once |") and "<script>" not in markdown
    assert lines[at + 2].endswith(r"upon \| a time |")
    assert lines[at + 3] == f"| 2. He | {'x' * 400}… | {'x' * 400}… |"
    assert "<script>" not in page and "&lt;script&gt;alert(1)" in page
    assert page.count('<span class="alike"> upon </span>') == 4
    assert "| beginning | original | int4 |" not in lines


def test_results_keep_texts_and_older_ones_have_none():
    one = with_texts(report("int2", a=text(0.1)), (TextPair("a", "b", "c", 0), TextPair("d", "", "", None)))
    data = json.loads(one.to_json())
    again = EvalReport.from_dict(data)
    assert again.own_text == one.own_text
    written = data.pop("own_text")["sampled"]
    older = EvalReport.from_dict(data)
    assert older.own_text == {}
    assert "Texts that they write" not in document([older]).markdown()
    data |= {"continuations": written["model"], "reference_continuations": written["original"]}
    assert EvalReport.from_dict(data | {"text_pairs": written["pairs"]}).own_text == {
        "sampled": one.own_text["sampled"]
    }


def test_what_cannot_be_reported_is_an_error(tmp_path, unhashed):
    with pytest.raises(UsageError, match="nothing to report"):
        write_report(tmp_path, [])
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write the report"):
        write_report(tmp_path / "file", [report(a=text(0.1))])
