"""Kernels that are compiled side by side: what is launched, and when, without a GPU."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from quantkit.kernels import compiling
from quantkit.kernels.compiling import Compilers, compiled_first


def test_nothing_is_compiled_on_a_cpu() -> None:
    calls: list[Compilers | None] = []
    compiled_first(torch.device("cpu"), lambda: calls.append(compiling.COMPILERS.get()))
    assert calls == [None]


def test_interpreted_kernels_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    calls: list[Compilers | None] = []
    compiled_first(torch.device("cuda"), lambda: calls.append(compiling.COMPILERS.get()))
    assert calls == [None]


#: Kernels are compiled for an H200, and a launch only notes their name and warps.
START = """
import os, signal, threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
import torch
from triton import AsyncCompileMode
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from quantkit.kernels import compiling
from quantkit.kernels.building import building
from quantkit.kernels.compiling import Compilers, compiled_first
from quantkit.kernels.fused.glue import gate
from quantkit.kernels.launcher import IndexLaunch, Launch
from quantkit.kernels.tiles.gpu import CompileOnly

driver.set_active(CompileOnly(GPUTarget("cuda", 90, 32)))
launched, calls, rewound, launchers = [], [], [], []
CompileOnly.launcher_cls = lambda self, source, metadata: launchers.append(
    (metadata.num_warps, threading.current_thread() is threading.main_thread())
)
CompiledKernel._init_handles = lambda self: None
CompiledKernel.run = property(lambda self: lambda *_: launched.append(self.metadata.num_warps))
GPU, x = torch.device("cuda"), torch.zeros(4, 64, dtype=torch.bfloat16)


@contextmanager
def held(before=lambda: None):
    # What compiles ends no sooner than what has not begun is cancelled, or in a minute.
    cancelled, shutdown, launcher = threading.Event(), compiling._Pool.shutdown, CompileOnly.launcher_cls

    def shut(pool, wait=True, *, cancel_futures=False):
        shutdown(pool, wait=wait, cancel_futures=cancel_futures)
        if cancel_futures:
            cancelled.set()

    def launcher_cls(self, source, metadata):
        before()
        cancelled.wait(60)
        launcher(self, source, metadata)

    compiling._Pool.shutdown, CompileOnly.launcher_cls = shut, launcher_cls
    try:
        yield
    finally:
        compiling._Pool.shutdown, CompileOnly.launcher_cls = shutdown, launcher


def launch(kind, warps, block=64):
    return kind(gate, (4, 1), KIND="silu", B=block, PDL=False, num_warps=warps)


def run():
    calls.append(list(launched))
    for one in every:
        one(x, x, x, 64, 64, 64)
    return "what it gives"


def first():
    for noted in (launched, calls, rewound, launchers):
        noted.clear()
    return compiled_first(GPU, run, lambda: rewound.append(list(launched)))
"""
CASES = {
    "none is launched before all are compiled": """
every = [launch(Launch, warps) for warps in (1, 2, 4)]
compiling.WAIT = 0
assert first() == "what it gives"
assert (calls, rewound, launched) == ([[], []], [[]], [1, 2, 4])
assert sorted(launchers) == [(1, False), (2, False), (4, False)]
# In memory.
assert first() == "what it gives"
assert (calls, rewound, launched) == ([[]], [], [1, 2, 4])
# On the disk.
compiling.WAIT = 60
gate.device_caches.clear()
every = [launch(Launch, warps) for warps in (1, 2, 4)]
assert first() == "what it gives"
assert (calls, rewound, launched) == ([[]], [], [1, 2, 4])
""",
    "indices are not left out": """
every = [launch(Launch, 1), launch(IndexLaunch, 2), launch(Launch, 4)]
compiling.WAIT = 0
first()
assert (calls, rewound, launched) == ([[], [2]], [[2]], [2, 1, 2, 4])
""",
    "nor are layouts of weights, which are kept": """
one, other = launch(Launch, 1), launch(Launch, 2)
kept, compiling.WAIT = [], 0


