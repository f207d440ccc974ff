"""Memory that is free. Where a GPU has too little: fewer rows at a time where that works, else an error.

Nothing moves to the CPU by itself: its sums have another order, and a run writes the bytes of its device.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from quantkit.errors import EnvironmentProblem
from quantkit.files import size_text

T = TypeVar("T")

logger = logging.getLogger("quantkit.memory")

#: What to do about a run that writes.
RUN_AGAIN = (
    "Free memory on it and run the same command, with --resume where it has begun to write; or start over "
    "with --device cpu."
)

#: The same where the host has too little.
RUN_ON_HOST = "Free memory and run the same command, with --resume where it has begun to write."

#: The most that torch may hold for reuse when a linear of a calibrated model comes, and when rows do that are
#: quantized without data.
IDLE_BYTES = 1 << 30
STREAM_IDLE_BYTES = 256 << 20
#: What the driver counts beside torch's memory: CUDA's context and the code of kernels and libraries. 0.98 GB
#: on an H200 (benchmarks/results/h200-quantize-memory.json).
CONTEXT_BYTES = 1 << 30

_ASKED_OF_HOST = re.compile(r"tried to allocate (\d+) bytes")
_TRIED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_FREE = re.compile(r"of which ([\d.]+ \w+) is free")
_said: set[int] = set()


def free_memory(device: torch.device) -> int:
    """Bytes free on the GPU, what torch holds there for reuse included, or on the host for a CPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return int(psutil.virtual_memory().available)


def free_share(device: torch.device, processes: int) -> int:
    """Bytes free on a device for each of the `processes` of this host; a GPU has one."""
    return free_memory(device) // (processes if device.type == "cpu" else 1)


def trim_cache(device: torch.device, most: int = IDLE_BYTES) -> None:
    """Give a GPU's memory back that torch holds for reuse, where that is more than it may hold idle.

    Blocks of other sizes do not fit into what it holds, which grows past all that is in use. Others who use
    the GPU, and nvidia-smi, count it as used. A limit on what torch may allocate would bound it too, and end
    a run for which a plan is short; this only takes time.
    """
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if idle > most:
            torch.cuda.empty_cache()


def say_if_short(needed: int, device: torch.device, *, calibrated: bool) -> None:
    """Warn where a GPU has less free memory than a run takes, `needed` as the driver counts it."""
    # Asking a GPU makes the context, so that it is not free any more.
    if device.type != "cuda" or needed - CONTEXT_BYTES <= (free := free_memory(device)):
        return
    logger.warning(
        "this run takes up to %s of GPU memory, and %s has %s free beside its context. Fewer rows at a time "
        "are tried where that helps, which takes longer, and it may end with an error. Free memory on it, "
        "name another GPU (--device cuda:N), %sor use --device cpu.",
        size_text(needed),
        device,
        size_text(free),
        "take shorter samples (--calibration-length) or a method without data (--method mse), "
        if calibrated
        else "",
    )


def in_pieces(function: Callable[..., T], rows: Sequence[torch.Tensor], what: str, unit: int = 1) -> list[T]:
    """`function` of rows, each argument [n, K], or in their order of as many at a time as a GPU has memory
    for: a multiple of `unit`.

    `EnvironmentProblem` about `what` where that is not even one.
    """
    try:
        return [function(*rows)]
    except torch.OutOfMemoryError as error:
        needed = _figures(error)
        if len(rows[0]) <= unit:
            least = "one row" if unit == 1 else f"{unit} rows"
            raise _too_little(f"{what}, even {least} at a time", needed, RUN_AGAIN) from error
    # Not in the handler: what it handles keeps the tensors of the attempt alive.
    torch.cuda.empty_cache()
    half = -(-len(rows[0]) // (2 * unit)) * unit
    if half not in _said:
        _said.add(half)
        logger.warning(
            "%s: the GPU has too little memory for %d rows at a time (%s), so %d are tried; it takes longer. "
            "Free memory on it to avoid that.",
            what,
            len(rows[0]),
            needed,
            half,
        )
    parts = zip(*(torch.split(of_one, half) for of_one in rows), strict=True)
    return [done for part in parts for done in in_pieces(function, part, what, unit)]


@contextmanager
def enough_memory(what: str, remedy: str = RUN_AGAIN) -> Iterator[None]:
    """What a GPU or the host has no memory for in the block as an `EnvironmentProblem` about `what`.

    `remedy` is for GPUs.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _too_little(what, _figures(error), remedy) from error
    except (MemoryError, RuntimeError) as error:
        if not is_lack_of_memory(error):
            raise
        asked = _ASKED_OF_HOST.search(str(error))
        needed = (
            "Python does not say how much" if asked is None else f"{size_text(int(asked[1]))} needed at once"
        )
        raise EnvironmentProblem(
            f"{what}: the host has too little memory ({needed}). {RUN_ON_HOST}"
        ) from error


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether there was no memory, on a GPU or on the host, for which torch has no class of its own."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def _too_little(what: str, figures: str, remedy: str) -> EnvironmentProblem:
    return EnvironmentProblem(f"{what}: the GPU has too little memory ({figures}). {remedy}")


def _figures(error: torch.OutOfMemoryError) -> str:
    """`2.00 GiB needed at once, 512.00 MiB free`, as far as torch tells."""
    text = str(error)
    tried, free = _TRIED.search(text), _FREE.search(text)
    if tried is None:
        return text.partition("\n")[0] or "torch does not say how much"
    return f"{tried[1]} needed at once" + (f", {free[1]} free" if free else "")
