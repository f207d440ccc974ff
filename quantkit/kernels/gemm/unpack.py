"""Kernel `unpack`, in torch operations, for every scheme: dequantize a block of rows, multiply, repeat.

The dense weight is never in memory as a whole.
"""

import time
from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F

from quantkit.kernels.problem import Kernel, always
from quantkit.packing.tensor import PackedTensor

#: Weights dequantized at a time, by device. On a CPU they take 2 MiB as float32, which stays in cache, while
#: one torch operation on them (about 25 us) is long enough to hide the start of all threads. With 512 rows of
#: x, 1536 x 576 weights take 7.6 ms on one core, and 10.6 ms in blocks twice as large, whose memory is
#: returned to the system after each.
BLOCK_WEIGHTS = {"cpu": 1 << 19, "cuda": 1 << 26}


def block_rows(columns: int, device: torch.device) -> int:
    """Return the number of rows of a weight with `columns` columns to dequantize at a time on `device`."""
    return max(1, BLOCK_WEIGHTS[device.type] // max(1, columns))


def dequantized_blocks(weight: PackedTensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield `weight` [N, K] dequantized in blocks of rows: (slice of the rows, float32 [rows, K]).

    If the scheme has a column scale, factors of the columns of x, it is not applied.
    """
    rows, columns = weight.shape
    zeros = weight.zero_points()
    step = block_rows(columns, weight.device)
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        yield (
            block,
            weight.without_column_scale(block.start, block.stop, None if zeros is None else zeros[block]),
        )


#: A dtype counts as slower if float32 takes less than this part of its time. The margin makes the answer the
#: same in every process.

_CLEARLY = 0.8
#: Rows of x, columns and rows of the weight in the timed products: 1 ms on a core with AVX512.
_TIMED = (256, 512, 512)


@lru_cache(maxsize=8)
def is_slower_than_float32(dtype: torch.dtype) -> bool:
    """Return True if a CPU multiplies matrices of `dtype` more slowly than float32; timed once per process.

    A CPU may have instructions for bfloat16 and still be slower with them. A core of a Xeon with AVX512_BF16,
    but without AMX for this process, has 84 GFLOP/s in bfloat16 and 160 in float32 (torch 2.13.0).
    """
    return _seconds(torch.float32) < _CLEARLY * _seconds(dtype)


def _seconds(dtype: torch.dtype) -> float:
    """Return the seconds that a matrix product on the CPU takes in `dtype`: the fastest of three."""
    rows, columns, outputs = _TIMED
    x, weight = (torch.ones(count, columns, dtype=dtype, device="cpu") for count in (rows, outputs))
    times = []
    # The caller may be inside autocast, which would compute both in one dtype.
    with torch.autocast("cpu", enabled=False):
        for _ in range(4):
            began = time.perf_counter()
            F.linear(x, weight)
            times.append(time.perf_counter() - began)
    return min(times[1:])


def _launch_unpack(
    x: torch.Tensor,
    weight: PackedTensor,
    layout: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return y [M, N] = x [M, K] W^T + bias, dequantizing a block of rows of W at a time.

    `layout` is not used: the kernel reads the weight as stored.
    """
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if x.device.type == "cpu" and x.dtype != torch.float32 and is_slower_than_float32(x.dtype):
        # Only y is rounded, neither weights nor sums. Autocast was applied to x already, and would cast back.
        with torch.autocast("cpu", enabled=False):
            return _multiply(x.float(), weight, None if bias is None else bias.float(), out)
    return _multiply(x, weight, bias, out)


def _multiply(
    x: torch.Tensor, weight: PackedTensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Write x [M, K] W^T + `bias` [N] to `out` [M, N] of any dtype; `bias` may be None.

    Rows of `weight`, W [N, K], are dequantized block by block, and multiplied in the dtype of x.
    """
    for rows, block in dequantized_blocks(weight):
        out[:, rows] = F.linear(x, block.to(x.dtype), None if bias is None else bias[rows])
    return out


UNPACK_KERNEL = Kernel(
    name="unpack",
    summary="unpacks a block of rows into the activation dtype, or into float32 where a CPU multiplies that "
    "faster, and multiplies; any scheme and shape",
    devices=("cpu", "cuda"),
    why_unsupported=always,
    why_slower=always,
    layout=None,
    launch=_launch_unpack,
)
