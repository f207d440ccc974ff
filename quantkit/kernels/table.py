"""The kernel table: every row, which one runs a problem, and why the others do not."""

import logging
import os
from functools import lru_cache

from quantkit.errors import KernelError
from quantkit.kernels.cpu import CPU_ROWS
from quantkit.kernels.fused.rows import FUSED_ROWS
from quantkit.kernels.problem import KernelRow, Problem
from quantkit.kernels.unpack import UNPACK_ROW

FORCE_VARIABLE = "QUANTKIT_KERNEL"
VERBOSE_VARIABLE = "QUANTKIT_VERBOSE"

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


def forced_row() -> str:
    """The row that `QUANTKIT_KERNEL` names; "" when it is not set."""
    return os.environ.get(FORCE_VARIABLE, "")


def choose(problem: Problem) -> KernelRow:
    """The row that runs `problem`: the forced one, else the first that neither refuses nor loses.

    Raises `KernelError` with every row's reason when none runs it, with the forced row's reason when
    that one cannot, and with the known names when the forced name is unknown.
    """
    return _choose(problem, forced_row())


def explain(problem: Problem) -> tuple[tuple[str, str | None], ...]:
    """For each row in order: its name, and why it does not run `problem` or None where it would."""
    return tuple((row.name, _why_not(row, problem)) for row in ROWS)


def _why_not(row: KernelRow, problem: Problem) -> str | None:
    return _unsupported(row, problem) or row.pays(problem) or _unbuilt(row, problem)


@lru_cache(maxsize=8192)
def _choose(problem: Problem, forced: str) -> KernelRow:
    if forced:
        row = row_named(forced)
        reason = _unsupported(row, problem) or _unbuilt(row, problem)
        if reason is not None:
            raise KernelError(
                f"{FORCE_VARIABLE}={forced} cannot run {problem}: {reason}. "
                f"Unset {FORCE_VARIABLE} or name another row."
            )
        return row
    verdicts = explain(problem)
    for row, (_, reason) in zip(ROWS, verdicts, strict=True):
        if reason is None:
            return row
    reasons = "\n".join(f"  {name}: {reason}" for name, reason in verdicts)
    raise KernelError(f"no kernel runs {problem}:\n{reasons}")


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


def log_choice(problem: Problem, row: KernelRow) -> None:
    """With `QUANTKIT_VERBOSE=1`, say once per scheme, N, K and power of two of M what runs and why."""
    if os.environ.get(VERBOSE_VARIABLE) == "1":
        bucket = 1 << (problem.m - 1).bit_length()
        _log_once(problem, row, (str(problem.scheme), problem.n, problem.k, bucket))


_logged: set[tuple[str, int, int, int]] = set()


def _log_once(problem: Problem, row: KernelRow, key: tuple[str, int, int, int]) -> None:
    if key in _logged:
        return
    _logged.add(key)
    faster = []
    for name, reason in explain(problem):
        if name == row.name:
            break
        if reason is not None and problem.device in row_named(name).devices:
            faster.append(f"; not {name}: {reason}")
    # A warning, because Python shows nothing below one unless the application configures logging, and
    # whoever sets the variable has asked to see this.
    logger.warning("%s: %s%s", problem, row.name, "".join(faster))
