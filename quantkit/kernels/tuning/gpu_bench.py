"""Time and compile the candidates (kernel and tile) of a tile search on a GPU."""

import multiprocessing
import os
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from quantkit.errors import KernelError
from quantkit.kernels.gemm.fused_kernels import FRAGMENTS, compile_kernels
from quantkit.kernels.gemm.unpack import dequantized_blocks
from quantkit.kernels.problem import Problem, TileError
from quantkit.kernels.registry import kernel_named
from quantkit.kernels.tuning.search import Candidate, Unfit, Weight
from quantkit.kernels.tuning.timing import copies, graph_time, random_packed, rest_for
from quantkit.packing.tensor import PackedTensor
from quantkit.signals import HeldSignals, kept_from_children

#: Least M for which 3 copies of a weight suffice: a product then takes long compared to reading the L2 cache.
MANY_ROWS, FEW_COPIES = 1024, 3
#: Seconds before compiling a candidate is given up.
COMPILE_SECONDS = 120
#: Seconds between checks for signals meanwhile.
CHECK_SECONDS = 0.5


class GpuBench:
    """Benchmark of products with one random packed weight on the GPU, for the tile search.

    The weight is copied until all copies together exceed the L2 cache.
    """

    def __init__(self, packed: PackedTensor, dtype: torch.dtype) -> None:
        """Build copies of the kernel layout of the weight `packed` [n, k], for activations of `dtype`."""
        self.packed, self.dtype = packed, dtype
        layout = FRAGMENTS.build(packed, dtype)
        nbytes = sum(part.nbytes for part in layout)
        clones = [tuple(part.clone() for part in layout) for _ in range(copies(nbytes) - 1)]
        self.layouts = [layout, *clones]
        self.expected: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def error(self, candidate: Candidate, m: int) -> float:
        """Return the largest error of y [m, n] by a candidate (kernel and tile), for m rows of x.

        An error is relative to |y| + sqrt(sum of squares of the terms of y), as `search.LIMITS` is.
        """
        x, y, size = self._expected(m)
        with _explained(candidate, self.packed, m):
            found = self._run(candidate, x, self.layouts[0])
            return float(((found.float() - y).abs() / size).max())

    def time(self, candidate: Candidate, m: int, replays: int) -> float:
        """Return microseconds of one product with m rows of x by a candidate (kernel and tile).

        The time is the median over `replays` replays of a CUDA graph.
        """
        x, _, _ = self._expected(m)
        layouts = self.layouts if m < MANY_ROWS else self.layouts[:FEW_COPIES]
        with _explained(candidate, self.packed, m):
            calls = [partial(self._run, candidate, x, layout) for layout in layouts]
            return graph_time(calls, replays, rest=rest_for(m))

    def _run(self, candidate: Candidate, x: torch.Tensor, layout: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return y [m, n] = x W^T for `x` [m, k], by the candidate's kernel and tile.

        `layout` is one of the copies of W in the kernel layout.
        """
        tile = {} if candidate.tile is None else {"tile": candidate.tile}
        return kernel_named(candidate.kernel).launch(x, self.packed, layout, None, **tile)

    def _expected(self, m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return random x [m, k], y = x W^T with W dequantized by torch, and the expected size of errors.

        The last two are float32 [m, n]. The size is |y| + sqrt(sum of squares of the terms of y), as rounding
        errors of terms are independent.
        """
        if m not in self.expected:
            self.expected.clear()
            rows, columns = self.packed.shape
            generator = torch.Generator(self.packed.device).manual_seed(m)
            x = torch.randn(m, columns, generator=generator, device=self.packed.device).to(self.dtype)
            y, size = (torch.empty(m, rows, device=x.device) for _ in range(2))
            for block, weights in dequantized_blocks(self.packed):
                y[:, block] = x.float() @ weights.T
                size[:, block] = x.float().square() @ weights.square().T
            size.sqrt_().add_(y.abs()).clamp_min_(torch.finfo(torch.float32).tiny)
            self.expected[m] = x, y, size
        return self.expected[m]


@contextmanager
def _explained(candidate: Candidate, packed: PackedTensor, m: int) -> Iterator[None]:
    """Context manager: turn lack of registers or memory into `Unfit`, and other errors into `KernelError`.

    After a `KernelError` the GPU may be unusable. The error names the candidate, the weight `packed` [N, K],
    and M.
    """
    try:
        yield
    except (TileError, torch.OutOfMemoryError) as error:
        raise Unfit(str(error).splitlines()[0]) from error
    except RuntimeError as error:
        raise KernelError(
            f"{candidate} failed for {packed.scheme}, M={m}: {error}. Tuning cannot go on in this process; "
            "what was found so far is kept. Run it again without this format, shape or M."
        ) from error


@contextmanager
def gpu_bench(weight: Weight) -> Iterator[GpuBench]:
    """Context manager: yield a `GpuBench` for a weight, on the current GPU; free its memory at the end."""
    device = torch.device("cuda", torch.cuda.current_device())
    bench = GpuBench(random_packed(weight.scheme, weight.n, weight.k, device), weight.dtype)
    try:
        yield bench
    finally:
        del bench
        torch.cuda.empty_cache()


#: Target of Triton's compiler: backend, architecture and threads per warp, as ("cuda", 90, 32).
Target = tuple[str, int | str, int]


def gpu_target() -> Target:
    """Return what Triton compiles for on the current GPU: (backend, architecture, threads of a warp)."""
    from triton.runtime.driver import driver

    found = driver.active.get_current_target()
    return found.backend, found.arch, found.warp_size


class CompilePool:
    """Pool of `jobs` processes that compile candidates (kernel and tile) into Triton's cache, without a GPU.

    A compiler that crashes or hangs loses one candidate only. Used as a context manager, the pool holds
    signals such as Ctrl-C back. Held signals end the block when the next candidate is submitted or waited
    for.
    """

    def __init__(self, jobs: int, target: Target) -> None:
        self._signals = HeldSignals()
        self._workers = [_Worker(target, self._signals) for _ in range(jobs)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(jobs)
        self._futures: dict[tuple[Problem, Candidate], Future[str | None]] = {}

    def __enter__(self) -> "CompilePool":
        self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._threads.shutdown(wait=False, cancel_futures=True)
            for worker in self._workers:
                worker.kill()
            # No thread waits for a worker at this point.
            self._threads.shutdown()
        finally:
            self._signals.__exit__(kind, error, trace)

    def submit(self, problem: Problem, candidate: Candidate) -> Callable[[], str | None]:
        """Start compiling a candidate (kernel and tile) for a problem; return a function that waits for it.

        That function returns why compiling failed, or None.
        """
        self._signals.check()
        job = (kernel_named(candidate.kernel).representative(problem), candidate)
        if job not in self._futures:
            self._futures[job] = self._threads.submit(self._run, *job)
        return partial(self._waited, self._futures[job])

    def _waited(self, future: Future[str | None]) -> str | None:
        # Also for finished candidates: measuring between them takes time.
        self._signals.check()
        return future.result()

    def _run(self, problem: Problem, candidate: Candidate) -> str | None:
        worker = self._idle.get()
        try:
            return worker.run(problem, candidate)
        finally:
            self._idle.put(worker)


class _Worker:
    """Process of a `CompilePool`, started with its first candidate, that compiles one at a time."""

    def __init__(self, target: Target, signals: HeldSignals) -> None:
        self._target = target
        self._signals = signals
        self._process: Any = None
        self._connection: Connection | None = None
        self._killed = False

    def run(self, problem: Problem, candidate: Candidate) -> str | None:
        """Compile a candidate; return why it failed, or None."""
        if self._killed:
            return "the search ended"
        try:
            connection = self._connected()
            connection.send((problem, candidate))
            if self._has_answered(connection):
                reason: str | None = connection.recv()
                return reason
            reason = f"compiling it takes more than {COMPILE_SECONDS} s"
        except (EOFError, OSError):
            reason = "the compiler crashed"
        # The next candidate gets a new process.
        self._process.kill()
        self._connection = None
        return reason

    def _has_answered(self, connection: Connection) -> bool:
        """Return True if the process answers within `COMPILE_SECONDS`.

        Raises `Interrupted` if a signal such as Ctrl-C was held back meanwhile (`HeldSignals`).
        """
        left: float = COMPILE_SECONDS
        while not connection.poll(min(left, CHECK_SECONDS)):
            self._signals.check()
            left -= CHECK_SECONDS
            if left <= 0:
                return False
        return True

    def kill(self) -> None:
        """End the process, even during a compilation."""
        self._killed = True
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def _connected(self) -> Connection:
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            self._connection, child_end = context.Pipe()
            process = context.Process(target=_work, args=(child_end, self._target), daemon=True)
            with kept_from_children():
                process.start()
            child_end.close()
            self._process = process
            if self._killed:
                process.kill()
        return self._connection


def _work(connection: Connection, target: Target) -> None:
    """Run in a compiling process: compile each (problem, candidate) from `connection` until it closes.

    `target` is what Triton compiles for (`gpu_target`). The answer to a candidate is None, or why it does not
    compile.
    """
    # Before Triton is imported: in interpreter mode it compiles nothing.
    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)
    # Lower priority, so that the measuring process never waits for a core.
    os.nice(10)
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    driver.set_active(CompileOnly(GPUTarget(*target)))
    while True:
        try:
            problem, candidate = connection.recv()
        except (EOFError, OSError):
            return
        try:
            layout = FRAGMENTS.build(
                random_packed(problem.scheme, 16, problem.k, torch.device("cpu")), problem.dtype
            )
            compile_kernels(candidate.kernel, problem, layout, candidate.tile)
            reason = None
        except Exception as error:
            # Triton's messages start with the source and end with the error.
            last = (str(error).strip().splitlines() or [""])[-1]
            reason = f"it does not compile: {type(error).__name__}: {last}"
        connection.send(reason)


class CompileOnly:
    """Stand-in for Triton's driver of a GPU, with which kernels compile, but cannot be launched."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        """Do nothing instead of building a launcher for a compiled kernel, as Triton asks its driver to."""
