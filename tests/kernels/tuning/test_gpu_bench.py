"""The parts of a search that touch kernels, as far as they need no GPU: checking results, and compiling."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from quantkit.errors import KernelError
from quantkit.kernels.gemm.portable.portable_gemm_launch import PortableGemmTile
from quantkit.kernels.gemm.portable.portable_gemv_launch import PortableGemvTile
from quantkit.kernels.problem import Problem, TileError
from quantkit.kernels.registry import kernel_named
from quantkit.kernels.tuning import gpu_bench as gpu_module
from quantkit.kernels.tuning.gpu_bench import CompilePool, GpuBench, _explained
from quantkit.kernels.tuning.search import LIMITS, Candidate, Unfit
from quantkit.kernels.tuning.timing import REST, random_packed
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import scheme

from ...support.compare import assert_equal

pytest.importorskip("triton")

Ask = Callable[..., Problem]
H200 = ("cuda", 90, 32)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = {
    **{name: scheme(name) for name in PRESETS},
    "int4 integer": scheme("int4", zero_point="integer", group_size=64),
    "int3 float": scheme("int3", zero_point="float", group_size=48),
    "fp8 tensor": scheme("fp8", group_size="tensor"),
    "int4 e4m3": scheme("int4", scale_dtype=torch.float8_e4m3fn),
}


@pytest.mark.parametrize("case", CASES)
def test_random_weights_are_numbers_of_every_scheme(case: str) -> None:
    packed = random_packed(CASES[case], 40, 96, DEVICE)
    assert packed.shape == (40, 96)
    assert packed.scheme == CASES[case].for_columns(96)
    weight = packed.dequantize()
    assert bool(weight.isfinite().all())
    assert 1e-4 < float(weight.std()) < 1
    assert_equal(weight, random_packed(CASES[case], 40, 96, DEVICE).dequantize())


@pytest.mark.parametrize(
    "tile",
    [PortableGemvTile(2, 128), PortableGemvTile(2, 256, 2, True), PortableGemmTile(4, 16, stages=2), None],
    ids=str,
)
def test_a_bench_tells_right_from_wrong(
    tile: PortableGemvTile | PortableGemmTile | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU in float32, which takes the least time."""
    monkeypatch.setattr(gpu_module, "copies", lambda nbytes: 2)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    row = {
        PortableGemvTile: "fused-portable-gemv",
        PortableGemmTile: "fused-portable",
        type(None): "dequantize",
    }[type(tile)]
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    bench = GpuBench(
        random_packed(scheme("int4", zero_point="integer", group_size=64), 40, 256, DEVICE), dtype
    )
    candidate = Candidate(row, tile)
    limit = 1e-5 if DEVICE.type == "cpu" else LIMITS[dtype]
    assert bench.error(candidate, 5) < limit
    assert bench.error(candidate, 2) < limit, "x of another M is another x"
    assert len(bench.layouts) == 2
    codes = bench.layouts[0][0]
    codes.view(-1)[:8] ^= -1
    assert bench.error(candidate, 5) > LIMITS[torch.bfloat16]


