"""Kernel registry: list all kernels, select one for a problem, and explain the selection.

Times in tile tables decide. Without them rules do: `Kernel.why_slower`, and `TileSpace.rule` for the tile.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from quantkit.errors import KernelError, unknown_name
from quantkit.kernels.gemm.cpu import CPU_KERNELS
from quantkit.kernels.gemm.fused_kernels import FUSED_KERNELS
from quantkit.kernels.gemm.unpack import UNPACK_KERNEL
from quantkit.kernels.problem import Gpu, Kernel, Layout, Problem, tile_text
from quantkit.kernels.tuning.store import StoredTable, stored_tables
from quantkit.kernels.tuning.tile_table import Entry, Key, TileTable, bucket

FORCE_VARIABLE = "QUANTKIT_KERNEL"
VERBOSE_VARIABLE = "QUANTKIT_VERBOSE"

#: An entry for a larger M is used if it took less than this part of the time: fewer rows take no longer.
FASTER = 0.9
#: Largest M for which an entry for a larger M must have the same kernel: kernels for few rows get faster with
#: fewer.
SAME_KERNEL_UP_TO = 16

logger = logging.getLogger("quantkit.kernels")

#: All kernels, fastest first per device. To add one, add a row to `CPU_KERNELS` or `FUSED_KERNELS`.
KERNELS: tuple[Kernel, ...] = (*CPU_KERNELS, *FUSED_KERNELS, UNPACK_KERNEL)


def kernel_named(name: str) -> Kernel:
    """Return the kernel called `name`; raise `KernelError` with a list of all names if unknown."""
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    names = (kernel.name for kernel in KERNELS)
    raise unknown_name("kernel", name, names, remedy=f"Check {FORCE_VARIABLE}.", error=KernelError)


def layout_named(name: str) -> Layout:
    """Return the kernel layout of weights called `name`, which must exist."""
    return next(
        kernel.layout for kernel in KERNELS if kernel.layout is not None and kernel.layout.name == name
    )


def forced_kernel() -> str:
    """Return the name of a kernel in the environment variable `QUANTKIT_KERNEL`; "" if it is not set."""
    stored = _stored(_FORCE_KEY)
    return "" if stored is None else os.fsdecode(stored)


def choosing(dtype: torch.dtype) -> tuple[Any, ...]:
    """Return all settings on which the selection of kernels for x of `dtype` depends, as a key for caches.

    The environment is read as bytes: `os.environ` takes 1 us to decode a variable.
    """
    fp16_accumulation = dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation
    return _stored(_FORCE_KEY), _stored(_VERBOSE_KEY), fp16_accumulation, _tables_read[0]


#: Dict inside `os.environ`; `os.environ` itself on systems that differ from Linux.
_environment: Any = getattr(os.environ, "_data", None)
_as_key: Callable[[str], Any] = getattr(os.environ, "encodekey", str)
if not isinstance(_environment, dict):
    _environment, _as_key = os.environ, str
_stored: Callable[[Any], Any] = _environment.get
_FORCE_KEY, _VERBOSE_KEY = map(_as_key, (FORCE_VARIABLE, VERBOSE_VARIABLE))
#: Number of times that tile tables were read again.
_tables_read = [0]


@dataclass(frozen=True)
class Measured:
    """Entry of a tile table, measured for up to `m` rows of x, that is used for a problem.

    `asked` is the table key of the problem, whose m is at most this `m`. `gpu` is the GPU measured, "" for
    the problem's own.
    """

    asked: Key
    m: int
    entry: Entry
    gpu: str = ""

    @property
    def on(self) -> str:
        """Return the text "on <GPU>" for messages; "on this GPU" unless another, similar GPU was measured."""
        return f"on {self.gpu or 'this GPU'}"

    @property
    def where(self) -> str:
        """Return `on` as text for messages, and " at M=..." if an entry for a larger M is used."""
        return self.on if self.m == self.asked.m else f"{self.on} at M={self.m}"


@dataclass(frozen=True)
class Chosen:
    """Kernel selected for a problem, with its tile (launch configuration; None without tiles).

    `launch` is `kernel.launch` with that tile. `measured` is the entry of a tile table with the tile; None if
    rules chose it.
    """

    kernel: Kernel
    tile: Any
    measured: Measured | None
    launch: Callable[..., torch.Tensor]

    def rounds(self, problem: Problem) -> bool:
        """Return True if the kernel rounds x to 8 bits itself, in its own launch."""
        return self.kernel.rounds_x or self.kernel.why_no_rounding(problem, self.tile) is None

    @property
    def is_fitted(self) -> bool:
        """Return True if the measured tile was adapted to the problem's rows of x."""
        return self.measured is not None and self.tile != self.measured.entry.tile

    @property
    def us(self) -> float | None:
        """Return microseconds of this tile, if measured on the problem's GPU for its M; else None."""
        measured = self.measured
        if measured is None or measured.gpu or measured.m != measured.asked.m or self.is_fitted:
            return None
        return measured.entry.us

    @property
    def source(self) -> str:
        """Return text that says where the tile was measured; "" if it was not, or if `us` has its time."""
        if self.measured is None or self.us is not None:
            return ""
        if self.is_fitted:
            return f"fitted to what was measured {self.measured.on} at M={self.measured.m}"
        return f"measured {self.measured.where}"


