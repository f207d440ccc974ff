"""The tiles of the fused kernels: the one that rules give, those that may be, those worth measuring.

The rules were made on one H200 (docs/kernels.md). Other GPUs have them in proportion to their
multiprocessors, and within their shared memory.
"""

from collections.abc import Mapping
from dataclasses import replace

from quantkit.kernels.fused.launch import (
    HOPPER_PROCESSORS,
    HOPPER_SHARED,
    HopperTile,
    SkinnyTile,
    Tile,
    hopper_step,
    shares,
    skinny_columns,
    skinny_steps,
)
from quantkit.kernels.fused.layout import ROWS, Geometry, geometry
from quantkit.kernels.problem import GPU_FEATURES, Problem, Tiling

#: Weights with so many rows or fewer leave processors of an H200 idle unless tiles are split by columns.
FEW_ROWS = 8192
#: Rows with more columns than this take many steps, each of which waits for its loads.
LONG_ROWS = 8192
#: And with more than this, so many that unrolled they would not fit the instruction cache.
VERY_LONG_ROWS = 16384
#: Pairs of a segment: all that `fused-skinny` takes, and the most there are.
SKINNY_SEGMENT, TILED_SEGMENT = 8, 128
#: Rows of x and of the weight that a tile of `fused-hopper` may have, with its microseconds for 256 columns
#: of int4 on an H200, and those of what surrounds all steps.
HOPPER_TILES: Mapping[tuple[int, int], float] = {
    (64, 128): 1.3,
    (128, 128): 1.5,
    (128, 192): 2.2,
    (256, 128): 2.5,
}
HOPPER_AROUND = 3.0
#: Microseconds, for each row of x of a tile of 128 rows of the weight, that sums of its parts take to be
#: written and added up.
HOPPER_SHARES = 0.033
#: Bytes of x that stay in the cache. Programs that share tiles are at different steps, and read x from there.
HOPPER_CACHED = 32 << 20
#: Registers of a thread that codes in flight, or sums, may take before ptxas would spill.
CODE_REGISTERS, SUM_REGISTERS = 64, 128

#: What each field of a tile may be: what the kernels were tried with. Adding a candidate is adding a number.
SKINNY_VALUES: Mapping[str, tuple[int, ...]] = {
    "warps": (2, 4, 8),
    "columns": (128, 256, 512, 1024),
    "row_tiles": (1, 2),
    "ahead": (False, True),
    "unroll": (4, 8, 16),
    "present": (False, True),
    "together": (False, True),
}
HOPPER_VALUES: Mapping[str, tuple[int, ...]] = {
    "m": (64, 128, 256),
    "rows": (128, 192),
    "ahead": (1, 2),
    "share": (False, True),
}
TILED_VALUES: Mapping[str, tuple[int, ...]] = {
    "row_tiles": (4, 8),
    "m": (16, 32, 64, 128, 256),
    "split": (1, 2, 4, 8),
    "warps": (4, 8),
    "stages": (2, 3, 4, 5),
    "half_sums": (False, True),
    "chains": (1, 2),
    "at_once": (0, 1, 2),
}
#: GPUs whose tensor cores, in GeForce products, sum float16 twice as fast in float16 as in float32.
HALF_RATE = ((8, 6), (8, 9), (12, 0))


def has_few_rows(n: int, multiprocessors: int = HOPPER_PROCESSORS) -> bool:
    """Whether a weight of n rows has too few for so many multiprocessors."""
    return n * HOPPER_PROCESSORS <= FEW_ROWS * multiprocessors


def skinny_tile(shape: Geometry, m: int, multiprocessors: int = HOPPER_PROCESSORS) -> SkinnyTile:
    """The tile for m rows of x: as many bytes in flight as the registers hold."""
    if shape.k > VERY_LONG_ROWS:
        return SkinnyTile(columns=max(256, shape.span), unroll=4)
    whole = shape.dot == 128 and shape.group >= 128
    long = has_few_rows(shape.n, multiprocessors) and shape.k > LONG_ROWS
    columns = 512 if m <= 8 and whole and not long else 256
    least = max(shape.span, 128)
    while columns > least and 4 * columns > shape.spans * shape.span:
        columns //= 2
    ahead = shape.bits <= 4 and whole and (m > 8 or shape.bits == 4 or long)
    return SkinnyTile(warps=8 if long and not whole else 4, columns=max(columns, least), ahead=ahead)


