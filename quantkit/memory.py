"""Check free memory. A GPU with too little gets fewer rows at a time where that works, else the run ends.

Nothing moves to the CPU silently: its sums have another order, and the bytes of a run depend on its device.
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

#: Remedy for a run that writes, on a GPU with too little memory.
RUN_AGAIN = (
    "Free memory on it and run the same command, with --resume where it has begun to write; or start over "
    "with --device cpu."
)

#: Remedy for a host with too little memory.
RUN_ON_HOST = "Free memory and run the same command, with --resume where it has begun to write."

#: Most bytes that torch may cache while unused. Applies before each linear of a calibrated model, and while
#: rows are quantized without data.
IDLE_BYTES = 1 << 30
STREAM_IDLE_BYTES = 256 << 20
#: Bytes that the driver counts in addition to torch's memory: CUDA's context and the code of kernels and
#: libraries. 0.98 GB on an H200 (benchmarks/results/h200-quantize-memory.json).
CONTEXT_BYTES = 1 << 30
#: cuBLAS workspaces and CUDA graphs, in bytes: an H200 used 6.38 GB for 6.28 GB of GPTQ tensors.
WORKSPACE_BYTES = 128 << 20

_ASKED_OF_HOST = re.compile(r"tried to allocate (\d+) bytes")
_TRIED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_FREE = re.compile(r"of which ([\d.]+ \w+) is free")
_said: set[int] = set()


def free_memory(device: torch.device) -> int:
    """Return free bytes: on a GPU including the memory that torch caches, for a CPU those of the host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return int(psutil.virtual_memory().available)


def free_share(device: torch.device, processes: int) -> int:
    """Return the free bytes of a device that one process may count on.

    On a CPU those of the host divided by the `processes` on it; of a GPU all, as each process has its own.
    """
    return free_memory(device) // (processes if device.type == "cpu" else 1)


def trim_cache(device: torch.device, most: int = IDLE_BYTES) -> None:
    """Return cached memory of torch to the GPU if it is more than `most` bytes.

    Blocks of other sizes do not fit into cached blocks, so the cache outgrows the memory in use. Other users
    of the GPU, and nvidia-smi, count it as used. An allocation limit would bound it too, but would end a run
    whose plan is too low; trimming only takes time.
    """
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if idle > most:
            torch.cuda.empty_cache()


def say_if_short(needed: int, device: torch.device, *, calibrated: bool) -> None:
    """Warn if a GPU has less free memory than a run needs: `needed` bytes, as the driver counts them."""
    # The query itself creates the CUDA context, which then is no longer free memory.
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
    """Apply `function` to rows; each argument is [n, K]. Short of GPU memory, split the rows.

    Each piece has a multiple of `unit` rows; results are in the order of the rows. Raises
    `EnvironmentProblem` about `what` if even one unit does not fit.
    """
    try:
        return [function(*rows)]
    except torch.OutOfMemoryError as error:
        needed = _figures(error)
        if len(rows[0]) <= unit:
            least = "one row" if unit == 1 else f"{unit} rows"
            raise _too_little(f"{what}, even {least} at a time", needed, RUN_AGAIN) from error
    # Outside the handler, because the exception keeps the tensors of the attempt alive.
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
    """Context manager: raise a lack of memory, on a GPU or the host, as `EnvironmentProblem` about `what`.

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
    """Return True if memory ran out on a GPU or the host; torch has no class for the latter."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def _too_little(what: str, figures: str, remedy: str) -> EnvironmentProblem:
    return EnvironmentProblem(f"{what}: the GPU has too little memory ({figures}). {remedy}")


def _figures(error: torch.OutOfMemoryError) -> str:
    """Return `2.00 GiB needed at once, 512.00 MiB free`, as far as torch says."""
    text = str(error)
    tried, free = _TRIED.search(text), _FREE.search(text)
    if tried is None:
        return text.partition("\n")[0] or "torch does not say how much"
    return f"{tried[1]} needed at once" + (f", {free[1]} free" if free else "")
