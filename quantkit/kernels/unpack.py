"""The row that always works: unpack a block of rows, multiply, go on. Never all of the dense weight."""

import torch
import torch.nn.functional as F

from quantkit.kernels.problem import KernelRow, always
from quantkit.packing.tensor import PackedTensor

#: Weights unpacked at a time, by device. On a CPU they take 4 MiB as float32, which stays in cache, while one
#: torch operation on them is long enough (about 50 us) to hide what starting it on all threads costs.
BLOCK_WEIGHTS = {"cpu": 1 << 20, "cuda": 1 << 26}


def block_rows(columns: int, device: torch.device) -> int:
    """Rows of the weight that are unpacked at a time on `device`."""
    return max(1, BLOCK_WEIGHTS[device.type] // max(1, columns))


def _launch_unpack(
    x: torch.Tensor,
    weight: PackedTensor,
    layout: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    rows, columns = weight.shape
    zeros = weight.zero_points()
    out = torch.empty(x.shape[0], rows, dtype=x.dtype, device=x.device)
    step = block_rows(columns, x.device)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block = weight.without_column_scale(start, stop, None if zeros is None else zeros[start:stop])
        out[:, start:stop] = F.linear(x, block.to(x.dtype), None if bias is None else bias[start:stop])
    return out


UNPACK_ROW = KernelRow(
    name="unpack",
    summary="unpacks a block of rows into the activation dtype and multiplies; any scheme and shape",
    devices=("cpu", "cuda"),
    supports=always,
    pays=always,
    layout=None,
    launch=_launch_unpack,
)
