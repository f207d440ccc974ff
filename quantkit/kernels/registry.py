"""The kernel table: every row, which one runs a problem, and why the others do not."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from quantkit.errors import KernelError
from quantkit.kernels.gemm.cpu import CPU_ROWS
from quantkit.kernels.gemm.fused_kernels import FUSED_ROWS
from quantkit.kernels.gemm.unpack import UNPACK_ROW
from quantkit.kernels.problem import Gpu, KernelRow, Layout, Problem, tile_text
from quantkit.kernels.tuning.store import StoredTable, stored_tables
from quantkit.kernels.tuning.tile_table import Entry, Key, TileTable, bucket

FORCE_VARIABLE = "QUANTKIT_KERNEL"
VERBOSE_VARIABLE = "QUANTKIT_VERBOSE"

#: What took less than this part of the time for more rows of x is taken instead, as it takes no longer for
#: fewer.
SOONER = 0.9
#: Up to so many rows of x, if fewer than were measured, only where it is the same kernel: that for few rows
#: does less the fewer there are.
SAME_KERNEL_UP_TO = 16

logger = logging.getLogger("quantkit.kernels")

#: Every kernel there is, fastest first per device. Adding one is adding a row.
ROWS: tuple[KernelRow, ...] = (*CPU_ROWS, *FUSED_ROWS, UNPACK_ROW)


def row_named(name: str) -> KernelRow:
    """The row called `name`; `KernelError` lists the known ones."""
    for row in ROWS:
        if row.name == name:
            return row
    known = ", ".join(row.name for row in ROWS)
    raise KernelError(f"there is no kernel {name!r}; known are {known}. Check {FORCE_VARIABLE}.")


def layout_named(name: str) -> Layout:
    """The layout called `name`, of those that rows have."""
    return next(row.layout for row in ROWS if row.layout is not None and row.layout.name == name)


def forced_row() -> str:
    """The row that `QUANTKIT_KERNEL` names; "" when it is not set."""
    return os.environ.get(FORCE_VARIABLE, "")


def choosing(dtype: torch.dtype) -> tuple[Any, ...]:
    """All that a choice for one problem, and whether it is told, depends on: equal as long as that is.

    The environment as its bytes, as `os.environ` takes a microsecond to decode a variable.
    """
    half_sums = dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation
    return _stored(_FORCE_KEY), _stored(_VERBOSE_KEY), half_sums, _tables_read[0]


#: What `os.environ` keeps variables in; where that is another one than on Linux, `os.environ` itself.
_environment: Any = getattr(os.environ, "_data", None)
_as_key: Callable[[str], Any] = getattr(os.environ, "encodekey", str)
if not isinstance(_environment, dict):
    _environment, _as_key = os.environ, str
_stored: Callable[[Any], Any] = _environment.get
_FORCE_KEY, _VERBOSE_KEY = map(_as_key, (FORCE_VARIABLE, VERBOSE_VARIABLE))
#: How often tile tables were to be read anew.
_tables_read = [0]


@dataclass(frozen=True)
class Measured:
    """What a tile table has of a problem: the entry of `m`, the bucket of its M or one of more rows of x.

    `gpu` names the GPU that it was measured on if that is another one, which is like this one.
    """

    asked: Key
    m: int
    entry: Entry
    gpu: str = ""

    @property
    def on(self) -> str:
        """On which GPU."""
        return f"on {self.gpu or 'this GPU'}"

    @property
    def where(self) -> str:
        """On which GPU, and with how many rows of x if those are others."""
        return self.on if self.m == self.asked.m else f"{self.on} at M={self.m}"


@dataclass(frozen=True)
class Chosen:
    """What runs a problem: the row, its tile (None for a row without), and `KernelRow.launch` with that tile.

    `measured` is what a tile table says of the row, None where the rules chose it.
    """

    row: KernelRow
    tile: Any
    measured: Measured | None
    launch: Callable[..., torch.Tensor]

    @property
    def is_fitted(self) -> bool:
        """Whether the tile is another one than what was measured."""
        return self.measured is not None and self.tile != self.measured.entry.tile

    @property
    def us(self) -> float | None:
        """Microseconds that the row was measured to take on this GPU for this weight in this tile.

        With as many rows of x, or up to the next power of two.
        """
        measured = self.measured
        if measured is None or measured.gpu or measured.m != measured.asked.m or self.is_fitted:
            return None
        return measured.entry.us

    @property
    def source(self) -> str:
        """Where the tile is from, if a table has a part in it and does not say how long it takes."""
        if self.measured is None or self.us is not None:
            return ""
        if self.is_fitted:
            return f"fitted to what was measured {self.measured.on} at M={self.measured.m}"
        return f"measured {self.measured.where}"


def choose(problem: Problem) -> Chosen:
    """What runs `problem`: the forced row, else the one a tile table has, else the first that pays.

    Raises `KernelError` with every row's reason when none runs it, with the forced row's reason when
    that one cannot, and with the known names when the forced name is unknown.
    """
    return _choose(problem, forced_row())


def choose_unforced(problem: Problem) -> Chosen:
    """`choose` as if `QUANTKIT_KERNEL` were not set."""
    return _choose(problem, "")


def choose_by_rules(problem: Problem) -> Chosen:
    """`choose_unforced` as if there were no tile tables."""
    return _first(problem, None)


def explain(problem: Problem) -> tuple[tuple[str, str | None], ...]:
    """For each row in order: its name, and why it does not run `problem` or None where it would."""
    return _explain(problem, _measured(problem))


def _explain(problem: Problem, measured: Measured | None) -> tuple[tuple[str, str | None], ...]:
    if measured is None:
        return tuple(
            (row.name, _unsupported(row, problem) or row.pays(problem) or _unbuilt(row, problem))
            for row in ROWS
        )
    before = [row.name for row in ROWS].index(measured.entry.row)
    return tuple(
        (row.name, _unable(row, problem) or (_slower(row, problem, measured) if index < before else None))
        for index, row in enumerate(ROWS)
    )


def _slower(row: KernelRow, problem: Problem, measured: Measured) -> str:
    entry, where = measured.entry, measured.where
    us = entry.others.get(row.name)
    if us is not None:
        return f"measured slower {where}: {us:.1f} us against {entry.us:.1f} us"
    reason = row.pays(problem) or "not measured"
    return f"{reason}; {where} {entry.row} was measured: {entry.us:.1f} us"


@lru_cache(maxsize=64)
def tile_tables(gpu: Gpu) -> tuple[StoredTable, ...]:
    """The tile tables for a GPU, the one that wins first; see `stored_tables`."""
    return stored_tables(gpu, ROWS)


def forget_tile_tables() -> None:
    """Read tile tables anew at the next choice."""
    _tables_read[0] += 1
    tile_tables.cache_clear()
    _choose.cache_clear()


def _measured(problem: Problem, forced: str = "") -> Measured | None:
    """What the first tile table says of `problem` whose row can run it, or of a forced row."""
    if problem.gpu is None:
        return None
    asked = Key.of(problem)
    tables = (stored.table for stored in tile_tables(problem.gpu))
    found = (_soonest(table, asked, problem, forced) for table in tables if asked in table.entries)
    return next((one for one in found if one is not None), None)


def _soonest(table: TileTable, asked: Key, problem: Problem, forced: str) -> Measured | None:
    """What a table has for `asked`, or for more rows of x if that took less time; of a forced row, if there
    is one.

    None where the row of `asked` cannot run `problem`.
    """
    own = table.entries[asked]

    def is_able(one: Key) -> bool:
        entry = table.entries[one]
        comparable = problem.m > SAME_KERNEL_UP_TO or problem.m == asked.m or entry.row == own.row
        return (entry.row == forced if forced else comparable) and _runs(entry, problem)

    able = [one for one in (asked, *table.with_more_rows(asked)) if is_able(one)]
    if not able or (not forced and asked not in able):
        return None
    least = min(able, key=lambda one: table.entries[one].us)
    if asked in able and table.entries[least].us >= SOONER * own.us:
        least = asked
    name = table.gpu.name if problem.gpu is not None and table.gpu.name != problem.gpu.name else ""
    return Measured(asked, least.m, table.entries[least], name)


def _runs(entry: Entry, problem: Problem) -> bool:
    row = row_named(entry.row)
    if _unable(row, problem) is not None:
        return False
    return row.tiling is None or row.tiling.why_not(problem, entry.tile) is None


@lru_cache(maxsize=8192)
def _choose(problem: Problem, forced: str) -> Chosen:
    measured = _measured(problem, forced)
    if forced:
        row = row_named(forced)
        reason = _unable(row, problem)
        if reason is not None:
            raise KernelError(
                f"{FORCE_VARIABLE}={forced} cannot run {problem}: {reason}. "
                f"Unset {FORCE_VARIABLE} or name another row."
            )
        return _chosen(row, problem, measured)
    return _first(problem, measured)


def _first(problem: Problem, measured: Measured | None) -> Chosen:
    verdicts = _explain(problem, measured)
    for row, (_, reason) in zip(ROWS, verdicts, strict=True):
        if reason is None:
            return _chosen(row, problem, measured)
    reasons = "\n".join(f"  {name}: {reason}" for name, reason in verdicts)
    raise KernelError(f"no kernel runs {problem}:\n{reasons}")


def _chosen(row: KernelRow, problem: Problem, measured: Measured | None) -> Chosen:
    if measured is not None and measured.entry.row != row.name:
        measured = None
    tile = None
    if row.tiling is not None and measured is None:
        tile = row.tiling.rule(problem)
    elif row.tiling is not None and measured is not None:
        tile = row.tiling.fitted(problem, measured.entry.tile, replace(problem, m=measured.m))
    return Chosen(row, tile, measured, row.launch if tile is None else partial(row.launch, tile=tile))


def _unable(row: KernelRow, problem: Problem) -> str | None:
    return _unsupported(row, problem) or _unbuilt(row, problem)


def _unsupported(row: KernelRow, problem: Problem) -> str | None:
    if problem.device not in row.devices:
        return f"it runs on {' and '.join(row.devices)}, the tensors are on {problem.device}"
    return row.supports(problem)


def _unbuilt(row: KernelRow, problem: Problem) -> str | None:
    if row.layout is not None and problem.layout not in (None, row.layout.name):
        built = f"{problem.layout} was" if problem.layout else "none was"
        return (
            f"it needs the weight layout {row.layout.name} and {built} built; call build_layout with this "
            f"dtype outside torch.compile (with {FORCE_VARIABLE} set, if it is to be forced)"
        )
    return None


def warn_unfused(problem: Problem, row: KernelRow) -> None:
    """Say once per scheme, N and K that a GPU runs `row`, without a layout, and why no faster one.

    On a CPU such a row often is the fastest there is.
    """
    if problem.device != "cpu":
        _log_once(problem, row, (str(problem.scheme), problem.n, problem.k, 0))


def is_verbose() -> bool:
    """Whether somebody has asked to see what runs and why."""
    return os.environ.get(VERBOSE_VARIABLE) == "1"


def log_choice(problem: Problem, chosen: Chosen) -> None:
    """With `QUANTKIT_VERBOSE=1`, say once per scheme, N, K, power of two of M and tile what runs and why."""
    if is_verbose():
        tile = "" if chosen.tile is None else f" {tile_text(chosen.tile)}"
        key = (str(problem.scheme), problem.n, problem.k, bucket(problem.m), tile)
        _log_once(problem, chosen.row, key, tile + sums_text(problem, chosen.tile) + _how(chosen))


def _how(chosen: Chosen) -> str:
    if chosen.us is not None:
        return f", measured {chosen.us:.1f} us"
    return chosen.source and f", {chosen.source}"


def sums_text(problem: Problem, tile: Any) -> str:
    """What became of torch's leave to sum in float16; "" where it gave none."""
    if not problem.half_sums:
        return ""
    if getattr(tile, "half_sums", False):
        return ", sums of a step in float16"
    return ", sums in float32 (float16 is allowed, but brings nothing here)"


