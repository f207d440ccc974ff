"""A long run: pieces of all targets handed to processes, which may die of a case and go on behind it."""

import argparse
import faulthandler
import math
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from .runner import Place, Tally, case_of, finding, in_scratch, run_case
from .targets import TARGETS

#: Cases of a piece, at most: with those of many targets in turns, a run that is stopped has some of each.
PIECE = 500
_NONE = -1


@dataclass
class Result:
    """Of one target: how cases ended, the first case of each finding, and the time of all processes."""

    tally: Tally = field(default_factory=Tally)
    findings: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, outcomes: Mapping[str, int], findings: Mapping[str, int], seconds: float) -> None:
        self.tally.outcomes.update(outcomes)
        self.findings = {**findings, **self.findings}
        self.seconds += seconds


@dataclass(frozen=True)
class Piece:
    """The cases from `first` to before `end` of a target."""

    name: str
    first: int
    end: int


def shares(names: list[str], cases: int, least: Mapping[str, int]) -> dict[str, int]:
    """How many of the cases each target gets: as many as `least` says, or its share of all others."""
    rest = [name for name in names if name not in least]
    total = sum(TARGETS[name].share for name in rest)
    left = max(0, cases - sum(least.values()))
    return {name: least.get(name) or max(1, round(left * TARGETS[name].share / total)) for name in names}


def count(text: str) -> tuple[str, int]:
    """`TARGET=CASES` of a command line."""
    name, _, number = text.rpartition("=")
    if name not in TARGETS or not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not TARGET=CASES with one of {', '.join(TARGETS)}")
    return name, int(number)


def run(counts: Mapping[str, int], seed: int, jobs: int, end: float | None, keep: Path) -> dict[str, Result]:
    """So many cases of each target, or as many as there are before `end` of `time.monotonic`."""
    results = {name: Result() for name in counts}
    left = deque(pieces(counts, jobs))
    workers = [_Worker(seed, end, keep) for _ in range(min(jobs, len(left)))]
    busy = {worker.start(left.popleft()): worker for worker in workers}
    while busy:
        for ready in wait(list(busy)):
            worker = busy.pop(ready)
            name = worker.piece.name
            answer, rest = worker.answer()
            results[name].add(*answer)
            more = end is None or time.monotonic() < end
            if more and (rest or left):
                busy[worker.start(rest or left.popleft())] = worker
            else:
                worker.stop()
    return results


def pieces(counts: Mapping[str, int], jobs: int) -> list[Piece]:
    """The pieces of all targets, those that begin at the same part of theirs together."""
    found = []
    for name, count in counts.items():
        size = max(1, min(PIECE, math.ceil(count / jobs)))
        found += [Piece(name, first, min(first + size, count)) for first in range(0, count, size)]
    return sorted(found, key=lambda piece: piece.first / counts[piece.name])


class _Worker:
    """A process that does one piece after another; another one goes on where it dies."""

    piece: Piece

    def __init__(self, seed: int, end: float | None, keep: Path) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._fixed = seed, end, keep
        self._process: Any = None

    def start(self, piece: Piece) -> Any:
        """Begin a piece; the connection on which its answer comes."""
        self.piece = piece
        if self._process is None:
            self._at = self._context.Value("q", _NONE, lock=False)
            self._ours, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_work, args=(theirs, self._at, *self._fixed))
            self._process.start()
            theirs.close()
        self._at.value = _NONE
        self._ours.send(piece)
        return self._ours

    def answer(self) -> tuple[Any, Piece | None]:
        """What came of the piece, and what of it is left to do."""
        try:
            return self._ours.recv(), None
        except EOFError:
            self._process.join()
            self._process = None
        number, name = self._at.value, self.piece.name
        if number == _NONE:
            raise RuntimeError(f"a process of the run died before a case of {name}")
        seed, _, keep = self._fixed
        _keep(keep, name, number, case_of(TARGETS[name], seed, number))
        rest = Piece(name, number + 1, self.piece.end) if number + 1 < self.piece.end else None
        done = {"finding": 1, "of a process that died": number - self.piece.first}
        return (done, {f"the process died in case {number}": number}, 0.0), rest

    def stop(self) -> None:
        if self._process is not None:
            self._ours.close()
            self._process.join()


def _work(pieces: Any, at: Any, seed: int, end: float | None, keep: Path) -> None:
    import torch

    torch.set_num_threads(1)
    with in_scratch() as scratch:
        _settle(Path(scratch))
        place = Place(Path(scratch))
        for piece in _received(pieces):
            pieces.send(_run(piece, place, at, seed, end, keep))


def _received(pieces: Any) -> Iterator[Piece]:
    while True:
        try:
            yield pieces.recv()
        except EOFError:
            return


def _run(piece: Piece, place: Place, at: Any, seed: int, end: float | None, keep: Path) -> Any:
    target, tally, kinds = TARGETS[piece.name], Tally(), dict[str, int]()
    begun = time.monotonic()
    for number in range(piece.first, piece.end):
        at.value = number
        # Where not even a signal gets through: in C code that does not return.
        faulthandler.dump_traceback_later(10 * target.seconds, exit=True)
        case = case_of(target, seed, number)
        try:
            outcome = run_case(target, case, place)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever it is, it is what we are looking for
            kind = finding(error)
            outcome = "finding"
            if kind not in kinds:
                kinds[kind] = number
                _keep(keep, piece.name, number, case)
                print(f"{piece.name} {number}: {kind}", file=sys.stderr, flush=True)
        tally.outcomes[outcome] += 1
        if end is not None and time.monotonic() > end:
            break
    faulthandler.cancel_dump_traceback_later()
    return dict(tally.outcomes), kinds, time.monotonic() - begun


def _settle(scratch: Path) -> None:
    """No cache and no home of the user: nothing of theirs is read or written."""
    for variable in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
        os.environ[variable] = str(scratch / "home")


def _keep(findings: Path, name: str, number: int, case: bytes) -> None:
    findings.mkdir(parents=True, exist_ok=True)
    (findings / f"{name}-{number}").write_bytes(case)