def building_once():
    calls.append(list(launched))
    one(x, x, x, 64, 64, 64)
    if not kept:
        with building():
            other(x, x, x, 64, 64, 64)
        kept.append(list(launched))


for noted in (launched, calls):
    noted.clear()
compiled_first(GPU, building_once)
assert (calls, kept, launched) == ([[], [2]], [[2]], [2, 1])
""",
    "nor is what comes before": """
every = [launch(Launch, 1)]
first()
every += [launch(Launch, 2), launch(Launch, 1)]
compiling.WAIT = 0
first()
assert (calls, rewound, launched) == ([[], [1]], [[1]], [1, 1, 2, 1])
""",
    "errors of the compiler are those of the launch": """
every = [launch(Launch, 1), launch(Launch, 2, block=63)]
compiling.WAIT = 0
for _ in range(2):
    try:
        first()
    except Exception as error:
        assert "power of 2" in str(error), error
    else:
        raise AssertionError("it compiled")
    compiling.WAIT = 60
every = [launch(Launch, 4)]
compiling.WAIT = 0
first()
assert launched == [4], "an error leaves nothing behind"
""",
    "what is undefined may be refused": """
every = [launch(Launch, 1)]
compiling.WAIT = 0


def refusing():
    run()
    if not launched:
        raise ValueError("nothing is there")
    return 1


assert compiled_first(GPU, refusing) == 1
launched.clear()
every = []
try:
    compiled_first(GPU, refusing)
except ValueError:
    pass
else:
    raise AssertionError("an error of a run that launched all is its own")
""",
    "somebody else compiles side by side": """
every = [launch(Launch, warps) for warps in (1, 2)]
compiling.WAIT = 0
with ThreadPoolExecutor(2) as pool, AsyncCompileMode(pool):
    first()
assert (calls, launched) == ([[]], [1, 2])
""",
    "an error of time is the compiler's": """
compilers, promise = Compilers(), Future()
promise.set_exception(TimeoutError("of the disk"))
promised = type("Promise", (), {"future": promise, "result": promise.result})
for needed in (False, True):
    try:
        compilers.kernel(None, promised, needed)
    except TimeoutError as error:
        assert str(error) == "of the disk" and not compilers.leave_out
    else:
        raise AssertionError("it is taken for one that is being compiled")
""",
    "an interrupt leaves nothing behind, nor waits for what has not begun": """
compiling.cores, compiling.WAIT = lambda: 1, 0
for stop in (KeyboardInterrupt, SystemExit):
    gate.device_caches.clear()
    every = [launch(Launch, warps, block) for warps in (1, 2, 4) for block in (32, 64, 128)]
    launched.clear()
    launchers.clear()

    def interrupted():
        run()
        raise stop

    with held():
        try:
            compiled_first(GPU, interrupted)
        except stop:
            pass
    assert compiling.COMPILERS.get() is None and len(launchers) <= 1
    launch(Launch, 8)(x, x, x, 64, 64, 64)
    assert launched == [8]
""",
    "nor does one while it waits": """
compiling.cores, compiling.WAIT = lambda: 1, 0
every = [launch(Launch, warps, block) for warps in (1, 2, 4) for block in (32, 64, 128)]
launched.clear()
launchers.clear()
has_run = threading.Event()


def noted():
    run()
    has_run.set()


with held(lambda: (has_run.wait(60), os.kill(os.getpid(), signal.SIGINT))):
    try:
        compiled_first(GPU, noted)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("it was not interrupted")
assert len(launchers) == 1 and not launched
""",
}


#: Each begins with no kernel in memory or in Triton's cache.
ALL = """
import json, sys, tempfile
from triton import knobs

for name, case in json.loads(sys.argv[1]).items():
    gate.device_caches.clear()
    compiling.WAIT = 60
    with tempfile.TemporaryDirectory() as knobs.cache.dir:
        try:
            exec(case)
        except Exception as error:
            error.add_note(name)
            raise
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")
def test_kernels_are_compiled_before_they_are_launched() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START + ALL, json.dumps(CASES)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