def warn_looped(problem: Problem, experts: int, reason: str) -> None:
    """Say once per reason, scheme, N and K that a GPU multiplies with one expert after the other, and why."""
    if problem.device != "cpu":
        what = f"{experts} experts, {problem}: one after the other, as the host reads which are chosen"
        _say_once((reason, str(problem.scheme), problem.n, problem.k), f"{what}; not grouped: {reason}")


def log_grouped(
    problem: Problem, experts: int, row: str, tile: Any, why_not_narrow: Callable[[], str | None]
) -> None:
    """`log_choice` for M pairs of a token and an expert, by the kernels of `row` for all experts at once."""
    if is_verbose():
        key = ("grouped", str(problem.scheme), problem.n, problem.k, bucket(problem.m))
        what = f"{experts} experts, {problem}: grouped {row} {tile_text(tile)}{sums_text(problem, tile)}"
        if row in ("fused-skinny", "fused-tiled") and (reason := why_not_narrow()) is not None:
            what += f"; not fused-narrow: {reason}"
        _say_once(key, what)


_logged: set[tuple[str | int, ...]] = set()


@contextmanager
def quietly() -> Iterator[None]:
    """Say nothing of slower kernels inside, where they run on purpose, unless somebody asked to see them.

    What was not said is said of what runs after it.
    """
    level = logger.level
    if not is_verbose():
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _say_once(key: tuple[str | int, ...], what: str) -> None:
    if key not in _logged and logger.isEnabledFor(logging.WARNING):
        _logged.add(key)
        # A warning, because Python shows nothing below one unless the application configures logging, and
        # whoever sets the variable has asked to see this.
        logger.warning("%s", what)


def _log_once(problem: Problem, row: KernelRow, key: tuple[str | int, ...], how: str = "") -> None:
    if key in _logged:
        return
    faster = []
    for name, reason in explain(problem):
        if name == row.name:
            break
        if reason is not None and problem.device in row_named(name).devices:
            faster.append(f"; not {name}: {reason}")
    _say_once(key, f"{problem}: {row.name}{how}{''.join(faster)}")
