"""`quantkit bench`: what it prints and writes, and what it refuses."""

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from quantkit.bench import machine, worker
from quantkit.bench.figures import Speed, read_benchmark
from quantkit.bench.speed import measure_speed
from quantkit.errors import UsageError

from .conftest import SOURCE, Run

pytest.importorskip("matplotlib")


def test_bench_writes_what_it_prints(
    run: Run, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fresh processes are for memory; tests/bench has one.
    monkeypatch.setattr(worker, "speed_of", measure_speed)
    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 20)
    file, report, trace = tmp_path / "bench.json", tmp_path / "report", tmp_path / "trace.json"
    done = run(
        *("bench", packed, "--against", SOURCE, "--batch", "1,2", "--prompt", "4", "--new-tokens", 2),
        *("--repeats", 1, "--device", "cpu", "--json", file, "--report", report, "--profile", trace),
    )
    assert done.code == 0
    assert re.search(
        r"note: int4: (about \d+:\d\d|less than a second) of generating on this machine, by its first "
        "generation, then stor",
        done.err,
    )
    assert re.search(
        r"note: stories260K: (about \d+:\d\d|less than a second) of generating on this machine, by its "
        r"first generation\. F",
        done.err,
    )
    # All of what a CPU has less of was asked for.
    assert "the default is" not in done.err
    for line in (f"wrote {file}", f"wrote {report / 'bench.md'}", f"wrote {trace}"):
        assert line in done.out
    found = read_benchmark(file).speed
    assert found is not None and found == read_benchmark(report / "bench.json").speed
    assert [one.label for one in found] == ["int4", "stories260K"]
    cells = [(batch, 4, mode) for batch in (1, 2) for mode in ("eager", "flat")]
    assert [(cell.batch, cell.prompt, cell.mode) for one in found for cell in one.cells] == cells * 2
    for cell in found[0].cells:
        assert f"{cell.decode.median:.3g} ({cell.decode.low:.3g} to" in done.out
    assert f"quantkit bench {packed} --against" in (report / "bench.md").read_text()
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(("error", "code"), [(UsageError("no such model"), 2), (KeyboardInterrupt(), 130)])
def test_what_was_measured_before_a_failure_is_shown_and_stored(
    run: Run,
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 20)

    def measured(source: str, *given: Any, **named: Any) -> Speed:
        if source == str(SOURCE):
            raise error
        return measure_speed(source, *given, **named)

    monkeypatch.setattr(worker, "speed_of", measured)
    file = tmp_path / "bench.json"
    done = run(
        *("bench", packed, "--against", SOURCE, "--batch", "1", "--prompt", "4", "--new-tokens", 2),
        *("--repeats", 1, "--device", "cpu", "--json", file),
    )
    assert done.code == code
    found = read_benchmark(file).speed
    assert found is not None and [one.label for one in found] == ["int4"]
    assert f"wrote {file}" in done.out
    assert f"{found[0].cells[0].decode.median:.3g} (" in done.out


def test_a_cpu_says_what_it_measures_by_default_and_how_to_ask_for_more(
    packed: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "speed_of", measure_speed)
    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 20)
    done = run("bench", packed, "--prompt", "4", "--new-tokens", 2, "--device", "cpu")
    assert done.code == 0
    expected = (
        "note: on a CPU the default is --batch 1 --repeats 3; --batch 1,4 --repeats 5 measures more, and "
        "takes longer."
    )
    assert expected in done.err.splitlines()


def test_a_pipe_has_the_figures_of_all_models_once(
    packed: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "speed_of", measure_speed)
    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 20)
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.extend(pipe.read_text() for _ in range(2)))
    reader.start()
    done = run(
        *("bench", packed, "--against", SOURCE, "--batch", "1", "--prompt", "4", "--new-tokens", 2),
        *("--repeats", 1, "--device", "cpu", "--json", pipe),
    )
    reader.join()
    assert done.code == 0
    # That it can be written is seen by opening it.
    assert read[0] == ""
    assert len(json.loads(read[1])["speed"]) == 2


def test_serve_like_reports_the_load_at_each_rate(run: Run, packed: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    done = run(
        *("bench", packed, "--serve-like", "--rate", "50,100", "--requests", 2, "--prompt-range", "2-4"),
        *("--answer-range", 3, "--device", "cpu", "--report", report),
    )
    assert done.code == 0, done.err
    (found,) = json.loads((report / "serve.json").read_text())["serving"]
    assert [load["rate"] for load in found["loads"]] == [50, 100]
    assert (found["prompt_tokens"], found["new_tokens"]) == ([2, 4], [3, 3])
    assert "first token p50" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "1"), "--rate needs --serve-like."),
        (("--requests", "4"), "--requests needs --serve-like."),
        (("--serve-like", "--repeats", "5"), "--repeats does not go with --serve-like."),
        (("--serve-like", "--batch", "1"), "--batch does not go with --serve-like."),
        (("--serve-like", "--profile", "x"), "--profile does not go with --serve-like."),
        (("--batch", "1,a"), "--batch is '1,a'; it is numbers from 1"),
        (("--prompt", "0"), "--prompt is '0'; it is numbers from 1"),
        (("--serve-like", "--rate", "fast"), "--rate is 'fast'; it is requests per second"),
        (("--serve-like", "--rate", "-1"), "rates above 0 per second"),
        (("--serve-like", "--prompt-range", "8-4"), "prompts of 8 to 4 tokens"),
        (("--serve-like", "--prompt-range", "8-"), "--prompt-range is '8-'; it is a number of tokens"),
        (("--dtype", "int3"), "unknown dtype 'int3'"),
        (("--serve-like", "--seed", "-5"), "seed is -5; use 0 to"),
        (("--seed", str(1 << 64)), f"seed is {1 << 64}; use 0 to {(1 << 63) - 1}."),
    ],
)
def test_contradictions_are_refused(
    run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    done = run("bench", packed, *arguments)
    assert done.code == 2
    assert message in done.err


def test_what_cannot_be_written_is_refused_first(run: Run, packed: Path, tmp_path: Path) -> None:
    done = run("bench", packed, "--json", tmp_path / "none" / "bench.json")
    assert done.code == 5
    assert "cannot write" in done.err
