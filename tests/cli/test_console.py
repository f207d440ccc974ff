"""Progress where there is no terminal: plain lines, the first after 10 s, then a minute apart."""

import io
import re
import subprocess
import sys

import pytest
from rich.console import Console

from quantkit.cli import console
from quantkit.progress_bar import progress_bar

LINES = """
from quantkit.cli import console
console.LINE_SECONDS = 0.0
with console.progress("quantizing") as report:
    report(0, 200, "first")
    report(50, 200, "a\\x1b[31mb")
with console.progress("hidden", shown=False) as report:
    report(1, 2, "not shown")
"""


def test_a_pipe_gets_lines_without_control_characters() -> None:
    done = subprocess.run([sys.executable, "-c", LINES], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert re.fullmatch(r"quantizing: 0 % after 0:0\d, first, [\d.]+ MB RAM", first)
    assert re.fullmatch(r"quantizing: 25 % after 0:0\d, 0:0\d left, a\\x1b\[31mb, [\d.]+ MB RAM", second)


def test_a_line_a_minute_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    report = console._plain_lines("evaluating", lambda: now[0])
    # A run that is resumed begins at 40.
    for seconds, done in ((100, 40), (109, 45), (115, 46), (161, 48), (175, 50), (235, 60), (7435, 90)):
        now[0] = seconds
        report(done, 100, f"at {done}")
    found = [re.sub(r"[\d.]+ [MG]B", "N", line) for line in capsys.readouterr().err.splitlines()]
    assert found == [
        "evaluating: 46 % after 0:15, 2:15 left, at 46, N RAM",
        "evaluating: 50 % after 1:15, 6:15 left, at 50, N RAM",
        "evaluating: 60 % after 2:15, 4:30 left, at 60, N RAM",
        "evaluating: 90 % after 2:02:15, 24:27 left, at 90, N RAM",
    ]


def test_the_time_left_is_that_of_the_work_at_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Sensitivities are measured before weights are quantized, at another speed and of another total."""
    now = [0.0]
    report = console._plain_lines("quantizing", lambda: now[0])
    # A minute after the end of the first, the other is at 60 of 300 and began at 10.
    for seconds, done, total in ((0, 0, 20), (61, 10, 20), (100, 20, 20), (110, 10, 300), (160, 60, 300)):
        now[0] = seconds
        report(done, total, "w")
    found = [re.sub(r"[\d.]+ [MG]B", "N", line) for line in capsys.readouterr().err.splitlines()]
    assert found == [
        "quantizing: 50 % after 1:01, 1:01 left, w, N RAM",
        "quantizing: 20 % after 2:40, 4:48 left, w, N RAM",
    ]


TRAINING = "step 13153 of 14229, KL 0.2235"


def test_work_that_knows_the_time_left_has_one_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    report = console._plain_lines("quantizing", lambda: now[0])
    report(0, 14229, "step 0 of 14229, 14:00 left")
    now[0] = 663.0
    report(13153, 14229, f"{TRAINING}, 2:47 left")
    line = capsys.readouterr().err
    assert line.startswith(f"quantizing: 92 % after 11:03, 2:47 left, {TRAINING}, ")
    assert line.count("left") == 1 and TRAINING in line[:80]


def test_a_bar_of_80_columns_has_the_loss_and_one_time_left() -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=80, color_system=None)
    with progress_bar(terminal, "quantizing") as report:
        report(13153, 14229, f"{TRAINING}, 2:47 left")
    lines = [line for line in re.split(r"[\r\n]", shown.getvalue()) if "step" in line]
    assert lines and all(TRAINING in line and line.count("2:47") == 1 for line in lines)


def test_the_first_line_waits_for_a_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    report = console._plain_lines("measuring", lambda: now[0])
    for seconds, label in ((20, "loading"), (30, "batch 1, 2:00 left"), (40, "batch 1, 1:50 left")):
        now[0] = seconds
        report(0, 9, label)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("measuring: 0 % after 0:30, 2:00 left, batch 1, ")


def test_short_work_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("verifying") as report:
        for done in range(101):
            report(done, 100, "hashing")
    assert capsys.readouterr().err == ""
