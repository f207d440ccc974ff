"""Reports: verdicts, tables, files, and what is said when there is no plot."""

import builtins
import json
import math

import pytest
from rich.console import Console

from quantkit.errors import EnvironmentProblem, OutputError, UsageError
from quantkit.eval.evaluate import EvalReport
from quantkit.eval.metrics import TextMetrics
from quantkit.eval.models import Versions
from quantkit.eval.report import VERDICTS, table, verdict, verdict_line, write_report
from quantkit.eval.sizes import Sizes
from quantkit.eval.tasks import jsonable, run_tasks


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
        kl_max=kl,
    )


def report(label: str = "model", linears: float | None = 4.125, **texts: TextMetrics) -> EvalReport:
    return EvalReport(
        model=f"/models/{label}",
        against="/models/original",
        texts=texts,
        sizes=Sizes(linears, 5.0, 14_500_000, "int4 g128 bfloat16", "mse"),
        reference_sizes=Sizes(None, 16.0, 55_000_000, "dense"),
        dtype="float32",
        window=1024,
        max_windows=1,
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


def test_write_report(tmp_path):
    reports = [
        report("int8", 8.03, **{"books.txt": text(0.0), "docs.txt": text(0.002)}),
        report("binary|x", 1.125, **{"books.txt": text(5.0, top1=0.05), "docs.txt": text(4.0, top1=0.04)}),
    ]
    files = write_report(tmp_path / "out", reports)
    assert [file.name for file in files] == ["report.md", "report.json", "kl.png"]
    markdown = files[0].read_text(encoding="utf-8")
    assert "int8: indistinguishable" in markdown and r"binary|x: unusable" in markdown
    assert "![KL mean against bits per weight](kl.png)" in markdown
    assert "cut to 1024" in markdown and "14.50 MB" in markdown
    rows = [line for line in markdown.splitlines() if line.startswith(("| int8", r"| binary\|x"))]
    assert len(rows) == 4
    assert {line.replace(r"\|", "").count("|") for line in rows} == {13}
    content = json.loads(files[1].read_text(), parse_constant=pytest.fail)
    assert content["version"] == 1
    assert content["reports"][1]["texts"]["books.txt"]["kl_mean"] == 5.0
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_said_in_the_report(tmp_path, monkeypatch):
    real = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    files = write_report(tmp_path, [report(a=text(0.1))])
    assert [file.name for file in files] == ["report.md", "report.json"]
    assert "pip install 'quantkit[plots]'" in files[0].read_text(encoding="utf-8")


def test_without_a_reference_there_is_no_plot(tmp_path):
    files = write_report(tmp_path, [report(a=text(None))])
    assert len(files) == 2 and "not compared with a reference" in files[0].read_text(encoding="utf-8")


def test_what_cannot_be_reported_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="nothing to report"):
        write_report(tmp_path, [])
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write the report"):
        write_report(tmp_path / "file", [report(a=text(0.1))])


def test_the_table_takes_names_as_they_are():
    console = Console(width=250, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(table([report("[bold]x[/bold]", **{"books.txt": text(5.0)}), report(a=text(None))]))
    out = captured.get()
    assert (
        "[bold]x[/bold]" in out and "unusable" in out and "4.125" in out and "mse" in out and "90.00 %" in out
    )


def test_tasks_without_lm_eval_name_the_extra(monkeypatch):
    real = builtins.__import__

    def without_lm_eval(name, *args, **kwargs):
        if name.split(".")[0] == "lm_eval":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_lm_eval)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'quantkit\[eval\]'"):
        run_tasks(None, None, ["arc_easy"])
    with pytest.raises(UsageError, match="no task"):
        run_tasks(None, None, [])
    with pytest.raises(UsageError, match="limit is 0"):
        run_tasks(None, None, ["arc_easy"], limit=0)


def test_results_become_json():
    import numpy as np

    found = jsonable(
        {"acc": np.float64(0.5), 1: [np.int64(3), float("nan")], "f": len, "a": np.array([1, 2])}
    )
    assert found == {"acc": 0.5, "1": [3, None], "f": str(len), "a": [1, 2]}
    json.dumps(found, allow_nan=False)
