"""Sweep everything: `python -m tests.reliability --jobs 16 --out hardening.json`.

First every test of faults, with all failing calls, kills and changed bytes; then hostile files. The figures
are one JSON object: commit, machine, counts, what was wrong, and how much was not reached in time.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .sweep import END, FIGURES, NO_TIME

ROOT = Path(__file__).parents[2]
TESTS = ("tests/reliability", "tests/checkpoint/test_writer.py")
#: Of the time, at most so much for the tests of faults.
FAULTS = 0.7
SHOWN_CHARS = 3000
MEMORY_BYTES = 4 << 30


class Outcomes:
    """How tests ended."""

    def __init__(self) -> None:
        self.counts, self.failed = Counter[str](), dict[str, str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            late = report.skipped and NO_TIME in str(report.longrepr)
            self.counts["not reached" if late else report.outcome] += 1
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-SHOWN_CHARS:]


def faults(jobs: int, seconds: float) -> dict[str, Any]:
    """Run the tests of faults: how they ended, what was tried, and what was wrong."""
    outcomes = Outcomes()
    os.environ[END] = str(time.monotonic() + seconds)
    with tempfile.TemporaryDirectory(dir=memory()) as place:
        os.environ[FIGURES] = str(Path(place, "figures"))
        kept = ("--basetemp", str(Path(place, "tests")), "-o", "tmp_path_retention_policy=none")
        processes = ("-n", str(jobs), "--dist", "worksteal") if jobs > 1 else ()
        options = ("-m", "", "-p", "no:cacheprovider", "--tb=short", *kept, *processes)
        # The figures are all that goes to stdout.
        with contextlib.redirect_stdout(sys.stderr):
            pytest.main([*options, *(str(ROOT / test) for test in TESTS)], plugins=[outcomes])
        path = Path(os.environ.pop(FIGURES))
        told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kinds: dict[str, Counter[str]] = {}
    for one in told:
        kinds.setdefault(one.pop("kind"), Counter()).update(one)
    return {
        "tests": dict(outcomes.counts),
        "tried": {k: dict(kinds[k]) for k in sorted(kinds)},
        "failed": outcomes.failed,
    }


def fuzz(
    cases: int, least: Sequence[str], seed: int, jobs: int, seconds: float, findings: Path
) -> dict[str, Any]:
    """Run hostile files of every kind: how many, how they ended, and what was found."""
    from ..fuzz.__main__ import figures
    from ..fuzz.campaign import count, run, shares
    from ..fuzz.targets import TARGETS

    counts = shares([*TARGETS], cases, dict(map(count, least)))
    results = run(counts, seed, jobs, time.monotonic() + seconds, findings)
    total = sum(result.tally.cases for result in results.values())
    return {"cases": total, "of": cases, "seed": seed, "targets": {k: figures(v) for k, v in results.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seconds", type=float, default=7200, help="stop after so many")
    parser.add_argument("--cases", type=int, default=1_000_000, help="hostile files; 0 for none")
    parser.add_argument(
        "--least", action="append", default=[], metavar="TARGET=CASES", help="of --cases; may be repeated"
    )
    parser.add_argument("--no-faults", action="store_true", help="hostile files only")
    parser.add_argument("--seed", type=int, default=0, help="of the hostile files")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where findings go")
    parser.add_argument("--out", type=Path, help="a file for the figures too")
    parser.add_argument("--commit", default=commit(), help="of the tree, where git is not there")
    options = parser.parse_args()
    begun = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"
    for_faults = options.seconds * (FAULTS if options.cases else 1)
    figures: dict[str, Any] = {"commit": options.commit, "machine": machine(), "jobs": options.jobs}
    violations: dict[str, str] = {}
    if not options.no_faults:
        figures["faults"] = faults(options.jobs, for_faults)
        violations |= figures["faults"].pop("failed")
        figures["seconds of faults"] = round(time.monotonic() - begun)
    if options.cases:
        left = options.seconds - (time.monotonic() - begun)
        figures["fuzz"] = fuzz(
            options.cases, options.least, options.seed, options.jobs, left, options.findings
        )
        for target, result in figures["fuzz"]["targets"].items():
            violations |= {f"fuzz: {target} {n}": kind for kind, n in result["findings"].items()}
    figures |= {"seconds": round(time.monotonic() - begun), "violations": violations}
    text = json.dumps(figures, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return 1 if violations else 0


def memory() -> str | None:
    """A directory in memory where there is a large one: tests of faults really sync what they write."""
    place = Path("/dev/shm")
    return str(place) if place.is_dir() and shutil.disk_usage(place).free > MEMORY_BYTES else None


def commit() -> str:
    """The commit of the tree, and whether it has changes."""
    try:
        at, changes = (
            subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout
            for args in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return at.strip() + (" with changes" if changes.strip() else "")


def machine() -> str:
    """The cores, and the versions of Python and torch."""
    import torch

    return f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
