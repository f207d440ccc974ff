"""The benchmark of compiling side by side."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")
def test_both_ways_are_timed() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "compiling.py")]
    options = ["--shapes", "256,256", "512,256", "--rows", "1", "--head", "int4"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    ways = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert ways == ["one after the other", "side by side"]
    assert all(": 2 products, " in line for line in done.stdout.splitlines())
