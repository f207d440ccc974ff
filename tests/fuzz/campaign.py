"""A long run: the cases of a target shared among processes, which may die of one and go on behind it."""

import faulthandler
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from .runner import Place, Tally, case_of, finding, in_scratch, run_case
from .targets import TARGETS


def run_target(name: str, count: int, arguments: Any, began: float) -> tuple[Tally, dict[str, int], float]:
    start, context = time.monotonic(), multiprocessing.get_context("spawn")
    end = None if arguments.seconds is None else began + arguments.seconds
    tally, findings = Tally(), dict[str, int]()
    workers = [_Worker(context, name, arguments, job, count, end) for job in range(arguments.jobs)]
    for worker in workers:
        outcomes, kinds = worker.result()
        tally.outcomes.update(outcomes)
        for kind, number in kinds.items():
            findings.setdefault(kind, number)
    return tally, findings, time.monotonic() - start


_NONE = -1


class _Worker:
    """A process with every `jobs`-th case. If one kills it, the next goes on behind that case."""

    def __init__(
        self, context: Any, name: str, arguments: Any, job: int, count: int, end: float | None
    ) -> None:
        self._context, self._count, self._end = context, count, end
        self._name, self._arguments, self._job = name, arguments, job
        self._at = context.Value("q", _NONE, lock=False)
        self._start(job)

    def _start(self, first: int) -> None:
        self._ours, theirs = self._context.Pipe(duplex=False)
        numbers = (first, self._count, self._arguments.jobs)
        self._process = self._context.Process(
            target=_work,
            args=(
                self._name,
                self._arguments.seed,
                numbers,
                self._end,
                self._arguments.findings,
                self._at,
                theirs,
            ),
        )
        self._process.start()
        theirs.close()

    def result(self) -> tuple[dict[str, int], dict[str, int]]:
        outcomes: dict[str, int] = {}
        kinds: dict[str, int] = {}
        while True:
            done = True
            try:
                some, found = self._ours.recv()
            except EOFError:
                done = False
                number = self._at.value
                if number == _NONE:
                    raise RuntimeError("a process of the run died before its first case") from None
                some, found = {}, {f"the process died in case {number}": number}
                case = case_of(TARGETS[self._name], self._arguments.seed, number)
                _keep(self._arguments.findings, self._name, number, case)
            self._process.join()
            for key, value in some.items():
                outcomes[key] = outcomes.get(key, 0) + value
            kinds |= found
            if done:
                return outcomes, kinds
            first, self._at.value = number + self._arguments.jobs, _NONE
            self._start(first)


def _work(
    name: str,
    seed: int,
    numbers: tuple[int, int, int],
    end: float | None,
    findings: Path,
    at: Any,
    results: Any,
) -> None:
    import torch

    torch.set_num_threads(1)
    target, tally, kinds = TARGETS[name], Tally(), dict[str, int]()
    first, count, step = numbers
    with in_scratch() as scratch:
        _settle(Path(scratch))
        place = Place(Path(scratch))
        for number in range(first, count, step):
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
                    _keep(findings, name, number, case)
                    print(f"{name} {number}: {kind}", file=sys.stderr, flush=True)
            tally.outcomes[outcome] += 1
            if end is not None and time.monotonic() > end:
                break
        faulthandler.cancel_dump_traceback_later()
    results.send((dict(tally.outcomes), kinds))


def _settle(scratch: Path) -> None:
    """No cache and no home of the user: nothing of theirs is read or written."""
    for variable in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
        os.environ[variable] = str(scratch / "home")


def _keep(findings: Path, name: str, number: int, case: bytes) -> None:
    findings.mkdir(parents=True, exist_ok=True)
    (findings / f"{name}-{number}").write_bytes(case)
