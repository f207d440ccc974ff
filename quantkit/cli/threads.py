"""`--threads`: how many threads compute on a CPU, and whether there are cores for them.

The number goes into the environment before torch is imported, so that torch, its libraries and the processes
that a command starts all have it.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import psutil
import typer

from quantkit.cli.console import note

#: What OpenMP, and all that torch computes with on a CPU, reads when it is loaded.
VARIABLE = "OMP_NUM_THREADS"
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        help="Threads that compute on a CPU.",
        show_default=f"{VARIABLE}, else the physical cores that this process may use",
    ),
]
#: Seconds for which the load of cores is looked at: the kernel counts in hundredths.
_LOOK = 0.1
#: A core that is busy for less than this part of the time is free.
_BUSY = 0.5


def with_threads(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the option `--threads`, which is set before it runs."""
    hints = get_type_hints(command, include_extras=True)
    option = Parameter("threads", Parameter.KEYWORD_ONLY, default=None, annotation=Threads)
    parameters = [
        one.replace(annotation=hints[one.name], kind=Parameter.KEYWORD_ONLY)
        for one in signature(command).parameters.values()
    ]

    def threaded(*, threads: int | None, **given: Any) -> None:
        use_threads(threads, device=given.get("device", "auto"))
        command(**given)

    threaded.__name__, threaded.__doc__ = command.__name__, command.__doc__
    threaded.__annotations__ = {one.name: one.annotation for one in (*parameters, option)}
    threaded.__signature__ = Signature([*parameters, option])  # type: ignore[attr-defined]
    return threaded


def use_threads(asked: int | None, device: str = "auto") -> None:
    """Compute with `asked` threads; a note says so where they are more than the cores that are free.

    None leaves `OMP_NUM_THREADS` as it is, or else means `usable_cores()`. A process that has imported torch
    by then keeps its number.
    """
    loaded = "torch" in sys.modules
    if asked is not None or VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(asked or usable_cores())
    threads = int(os.environ[VARIABLE].partition(",")[0])
    short = shortage(threads)
    if short is not None and not loaded:
        # Threads that wait spin, for the next work comes within microseconds. Without cores of their own they
        # spin on those of the threads that they wait for. Where cores are free it is sleeping that is slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    from quantkit.devices import named_device

    if asked is not None:
        # torch takes fewer by itself where there are fewer cores.
        torch.set_num_threads(asked)
    # Of processes that share the work, as torchrun starts them, the first speaks.
    if short is not None and os.environ.get("RANK", "0") == "0" and named_device(device).type == "cpu":
        note(short)


def shortage(threads: int) -> str | None:
    """What to tell the user where fewer than `threads` cores are free now; looks for 0.1 s."""
    then = _used()
    time.sleep(_LOOK)
    seconds, used, own = (after - before for after, before in zip(_used(), then, strict=True))
    cores = usable_cores()
    free = min(float(cores), _physical(_allowed()) - max(0.0, used - own) / seconds)
    if free + _BUSY >= threads:
        return None
    whole = max(0, int(free + _BUSY))
    remedy = f"end other work or use --threads {whole}" if whole else "end other work"
    compute = "thread computes" if threads == 1 else "threads compute"
    return (
        f"other programs use the CPU: {threads} {compute} where {whole} of {cores} cores are free, "
        f"which makes this slower; {remedy}"
    )


def usable_cores() -> int:
    """Physical cores that this process may use: its affinity, without hyperthreads, within cgroup limits."""
    cores = _physical(_allowed())
    return max(1, min([cores, *(int(limit) for limit in _cgroup_limits())]))


def _used() -> tuple[float, float, float]:
    """Seconds of the clock, those that cores were used, and those that this process used them."""
    allowed = _allowed()
    times = [one for number, one in enumerate(psutil.cpu_times(percpu=True)) if number in allowed]
    idle = sum(one.idle + getattr(one, "iowait", 0.0) for one in times)
    clock = time.perf_counter()
    # From what is idle: times of guests are in others too.
    return clock, clock * len(times) - idle, sum(os.times()[:2])


def _allowed() -> set[int]:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _physical(processors: set[int], root: Path = Path("/sys/devices/system/cpu")) -> int:
    """The cores that `processors` are of, which may be two of one."""
    if not root.is_dir():
        return min(len(processors), psutil.cpu_count(logical=False) or len(processors))
    cores = set()
    for number in processors:
        file = root / f"cpu{number}/topology/thread_siblings_list"
        cores.add(file.read_text().strip() if file.is_file() else str(number))
    return len(cores)


def _cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[float]:
    """The processors' worth of time that the cgroups of this process may use, of versions 1 and 2."""
    if not own.is_file():
        return
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A container may see its own group as the root, whatever the path says.
        top = root / controllers if controllers else root
        groups = [top / path.lstrip("/"), *(top / path.lstrip("/")).parents]
        for group in groups[: groups.index(top) + 1]:
            yield from _quota(group)


def _quota(group: Path) -> Iterator[float]:
    """The limit of one cgroup, if it has one."""
    try:
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        # "max", and -1 in version 1, is none.
        if quota != "max" and int(quota) > 0:
            yield int(quota) / int(period)
    except (OSError, ValueError):
        return