def tiled_tile(
    shape: Geometry,
    m: int,
    shared: int = HOPPER_SHARED,
    multiprocessors: int = HOPPER_PROCESSORS,
    features: frozenset[str] = GPU_FEATURES,
) -> Tile:
    """The tile for m rows of x on a GPU with so many bytes of shared memory for a program.

    Weights with few rows are split by columns to keep all processors busy.
    """
    few = has_few_rows(shape.n, multiprocessors)
    if m <= 64:
        columns = 16 if m <= 16 else 32 if m <= 32 else 64
        tile, most = Tile(4 if few else 8, columns, stages=4), 2 * multiprocessors
    elif "wgmma" in features and shape.span <= 128:
        return _two_chains(shape, m, shared, multiprocessors, features)
    elif shape.span > 128 and not few:
        tile, most = Tile(8, 128, warps=8), 0
    else:
        tile, most = Tile(4, 128), multiprocessors
    tile = _in_memory(tile, shape, shared, features)
    split = (replace(tile, split=parts) for parts in (4, 2, 1) if shape.steps % parts == 0)
    return next(one for one in split if one.split == 1 or programs(one, shape, m) <= most)


def _two_chains(shape: Geometry, m: int, shared: int, multiprocessors: int, features: frozenset[str]) -> Tile:
    """The largest of two tiles, and the fewest parts of the columns, that give most processors a program."""
    tiles = [Tile(warps, 128, 1, warps, 3, chains=2) for warps in (8, 4)]
    tiles = [_in_memory(tile, shape, shared, features) for tile in tiles]
    parts = [parts for parts in (1, 2, 4) if shape.steps % parts == 0]
    found = [replace(tile, split=split) for split in parts for tile in tiles]
    busy = (tile for tile in found if 4 * programs(tile, shape, m) >= 3 * multiprocessors)
    return next(busy, found[-1])


