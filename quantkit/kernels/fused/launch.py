"""From operands to a launch of a fused kernel: its constants, its tile, its grid."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any

import torch

from quantkit.kernels.fused.expressions import portable
from quantkit.kernels.fused.layout import ROWS, Geometry, geometry
from quantkit.kernels.fused.ptx import expression
from quantkit.kernels.launcher import Launch, overlap, power_of_two
from quantkit.kernels.problem import COLUMN_ORDERS, gpu_of
from quantkit.packing.schemes import Scheme

#: Multiprocessors of an H200, for which the rules were made.
HOPPER_PROCESSORS = 132
#: Tiles of rows of x that share the weights in the cache run next to each other, so many of them.
RASTER = 8
#: Shared memory of a program on GPUs of compute capability 9, in bytes.
HOPPER_SHARED = 227 << 10
#: The same for all but blocks of x in `hopper`: barriers, and outputs on their way to other threads.
HOPPER_SCRATCH = 8 << 10
#: Columns of a block of x in `hopper`.
HOPPER_COLUMNS = 128
#: Blocks of x that `hopper` has in shared memory at most.
HOPPER_STAGES = 8
#: Registers of a thread that multiplies in `hopper`, by rows of the weight, of which four warps have 64. With
#: the 24 of one that copies, a thread of each group has 504 together.
MULTIPLYING_REGISTERS = {128: 240, 192: 160}
#: Outputs that a program of `combine` adds up.
COMBINED = 512
#: Tokens of one launch and the next are so far apart: by 2^64 divided by the golden ratio.
TOKENS_APART = 0x9E3779B97F4A7C15
_LAUNCHES = count(1, 2)
#: Steps that a program has of a tile that it shares, at least.
LEAST_SHARE = 2
#: Numbers that a program which orders pairs has at a time: its pairs times the experts.
ORDERED = 8192
#: Outputs that a program of `weigh_pairs` has.
WEIGHED = 1024
#: PTX that waits until no more than the products of the other chain are in flight, of which there are eight
#: or more, and seven the most that can be waited for.
HOLD = "{wgmma.wait_group.sync.aligned 7;\nmov.b32 $0, $1;}"
#: How 8-bit scales are to be read; the others are floats of Triton's own.
SCALE_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}


@dataclass(frozen=True)
class Grouping:
    """Sizes of products of `count` pairs, each of a token and one of `experts` with so many matrices.

    A segment has up to `rows` pairs, and a token `slots` of them.
    """

    count: int
    experts: int
    rows: int
    matrices: int
    slots: int

    @property
    def segments(self) -> int:
        """No more segments than this have pairs."""
        return most_segments(self.count, self.experts, self.rows)


def most_segments(pairs: int, experts: int, rows: int) -> int:
    """How many segments of up to so many rows so many pairs can have."""
    return (pairs + min(experts, pairs) * (rows - 1)) // rows


@dataclass(frozen=True)
class Pairs:
    """Pairs of a token and an expert, for weights that lie one after the other, those of an expert together.

    `order` int32 [P] and `segments` int32 [P, 3] are those of `quantkit.kernels.fused.pairs`. Row p of y
    [P, matrices * n] is that of pair p, which has row p // slots of x.
    """

    order: torch.Tensor
    segments: torch.Tensor
    grouping: Grouping


@dataclass(frozen=True)
class Operands:
    """x [m, k] and a weight [n, k] in the fragment layout: codes, scale, zero, factor, values.

    Kernels take besides what the device can do, of `GPU_FEATURES`. With `pairs`, the parts of the layout have
    a first dimension more, that of matrices of experts. Columns of x may be `ordered` as `column_order` says.
    """

    x: torch.Tensor
    layout: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None
    scheme: Scheme
    n: int
    pairs: Pairs | None = None
    ordered: bool = False

    @property
    def grouping(self) -> Grouping | None:
        return None if self.pairs is None else self.pairs.grouping

    @property
    def grouped(self) -> tuple[torch.Tensor, ...]:
        """What kernels take of pairs, after their other arguments."""
        return () if self.pairs is None else (self.pairs.order, self.pairs.segments)

    @property
    def shape(self) -> Geometry:
        return geometry(self.n, self.x.shape[1], self.scheme, self.x.dtype)


@dataclass(frozen=True)
class SkinnyTile:
    """Warps that divide the columns, columns of each per step, row tiles, whether loads run ahead, and how
    many steps are unrolled at most: the instruction cache holds only so many.

    If only rows of x that are `present` are loaded, lanes of a warp that have none load nothing. If sums are
    added up `together` as soon as they have had their scales, they take fewer registers.
    """

    warps: int = 4
    columns: int = 512
    row_tiles: int = 1
    ahead: bool = False
    unroll: int = 16
    present: bool = False
    together: bool = False


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


@dataclass(frozen=True)
class HopperTile:
    """Rows of x and of the weight of a program, how early codes are loaded, and who has the last tiles.

    Codes are on their way while one unit is multiplied, or two. Where some programs would be idle at the end,
    all have a `share` of the steps of the tiles that are left.
    """

    m: int = 128
    rows: int = 128
    ahead: int = 1
    share: bool = False

    @property
    def stages(self) -> int:
        """Blocks of x in shared memory: as many as there is room for, up to what memory takes to answer."""
        return min(HOPPER_STAGES, (HOPPER_SHARED - HOPPER_SCRATCH) // (2 * self.m * HOPPER_COLUMNS))


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
        "TABLE": None if found is None else found.table,
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


def column_order(shape: Geometry) -> str:
    """The one of `COLUMN_ORDERS` that `tiled` has columns of x in."""
    return "fragments of 16" if shape.group == 16 else "fragments"


def ordering(name: str) -> dict[str, tuple[int, ...]]:
    """What kernels know of one of `COLUMN_ORDERS`."""
    shape, axes = COLUMN_ORDERS[name]
    return {"SHAPE": shape, "AXES": axes}


def _empty(op: Operands, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(size, dtype=dtype or op.x.dtype, device=op.x.device)


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


def _multiprocessors(device: torch.device) -> int:
    """Those of an H200 where a kernel is only compiled."""
    gpu = gpu_of(device)
    return HOPPER_PROCESSORS if gpu is None else gpu.multiprocessors


def _known_of(grouping: Grouping | None) -> dict[str, Any]:
    """What kernels know of pairs at compile time."""
    if grouping is None:
        return {"order": None, "segments": None, "MATRICES": 1}
    return {"MATRICES": grouping.matrices}


@lru_cache(maxsize=4096)
def _skinny(
    m: int,
    n: int,
    k: int,
    scheme: Scheme,
    dtype: torch.dtype,
    bias: bool,
    tile: SkinnyTile,
    features: frozenset[str],
    grouping: Grouping | None,
) -> Launch:
    from quantkit.kernels.fused.skinny import skinny as kernel

    shape = geometry(n, k, scheme, dtype)
    programs = -(-shape.row_tiles // tile.row_tiles)
    return Launch(
        kernel,
        # Segments of an expert run next to each other, and share its weights in the cache.
        (programs,) if grouping is None else (grouping.segments, programs * grouping.matrices),
        **constants(n, k, scheme, dtype, "ptx" in features),
        HAS_BIAS=bias,
        W=tile.warps,
        NG=tile.columns // shape.dot,
        R=tile.row_tiles,
        BM=skinny_columns(m, features),
        AHEAD=tile.ahead,
        UNROLL=unrolled(tile, shape),
        TOGETHER=tile.together,
        PRESENT=tile.present and m < 8 and "ptx" in features and grouping is None,
        **_known_of(grouping),
        SLOTS=1 if grouping is None else grouping.slots,
        num_warps=tile.warps,
        num_stages=1,
        **overlap(features),
    )


def skinny(op: Operands, tile: SkinnyTile, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """y [m, n] for m up to 32; with pairs, y [P, matrices * n] for segments of up to 32."""
    m, k = op.x.shape
    y = _outputs(op)
    m = m if op.grouping is None else op.grouping.rows
    # What is present is loaded 16 bytes at a time.
    if tile.present and op.x.data_ptr() % 16:
        tile = replace(tile, present=False)
    launch = _skinny(m, op.n, k, op.scheme, op.x.dtype, op.bias is not None, tile, features, op.grouping)
    launch(op.x, *op.layout, y if op.bias is None else op.bias, y, m, op.n, *op.grouped)
    return y


def _outputs(op: Operands) -> torch.Tensor:
    """Room for y."""
    if op.grouping is None:
        return _empty(op, op.x.shape[0], op.n)
    return _empty(op, op.grouping.count, op.grouping.matrices * op.n)


@dataclass(frozen=True)
class _Tiles:
    """The launches of `tiled`, and the sizes of what they write; `m` is what the kernel is told of x.

    `combine` adds up what `rest` tiles, those split by columns, have of each part; None where none is split.
    """

    order: Launch
    kernel: Launch
    combine: Launch | None
    m: int
    width: int
    full: int
    rest: int


def _order_launch(
    m: int, shape: Geometry, features: frozenset[str], grouping: Grouping | None = None
) -> Launch:
    from quantkit.kernels.fused.tiled import order_columns

    return Launch(
        order_columns,
        (m if grouping is None else grouping.count, -(-shape.spans * shape.span // 1024)),
        **({"order": None} if grouping is None else {}),
        SLOTS=1 if grouping is None else grouping.slots,
        **ordering(column_order(shape)),
        BLOCK=1024,
        **overlap(features),
    )


def _ordered(op: Operands, order: Launch, rows: int, columns: int) -> torch.Tensor:
    """x in the order of the fragments, [rows, columns] with zeros at the end, by `order` unless it is so."""
    if op.ordered:
        return op.x
    ordered = _empty(op, rows, columns)
    order(op.x, ordered, op.x.shape[1], columns, *op.grouped[:1])
    return ordered


@lru_cache(maxsize=4096)
def _tiled(
    m: int,
    n: int,
    k: int,
    scheme: Scheme,
    dtype: torch.dtype,
    bias: bool,
    tile: Tile,
    features: frozenset[str],
    multiprocessors: int,
    grouping: Grouping | None,
) -> _Tiles:
    from quantkit.kernels.fused.tiled import combine
    from quantkit.kernels.fused.tiled import tiled as kernel

    shape = geometry(n, k, scheme, dtype)
    assert shape.steps % tile.split == 0 and (grouping is None or tile.split == 1), (shape, tile)
    known = constants(n, k, scheme, dtype, "ptx" in features)
    width = shape.spans * shape.span
    order = _order_launch(m, shape, features, grouping)
    of_segment = 1 if grouping is None else -(-grouping.rows // tile.m)
    if grouping is not None:
        m = grouping.segments * of_segment * tile.m
    tiles = -(-n // tile.rows) * (1 if grouping is None else grouping.matrices) * -(-m // tile.m)
    full = whole_tiles(tile, tiles, multiprocessors)
    rest = tiles - full
    main = Launch(
        kernel,
        (full + rest * tile.split,),
        **known,
        HAS_BIAS=bias,
        RT=tile.row_tiles,
        BM=tile.m,
        CHAINS=tile.chains,
        SPLIT=tile.split if rest else 1,
        SOME_WHOLE=tile.at_once > 0,
        WAIT=tile.chains == 1 and not features.isdisjoint({"ptx", "wgmma"}),
        STAGES=tile.stages,
        RASTER=RASTER,
        HALF=half_unit(n, k, scheme) if tile.half_sums else None,
        HOLD=HOLD if tile.chains > 1 and "wgmma" in features else None,
        **_known_of(grouping),
        TILES_OF_SEGMENT=of_segment,
        PDL="overlap" in features,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if not rest:
        return _Tiles(order, main, None, m, width, full, rest)
    part = max(1, min(tile.m, COMBINED // tile.rows))
    last = Launch(
        combine,
        (rest, tile.m // part),
        **{name: known[name] for name in ("GROUPS", "SCALE", "HAS_FACTOR")},
        HAS_BIAS=bias,
        BM=tile.m,
        ROWS=tile.rows,
        SPLIT=tile.split,
        RASTER=RASTER,
        PART=part,
        **overlap(features),
    )
    return _Tiles(order, main, last, m, width, full, rest)


def tiled(op: Operands, tile: Tile, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """y [m, n] for any m; with pairs, y [P, matrices * n]."""
    m, k = op.x.shape
    run = _tiled(
        m,
        op.n,
        k,
        op.scheme,
        op.x.dtype,
        op.bias is not None,
        tile,
        features,
        _multiprocessors(op.x.device),
        op.grouping,
    )
    y = _outputs(op)
    ordered = _ordered(op, run.order, y.shape[0], run.width)
    bias = y if op.bias is None else op.bias
    sums = y if run.rest == 0 else _empty(op, tile.split, run.rest, tile.m, tile.rows, dtype=torch.float32)
    run.kernel(ordered, *op.layout, bias, y, sums, run.m, op.n, run.full, *op.grouped)
    if run.combine is not None:
        _, scale, _, factor, _ = op.layout
        run.combine(sums, scale, factor, bias, y, run.m, op.n, run.full)
    return y


@dataclass(frozen=True)
class _HopperTiles:
    """The launches of `hopper`, the layout of what is in shared memory, and who has which steps.

    `shares` are those of the function. Parts of tiles take `sums` numbers, with what programs say of them. A
    weight has so many `spans` and `blocks`.
    """

    order: Launch
    kernel: Launch
    columns: int
    layout: Any
    shares: tuple[int, int, int]
    spans: int
    blocks: int
    sums: int


@lru_cache(maxsize=4096)
def _hopper(
    m: int,
    n: int,
    k: int,
    scheme: Scheme,
    dtype: torch.dtype,
    bias: bool,
    tile: HopperTile,
    features: frozenset[str],
    multiprocessors: int,
) -> _HopperTiles:
    from triton.experimental.gluon.language import NVMMASharedLayout

    from quantkit.kernels.fused.hopper import hopper as kernel

    shape = geometry(n, k, scheme, dtype)
    known = hopper_constants(n, k, scheme, dtype)
    columns = shape.spans * shape.span
    tiles, steps = -(-n // tile.rows) * -(-m // tile.m), -(-columns // hopper_step(shape))
    full, share, width = tiles, 0, steps
    if tile.share:
        full, share, width = shares(tiles, steps, multiprocessors)
    programs = min(multiprocessors, tiles) if full == tiles else multiprocessors
    main = Launch(
        kernel,
        (programs,),
        **{name: known[name] for name in kernel.arg_names if name in known},
        HAS_BIAS=bias,
        ROWS=tile.rows,
        BM=tile.m,
        AHEAD=tile.ahead,
        STAGES=tile.stages,
        REGISTERS=MULTIPLYING_REGISTERS[tile.rows],
        RASTER=RASTER,
        num_warps=4,
        **overlap(features),
    )
    return _HopperTiles(
        _order_launch(m, shape, features),
        main,
        columns,
        NVMMASharedLayout(128, 16, 2),
        (full, share, width),
        shape.spans,
        shape.blocks,
        # A word of 64 bits for each group of warps.
        programs * (tile.rows * tile.m + tile.rows // 64 * 2) if 0 < share < steps else 0,
    )


def hopper_constants(n: int, k: int, scheme: Scheme, dtype: torch.dtype) -> dict[str, Any]:
    """What `hopper` knows of a weight at compile time, the same for every K."""
    shape, known = geometry(n, k, scheme, dtype), constants(n, k, scheme, dtype, True)
    # The scale of a whole row takes its place in the only block there is.
    known |= {"GROUPS": 1, "PER_BLOCK": HOPPER_COLUMNS} if shape.groups == 1 else {"GROUPS": 2}
    return {name: value for name, value in known.items() if name not in ("SPANS", "BLOCKS")}


def hopper_step(shape: Geometry) -> int:
    """Columns of a step of `hopper`: twice what it decodes at a time."""
    return 2 * max(HOPPER_COLUMNS, shape.span)


def shares(tiles: int, steps: int, programs: int) -> tuple[int, int, int]:
    """How many of `tiles` are done whole, and for the others the steps of a program and from tile to tile.

    Each of the latter is divided among as many programs, unless it is sooner to give all programs the same,
    some of which have parts of two tiles then.
    """
    others = tiles % programs
    if others == 0:
        return tiles, 0, steps
    apart = max(LEAST_SHARE, -(-steps // (programs // others)))
    even = max(LEAST_SHARE, -(-others * steps // programs))
    if apart <= even:
        return tiles - others, apart, -(-steps // apart) * apart
    return tiles - others, even, steps


def hopper(op: Operands, tile: HopperTile, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """y [m, n] for any m, on GPUs of compute capability 9."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    m, k = op.x.shape
    processors = _multiprocessors(op.x.device)
    run = _hopper(m, op.n, k, op.scheme, op.x.dtype, op.bias is not None, tile, features, processors)
    y = _outputs(op)
    ordered = _ordered(op, run.order, m, run.columns)
    x = TensorDescriptor(ordered, [m, run.columns], [run.columns, 1], [tile.m, HOPPER_COLUMNS], run.layout)
    bias = y if op.bias is None else op.bias
    sums = _empty(op, run.sums, dtype=torch.float32) if run.sums else y
    run.kernel(x, *op.layout, bias, y, sums, m, op.n, *run.shares, run.spans, run.blocks, launch_token())
    return y


