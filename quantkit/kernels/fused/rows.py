"""The fused kernels as rows of the kernel table: what they take, when they pay, and with which tiles.

Where they pay was measured on one H200 (docs/kernels.md); other GPUs use the same rules.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from quantkit.kernels.fused import launch
from quantkit.kernels.fused.expressions import expression
from quantkit.kernels.fused.launch import Operands, SkinnyTile, Tile
from quantkit.kernels.fused.layout import ROWS, Geometry, build, geometry
from quantkit.kernels.problem import KernelRow, Layout, Problem, always, device_features, one_plane
from quantkit.packing.tensor import PackedTensor

#: The most rows of x that `fused-skinny` takes.
SKINNY_ROWS = 32
#: Weights with so many rows or fewer leave processors idle unless tiles are split by columns.
FEW_ROWS = 8192
#: Rows with more columns than this take many steps, each of which waits for its loads.
LONG_ROWS = 8192
#: Bytes of shared memory that a program may have on an H100 or H200.
HOPPER_SHARED = 227 << 10
#: Steps that the kernel for few rows of x unrolls at most.
SKINNY_STEPS = 64
#: Weights dequantized at a time, 256 MiB in 16 bits.
DENSE_WEIGHTS = 1 << 27


def _build(weight: PackedTensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    layout = build(weight, dtype)
    if weight.device.type == "cuda":
        # Kernels that overlap the one before them read weights before they wait for it.
        torch.cuda.current_stream(weight.device).synchronize()
    return layout


FRAGMENTS = Layout("fragments", _build)


def _unpackable(problem: Problem) -> str | None:
    """Why the fragment layout cannot hold a weight."""
    if "triton" not in problem.features:
        return "Triton is not installed"
    if problem.scheme.planes > 1:
        return one_plane(problem)
    size = problem.scheme.group_columns(problem.k)
    if size not in (16, problem.k) and size % 32:
        return f"it takes groups of 16 or of multiples of 32 columns, not of {size}"
    return None


def _unmultipliable(problem: Problem) -> str | None:
    if problem.dtype == torch.float32:
        return "it multiplies bfloat16 or float16 activations; cast x to one of them"
    return _unpackable(problem)


def _skinny_supports(problem: Problem) -> str | None:
    if problem.m > SKINNY_ROWS:
        return f"it takes up to {SKINNY_ROWS} rows of x, not {problem.m}"
    reason = _unmultipliable(problem)
    if reason is not None:
        return reason
    shape = geometry(problem.n, problem.k, problem.scheme, problem.dtype)
    tile = skinny_tile(shape, problem.m)
    steps = -(-shape.spans * shape.span // (tile.warps * tile.columns))
    return None if steps <= SKINNY_STEPS else f"{problem.k} columns are more than it unrolls"


#: Without PTX, values are looked up, and take more shared memory than a program may have on some GPUs.
_LOOKED_UP = "without PTX its values are looked up and pass through shared memory"


def _skinny_pays(problem: Problem) -> str | None:
    if "ptx" not in problem.features:
        return _LOOKED_UP
    limit = 16 if problem.n <= FEW_ROWS and problem.k <= LONG_ROWS else 8
    return None if problem.m <= limit else f"tensor cores are busier in tiles from M={limit + 1} on"


def _tiled_pays(problem: Problem) -> str | None:
    shape = geometry(problem.n, problem.k, problem.scheme, problem.dtype)
    if "ptx" not in problem.features:
        return _LOOKED_UP
    if expression(problem.scheme.format, str(problem.dtype).removeprefix("torch.")) is None:
        return f"it would look up every value of {problem.scheme.format.name} once for each tile of x"
    many = 256 if problem.n <= FEW_ROWS else 512
    limit = 128 if shape.span > 128 else many
    if problem.m <= limit:
        return None
    return f"dequantizing and the library's product are faster from M={limit + 1} on"


def skinny_tile(shape: Geometry, m: int) -> SkinnyTile:
    """The tile for m rows of x: as many bytes in flight as the registers hold."""
    whole = shape.dot == 128 and shape.group >= 128
    long = shape.n <= FEW_ROWS and shape.k > LONG_ROWS
    columns = 512 if m <= 8 and whole and not long else 256
    least = max(shape.span, 128)
    while columns > least and 4 * columns > shape.spans * shape.span:
        columns //= 2
    ahead = shape.bits <= 4 and whole and (m > 8 or shape.bits == 4 or long)
    return SkinnyTile(warps=8 if long and not whole else 4, columns=max(columns, least), ahead=ahead)


def tiled_tile(shape: Geometry, m: int, shared: int = HOPPER_SHARED) -> Tile:
    """The tile for m rows of x on a GPU with so many bytes of shared memory for a program.

    Weights with few rows are split by columns to keep all processors busy.
    """
    few = shape.n <= FEW_ROWS
    if m <= 64:
        columns = 16 if m <= 16 else 32 if m <= 32 else 64
        tile, programs = Tile(4 if few else 8, columns, stages=4), 264
    elif shape.span > 128 and not few:
        tile, programs = Tile(8, 128, warps=8), 0
    else:
        tile, programs = Tile(4, 128), 132
    while shared_memory(tile, shape) > shared and tile.stages > 2:
        tile = replace(tile, stages=tile.stages - 1)
    while shared_memory(tile, shape) > shared and tile.m > 16:
        tile = replace(tile, m=tile.m // 2)
    return _split(tile, shape, m, programs)


def shared_memory(tile: Tile, shape: Geometry) -> int:
    """Bytes of shared memory that a program of `fused-tiled` takes at most: its operands, in every stage."""
    columns = max(shape.span, 128)
    weights = ROWS * tile.row_tiles * columns
    scales = weights // shape.group * 4 * (2 if shape.group < columns else 1)
    stage = 2 * columns * tile.m + weights * shape.bits // 8 + scales + 1024
    return stage * tile.stages


def _split(tile: Tile, shape: Geometry, m: int, programs: int) -> Tile:
    """`tile` in as many parts, up to four, as divide the steps and give no more than so many programs."""
    whole = -(-shape.row_tiles // tile.row_tiles) * -(-m // tile.m)
    parts = (s for s in (4, 2, 1) if shape.steps % s == 0 and (s == 1 or whole * s <= programs))
    return replace(tile, split=next(parts))


@lru_cache(maxsize=16)
def _shared_memory(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    # What a program may have if it asks for it; not every build of torch says.
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def _launch(
    run: Callable[[Operands, frozenset[str]], torch.Tensor],
) -> Callable[[torch.Tensor, PackedTensor, tuple[torch.Tensor, ...], torch.Tensor | None], torch.Tensor]:
    """`run`, which gets the device's features too, as rows launch: with x's device the current one."""

    def launched(
        x: torch.Tensor, weight: PackedTensor, layout: tuple[torch.Tensor, ...], bias: torch.Tensor | None
    ) -> torch.Tensor:
        operands = Operands(x, layout, bias, weight.scheme, weight.shape[0])
        features = device_features(x.device.type)
        if x.device.index == torch.cuda.current_device():
            return run(operands, features)
        with torch.cuda.device(x.device):
            return run(operands, features)

    return launched


@_launch
def _skinny_launch(operands: Operands, features: frozenset[str]) -> torch.Tensor:
    tile = skinny_tile(operands.shape, operands.x.shape[0])
    return launch.skinny(operands, tile, inline="ptx" in features, overlap="overlap" in features)


@_launch
def _tiled_launch(operands: Operands, features: frozenset[str]) -> torch.Tensor:
    x = operands.x
    tile = tiled_tile(operands.shape, x.shape[0], _shared_memory(x.device))
    return launch.tiled(operands, tile, inline="ptx" in features)


@_launch
def _dense_launch(operands: Operands, features: frozenset[str]) -> torch.Tensor:
    x, bias, n = operands.x, operands.bias, operands.n
    inline = "ptx" in features
    step = max(1, DENSE_WEIGHTS // x.shape[1] // ROWS) * ROWS
    if step >= n:
        return F.linear(x, launch.dequantize(operands, 0, n, inline=inline), bias)
    y = x.new_empty(x.shape[0], n)
    for start in range(0, n, step):
        stop = min(start + step, n)
        block = launch.dequantize(operands, start, stop, inline=inline)
        y[:, start:stop] = F.linear(x, block, None if bias is None else bias[start:stop])
    return y


FUSED_ROWS = (
    KernelRow(
        name="fused-skinny",
        summary="Triton: reads every packed byte once and multiplies in registers, for a few rows of x",
        devices=("cuda",),
        supports=_skinny_supports,
        pays=_skinny_pays,
        layout=FRAGMENTS,
        launch=_skinny_launch,
    ),
    KernelRow(
        name="fused-tiled",
        summary="Triton: decodes weights in registers and multiplies tiles on tensor cores; weights take "
        "their scales in the dtype of x",
        devices=("cuda",),
        supports=_unmultipliable,
        pays=_tiled_pays,
        layout=FRAGMENTS,
        launch=_tiled_launch,
    ),
    KernelRow(
        name="dequantize",
        summary="Triton: writes the weight in the dtype of x, 2^27 at a time, for the library to multiply",
        devices=("cuda",),
        supports=_unpackable,
        pays=always,
        layout=FRAGMENTS,
        launch=_dense_launch,
    ),
)
