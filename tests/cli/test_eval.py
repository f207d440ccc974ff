"""`quantkit eval`: what it says of models, its resumption, and what it refuses."""

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from quantkit.report.eval_plots import floor_label

from ..reliability.faults import edit_json
from .conftest import SOURCE, STORIES, Run


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "nothing to evaluate: give --text FILE"),
        (("--text", "missing.txt"), 2, "missing.txt: cannot be read"),
        (("--tasks", ","), 2, "--tasks is empty; name at least one"),
        (("--text", STORIES, "--noise-floor"), 2, "give --against as well"),
        (("--tasks", "x", "--against", SOURCE, "--per-block"), 2, "give --against and --text as well"),
        (("--text", STORIES, "--task-path", "."), 2, "name them with --tasks"),
        (("--text", STORIES, "--limit", "3"), 2, "--limit is of tasks and none is to run"),
        (("--text", STORIES, "--window", "64", "--stride", "65"), 2, "stride is 65; use 1 to 64"),
        (("--text", STORIES, "--logits-space", "much"), 2, "size 'much' is not"),
        (("--text", STORIES, "--dtype", "int3"), 2, "unknown dtype 'int3'"),
        (("--text", STORIES, "--device", "tpu", "--max-windows", "1"), 2, "unknown device 'tpu'"),
        (("--text", STORIES, "--json", "missing/eval.json"), 5, "cannot write missing/eval.json"),
        (("--text", STORIES, "--report", STORIES), 5, "cannot create the directory"),
        (("--text", STORIES, "--window", "1"), 2, "Invalid value for '--window'"),
    ],
)
def test_wrong_options_of_eval(
    run: Run, packed: Path, arguments: tuple[object, ...], code: int, message: str
) -> None:
    done = run("eval", packed, *arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.err


def test_eval_without_lm_eval(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.cli.commands.evaluate.find_spec", lambda name: None)
    done = run("eval", packed, "--text", STORIES, "--tasks", "arc_easy")
    assert (done.code, done.out) == (7, "")
    assert "pip install 'lm-eval[hf]>=" in done.err


def test_eval_of_directories_on_texts_asks_the_network_nothing(
    run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a token, which is for models and tasks of the hub."""
    asked: list[object] = []
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(socket.socket, "connect", lambda *address: asked.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: asked.append(address))
    done = run("eval", packed, "--against", SOURCE, "--text", STORIES, "--window", 32, "--max-windows", 1)
    assert (done.code, asked) == (0, [])


def test_eval_compares_models_and_goes_on_after_an_interruption(
    run: Run, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.eval import runner

    calls = 0

    def interrupted(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    report, file = tmp_path / "report", tmp_path / "figures.json"
    command = (
        *("eval", packed, SOURCE, "--text", STORIES, "--window", 32, "--max-windows", 2),
        *("--against", SOURCE, "--report", report, "--json", file, "--no-noise-floor", "--no-per-block"),
    )
    monkeypatch.setattr(runner, "check_finite", interrupted)
    done = run(*command)
    assert (done.code, done.out) == (130, "")
    assert f"what is done so far is in {report / '.quantkit-eval'}; the same command goes on" in done.err
    assert list(report.iterdir()) == [report / ".quantkit-eval"]

    done = run(*command)
    assert done.code == 0
    assert "int4: 1 of 2 batches of windows come from a run that was interrupted" in done.err
    assert re.search(r"\nint4 .*\nstories260K .* \+0\.00000 +0 +100\.00%\n", done.out)
    assert calls == 7
    figures = json.loads(file.read_text())["reports"]
    assert [one["label"] for one in figures] == ["int4", "stories260K"]
    assert not (report / ".quantkit-eval").exists()


def test_eval_calls_the_noise_floor_as_the_report_does(run: Run, packed: Path) -> None:
    options = ("--against", SOURCE, "--noise-floor", "--text", STORIES, "--window", 64, "--max-windows", 1)
    done = run("eval", packed, *options)
    assert floor_label(str(SOURCE), "bfloat16") in done.out


def test_eval_without_a_reference(run: Run, packed: Path) -> None:
    done = run("eval", packed, "--text", STORIES, "--window", 4096, "--max-windows", 1)
    assert done.code == 0
    assert "KL" not in done.out
    assert "int4: not compared with a reference" in done.out
    assert "window 4096 was cut to 512" in done.err and "stride" not in done.err
    done = run("eval", packed, "--text", STORIES, "--window", 4096, "--stride", 600, "--max-windows", 1)
    assert (
        "window 4096 was cut to 512, the positions that the model has; so was the stride of 600"
        in " ".join(done.err.split())
    )


def test_a_model_that_fails_hides_no_other(run: Run, packed: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(packed, tmp_path / "broken"))
    for file in broken.glob("tokenizer*"):
        file.unlink()
    work, figures = tmp_path / "work", tmp_path / "eval.json"
    done = run(
        *("eval", broken, packed, tmp_path / "missing", "--text", STORIES, "--window", 64),
        *("--max-windows", 1, "--json", figures, "--work", work),
    )
    assert done.code == 2
    assert re.search(r"^int4 +4\.277 +7\.845 ", done.out, re.MULTILINE)
    assert "broken" not in done.out
    first, second = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert first.startswith(f"error: {broken} has ") and "tokenizer" in first
    assert second.startswith(f"error: '{tmp_path / 'missing'}' is no directory; ")
    assert json.loads(figures.read_text())["label"] == "int4"
    # The same command goes on from there once the others are mended.
    assert work.is_dir()


def test_what_is_wrong_for_all_models_is_said_once(run: Run, packed: Path) -> None:
    done = run("eval", packed, SOURCE, "--text", "missing.txt")
    assert (done.code, done.out, done.err.count("missing.txt: cannot be read")) == (2, "", 1)


def test_what_other_tools_packed_is_read_without_them_and_counted(run: Run, tmp_path: Path) -> None:
    """The bits of low-bit weights with all their parts, and no bars of other libraries in a pipe."""
    own, foreign, mlx = tmp_path / "own", tmp_path / "foreign", tmp_path / "mlx"
    options = ("--format", "int4", "-g", 32, "--rule", "*.down_proj=keep", "--no-check")
    assert run("quantize", SOURCE, own, *options).code == 0
    assert run("export", own, mlx, "--to", "mlx").code == 0
    shutil.copytree(own, foreign)
    (foreign / "quantkit_manifest.json").unlink()
    edit_json(foreign / "config.json", lambda config: config["quantization_config"].pop("quantkit"))
    done = run("eval", own, foreign, mlx, "--text", STORIES, "--window", 64, "--max-windows", 1)
    assert done.code == 0, done.err
    rows = {line.split()[0]: line.split()[1:] for line in done.out.splitlines()}
    assert [rows[name][:2] for name in ("own", "foreign", "mlx")] == [
        *(["4.522", "13.875"], ["4.522", "13.875"], ["5.000", "14.190"]),
    ]
    assert rows["own"][-1] == rows["foreign"][-1] == rows["mlx"][-1]
    assert "mlx is low-bit already, and its weights are dequantized as they are read" in done.err
    assert all(line.startswith("note: ") for line in done.err.splitlines()), done.err