def launch_token() -> int:
    """A number that no other launch of this process has, and that no memory has but by chance.

    By it programs of a launch tell each other, in memory that nobody has cleared, that something is there. It
    is odd, as `Launch` looks kernels up by whether integers are multiples of 16.
    """
    return (next(_LAUNCHES) * TOKENS_APART) % (1 << 63) | 1 << 62


@dataclass(frozen=True)
class _Order:
    """The launches of `order_pairs`: `count` for each chunk of pairs, None where there is one."""

    count: Launch | None
    place: Launch
    chunks: int
    buckets: int


@lru_cache(maxsize=4096)
def _order(pairs: int, experts: int, rows: int, dtype: torch.dtype, features: frozenset[str]) -> _Order:
    """`dtype` is that of the index, which kernels are compiled for."""
    from quantkit.kernels.fused.pairs import count_pairs
    from quantkit.kernels.fused.pairs import order_pairs as kernel

    buckets = power_of_two(experts + 1)
    chunk = min(max(ORDERED // buckets, 16), power_of_two(max(pairs, 16)))
    chunks = -(-pairs // chunk)
    known = {"EXPERTS": experts, "BUCKETS": buckets, "CHUNK": chunk, **overlap(features)}
    if chunks == 1:
        return _Order(None, Launch(kernel, (1,), counts=None, ROWS=rows, **known), chunks, buckets)
    place = Launch(kernel, (chunks,), ROWS=rows, **known)
    return _Order(Launch(count_pairs, (chunks,), **known), place, chunks, buckets)


def order_pairs(
    index: torch.Tensor, experts: int, rows: int, features: frozenset[str] = frozenset()
) -> tuple[torch.Tensor, torch.Tensor]:
    """`order` and `segments` of `Pairs` for the chosen experts [P], contiguous integers, P >= 1."""
    pairs = index.shape[0]
    run = _order(pairs, experts, rows, index.dtype, features)

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=index.device)

    order, segments = empty(pairs), empty(pairs, 3)
    if run.count is None:
        run.place(index, order, segments, pairs)
    else:
        counts = empty(run.chunks, run.buckets)
        run.count(index, counts, pairs)
        run.place(index, order, segments, pairs, counts.cumsum(0, dtype=torch.int32))
    return order, segments


@lru_cache(maxsize=1024)
def _weigh(
    tokens: int,
    slots: int,
    n: int,
    experts: int,
    dtypes: tuple[torch.dtype, ...],
    features: frozenset[str],
) -> Launch:
    """`dtypes` are those of the tensors, which the kernel is compiled for."""
    from quantkit.kernels.fused.pairs import weigh_pairs as kernel

    grid = (tokens, -(-n // WEIGHED))
    return Launch(kernel, grid, EXPERTS=experts, SLOTS=slots, BLOCK=WEIGHED, **overlap(features))


def weigh_pairs(
    y: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    features: frozenset[str] = frozenset(),
) -> torch.Tensor:
    """The sums over slots of y [T * slots, n] times `weights` [T, slots], in y's dtype, added up in float32.

    Rows of y whose `index` [T, slots] is no expert's are not read. All are contiguous.
    """
    out = y.new_empty(index.shape[0], y.shape[1])
    dtypes = (y.dtype, index.dtype, weights.dtype)
    launch = _weigh(*index.shape, y.shape[1], experts, dtypes, features)
    launch(y, index, weights, out, y.shape[1])
    return out


def whole_tiles(tile: Tile, tiles: int, multiprocessors: int) -> int:
    """How many of so many tiles are not split by columns: full rounds of all multiprocessors."""
    if tile.split == 1:
        return tiles
    at_once = tile.at_once * multiprocessors
    return tiles // at_once * at_once if at_once else 0


#: Row tiles of a program of `dequantize`, one per warp.
DENSE_WARPS = 4


@lru_cache(maxsize=4096)
def _dequantize(
    rows: int, n: int, k: int, scheme: Scheme, dtype: torch.dtype, features: frozenset[str]
) -> Launch:
    from quantkit.kernels.fused.dense import dequantize as kernel

    shape = geometry(n, k, scheme, dtype)
    spans = max(128 // shape.span, 1)
    return Launch(
        kernel,
        (-(-rows // (ROWS * DENSE_WARPS)), -(-shape.spans // spans)),
        **constants(n, k, scheme, dtype, "ptx" in features),
        C=spans,
        W=DENSE_WARPS,
        num_warps=DENSE_WARPS,
    )


def dequantize(op: Operands, start: int, stop: int, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """Rows `start` (a multiple of 16) to `stop` of the weight in x's dtype, [stop - start, k]."""
    k = op.x.shape[1]
    out = _empty(op, stop - start, k)
    launch = _dequantize(stop - start, op.n, k, op.scheme, op.x.dtype, features)
    launch(*op.layout, out, start // ROWS, stop)
    return out
