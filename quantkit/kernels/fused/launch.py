"""From operands to a launch of a fused kernel: its constants, its tile, its grid."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from quantkit.kernels.fused.expressions import expression, field_numbers
from quantkit.kernels.fused.layout import ROWS, Geometry, geometry
from quantkit.packing.schemes import Scheme

#: How 8-bit scales are to be read; the others are floats of Triton's own.
SCALE_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}


@dataclass(frozen=True)
class Operands:
    """x [m, k] and a weight [n, k] in the fragment layout: codes, scale, zero, factor, values."""

    x: torch.Tensor
    layout: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None
    scheme: Scheme
    n: int

    @property
    def shape(self) -> Geometry:
        return geometry(self.n, self.x.shape[1], self.scheme, self.x.dtype)


@dataclass(frozen=True)
class SkinnyTile:
    """Warps that divide the columns, columns of each per step, row tiles, and whether loads run ahead."""

    warps: int = 4
    columns: int = 512
    row_tiles: int = 1
    ahead: bool = False


@dataclass(frozen=True)
class Tile:
    """Row tiles and rows of x of a program, parts of the columns, warps, stages of the pipeline.

    With `half_sums`, the products of a step, 128 columns or a span, are summed in float16, and added up in
    float32.
    """

    row_tiles: int
    m: int
    split: int = 1
    warps: int = 4
    stages: int = 3
    half_sums: bool = False


@lru_cache(maxsize=4096)
def constants(n: int, k: int, scheme: Scheme, dtype: torch.dtype, inline: bool) -> dict[str, Any]:
    """What all fused kernels know of a weight at compile time. `inline` allows PTX."""
    import triton.language as tl

    shape = geometry(n, k, scheme, dtype)
    name = str(dtype).removeprefix("torch.")
    carried = shape.carried != 1.0
    found = expression(scheme.format, name, bare=carried) if inline else None
    return {
        "K": shape.k,
        "SPANS": shape.spans,
        "TILES": shape.tiles,
        "DOT": shape.dot,
        "GROUP": shape.group,
        "GROUPS": shape.groups,
        "PER_BLOCK": shape.per_block,
        "BLOCKS": shape.blocks,
        "V": shape.in_block,
        "ON_WEIGHTS": shape.on_weights,
        "SCALE": "" if shape.on_weights else SCALE_KINDS.get(scheme.scale_dtype, ""),
        "HAS_ZERO": scheme.zero_point != "none",
        "HAS_FACTOR": scheme.global_scale or carried,
        "ASM": None if found is None else found.asm,
        "CONSTRAINTS": None if found is None else found.constraints,
        "FIELDS": field_numbers(scheme.format),
        "PLANES": shape.planes,
        "DTYPE": getattr(tl, name),
    }


@lru_cache(maxsize=1024)
def half_unit(n: int, k: int, scheme: Scheme) -> float:
    """What weights are multiplied with before they are summed in float16.

    Those of one scale per channel are without it then, and up to 57344: a power of two makes them 1 at most.
    """
    if geometry(n, k, scheme, torch.float16).groups > 1:
        return 1.0
    largest = scheme.format.max if scheme.zero_point == "none" else 2.0**scheme.format.bits
    return 2.0 ** -math.ceil(math.log2(largest))


def _empty(op: Operands, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(size, dtype=dtype or op.x.dtype, device=op.x.device)


def _start(kernel: Any, grid: tuple[int, ...], op: Operands, *arguments: Any, **options: Any) -> None:
    """Launch `kernel`; for operands on the meta device only compile it."""
    if op.x.is_meta:
        kernel.warmup(*arguments, grid=grid, **options)
    else:
        kernel[grid](*arguments, **options)


def skinny(op: Operands, tile: SkinnyTile, *, inline: bool = True, overlap: bool = False) -> torch.Tensor:
    """y [m, n] for m up to 32. `overlap` lets the launch overlap the end of the kernel before it."""
    from quantkit.kernels.fused.skinny import skinny as kernel

    m, k = op.x.shape
    shape = op.shape
    y = _empty(op, m, op.n)
    _start(
        kernel,
        (-(-shape.row_tiles // tile.row_tiles),),
        op,
        op.x,
        *op.layout,
        y if op.bias is None else op.bias,
        y,
        m,
        op.n,
        **constants(op.n, k, op.scheme, op.x.dtype, inline),
        HAS_BIAS=op.bias is not None,
        W=tile.warps,
        NG=tile.columns // shape.dot,
        R=tile.row_tiles,
        BM=8 if m <= 8 else 16 if m <= 16 else 32,
        AHEAD=tile.ahead,
        PDL=overlap,
        num_warps=tile.warps,
        num_stages=1,
        **({"launch_pdl": True} if overlap else {}),
    )
    return y


def tiled(op: Operands, tile: Tile, *, inline: bool = True) -> torch.Tensor:
    """y [m, n] for any m."""
    from quantkit.kernels.fused.tiled import combine, order_columns
    from quantkit.kernels.fused.tiled import tiled as kernel

    m, k = op.x.shape
    shape = op.shape
    assert shape.steps % tile.split == 0, (shape, tile)
    known = constants(op.n, k, op.scheme, op.x.dtype, inline)
    ordered = _empty(op, m, shape.spans * shape.span)
    width, halves = ordered.shape[1], shape.group == 16
    _start(order_columns, (-(-width // 1024), m), op, op.x, ordered, m, k, width, HALVES=halves, BLOCK=1024)
    y = _empty(op, m, op.n)
    bias = y if op.bias is None else op.bias
    sums = y if tile.split == 1 else _empty(op, tile.split, m, op.n, dtype=torch.float32)
    _start(
        kernel,
        (-(-shape.row_tiles // tile.row_tiles) * -(-m // tile.m), tile.split),
        op,
        ordered,
        *op.layout,
        bias,
        sums,
        m,
        op.n,
        **known,
        HAS_BIAS=op.bias is not None,
        RT=tile.row_tiles,
        BM=tile.m,
        SPLIT=tile.split,
        WAIT=inline,
        STAGES=tile.stages,
        RASTER=8,
        HALF=half_unit(op.n, k, op.scheme) if tile.half_sums else None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if tile.split > 1:
        last = {name: known[name] for name in ("GROUPS", "SCALE", "HAS_FACTOR")}
        _, scale, _, factor, _ = op.layout
        _start(
            combine,
            (-(-op.n // 1024), m),
            op,
            sums,
            scale,
            factor,
            bias,
            y,
            m,
            op.n,
            **last,
            HAS_BIAS=op.bias is not None,
            SPLIT=tile.split,
            BN=1024,
        )
    return y


#: Row tiles of a program of `dequantize`, one per warp.
DENSE_WARPS = 4


def dequantize(op: Operands, start: int, stop: int, *, inline: bool = True) -> torch.Tensor:
    """Rows `start` (a multiple of 16) to `stop` of the weight in x's dtype, [stop - start, k]."""
    from quantkit.kernels.fused.dense import dequantize as kernel

    k, shape = op.x.shape[1], op.shape
    spans = max(128 // shape.span, 1)
    out = _empty(op, stop - start, k)
    _start(
        kernel,
        (-(-(stop - start) // (ROWS * DENSE_WARPS)), -(-shape.spans // spans)),
        op,
        *op.layout,
        out,
        start // ROWS,
        stop,
        **constants(op.n, k, op.scheme, op.x.dtype, inline),
        C=spans,
        W=DENSE_WARPS,
        num_warps=DENSE_WARPS,
    )
    return out
