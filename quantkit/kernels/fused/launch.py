"""From operands to a launch of a fused kernel: its constants, its tile, its grid."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from quantkit.kernels.fused.expressions import portable
from quantkit.kernels.fused.layout import ROWS, Geometry, geometry
from quantkit.kernels.fused.ptx import expression
from quantkit.kernels.problem import gpu_of
from quantkit.packing.schemes import Scheme

#: Multiprocessors of an H200, for which the rules were made.
HOPPER_PROCESSORS = 132
#: Tiles of rows of x that share the weights in the cache run next to each other, so many of them.
RASTER = 8
#: Outputs that a program of `combine` adds up.
COMBINED = 512
#: PTX that waits until no more than the products of the other chain are in flight, of which there are eight
#: or more, and seven the most that can be waited for.
HOLD = "{wgmma.wait_group.sync.aligned 7;\nmov.b32 $0, $1;}"
#: How 8-bit scales are to be read; the others are floats of Triton's own.
SCALE_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}


@dataclass(frozen=True)
class Operands:
    """x [m, k] and a weight [n, k] in the fragment layout: codes, scale, zero, factor, values.

    Kernels take besides what the device can do, of `GPU_FEATURES`.
    """

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
    """Warps that divide the columns, columns of each per step, row tiles, whether loads run ahead, and how
    many steps are unrolled at most: the instruction cache holds only so many.
    """

    warps: int = 4
    columns: int = 512
    row_tiles: int = 1
    ahead: bool = False
    unroll: int = 16


@dataclass(frozen=True)
class Tile:
    """Row tiles of a chain and rows of x of a program, parts of the columns, warps, stages of the pipeline.

    With `half_sums`, the products of a step, 128 columns or a span, are summed in float16, and added up in
    float32. With two `chains`, the weights of one are decoded while those of the other are multiplied.
    `at_once` is how many programs a multiprocessor runs at a time: only those that do not fill all of them
    are split by columns then. If it is 0, all are.
    """

    row_tiles: int
    m: int
    split: int = 1
    warps: int = 4
    stages: int = 3
    half_sums: bool = False
    chains: int = 1
    at_once: int = 0

    @property
    def rows(self) -> int:
        """Rows of the weight that a program has."""
        return ROWS * self.row_tiles * self.chains


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
        "FIELDS": () if found else portable(scheme.format, bare=carried),
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


def _overlap(features: frozenset[str]) -> dict[str, bool]:
    """What lets a launch overlap the end of the kernel before it, on GPUs that can."""
    return {"PDL": True, "launch_pdl": True} if "overlap" in features else {"PDL": False}


def skinny_steps(tile: SkinnyTile, shape: Geometry) -> int:
    """Steps that a warp takes over the columns."""
    return -(-shape.spans * shape.span // (tile.warps * tile.columns))


def unrolled(tile: SkinnyTile, shape: Geometry) -> int:
    """How many of its steps are unrolled: all, or what leaves the fewest of the last loop without columns."""
    steps = skinny_steps(tile, shape)
    if steps <= tile.unroll:
        return steps
    return min(range(tile.unroll, tile.unroll // 2, -1), key=lambda part: -steps % part)


def skinny_columns(m: int, features: frozenset[str]) -> int:
    """Rows of x in a product of `fused-skinny`, of m there are: NVIDIA's tensor cores take 8, others 16."""
    return next(size for size in (8 if "ptx" in features else 16, 16, 32) if size >= m)


def skinny(op: Operands, tile: SkinnyTile, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """y [m, n] for m up to 32."""
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
        **constants(op.n, k, op.scheme, op.x.dtype, "ptx" in features),
        HAS_BIAS=op.bias is not None,
        W=tile.warps,
        NG=tile.columns // shape.dot,
        R=tile.row_tiles,
        BM=skinny_columns(m, features),
        AHEAD=tile.ahead,
        UNROLL=unrolled(tile, shape),
        num_warps=tile.warps,
        num_stages=1,
        **_overlap(features),
    )
    return y


def tiled(op: Operands, tile: Tile, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """y [m, n] for any m."""
    from quantkit.kernels.fused.tiled import combine, order_columns
    from quantkit.kernels.fused.tiled import tiled as kernel

    m, k = op.x.shape
    shape = op.shape
    assert shape.steps % tile.split == 0, (shape, tile)
    known = constants(op.n, k, op.scheme, op.x.dtype, "ptx" in features)
    ordered = _empty(op, m, shape.spans * shape.span)
    width, halves = ordered.shape[1], shape.group == 16
    _start(
        order_columns,
        (-(-width // 1024), m),
        op,
        op.x,
        ordered,
        m,
        k,
        width,
        HALVES=halves,
        BLOCK=1024,
        **_overlap(features),
    )
    y = _empty(op, m, op.n)
    bias = y if op.bias is None else op.bias
    tiles = -(-op.n // tile.rows) * -(-m // tile.m)
    full = whole_tiles(tile, tiles, op.x.device)
    rest = tiles - full
    sums = y if rest == 0 else _empty(op, tile.split, rest, tile.m, tile.rows, dtype=torch.float32)
    _start(
        kernel,
        (full + rest * tile.split,),
        op,
        ordered,
        *op.layout,
        bias,
        y,
        sums,
        m,
        op.n,
        full,
        **known,
        HAS_BIAS=op.bias is not None,
        RT=tile.row_tiles,
        BM=tile.m,
        CHAINS=tile.chains,
        SPLIT=tile.split if rest else 1,
        SOME_WHOLE=tile.at_once > 0,
        WAIT=tile.chains == 1 and not features.isdisjoint({"ptx", "wgmma"}),
        STAGES=tile.stages,
        RASTER=RASTER,
        HALF=half_unit(op.n, k, op.scheme) if tile.half_sums else None,
        HOLD=HOLD if tile.chains > 1 and "wgmma" in features else None,
        PDL="overlap" in features,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if rest:
        last = {name: known[name] for name in ("GROUPS", "SCALE", "HAS_FACTOR")}
        _, scale, _, factor, _ = op.layout
        part = max(1, min(tile.m, COMBINED // tile.rows))
        _start(
            combine,
            (rest, tile.m // part),
            op,
            sums,
            scale,
            factor,
            bias,
            y,
            m,
            op.n,
            full,
            **last,
            HAS_BIAS=op.bias is not None,
            BM=tile.m,
            ROWS=tile.rows,
            SPLIT=tile.split,
            RASTER=RASTER,
            PART=part,
            **_overlap(features),
        )
    return y


def whole_tiles(tile: Tile, tiles: int, device: torch.device) -> int:
    """How many of so many tiles are not split by columns: full rounds of all multiprocessors."""
    if tile.split == 1:
        return tiles
    gpu = gpu_of(device)
    at_once = tile.at_once * (HOPPER_PROCESSORS if gpu is None else gpu.multiprocessors)
    return tiles // at_once * at_once if at_once else 0


#: Row tiles of a program of `dequantize`, one per warp.
DENSE_WARPS = 4


def dequantize(op: Operands, start: int, stop: int, features: frozenset[str] = frozenset()) -> torch.Tensor:
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
        **constants(op.n, k, op.scheme, op.x.dtype, "ptx" in features),
        C=spans,
        W=DENSE_WARPS,
        num_warps=DENSE_WARPS,
    )
    return out
