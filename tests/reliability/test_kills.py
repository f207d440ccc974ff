"""Killed at any moment, or written to by several at once, a directory ends in the same bytes."""

import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from quantkit.quantization import stream
from quantkit.signals import terminate

from .injection import Fault, Injection
from .scenarios import GPTQ, Failed, Quantize, contents, gguf_source
from .sweep import tell

SOURCE = Path(__file__).parents[2] / "examples" / "stories260K"
#: In many shards, and with work files: most moments are between two files.
SHARDS = ("--method", "rtn", "--no-check", "--format", "int3", "--max-shard-size", "60KB")
RUNS = {"shards": SHARDS, "gptq": GPTQ}
#: Of a GGUF file, with the check of the result.
CONVERT = ("--max-shard-size", "60KB")
#: With the check of the result and its stored logits, which take most of the time.
CHECKED = ("--method", "rtn", "--format", "int4", "--group-size", "channel", "--max-shard-size", "60KB")
RESUME = ("--resume",)
#: The test of kills before every call is cut into so many, for as many processes.
PARTS = 12
#: Seconds for what takes one or two.
PATIENCE = 120


class Child:
    """A process forked after all imports that does `work`, with its exit code and what it said."""

    def __init__(self, work: Callable[[], object], said: Path) -> None:
        self._said = said
        self._ready = said.with_name("ready")
        self._ready.unlink(missing_ok=True)
        self._process = multiprocessing.get_context("fork").Process(target=self._run, args=(work,))
        self._process.start()

    def _run(self, work: Callable[[], object]) -> None:
        # From now on, as the command itself does it a little later.
        signal.signal(signal.SIGTERM, terminate)
        # Shells have background jobs ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # OpenMP's threads do not survive a fork: who waits for them waits for ever.
        torch.set_num_threads(1)
        code = 0
        try:
            self._ready.touch()
            work()
        except Failed as error:
            code = error.code
            self._said.write_text(str(error))
        except SystemExit as ended:
            code = int(ended.code or 0)
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            code = 70
            self._said.write_text(traceback.format_exc())
        os._exit(code)

    def signal(self, number: int, wait: float, begun: Path | None = None, patience: float = 0) -> None:
        """Send a signal so many seconds after the work has begun, or after file `begun` is there.

        That file is waited for no longer than `patience` seconds.
        """
        while not self._ready.exists():
            time.sleep(0.001)
        end = time.monotonic() + patience
        while begun is not None and not begun.exists() and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(wait)
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self) -> int:
        self._process.join(PATIENCE)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"a child is at work after {PATIENCE} s")
        return self._process.exitcode

    def said(self) -> str:
        return self._said.read_text() if self._said.exists() else ""


