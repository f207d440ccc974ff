"""Kernels that are compiled side by side: what is launched, and when, without a GPU."""

import json
import os
import re
import site
import subprocess
import sys
import threading
from importlib.util import find_spec
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from quantkit.kernels.jit import compile_pool, compile_worker
from quantkit.kernels.jit.compile_pool import Compilers, compiled_first
from quantkit.kernels.jit.compile_worker import Request

PACKAGE = Path(compile_pool.__file__).parents[2]
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_nothing_is_compiled_on_a_cpu() -> None:
    calls: list[Compilers | None] = []
    compiled_first(torch.device("cpu"), lambda: calls.append(compile_pool.COMPILERS.get()))
    assert calls == [None]


def test_interpreted_kernels_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    calls: list[Compilers | None] = []
    compiled_first(torch.device("cuda"), lambda: calls.append(compile_pool.COMPILERS.get()))
    assert calls == [None]


#: Kernels are compiled for an H200, and a launch only notes their name and warps.
START = """
import logging, os, shutil, signal, sys, tempfile, threading, time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
import torch
from triton import AsyncCompileMode
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton import knobs
from quantkit.kernels.jit import compile_pool, compile_worker
from quantkit.kernels.jit.building import building
from quantkit.kernels.jit.compile_pool import Compilers, compiled_first
from quantkit.kernels.ops.activation_kernel import gate
from quantkit.kernels.gemm.decode.decode_tiles import DecodeTile
from quantkit.kernels.gemm.fused_kernels import FRAGMENTS, compile_kernels
from quantkit.kernels.jit.launcher import IndexLaunch, Launch
from quantkit.kernels.tuning.timing import random_packed
from quantkit.kernels.problem import GPU_FEATURES, Gpu, Problem
from quantkit.kernels.tuning.gpu_bench import CompileOnly
from quantkit.packing.schemes import scheme

driver.set_active(CompileOnly(GPUTarget("cuda", 90, 32)))
launched, calls, rewound, launchers = [], [], [], []
said = []
noting = logging.Handler()
noting.emit = lambda record: said.append(record.getMessage().partition("longer: ")[2])
logging.getLogger("quantkit.kernels").addHandler(noting)
# None ends by itself, however slow the machine is.
idle, compile_worker.IDLE_SECONDS = compile_worker._IDLE, 3600.0
CompileOnly.launcher_cls = lambda self, source, metadata: launchers.append(
    (metadata.num_warps, threading.current_thread() is threading.main_thread())
)
CompiledKernel._init_handles = lambda self: None
CompiledKernel.run = property(lambda self: lambda *_: launched.append(self.metadata.num_warps))
GPU, x = torch.device("cuda"), torch.zeros(4, 64, dtype=torch.bfloat16)


@contextmanager
def held(before=lambda: None):
    # What compiles ends no sooner than what has not begun is cancelled, or in a minute.
    cancelled, shutdown, launcher = threading.Event(), ThreadPoolExecutor.shutdown, CompileOnly.launcher_cls

    def shut(pool, wait=True, *, cancel_futures=False):
        shutdown(pool, wait=wait, cancel_futures=cancel_futures)
        if cancel_futures:
            cancelled.set()

    def launcher_cls(self, source, metadata):
        before()
        cancelled.wait(60)
        launcher(self, source, metadata)

    ThreadPoolExecutor.shutdown, CompileOnly.launcher_cls = shut, launcher_cls
    try:
        yield
    finally:
        ThreadPoolExecutor.shutdown, CompileOnly.launcher_cls = shutdown, launcher


def no_process():
    raise OSError("there are too many")


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
assert first() == "what it gives"
assert (calls, rewound, launched) == ([[], []], [[]], [1, 2, 4])
assert sorted(launchers) == [(1, False), (2, False), (4, False)]
# In memory.
assert first() == "what it gives"
assert (calls, rewound, launched) == ([[]], [], [1, 2, 4])
# On the disk.
gate.device_caches.clear()
every = [launch(Launch, warps) for warps in (1, 2, 4)]
assert first() == "what it gives"
assert (calls, rewound, launched) == ([[]], [], [1, 2, 4])
""",
    "indices are not left out": """
every = [launch(Launch, 1), launch(IndexLaunch, 2), launch(Launch, 4)]
first()
assert (calls, rewound, launched) == ([[], [2]], [[2]], [2, 1, 2, 4])
""",
    "nor are layouts of weights, which are kept": """
one, other = launch(Launch, 1), launch(Launch, 2)
kept = []


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
first()
assert (calls, rewound, launched) == ([[], [1]], [[1]], [1, 1, 2, 1])
""",
    "errors of the compiler are those of the launch": """
every = [launch(Launch, 1), launch(Launch, 2, block=63)]
for _ in range(2):
    try:
        first()
    except Exception as error:
        assert "power of 2" in str(error), error
    else:
        raise AssertionError("it compiled")
every = [launch(Launch, 4)]
first()
assert launched == [4], "an error leaves nothing behind"
""",
    "what is undefined may be refused": """
every = [launch(Launch, 1)]


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
    "what is soon to run is compiled as well": """