def choose(problem: Problem) -> Chosen:
    """Select kernel and tile for `problem`: as `QUANTKIT_KERNEL` says, else a tile table, else the rules.

    Raises `KernelError` with reasons if no kernel can run it, or if the one in `QUANTKIT_KERNEL` cannot. If
    that name is unknown, the error lists all names.
    """
    return _choose(problem, forced_kernel())


@lru_cache(maxsize=8192)
def grad_kernel(problem: Problem) -> Kernel | None:
    """Return the first kernel that computes the gradient of x for `problem`; None if there is none."""
    able = (one for one in KERNELS if one.grad_x is not None and _unable(one, problem) is None)
    return next(able, None)


def choose_unforced(problem: Problem) -> Chosen:
    """Select the kernel and tile for `problem` by a tile table or the rules; ignore `QUANTKIT_KERNEL`.

    Raises `KernelError` with the reason of every kernel if none can run `problem`.
    """
    return _choose(problem, "")


def choose_by_rules(problem: Problem) -> Chosen:
    """Select the kernel and tile for `problem` by the rules alone, without tile tables."""
    return _first(problem, None)


def _candidates(problem: Problem) -> tuple[Kernel, ...]:
    """Return the kernels in order of choice: if x is rounded, those with `rounds_x`; then the others."""
    rounding = [kernel for kernel in KERNELS if kernel.rounds_x and problem.activations is not None]
    return (*rounding, *[kernel for kernel in KERNELS if not kernel.rounds_x])


def explain(problem: Problem) -> tuple[tuple[str, str | None], ...]:
    """Return (name, reason) of each kernel in order of choice: why it does not run `problem`, or None."""
    return _explain(problem, _measured(problem))


def _explain(problem: Problem, measured: Measured | None) -> tuple[tuple[str, str | None], ...]:
    kernels = _candidates(problem)
    if measured is None:
        return tuple(
            (
                kernel.name,
                _unsupported(kernel, problem) or kernel.why_slower(problem) or _unbuilt(kernel, problem),
            )
            for kernel in kernels
        )
    before = [kernel.name for kernel in kernels].index(measured.entry.kernel)
    return tuple(
        (
            kernel.name,
            _unable(kernel, problem) or (_slower(kernel, problem, measured) if index < before else None)
            if not kernel.rounds_x
            else _why_not_rounding(kernel, problem),
        )
        for index, kernel in enumerate(kernels)
    )


def _why_not_rounding(kernel: Kernel, problem: Problem) -> str | None:
    """Return why a kernel with `rounds_x` cannot run `problem`, or is slower than another; None if neither.

    It ignores tile tables, whose times were measured without rounding of x.
    """
    return _unable(kernel, problem) or kernel.why_slower(problem)


def _slower(kernel: Kernel, problem: Problem, measured: Measured) -> str:
    """Return why `kernel` is slower than the kernel of `measured`, the fastest by a tile table."""
    entry, where = measured.entry, measured.where
    us = entry.others.get(kernel.name)
    if us is not None:
        return f"measured slower {where}: {us:.1f} us against {entry.us:.1f} us"
    reason = kernel.why_slower(problem) or "not measured"
    return f"{reason}; {where} {entry.kernel} was measured: {entry.us:.1f} us"


@lru_cache(maxsize=64)
def tile_tables(gpu: Gpu) -> tuple[StoredTable, ...]:
    """Return the tile tables for a GPU, in order of precedence: the user's, then shipped ones; cached."""
    return stored_tables(gpu, KERNELS)


def forget_tile_tables() -> None:
    """Drop all cached tile tables and choices, so that tables are read again at the next choice."""
    _tables_read[0] += 1
    tile_tables.cache_clear()
    _choose.cache_clear()


