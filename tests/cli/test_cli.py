"""The command line as people use it: what it prints, how it ends, and that no mistake ends in a traceback."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.calibrate.methods import METHODS
from quantkit.calibrate.summaries import SUMMARIES
from quantkit.cli import console, parsing
from quantkit.cli.commands import demo
from quantkit.files import size_text
from quantkit.packing.presets import PRESETS
from quantkit.runtime.cache.kv_formats import KV_FORMATS

from .conftest import SOURCE, STORIES, Run

COMMANDS = (
    "quantize",
    "convert",
    "export",
    "merge",
    "plan",
    "inspect",
    "verify",
    "eval",
    "bench",
    "report",
    "push",
    "generate",
    "doctor",
    "tune",
    "formats",
    "methods",
    "demo",
)


def test_each_command_works_on_what_the_one_before_left(run: Run, tmp_path: Path) -> None:
    """quantize, inspect, verify, eval, generate, plan: each on what the one before left."""
    packed = tmp_path / "packed"
    done = run("quantize", SOURCE, packed, "-f", "int8", "--lm-head", "int8", "--rule", "*.down_proj=int4:32")
    assert done.code == 0
    assert re.search(r"model\.layers\.\*\.mlp\.down_proj +5 +64x172 int4 g32 +mse ", done.out)
    assert "5 int4 g32 bfloat16: rule '*.down_proj' (model.layers.*.mlp.down_proj)" in done.out
    assert "1 dense: an embedding (model.embed_tokens.weight)" in done.out
    assert "relative error: mean" in done.out
    assert f"wrote {packed}" in done.out
    assert "note: only quantkit can load this: model.layers.0.mlp.down_proj: " in done.err
    assert "(one of 5 linears)." in done.err.replace("\n", " ")

    done = run("inspect", packed)
    assert done.code == 0
    assert done.out.startswith(f"made from {SOURCE} with python ")
    assert re.search(r"lm_head +1 +512x64 int8 channel mse +8\.254 \d\.\de-0\d", done.out)

    done = run("verify", packed)
    assert (done.code, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines()] == ["ok"] * 5
    assert done.out.endswith("ok     logits: 16 tokens\n")

    file, report = tmp_path / "eval.json", tmp_path / "report"
    done = run(
        *("eval", packed, "--against", SOURCE, "--text", STORIES, "--window", 128, "--max-windows", 2),
        *("--json", file, "--report", report),
    )
    assert done.code == 0
    assert "stories.txt: 254 tokens" in done.out
    assert "packed: " in done.out
    figures = json.loads(file.read_text())
    assert set(figures["bits_per_weight"]) == {"linears", "model"}
    (text,) = figures["texts"].values()
    fields = {"perplexity", "reference_perplexity", "excess", "kl_mean", "kl_p99", "same_top1", "tokens"}
    assert fields <= set(text)
    assert text["tokens"] == 254
    assert text["excess"] == pytest.approx(math.log(text["perplexity"] / text["reference_perplexity"]))
    assert 0 < text["kl_mean"] < text["kl_p99"]
    assert (report / "report.md").read_text().startswith("# Accuracy of packed beside stories260K\n")
    assert "quantkit eval" in (report / "report.html").read_text()
    assert not (report / ".quantkit-eval").exists()

    done = run("generate", packed, "Once upon a time", "-n", 8)
    assert done.code == 0
    assert done.out.startswith("Once upon a time, there was")
    # Before the speed, notes name the weights that no kernel of this machine takes.
    assert re.fullmatch(r"(note: \d+ packed parameters .+\n)*8 tokens, [\d.]+ tokens/s\n", done.err)

    done = run("plan", packed)
    assert done.code == 3
    assert "the checkpoint is quantized already" in done.err


def test_doctor_lists_packages_kernels_and_reasons(run: Run) -> None:
    done = run("doctor", "--reasons")
    assert (done.code, done.err) == (0, "")
    assert re.search(r"^torch +\d", done.out, re.MULTILINE)
    assert re.search(r"^int8 channel bfloat16 +float32 ", done.out, re.MULTILINE)
    assert "  not torch-int4: " in done.out
    assert "  experts: " in done.out
    report = json.loads(run("doctor", "--json").out)
    assert set(report) == {"packages", "machine", "slow", "tile_tables", "kernels"}
    assert all(entry["kernel"] or entry["refused"] for entry in report["kernels"])


def test_doctor_says_that_a_kernel_is_forced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_KERNEL", "unpack")
    done = run("doctor", "--json")
    assert (
        done.code == 0 and "note: QUANTKIT_KERNEL is set, and products run unpack or not at all" in done.err
    )
    monkeypatch.setenv("QUANTKIT_KERNEL", "nope")
    assert run("doctor").code == 6


def test_demo_quantizes_compares_and_writes_a_report(run: Run, tmp_path: Path) -> None:
    arguments = ("demo", SOURCE, "--text", STORIES, "--window", 128, "--max-windows", 2, "--out", tmp_path)
    done = run(*arguments)
    assert done.code == 0
    assert re.search(r"^int8 +8\.\d{3} ", done.out, re.MULTILINE)
    assert "int8: indistinguishable" in done.out
    assert "binary: unusable" in done.out
    assert f"wrote {tmp_path / 'report' / 'report.html'}" in done.out
    reports = json.loads((tmp_path / "report" / "report.json").read_text())["reports"]
    assert [report["label"] for report in reports] == list(demo.FORMATS)
    assert run(*arguments, "--formats", "int8").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--formats", "int8,int9"), 4, "unknown format 'int9'"),
        (("--formats", ","), 2, "--formats is empty"),
        (("--text", "missing.txt"), 2, "missing.txt: cannot be read"),
        (("--out", STORIES), 5, "cannot create the directory"),
    ],
)
def test_wrong_options_of_demo(
    run: Run, tmp_path: Path, arguments: tuple[object, ...], code: int, message: str
) -> None:
    done = run("demo", SOURCE, "--text", STORIES, "--out", tmp_path / "out", *arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.err
    assert not (tmp_path / "out").exists()


def test_help_says_all(run: Run) -> None:
    done = run("--help")
    assert [command for command in COMMANDS if f"\n  {command} " in done.out] == list(COMMANDS)
    assert "..." not in done.out.partition("Commands:")[2]
    for command in COMMANDS:
        text = run(command, "--help").out
        assert max(map(len, text.splitlines())) <= 80
        bare = re.findall(r"\n  (?:-\w, )?(--[\w-]+)(?: <[^>]*>| [A-Z]+)?\n(?! {10})", text)
        assert bare == [], f"{command} does not explain {bare}"


def test_the_page_has_every_option(run: Run) -> None:
    page = (SOURCE.parents[1] / "docs" / "cli.md").read_text()
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    sections["quantize"] = sections["plan"] = sections.pop("quantize and plan")
    assert set(sections) == set(COMMANDS)
    for command in COMMANDS:
        known = set(re.findall(r"--[\w-]+", run(command, "--help").out)) - {"--help", "--reload"}
        assert known - set(re.findall(r"--[\w-]+", sections[command])) == set()


def test_help_names_every_format_and_method(run: Run) -> None:
    assert list(SUMMARIES) == list(METHODS)
    shown = {"quantize": [*PRESETS, *METHODS], "eval": KV_FORMATS}
    for command, names in shown.items():
        text = re.sub(r"[\s│]", "", run(command, "--help").out)
        assert [name for name in names if name not in text] == []


def test_version_is_three_numbers(run: Run) -> None:
    assert re.fullmatch(r"quantkit \d+\.\d+\.\d+\n", run("--version").out)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("10B", 10), ("500MB", 500_000_000), ("2 GiB", 2 << 30), ("3kb", 3000), ("24G", 24 * 10**9)],
)
def test_sizes_are_read_as_they_are_shown(text: str, size: int) -> None:
    assert parsing.parse_size(text) == size
    assert parsing.parse_size(parsing.shown_size(size)) == size


def test_sizes_are_shown_in_powers_of_1000() -> None:
    shown = [size_text(n) for n in (0, 999, 1000, 1_500_000, 2e9, 3e12, 4e15)]
    assert shown == ["0 B", "999 B", "1.00 kB", "1.50 MB", "2.00 GB", "3.00 TB", "4000.00 TB"]


def test_tables_fit_80_columns(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    out = run("inspect", packed).out
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(
        r"model\.layers\.\*\.self_attn\.k_proj +5 +32x64 int4 channel mse +4\.312 \d\.\de-03", out
    )
    out = run("eval", packed, "--against", SOURCE, "--text", STORIES, "--window", 64, "--max-windows", 1).out
    assert re.search(r"\nint4 +4\.277 +7\.845 +\d+\.\d\d kB +[\d.]+ +[+-][\d.]+ +[\d.]+ +[\d.]+%\n", out)


@pytest.mark.parametrize("width", [60, 70])
def test_names_break_after_dots_where_there_is_little_room(
    run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(console.out, "width", width)
    table = run("inspect", packed).out.partition("linear")[2].partition("\n1 dense")[0].splitlines()[1:]
    assert max(map(len, table)) <= width
    names = "".join(line.split(" ")[0] + ("" if line.split(" ")[0].endswith(".") else "\n") for line in table)
    assert "model.layers.*.self_attn.k_proj\n" in names and "model.layers.*.mlp.down_proj\n" in names


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "{packed}", "--json"]])
def test_a_closed_pipe_is_no_traceback(packed: Path, arguments: list[str]) -> None:
    code = "from quantkit.cli.main import main; main()"
    command = [sys.executable, "-c", code, *(argument.format(packed=packed) for argument in arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_the_package_runs_as_the_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "quantkit", "formats", "binary", "--codes"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "-1" in shown.stdout