every, soon, given = [launch(Launch, 1)], [launch(Launch, 2), launch(IndexLaunch, 4)], []


def ahead(result):
    given.append((result, list(launched)))
    for one in soon:
        one(x, x, x, 64, 64, 64)
    raise ValueError("nothing is there")


launched.clear()
assert compiled_first(GPU, run, lambda: given.append("rewound"), ahead) == "what it gives"
assert (given, launched) == (["rewound", ("what it gives", []), "rewound"], [4, 1])
assert sorted(warps for warps, _ in launchers) == [1, 2, 4]
# Nothing is missing, so that nothing is run ahead.
every = soon
compiled_first(GPU, run, ahead=ahead)
assert (len(given), launched, len(launchers)) == (3, [4, 1, 2, 4], 3)
""",
    "other processes compile": """
found = []
knobs.compilation.listener = lambda **known: found.append(known["cache_hit"])
every = [launch(Launch, warps) for warps in (1, 2, 4)]
first()
assert (launched, found, said) == ([1, 2, 4], [True] * 3, [])
# They are there, and asked again.
processes = {worker._process.pid for worker in idle}
gate.device_caches.clear()
every = [launch(Launch, warps, 32) for warps in (1, 2, 4)]
first()
assert processes & {worker._process.pid for worker in idle}
# One that ended is not asked, and one that ends meanwhile leaves its kernel to this process.
for worker in idle:
    worker._process.kill()
    worker._process.wait()
every = [launch(Launch, 1, 16)]
first()
(worker,) = idle
assert worker._process.pid not in processes


def killed(worker, request):
    worker._process.kill()
    worker._process.wait()
    return compiles(worker, request)


compiles, compile_worker._Worker.compile = compile_worker._Worker.compile, killed
every = [launch(Launch, 2, 16)]
found.clear()
first()
compile_worker._Worker.compile = compiles
assert (launched, found, idle) == ([2], [False], [])
assert said == ["the process that compiled ended"]
# What cannot be sent is compiled here.
module = "quantkit.kernels.ops.activation_kernel"
request = compile_worker.Request(module, "gate", lambda: 0, {}, {}, {}, None, {}, "")
assert not compile_worker.compile_elsewhere(request) and not idle
assert "pickle" in said[-1] and len(said) == 2
# They end some time after the last kernel.
compile_worker.IDLE_SECONDS = 0.01
every = [launch(Launch, 4, 16)]
first()
for _ in range(6000):
    if not idle:
        break
    time.sleep(0.01)