def _measured(problem: Problem, forced: str = "") -> Measured | None:
    """Return the entry for `problem` of the first tile table that has one; if `forced`, one of this kernel.

    None without a GPU or such an entry. Also None if the rules select a kernel with `rounds_x`.
    """
    if problem.gpu is None or (not forced and _is_rounded_within(problem)):
        return None
    key = Key.of(problem)
    tables = (stored.table for stored in tile_tables(problem.gpu))
    found = (_fastest(table, key, problem, forced) for table in tables if key in table.entries)
    return next((one for one in found if one is not None), None)


def why_rounded_before(problem: Problem) -> str | None:
    """Return why no kernel that multiplies 8-bit codes of x runs `problem`, by the last; None if one does."""
    here = [kernel for kernel in KERNELS if kernel.rounds_x and problem.device in kernel.devices]
    reasons = [_unsupported(kernel, problem) or kernel.why_slower(problem) for kernel in here]
    if not reasons:
        return f"none is for {problem.device}"
    return None if None in reasons else reasons[-1]


def _is_rounded_within(problem: Problem) -> bool:
    """Return True if `problem` rounds x, and the rules select a kernel for it that multiplies codes of x."""
    return problem.activations is not None and any(
        kernel.rounds_x and _why_not_rounding(kernel, problem) is None for kernel in KERNELS
    )


def _fastest(table: TileTable, key: Key, problem: Problem, forced: str) -> Measured | None:
    """Return the entry of `table` for `key`, which must exist, or a faster one for a larger M.

    A faster one takes less than `FASTER` times as long. If `problem.m` is not `key.m`, and at most
    `SAME_KERNEL_UP_TO`, it is of the same kernel. If `forced` names a kernel, only its entries count; None
    if none can run `problem`. Else None if the entry for `key` cannot.
    """
    own = table.entries[key]

    def is_able(one: Key) -> bool:
        entry = table.entries[one]
        comparable = problem.m > SAME_KERNEL_UP_TO or problem.m == key.m or entry.kernel == own.kernel
        return (entry.kernel == forced if forced else comparable) and _runs(entry, problem)

    able = [one for one in (key, *table.with_more_rows(key)) if is_able(one)]
    if not able or (not forced and key not in able):
        return None
    least = min(able, key=lambda one: table.entries[one].us)
    if key in able and table.entries[least].us >= FASTER * own.us:
        least = key
    name = table.gpu.name if problem.gpu is not None and table.gpu.name != problem.gpu.name else ""
    return Measured(key, least.m, table.entries[least], name)


def _runs(entry: Entry, problem: Problem) -> bool:
    """Return True if the kernel of `entry` supports `problem` with the tile of `entry`."""
    kernel = kernel_named(entry.kernel)
    if _unable(kernel, problem) is not None:
        return False
    return kernel.tile_space is None or kernel.tile_space.why_invalid(problem, entry.tile) is None


@lru_cache(maxsize=8192)
def _choose(problem: Problem, forced: str) -> Chosen:
    """Return what `choose` returns for `problem`; `forced` is the name in `QUANTKIT_KERNEL`, or ""."""
    measured = _measured(problem, forced)
    if forced:
        kernel = kernel_named(forced)
        reason = _unable(kernel, problem)
        if reason is not None:
            raise KernelError(
                f"{FORCE_VARIABLE}={forced} cannot run {problem}: {reason}. "
                f"Unset {FORCE_VARIABLE} or name another row."
            )
        return _chosen(kernel, problem, measured)
    return _first(problem, measured)


def _first(problem: Problem, measured: Measured | None) -> Chosen:
    """Return the first kernel that can run the problem and is not slower than a later one, with its tile.

    `measured` is the entry of a tile table for it. `KernelError` if there is no such kernel.
    """
    verdicts = _explain(problem, measured)
    for name, reason in verdicts:
        if reason is None:
            return _chosen(kernel_named(name), problem, measured)
    reasons = "\n".join(f"  {name}: {reason}" for name, reason in verdicts)
    raise KernelError(f"no kernel runs {problem}:\n{reasons}")


def _chosen(kernel: Kernel, problem: Problem, measured: Measured | None) -> Chosen:
    """Return `kernel` with a tile: that of `measured`, adapted to `problem`, or else the rules' choice."""
    if measured is not None and measured.entry.kernel != kernel.name:
        measured = None
    tile = None
    if kernel.tile_space is not None and measured is None:
        tile = kernel.tile_space.rule(problem)
    elif kernel.tile_space is not None and measured is not None:
        tile = kernel.tile_space.adapt(problem, measured.entry.tile, replace(problem, m=measured.m))
    return Chosen(
        kernel, tile, measured, kernel.launch if tile is None else partial(kernel.launch, tile=tile)
    )