@pytest.fixture(scope="module", params=[*RUNS, pytest.param("convert", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Run":
    place = tmp_path_factory.mktemp("kills")
    if request.param == "convert":
        return Run(Quantize("convert", gguf_source(place), CONVERT, mode=RESUME, verb="convert"), place)
    return Run(Quantize(request.param, SOURCE, RUNS[request.param], mode=RESUME), place)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> "Run":
    return Run(Quantize("checked", SOURCE, CHECKED, mode=RESUME), tmp_path_factory.mktemp("kills"))


class Run:
    """One kind of run: what it ends in, and how long that takes in a child."""

    def __init__(self, scenario: Quantize, place: Path) -> None:
        self.name, self.place, self._scenario = scenario.name, place, scenario
        # Here, so that children have imported everything.
        (place / "first").mkdir()
        self._scenario.run(place / "first")
        self.time()
        self.expected = contents(place / "whole/out")
        assert contents(place / "first/out") == self.expected and len(self.expected) > 6

    def time(self) -> None:
        """Measure `seconds` and `writing`, which signals are spread over: a machine is not equally busy."""
        shutil.rmtree(self.place / "whole", ignore_errors=True)
        begun = time.monotonic()
        child = self.start("whole")
        while not self.journal("whole").exists() and time.monotonic() < begun + PATIENCE:
            time.sleep(0.001)
        written = time.monotonic()
        assert child.wait() == 0
        self.seconds, self.writing = time.monotonic() - begun, time.monotonic() - written

    def journal(self, name: str) -> Path:
        """The first file of an output."""
        return self.place / name / "out" / ".quantkit-journal.jsonl"

    def start(self, name: str, n: int = 0) -> Child:
        """A child that quantizes or continues in `name`, killed before its call number `n` if any."""
        place = self.place / name
        place.mkdir(exist_ok=True)

        def work() -> None:
            with Injection([place], n, Fault.KILL).active():
                self.quantize(place)

        return Child(work if n else lambda: self.quantize(place), place / "said")

    def calls(self) -> int:
        """How many calls of a run change the disk."""
        place = self.place / "counted"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        with Injection([place], 0, Fault.KILL).active() as counted:
            self.quantize(place)
        return len(counted.calls)

    def quantize(self, place: Path) -> None:
        """Do it, or continue it, in this process."""
        self._scenario.run(place)

    def killed(self, name: str, number: int, chance: random.Random) -> int | None:
        """The exit code of a child that got a signal at a random moment; None if it was done before.

        Half of the moments are while the output is written: reading and planning may take most of a run.
        """
        child = self.start(name)
        if chance.random() < 0.5:
            child.signal(number, chance.uniform(0, self.seconds))
        else:
            child.signal(number, chance.uniform(0, self.writing), self.journal(name), self.seconds)
        code = child.wait()
        return None if code == 0 else code

    def check(self, name: str) -> None:
        """Continue what was interrupted, and compare."""
        child = self.start(name)
        assert child.wait() == 0, child.said()
        assert contents(self.place / name / "out") == self.expected
        shutil.rmtree(self.place / name)

    def judge(self, name: str) -> None:
        """Whether `verify` or `load` takes what is left for more than it is."""
        if (self.place / name / "out").is_dir():
            assert self._scenario.unsound(self.place / name, self.expected) is None

    def phase(self, name: str) -> str:
        """How far a run came."""
        out = self.place / name / "out"
        left = {path.name for path in out.iterdir()} if out.is_dir() else set()
        weights = sum(name.endswith(".safetensors") and not name.startswith(".") for name in left)
        if "config.json" in left:
            return "complete"
        if "quantkit_manifest.json" in left or "LICENSE" in left:
            return "after the shards"
        if weights:
            return f"{weights} files of weights"
        return "journal" if ".quantkit-journal.jsonl" in left else "nothing"


def kill_and_resume(run: Run, count: int, part: int = 0) -> Counter[str]:
    """Kill `count` times, some of them a second time while resuming; how far the runs were."""
    chance, phases = random.Random(f"{run.name} {count} {part}"), Counter[str]()
    while phases.total() < count:
        name = f"kill{phases.total()}"
        code = run.killed(name, signal.SIGKILL, chance)
        while code == -signal.SIGKILL:
            phases[run.phase(name)] += 1
            run.judge(name)
            again = phases.total() < count and chance.random() < 0.3
            code = run.killed(name, signal.SIGKILL, chance) if again else None
        assert code is None
        run.check(name)
    return phases


@pytest.mark.sampled(2)
def test_after_a_few_kills_the_bytes_are_the_same(run: Run) -> None:
    assert kill_and_resume(run, 3).total() == 3


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_after_many_kills_the_bytes_are_the_same(run: Run, part: int) -> None:
    run.time()
    phases = kill_and_resume(run, 25, part)
    tell(f"random SIGKILLs: {run.name}", kills=phases.total(), **phases)
    assert len(phases) >= 3


@pytest.mark.fault(62)
@pytest.mark.parametrize(
    ("count", "part"), [(2, 0), *(pytest.param(25, part, marks=pytest.mark.slow) for part in range(8))]
)
def test_kills_until_the_result_is_checked(checked: Run, count: int, part: int) -> None:
    if count > 2:
        checked.time()
    phases = kill_and_resume(checked, count, part)
    tell(f"random SIGKILLs: {checked.name}", kills=phases.total(), **phases)
    assert count < 20 or phases["after the shards"] >= 1


@pytest.mark.fault(62)
@pytest.mark.parametrize("few", [pytest.param(False, marks=pytest.mark.slow), True])
def test_kills_before_the_last_calls_that_change_the_disk(checked: Run, few: bool) -> None:
    """From the manifest on: between the stored logits and the name of config.json."""
    calls = checked.calls()
    for n in range(calls - 14, calls + 1, 8 if few else 1):
        assert checked.start("last", n).wait() == -signal.SIGKILL
        checked.judge("last")
        checked.check("last")


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.slow) for part in range(PARTS)] + [None]
)
def test_kills_before_calls_that_change_the_disk(run: Run, part: int | None) -> None:
    every = {"shards": 1, "gptq": 8, "convert": 4}[run.name]
    first, stride = (121, 241) if part is None else (1 + every * part, every * PARTS)
    kills = 0
    for n in range(first, 10_000, stride):
        code = run.start("call", n).wait()
        if code == 0:
            # Another part would find a finished run, which changes little.
            shutil.rmtree(run.place / "call")
            break
        assert code == -signal.SIGKILL
        kills += 1
        run.check("call")
    tell(f"SIGKILLs before calls that change the disk: {run.name}", kills=kills)
    assert kills >= 1


@pytest.mark.parametrize("count", [pytest.param(20, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_with_their_exit_code(run: Run, number: int, expected: int, count: int) -> None:
    chance, ended = random.Random(number), 0
    while ended < count:
        code = run.killed("signal", number, chance)
        said = run.place / "signal/said"
        assert code in (None, expected), said.read_text() if said.exists() else "nothing said"
        ended += code is not None
        run.check("signal")
    tell(f"signals {number}: {run.name}", signals=count)


@pytest.mark.fault(63)
@pytest.mark.parametrize("n", [50, 150])
def test_a_signal_as_the_main_thread_takes_a_lock_ends_the_run(run: Run, n: int) -> None:
    taken = 0

    def entered(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        inside = frame.f_code is threading.Condition.__enter__.__code__
        return left if event == "call" and inside else None

    def left(_: FrameType, event: str, __: object) -> Callable[..., Any]:
        nonlocal taken
        taken += event == "return"
        if event == "return" and taken == n:
            sys.settrace(None)
            signal.raise_signal(signal.SIGTERM)
        return left

    def work() -> None:
        sys.settrace(entered)
        run.quantize(place)

    place = run.place / f"lock{n}"
    place.mkdir()
    assert Child(work, place / "said").wait() == 128 + signal.SIGTERM
    run.check(place.name)


@pytest.mark.parametrize("writers", [2, 3])
@pytest.mark.sampled(3)
def test_one_of_several_writers_finishes(run: Run, monkeypatch: pytest.MonkeyPatch, writers: int) -> None:
    # Slowed down before its first shard, so that all are there at the same time.
    write_shard, pauses = stream.write_shard, iter([run.seconds + 0.5])
    monkeypatch.setattr(stream, "write_shard", lambda *a: (time.sleep(next(pauses, 0)), write_shard(*a))[1])
    children = [run.start("several") for _ in range(writers)]
    codes = [child.wait() for child in children]
    assert sorted(codes) == [0] + [5] * (writers - 1)
    # By a process, or by another one where it has not written yet which it is.
    assert "is LOCKED by " in children[0].said()
    assert contents(run.place / "several/out") == run.expected
    shutil.rmtree(run.place / "several")