def test_a_bench_rests_before_products_that_draw_much_power(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def graph_time(calls: list[object], replays: int, *, rest: float) -> float:
        asked.append((len(calls), replays, rest))
        return 7.0

    monkeypatch.setattr(gpu_module, "copies", lambda nbytes: 5)
    monkeypatch.setattr(gpu_module, "graph_time", graph_time)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    bench = GpuBench(random_packed(scheme("int4"), 16, 128, DEVICE), torch.bfloat16)
    assert [bench.time(Candidate("dequantize"), m, 9) for m in (64, 128, 1024)] == [7.0] * 3
    assert asked == [(5, 9, 0.0), (5, 9, REST), (3, 9, REST)]


def test_lack_of_room_is_a_reason_and_other_errors_end_the_search() -> None:
    packed = random_packed(scheme("int4"), 16, 128, DEVICE)
    candidate = Candidate("fused-portable-gemv", PortableGemvTile())
    for error in (TileError("too large"), torch.OutOfMemoryError("too large")):
        with pytest.raises(Unfit, match="too large"), _explained(candidate, packed, 1):
            raise error
    with (
        pytest.raises(
            KernelError,
            match=r"fused-portable-gemv warps=4 .* failed for int4 .* M=3: misaligned address.*kept",
        ),
        _explained(candidate, packed, 3),
    ):
        raise RuntimeError("misaligned address")


def test_problems_with_the_same_kernels_compile_once(ask: Ask) -> None:
    def asked(name: str, **changes: int) -> Problem:
        return kernel_named(name).representative(ask(**changes))

    assert [asked("fused-portable-gemv", m=m).m for m in (1, 2, 4, 8, 16, 32)] == [1, 8, 8, 8, 16, 32]
    assert [asked("fused-small-m", m=m).m for m in (1, 5, 9, 17)] == [1, 8, 16, 32]
    assert [asked("fused-portable", m=m).m for m in (1, 8, 16, 64, 1024)] == [1, 8, 16, 16, 16]
    assert [asked("fused-portable", n=n).n for n in (4096, 1024, 1000)] == [16, 16, 17]
    assert [asked("fused-gemv", m=m, n=1000).m for m in (1, 3, 9)] == [1, 4, 16]
    assert asked("fused-wgmma", m=100, n=1000) == ask(m=100, n=1000)


def test_candidates_compile_without_a_gpu(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    good = Candidate("fused-portable-gemv", PortableGemvTile(4, 512, 1, True))
    bad = Candidate("fused-portable-gemv", PortableGemvTile(3, 512, 1, True))
    with CompilePool(1, H200) as pool:
        waits = [pool.submit(ask(m=m), good) for m in (2, 8)]
        worse = pool.submit(ask(), bad)
        assert [wait() for wait in waits] == [None, None]
        assert str(worse()).startswith("it does not compile: ")
        assert pool.submit(ask(), bad)() == worse()
    cubins = list((tmp_path / "triton").rglob("portable_gemv.cubin"))
    assert len(cubins) == 1, "M of 2 and 8 have one kernel"


#: Kernels of a launch with real operands, and those that compile ahead for it, by the hash of Triton's cache.
AHEAD = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from quantkit.kernels.gemm import fused_kernels
from quantkit.kernels.gemm.wgmma.wgmma_tiles import WgmmaTile
from quantkit.kernels.gemm.small_m.small_m_tiles import SmallMTile
from quantkit.kernels.gemm.operands import Operands
from quantkit.kernels.gemm.portable.portable_gemv_launch import PortableGemvTile
from quantkit.kernels.gemm.decode.decode_tiles import DecodeTile
from quantkit.kernels.gemm.portable.portable_gemm_launch import PortableGemmTile
from quantkit.kernels.jit.launcher import Launch
from quantkit.kernels.tuning.timing import random_packed
from quantkit.kernels.problem import GPU_FEATURES, Problem
from quantkit.kernels.tuning.gpu_bench import CompileOnly
from quantkit.packing.schemes import scheme

driver.set_active(CompileOnly(GPUTarget("cuda", 90, 32)))
hashes = []


def recorded(self, *arguments):
    hashes.append(self._kernel.warmup(*arguments, grid=self._grid, **self._options).hash)


Launch.__call__ = recorded
cases = (
    ("fused-portable-gemv", PortableGemvTile(), 4, 64),
    ("fused-portable", PortableGemmTile(4, 64, 4), 64, 64),
    # A full round of 132 programs is not split, one more is.
    ("fused-portable", PortableGemmTile(4, 64, 2, occupancy=1), 64, 133 * 64),
    ("fused-small-m", SmallMTile(8, 2), 16, 4096),
    ("fused-small-m", SmallMTile(16, 1), 5, 96),
    ("fused-gemv", DecodeTile(8, 2, 1, 2, True), 1, 4096),
    ("fused-gemv", DecodeTile(8, 2, 2, 2), 3, 96),
    ("fused-gemv", DecodeTile(16, 1, 1, 1), 8, 9 * 132 * 16),
    ("fused-wgmma", WgmmaTile(64, stream_k=True), 64, 4096),
    # Nothing is left to share.
    ("fused-wgmma", WgmmaTile(64, stream_k=True), 64, 132 * 128),
)
for row, tile, m, n in cases[int(sys.argv[1]) :: 2]:
    hashes.clear()
    problem = Problem(m, n, 1024, scheme("int4", zero_point="integer"), torch.bfloat16, "cuda", GPU_FEATURES)
    packed = random_packed(problem.scheme, n, 1024, torch.device("cpu"))
    layout = fused_kernels.FRAGMENTS.build(packed, problem.dtype)
    kernel = fused_kernels.fused_kernel(row)
    kernel.run(
        Operands(torch.zeros(m, 1024).bfloat16(), layout, None, problem.scheme, n), tile, GPU_FEATURES
    )
    launched = list(hashes)
    hashes.clear()
    fused_kernels.compile_kernels(row, kernel.representative(problem), layout, tile)
    assert hashes == launched, (row, hashes, launched)
"""


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.sampled(2)
def test_what_compiles_ahead_is_what_is_launched(tmp_path: Path, first: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AHEAD, str(first)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


def test_a_compiler_that_crashes_takes_one_candidate(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    # Called with a connection and a target, it ends with an error.
    monkeypatch.setattr(gpu_module, "_work", int)
    one = Candidate("dequantize")
    with CompilePool(1, H200) as pool:
        assert pool.submit(ask(), one)() == "the compiler crashed"
        assert pool.submit(ask("int8"), one)() == "the compiler crashed", "with a process of its own"


def test_a_compiler_that_does_not_end_is_given_up(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "COMPILE_SECONDS", 0)
    with CompilePool(1, H200) as pool:
        assert pool.submit(ask(), Candidate("dequantize"))() == "compiling it takes more than 0 s"


def test_the_end_of_a_search_ends_its_compilers(ask: Ask) -> None:
    with CompilePool(2, H200) as pool:
        for k in range(128, 1408, 128):
            pool.submit(ask(k=k), Candidate("dequantize"))
        processes = [worker._process for worker in pool._workers]
    assert not any(process.is_alive() for process in processes if process is not None)


def _silent(connection: Connection, target: object) -> None:
    """A compiler that never answers."""
    connection.recv()
    time.sleep(600)


def _quick(connection: Connection, target: object) -> None:
    """A compiler that has nothing to do."""
    while True:
        connection.recv()
        connection.send(None)


def test_a_signal_ends_a_search_that_measures_what_has_been_compiled(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_module, "_work", _quick)
    unnoticed = False
    with pytest.raises(KeyboardInterrupt), CompilePool(1, H200) as pool:
        waits = [pool.submit(ask(k=k), Candidate("dequantize")) for k in (128, 256)]
        assert [wait() for wait in waits] == [None, None]
        os.kill(os.getpid(), signal.SIGINT)
        waits[1]()
        unnoticed = True
    assert not unnoticed


@pytest.mark.parametrize("asked", ["while it waits", "before it asks"])
def test_a_signal_ends_a_search_and_its_compilers(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(gpu_module, "_work", _silent)
    unnoticed = False
    with pytest.raises(KeyboardInterrupt), CompilePool(1, H200) as pool:
        wait = pool.submit(ask(), Candidate("dequantize"))
        while pool._workers[0]._process is None:
            time.sleep(0.01)
        interrupt = partial(os.kill, os.getpid(), signal.SIGINT)
        if asked == "while it waits":
            threading.Timer(0.2, interrupt).start()
            wait()
        else:
            interrupt()
        pool.submit(ask(k=256), Candidate("dequantize"))
        unnoticed = True
    assert not unnoticed
    assert not pool._workers[0]._process.is_alive()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
