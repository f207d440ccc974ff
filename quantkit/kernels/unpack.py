"""The row that always works: unpack a block of rows, multiply, go on. Never all of the dense weight."""

import torch
import torch.nn.functional as F

from quantkit.kernels.problem import KernelRow, always
from quantkit.packing.tensor import PackedTensor, dequantize_codes

#: Weights unpacked at a time, by device. On a CPU they take 4 MiB as float32, which stays in cache, while one
#: torch operation on them is long enough (about 50 us) to hide what starting it on all threads costs.
BLOCK_WEIGHTS = {"cpu": 1 << 20, "cuda": 1 << 26}


def block_rows(columns: int, device: torch.device) -> int:
    """Rows of the weight that are unpacked at a time on `device`."""
    return max(1, BLOCK_WEIGHTS[device.type] // max(1, columns))


def dequantize_rows(
    weight: PackedTensor, zero_point: torch.Tensor | None, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    """`weight.dequantize(dtype, start=start, stop=stop)`, faster, given `weight.zero_points()`."""
    codes = weight.codes(start, stop)
    scale = weight.group_scale(start, stop)
    zero = None if zero_point is None else zero_point[start:stop]
    rows, columns = codes.shape
    size = weight.scheme.group_size
    if size is not None and columns % size:
        return dequantize_codes(codes, scale, zero, weight.scheme).to(dtype)
    values = weight.scheme.format.decode(codes) if zero is None else codes.to(torch.float32)
    # Groups of equal length broadcast; only a ragged last group needs one scale spelled out per weight.
    groups = values.view(rows, scale.shape[1], -1)
    if zero is not None:
        groups.sub_(zero.to(torch.float32).unsqueeze(2))
    return groups.mul_(scale.unsqueeze(2)).view(rows, columns).to(dtype)


def _launch_unpack(
    x: torch.Tensor,
    weight: PackedTensor,
    layout: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    rows, columns = weight.shape
    zero_point = weight.zero_points()
    out = torch.empty(x.shape[0], rows, dtype=x.dtype, device=x.device)
    step = block_rows(columns, x.device)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block = dequantize_rows(weight, zero_point, start, stop, x.dtype)
        out[:, start:stop] = F.linear(x, block, None if bias is None else bias[start:stop])
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