def _unable(kernel: Kernel, problem: Problem) -> str | None:
    """Return why a kernel does not support `problem`, or has no layout of W; None if it can run."""
    return _unsupported(kernel, problem) or _unbuilt(kernel, problem)


def _unsupported(kernel: Kernel, problem: Problem) -> str | None:
    """Return why a kernel does not support `problem`; None if it does."""
    if problem.device not in kernel.devices:
        return f"it runs on {' and '.join(kernel.devices)}, the tensors are on {problem.device}"
    return kernel.why_unsupported(problem)


def _unbuilt(kernel: Kernel, problem: Problem) -> str | None:
    """Return why the weight lacks the layout that a kernel reads; None if it has it, or it can be built."""
    if kernel.layout is not None and problem.layout not in (None, kernel.layout.name):
        built = f"{problem.layout} was" if problem.layout else "none was"
        return (
            f"it needs the weight layout {kernel.layout.name} and {built} built; call build_layout with this "
            f"dtype outside torch.compile (with {FORCE_VARIABLE} set, if it is to be forced)"
        )
    return None


def warn_unfused(problem: Problem, kernel: Kernel) -> None:
    """Warn once per scheme, N and K that a GPU runs `kernel`, on W as stored, and why no faster kernel."""
    if problem.device != "cpu":
        _log_once(problem, kernel, (str(problem.scheme), problem.n, problem.k, 0))


def is_verbose() -> bool:
    """Return True if `QUANTKIT_VERBOSE=1`."""
    return _stored(_VERBOSE_KEY) in (b"1", "1")


def log_choice(problem: Problem, chosen: Chosen) -> None:
    """If `QUANTKIT_VERBOSE=1`, log kernel, tile and why, once per scheme, N, K, tile and bucket of M."""
    if is_verbose():
        tile = "" if chosen.tile is None else f" {tile_text(chosen.tile)}"
        key = (str(problem.scheme), problem.n, problem.k, bucket(problem.m), tile)
        _log_once(problem, chosen.kernel, key, tile + sums_text(problem, chosen.tile) + _how(chosen))


def _how(chosen: Chosen) -> str:
    if chosen.us is not None:
        return f", measured {chosen.us:.1f} us"
    return chosen.source and f", {chosen.source}"


def sums_text(problem: Problem, tile: Any) -> str:
    """Return text for messages: whether `tile` sums in float16 or float32; "" if float16 is not allowed."""
    if not problem.fp16_accumulation:
        return ""
    if getattr(tile, "fp16_accumulation", False):
        return ", sums of a step in float16"
    return ", sums in float32 (float16 is allowed, but brings nothing here)"


def warn_looped(problem: Problem, experts: int, reason: str) -> None:
    """Warn once per reason, scheme, N and K that a GPU multiplies `experts` experts one by one, and why."""
    if problem.device != "cpu":
        what = f"{experts} experts, {problem}: one after the other, as the host reads which are chosen"
        say_once((reason, str(problem.scheme), problem.n, problem.k), f"{what}; not grouped: {reason}")


def log_grouped(problem: Problem, experts: int, kernel: str, tile: Any, refusals: Callable[[], str]) -> None:
    """If `QUANTKIT_VERBOSE=1`, log once the kernel and tile of a grouped GEMM over `experts` experts.

    In `problem`, M counts routed tokens. `refusals` returns why no faster kernel runs it, for the log, or "".
    """
    if is_verbose():
        key = ("grouped", str(problem.scheme), problem.n, problem.k, bucket(problem.m))
        what = f"{experts} experts, {problem}: grouped {kernel} {tile_text(tile)}{sums_text(problem, tile)}"
        say_once(key, what + refusals())


_logged: set[tuple[str | int, ...]] = set()


@contextmanager
def quietly() -> Iterator[None]:
    """Context manager: do not warn of slow kernels inside, but still later, unless `QUANTKIT_VERBOSE=1`."""
    level = logger.level
    if not is_verbose():
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def say_once(key: tuple[str | int, ...], what: str) -> None:
    """Log `what`, unless something with this `key` was logged before."""
    if key not in _logged and logger.isEnabledFor(logging.WARNING):
        _logged.add(key)
        # A warning, because Python hides lower levels unless the application configures logging, and the user
        # asked.
        logger.warning("%s", what)


def _log_once(problem: Problem, kernel: Kernel, key: tuple[str | int, ...], how: str = "") -> None:
    if key in _logged:
        return
    faster = []
    for name, reason in explain(problem):
        if name == kernel.name:
            break
        if reason is not None and problem.device in kernel_named(name).devices:
            faster.append(f"; not {name}: {reason}")
    say_once(key, f"{problem}: {kernel.name}{how}{''.join(faster)}")