assert not idle
compile_worker.IDLE_SECONDS = 3600.0
# A cache whose files were moved has none of them.
elsewhere = tempfile.mkdtemp()
shutil.copytree(knobs.cache.dir, elsewhere, dirs_exist_ok=True)
shutil.rmtree(knobs.cache.dir)
knobs.cache.dir = elsewhere
gate.device_caches.clear()
every = [launch(Launch, warps, 32) for warps in (1, 2, 4)]
first()
assert (calls, launched) == ([[], []], [1, 2, 4])
shutil.rmtree(elsewhere)
os.makedirs(knobs.cache.dir)
# None can be started.
compile_worker._end_idle()
python, sys.executable = sys.executable, ""
every = [launch(Launch, 8, 16)]
first()
sys.executable = python
assert (launched, idle) == ([8], [])
assert said[2:] == ["sys.executable is no Python"]
started, compile_worker._Worker = compile_worker._Worker, no_process
every = [launch(Launch, 8, 32)]
first()
compile_worker._Worker = started
assert (launched, idle) == ([8], [])
assert said[3:] == ["OSError: there are too many"]
knobs.compilation.listener = None
""",
    "other processes compile what has records in it": """
found = []
knobs.compilation.listener = lambda **known: found.append((known["src"].name, known["cache_hit"]))
of, gpu = scheme("int4").for_columns(512), Gpu("Test GPU 3000", (9, 0), 130, 227 << 10)
layout = FRAGMENTS.build(random_packed(of, 16, 512, torch.device("cpu")), torch.bfloat16)
problem = Problem(1, 512, 512, of, torch.bfloat16, "cuda", GPU_FEATURES, FRAGMENTS.name, gpu)
compiled_first(GPU, lambda: compile_kernels("fused-gemv", problem, layout, DecodeTile()))
assert found == [("decode_gemm", True)]
knobs.compilation.listener = None
""",
    "somebody else compiles side by side": """
every = [launch(Launch, warps) for warps in (1, 2)]
with ThreadPoolExecutor(2) as pool, AsyncCompileMode(pool):
    first()
assert (calls, launched) == ([[]], [1, 2])
""",
    "an interrupt leaves nothing behind, nor waits for what has not begun": """
compile_pool.cores = lambda: 1
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
    assert compile_pool.COMPILERS.get() is None and len(launchers) <= 1
    launch(Launch, 8)(x, x, x, 64, 64, 64)
    assert launched[-1] == 8
""",
    "nor does one while it waits": """
compile_pool.cores = lambda: 1
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
import json

for name, case in json.loads(sys.argv[1]).items():
    gate.device_caches.clear()
    launchers.clear()
    with tempfile.TemporaryDirectory() as knobs.cache.dir:
        try:
            exec(case)
        except Exception as error:
            error.add_note(name)
            raise
"""


def _environment() -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")
def test_kernels_are_compiled_before_they_are_launched() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START + ALL, json.dumps(CASES)],
        capture_output=True,
        text=True,
        check=False,
        env=_environment(),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")
def test_processes_that_compile_import_no_torch() -> None:
    kernels = [path for path in MODULES if re.search(r"^@(triton|gluon)\.", path.read_text(), re.MULTILINE)]
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in kernels]
    assert len(names) > 20
    program = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
    program += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], env=_environment(), check=True)


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")
def test_what_does_not_compile_is_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from triton import knobs

    # What it sets in its process is set in this one.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    ours, theirs = Pipe()
    ours.send(
        Request(
            "quantkit.kernels.ops.activation_kernel", "no_kernel", None, {}, {}, {}, None, {}, str(tmp_path)
        )
    )
    thread = threading.Thread(target=compile_worker._work, args=(theirs,))
    thread.start()
    assert ours.recv() is False
    ours.close()
    thread.join()


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")
@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_a_python_that_compiles_finds_the_same_package(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    usual = [str(Path(str(pytest.importorskip("triton").__file__)).parents[1])]
    monkeypatch.setattr(site, "getsitepackages", lambda: usual)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    found = compile_worker._environment()
    paths = [path for path in (str(PACKAGE.parent), before) if path is not None and path not in usual]
    assert found["PYTHONPATH"].split(os.pathsep) == paths and "TRITON_INTERPRET" not in found