def _in_memory(tile: Tile, shape: Geometry, shared: int, features: frozenset[str]) -> Tile:
    """`tile` with fewer stages, and then rows of x, until it fits; of 4 row tiles where those do not help."""
    if shared_memory(replace(tile, stages=2, m=16), shape, features) > shared:
        tile = replace(tile, row_tiles=4)
    while shared_memory(tile, shape, features) > shared and tile.stages > 2:
        tile = replace(tile, stages=tile.stages - 1)
    while shared_memory(tile, shape, features) > shared and tile.m > 16:
        tile = replace(tile, m=tile.m // 2)
    return tile


def shared_memory(tile: Tile, shape: Geometry, features: frozenset[str] = GPU_FEATURES) -> int:
    """Bytes of shared memory that a program of `fused-tiled` takes at most: its operands, in every stage.

    Fragments are in the order of NVIDIA's tensor cores. For others the weights of a step may pass through
    shared memory once they are decoded, while the last stage is in registers.
    """
    columns = max(shape.span, 128)
    weights = tile.rows * columns
    scales = weights // shape.group * 4 * (2 if shape.group < columns else 1)
    stage = 2 * columns * tile.m + weights * shape.bits // 8 + scales + 1024
    return stage * tile.stages if "ptx" in features else stage * (tile.stages - 1) + 2 * weights


def programs(tile: Tile, shape: Geometry, m: int) -> int:
    """Programs of a launch of `fused-tiled` for m rows of x."""
    return -(-shape.n // tile.rows) * -(-m // tile.m) * tile.split


def segment_rows(pairs: int, experts: int) -> int:
    """How many pairs of one expert a program multiplies with at most: more than most experts have.

    Up to `SKINNY_SEGMENT` it is `fused-skinny` that does.
    """
    usual = -(-3 * pairs // (2 * experts))
    return min(max(1 << (usual - 1).bit_length(), SKINNY_SEGMENT), TILED_SEGMENT)


def _shape(problem: Problem) -> Geometry:
    return geometry(problem.n, problem.k, problem.scheme, problem.dtype)


def processors(problem: Problem) -> int:
    """Multiprocessors of the problem's GPU; those of an H200 where only the rules are asked."""
    return HOPPER_PROCESSORS if problem.gpu is None else problem.gpu.multiprocessors


def _shared(problem: Problem) -> int:
    return HOPPER_SHARED if problem.gpu is None else problem.gpu.shared_memory


def hopper_tile(shape: Geometry, m: int, multiprocessors: int = HOPPER_PROCESSORS) -> HopperTile:
    """The tile for m rows of x that should be fastest, by what each was measured to take for int4."""
    columns = hopper_step(shape)
    steps = -(-shape.k // columns)

    def time(tile: HopperTile) -> float:
        tiles = -(-shape.n // tile.rows) * -(-m // tile.m)
        mine, sums = -(-tiles // multiprocessors) * steps, 0.0
        if tile.share:
            full, share, _ = shares(tiles, steps, multiprocessors)
            mine = full // multiprocessors * steps + share
            sums = HOPPER_SHARES * tile.m * tile.rows / 128 if share else 0.0
        return mine * HOPPER_TILES[tile.m, tile.rows] * columns / 256 + HOPPER_AROUND + sums

    # Where registers are left, all formats but int4 gain from codes that are loaded two units ahead.
    tiles = [HopperTile(x, rows, 1 if x * rows > 128 * 128 else 2) for x, rows in _in_registers(shape)]
    able = (False, True) if 2 * m * shape.k <= HOPPER_CACHED else (False,)
    return min((replace(tile, share=share) for tile in tiles for share in able), key=time)


def _in_registers(shape: Geometry) -> list[tuple[int, int]]:
    """Rows of x and of the weight of tiles of `fused-hopper` whose sums leave registers for weights."""
    # Seven bits of 256 columns take many, and of 240 registers 192 rows leave 160.
    most = 128 if shape.span > 128 and shape.bits > 5 else 256
    three_groups = shape.span <= 128 and (shape.groups == 1 or shape.group >= 64)
    return [(x, rows) for x, rows in HOPPER_TILES if x <= most and (rows == 128 or three_groups)]


def _unknown_value(tile: SkinnyTile | Tile | HopperTile, values: Mapping[str, tuple[int, ...]]) -> str | None:
    for field, known in values.items():
        value = getattr(tile, field)
        if value not in known:
            return f"{field} is one of {', '.join(map(str, known))}, not {value}"
    return None


def _skinny_why_not(problem: Problem, tile: SkinnyTile) -> str | None:
    shape = _shape(problem)
    if (reason := _unknown_value(tile, SKINNY_VALUES)) is not None:
        return reason
    if tile.columns % max(shape.span, 128):
        return f"columns must be a multiple of {shape.span} for {shape.bits} bits, {tile.columns} is none"
    return None


def _skinny_loses(problem: Problem, tile: SkinnyTile) -> str | None:
    shape = _shape(problem)
    codes = tile.columns * ROWS * tile.row_tiles * shape.bits // (32 * 32) * (2 if tile.ahead else 1)
    columns_of_x = skinny_columns(problem.m, problem.features)
    sums = tile.columns // shape.dot * tile.row_tiles * ROWS * columns_of_x // 32
    least = SKINNY_VALUES["warps"][0] * max(shape.span, 128)
    whole = tile.unroll < SKINNY_VALUES["unroll"][-1] and skinny_steps(tile, shape) <= tile.unroll
    idle = tile.warps * tile.columns > max(shape.spans * shape.span, least)
    reasons = (
        (tile.together and (shape.on_weights or shape.groups == 1), "no scales multiply sums of a step"),
        (tile.row_tiles > 1 and problem.m <= 8, "more row tiles never won up to M=8"),
        (whole, "all steps are unrolled as it is"),
        (codes > CODE_REGISTERS, f"codes in flight would take {codes} registers"),
        (sums > SUM_REGISTERS, f"sums would take {sums} registers"),
        (idle, "some warps would have no columns"),
    )
    return next((reason for loses, reason in reasons if loses), None)


def _tiled_why_not(problem: Problem, tile: Tile) -> str | None:
    if (reason := _unknown_value(tile, TILED_VALUES)) is not None:
        return reason
    if tile.half_sums and not problem.half_sums:
        return "torch.backends.cuda.matmul.allow_fp16_accumulation is not set, or x is not float16"
    shape = _shape(problem)
    if tile.chains > 1 and shape.span > 128:
        return f"two chains take spans of up to 128 columns, {shape.bits} bits have {shape.span}"
    if shape.steps % tile.split:
        return f"{shape.steps} steps are not divided by a split of {tile.split}"
    return None


def _hopper_why_not(problem: Problem, tile: HopperTile) -> str | None:
    if (reason := _unknown_value(tile, HOPPER_VALUES)) is not None:
        return reason
    if (tile.m, tile.rows) not in HOPPER_TILES:
        return f"{tile.rows} rows of the weight are for 128 rows of x, not for {tile.m}"
    return None


def _hopper_loses(problem: Problem, tile: HopperTile) -> str | None:
    reasons = (
        (problem.m <= 32, "it multiplies 64 rows of x at least"),
        (tile.m > max(64, 2 * problem.m), f"{tile.m} rows do not suit {problem.m} rows of x"),
    )
    return next((reason for loses, reason in reasons if loses), None)


def _tiled_loses(problem: Problem, tile: Tile) -> str | None:
    shape, m, split = _shape(problem), problem.m, tile.split > 1
    sums, shared = tile.rows * tile.m // (32 * tile.warps), shared_memory(tile, shape, problem.features)
    tiles, at_once = programs(tile, shape, m) // tile.split, tile.at_once * processors(problem)
    reasons = (
        (tile.m > max(16, 2 * m) or 4 * tile.m < min(m, 256), f"{tile.m} rows do not suit {m} rows of x"),
        (sums > SUM_REGISTERS, f"sums would take {sums} registers"),
        # The bound is above what Triton takes.
        (shared > _shared(problem) * 5 // 4, f"stages would take {shared} bytes of shared memory"),
        (tile.at_once and not split, "no columns are split"),
        (at_once and (tiles < at_once or tiles % at_once == 0), "no round is partly filled"),
        (split and not at_once and tiles * tile.split > 8 * processors(problem), "there are programs enough"),
        (tile.chains > 1 and "wgmma" not in problem.features, "products are waited for at once"),
        (tile.chains > 1 and tile.half_sums, "sums in float16 are added up at once"),
        (tile.chains > 1 and tile.row_tiles < tile.warps, "a chain has too few rows for its warps"),
    )
    return next((reason for loses, reason in reasons if loses), None)


SKINNY = Tiling(
    SkinnyTile,
    SKINNY_VALUES,
    lambda problem: skinny_tile(_shape(problem), problem.m, processors(problem)),
    _skinny_why_not,
    _skinny_loses,
)


def _tiled_rule(problem: Problem) -> Tile:
    tile = tiled_tile(_shape(problem), problem.m, _shared(problem), processors(problem), problem.features)
    # AMD has a 12.0 too.
    fast = "ptx" in problem.features and problem.gpu is not None and problem.gpu.capability in HALF_RATE
    return replace(tile, half_sums=problem.half_sums and fast)


TILED = Tiling(
    Tile,
    TILED_VALUES,
    _tiled_rule,
    _tiled_why_not,
    _tiled_loses,
)
HOPPER = Tiling(
    HopperTile,
    HOPPER_VALUES,
    lambda problem: hopper_tile(_shape(problem), problem.m, processors(problem)),
    _hopper_why_not,
    _hopper_loses,
)
