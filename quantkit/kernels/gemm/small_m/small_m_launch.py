"""`fused-small-m`: its tiles, the rules for them, those worth measuring, and its launches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from quantkit.kernels.gemm.bound import BIAS, SUMS, Bound, X, Y
from quantkit.kernels.gemm.gpu_limits import processors, program_memory
from quantkit.kernels.gemm.operands import (
    Grouping,
    Operands,
    bound,
    constants,
    known_of,
    no_pairs,
    shape_of,
    table_bytes,
    unknown_value,
    with_shared_table,
)
from quantkit.kernels.jit.launcher import Launch, overlap
from quantkit.kernels.layouts.fragment_layout import ROWS, Geometry, geometry, value_sizes
from quantkit.kernels.layouts.shared_memory import power_of_two, undeclared_bytes
from quantkit.kernels.problem import Problem, Tiling
from quantkit.packing.schemes import Scheme

#: The most rows of x.
MOST_ROWS = 32
#: The fewest rows of x with which y is gated. With 16 a layer of Llama-3 8B takes 78.0 us instead of 80.0
#: (H200, int4); 5 to 8 were not tried.
LEAST_GATED = 9
#: Warps that a multiprocessor has, in one program or two: each of their threads may have 128 registers.
RESIDENT_WARPS = 16
#: Rows of x that a program adds up parts of, for one row tile.
ADDED = 8
#: Of experts: the most columns of a part, and rounds of large programs up to which those are the faster ones.
PART_COLUMNS, FEW_ROUNDS = 4096, 2
#: Up to so many columns of a part there is code for all; more takes longer to come than a loop. Twice as many
#: of those whose codes have more than so many bits in a unit: a loop has no registers for two such units.
UNROLLED, LOOP_BITS = 1024, 1024
#: What it takes a program to begin, and a launch to add parts up, in units of a warp.
BEGIN_UNITS, SUMS_UNITS = 4, 3
#: How long a program takes alone, of two that a multiprocessor has room for. H100, 37888 x 3584, 8 rows of x:
#: int3 takes 24.8 us in programs of 8 warps, of which some are alone, 29.9 in programs of 16.
LONE = 2 / 3
#: What each field of a tile may be: what the kernel was tried with. Adding a candidate is adding a number.
VALUES: Mapping[str, tuple[int, ...]] = {
    "warps": (4, 8, 16),
    "parts": (1, 2, 4, 7, 8),
    "ahead": (2, 4),
    "wgmma": (False, True),
}


@dataclass(frozen=True)
class SmallMTile:
    """Warps of a program, parts that the columns are divided into, and units that codes are loaded ahead.

    With `wgmma` four warps multiply at once, which decode what comes next meanwhile.
    """

    warps: int = 16
    parts: int = 1
    ahead: int = 2
    wgmma: bool = False


#: The tiles that rules choose among: fewer parts first, and larger programs.
_RULED = [SmallMTile(warps, parts) for parts in VALUES["parts"] for warps in (16, 8)]
#: From so many rows of x on rules have warps multiply together. H100, 4096 x 4096, 16 rows: int4 6.0 us, not
#: 6.7.
LEAST_WGMMA = 9


def rows_of_x(m: int) -> int:
    """Rows of x in a product, of m there are."""
    return next(size for size in (8, 16, MOST_ROWS) if size >= m)


def root_bytes(m: int) -> int:
    """Bytes of shared memory that roots of rows of x take, where a norm is ended."""
    return 4 * rows_of_x(m)


def is_wide(shape: Geometry) -> bool:
    """Whether a loop has no registers for the codes of two units: those of int5 and int7."""
    return shape.unit * shape.bits > LOOP_BITS


def is_loop(tile: SmallMTile, shape: Geometry) -> bool:
    """Whether the products of a part are a loop."""
    columns = -(-shape.steps // tile.parts) * shape.unit
    return columns > (2 * UNROLLED if is_wide(shape) else UNROLLED)


def spills(tile: SmallMTile, shape: Geometry) -> bool:
    """Whether warps that multiply together lack registers for codes: those of int7 in loops, of int5 where
    these are of a part.
    """
    return tile.wgmma and is_wide(shape) and is_loop(tile, shape) and (tile.parts > 1 or shape.bits > 6)


def units(tile: SmallMTile, shape: Geometry) -> tuple[int, int]:
    """Units of a part, and those of a chunk of x: of 512 columns, or 256 where that makes parts shorter.

    Loops of `wgmma` with two units ahead have 256 columns as well, where these are two units, so that what is
    loaded next is in its place: with 32 rows of x registers are spilled otherwise.
    """
    found, unit = -(-shape.steps // tile.parts), shape.unit
    is_short = tile.wgmma and tile.ahead == 2 and unit == 128 and is_loop(tile, shape)
    chunk = 512 // unit if found * unit % 512 == 0 and not is_short else 256 // unit
    return -(-found // chunk) * chunk, chunk


def is_even(tile: SmallMTile, shape: Geometry) -> bool:
    """Whether all parts have as many units, and whole blocks of scales."""
    count, _ = units(tile, shape)
    return (
        tile.parts * count == shape.steps
        and count * shape.unit % shape.per_block == 0
        and shape.k == shape.spans * shape.span
        and shape.blocks * shape.per_block >= shape.k
    )


def blocks_held(tile: SmallMTile, shape: Geometry) -> int:
    """Blocks of scales that a part may have a column of."""
    columns = units(tile, shape)[0] * shape.unit
    return -(-columns // shape.per_block) + (1 if tile.parts > 1 and columns % shape.per_block else 0)


def value_bytes(tile: SmallMTile, shape: Geometry, scheme: Scheme) -> int:
    """Bytes of the scales and zero-points of a program in shared memory."""
    return (
        tile.warps
        * ROWS
        * shape.in_block
        * power_of_two(blocks_held(tile, shape))
        * sum(value_sizes(shape, scheme))
    )


@dataclass(frozen=True)
class Room:
    """Shared memory of a program: chunks besides those of x, whether scales are there too, the bytes of all.

    The spare chunks make up for the bytes of a table, which Triton does not count.
    """

    spare: int
    holds: bool
    nbytes: int


def room(
    tile: SmallMTile,
    shape: Geometry,
    m: int,
    scheme: Scheme,
    memory: int,
    table: int = 0,
    roots: int = 0,
) -> Room:
    """That of a program, of the `memory` of its GPU, beside so many bytes of a table and of roots.

    Scales are held where products are a loop: loads of them would be waited for with those of codes.
    """
    count, chunk = units(tile, shape)
    size, mine = 2 * chunk * shape.unit * rows_of_x(m), count // chunk

    def found(held: int) -> Room:
        spare = -(-undeclared_bytes(mine * size + held + roots, table) // size)
        return Room(spare, held > 0, (mine + spare) * size + held)

    held = value_bytes(tile, shape, scheme) if is_loop(tile, shape) else 0
    able = found(held)
    return able if able.nbytes + table + roots <= _share(tile, memory) else found(0)


def _share(tile: SmallMTile, memory: int) -> int:
    """Bytes of shared memory of a program."""
    return memory * tile.warps // RESIDENT_WARPS


def row_tiles(
    tile: SmallMTile, shape: Geometry, multiprocessors: int, gated: bool = False, weights: int = 1
) -> int:
    """Row tiles of a program: as few as it takes for all programs of so many weights to run at once, up to
    one for each warp; if they are `gated`, pairs.
    """
    at_once, step = multiprocessors * (RESIDENT_WARPS // tile.warps), 2 if gated else 1

    def programs(count: int) -> int:
        return -(-shape.row_tiles // count) * tile.parts * weights

    counts = range(step, tile.warps, step)
    return next((count for count in counts if programs(count) <= at_once), tile.warps)


def rounds(tile: SmallMTile, shape: Geometry, multiprocessors: int) -> float:
    """How many times as many programs there are as run at once."""
    programs = -(-shape.row_tiles // row_tiles(tile, shape, multiprocessors)) * tile.parts
    return programs * tile.warps / (multiprocessors * RESIDENT_WARPS)


def _time(tile: SmallMTile, shape: Geometry, multiprocessors: int, lone: float = LONE) -> tuple[float, float]:
    """How long programs take, in units of a warp, and what tells tiles apart that take as long.

    One of two takes `lone` of it where there is no other on its multiprocessor in the last round.

    It is how many warps are idle; but of e2m1 with scales that are bytes two programs with idle warps take up
    to 1.3 times as long as one on an H100, for a reason that is not known.
    """
    mine = row_tiles(tile, shape, multiprocessors)
    done, last = divmod(rounds(tile, shape, multiprocessors), 1.0)
    is_lone = done > 0 and last <= 0.5 and tile.warps < RESIDENT_WARPS
    rest = math.ceil(last) * (lone if is_lone else 1.0)
    length = (done + rest) * (units(tile, shape)[0] + BEGIN_UNITS)
    length += SUMS_UNITS if tile.parts > 1 else 0
    return length, -tile.warps if shape.scale_kind and shape.bits == 4 else tile.warps - mine


def _rule(problem: Problem) -> SmallMTile:
    shape, count = shape_of(problem), processors(problem)
    return min(_able(problem) or _RULED[-1:], key=lambda tile: _time(tile, shape, count))


def _able(problem: Problem) -> list[SmallMTile]:
    """Those of the rules that can run a problem."""
    wgmma = problem.m >= LEAST_WGMMA and "wgmma" in problem.features
    ruled = [replace(tile, wgmma=wgmma) for tile in _RULED]
    able = [tile for tile in ruled if _why_not(problem, tile) is None]
    return [tile for tile in able if not spills(tile, shape_of(problem))] or able


def experts_tile(problem: Problem, weights: int) -> SmallMTile:
    """The tile for so many weights at once, each that of `problem`, of which some tile fits.

    Where programs run one after the other, some begin while others end: parts only cost then, and from a
    third round on so do large programs. H100, int4: two parts of gate and up take 1.02 to 1.27 of the time of
    one, and 8 warps 0.93 to 0.99 of that of 16 from a third round on.
    """
    every, count = replace(problem, n=problem.n * weights), processors(problem)
    shape, able = shape_of(every), _able(every)
    tiles = [tile for tile in able if units(tile, shape)[0] * shape.unit <= PART_COLUMNS] or able
    best = min(tiles, key=lambda tile: _time(tile, shape, count, lone=1.0))
    if rounds(best, shape, count) > 1:
        fewest = [tile for tile in tiles if tile.parts == tiles[0].parts]
        best = fewest[0 if rounds(fewest[0], shape, count) <= FEW_ROUNDS else -1]
    return best


def why_no_gate(problem: Problem, tile: SmallMTile) -> str | None:
    """Why y cannot be gated, for which a program has whole sums of pairs of row tiles."""
    if tile.parts > 1:
        return "sums of parts are added up in a launch of their own"
    if problem.m < LEAST_GATED:
        return f"it was not seen to be faster than a launch of its own below M={LEAST_GATED}"
    return no_pairs(problem)


def why_no_norm(problem: Problem, tile: SmallMTile, part: str) -> str | None:
    """Why a part of a norm cannot be done: what adds up parts of sums begins it, and x is copied as it is."""
    if part == "whole":
        return "it copies x as it is"
    if part == "begin":
        return None if tile.parts > 1 else "it writes y as it is where no parts are added up"
    return _too_much(problem, tile, root_bytes(problem.m))


def why_no_tile(problem: Problem) -> str | None:
    """Why no tile fits the GPU."""
    return _why_not(problem, _rule(problem))


def _why_not(problem: Problem, tile: SmallMTile) -> str | None:
    shape = shape_of(problem)
    if (reason := unknown_value(tile, VALUES)) is not None:
        return reason
    if tile.wgmma and "wgmma" not in problem.features:
        return "`wgmma` is for compute capability 9"
    if (reason := _too_much(problem, tile)) is not None:
        return reason
    if tile.parts > shape.steps:
        return f"there are no {tile.parts} parts of {shape.steps} units of columns"
    return None


def _too_much(problem: Problem, tile: SmallMTile, roots: int = 0) -> str | None:
    """Why a program cannot have x in shared memory, besides so many bytes of roots."""
    table, memory = table_bytes(problem.scheme, problem.dtype), program_memory(problem)
    x = room(tile, shape_of(problem), problem.m, problem.scheme, memory, table, roots).nbytes
    needed, most = x + table + roots, _share(tile, memory)
    if needed <= most:
        return None
    what = "x and the values of codes take" if table else "x takes"
    return f"{what} {needed} bytes of shared memory in {tile.parts} parts, of {most} that there are"


def _loses(problem: Problem, tile: SmallMTile) -> str | None:
    shape, count = shape_of(problem), processors(problem)
    busy = row_tiles(tile, shape, count) * RESIDENT_WARPS // tile.warps
    more = row_tiles(SmallMTile(tile.warps, 1), shape, count) * RESIDENT_WARPS // tile.warps
    reasons = (
        (2 * busy < RESIDENT_WARPS and tile.parts < 8, "more parts would keep more warps busy"),
        (tile.parts > 1 and more == RESIDENT_WARPS, "without parts all warps are busy"),
    )
    return next((reason for loses, reason in reasons if loses), None)


TILING = Tiling(SmallMTile, VALUES, _rule, _why_not, _loses)


@lru_cache(maxsize=4096)
def _launches(
    m: int,
    n: int,
    k: int,
    scheme: Scheme,
    dtype: torch.dtype,
    bias: bool,
    tile: SmallMTile,
    features: frozenset[str],
    multiprocessors: int,
    memory: int,
    gate: str = "",
    begins: float | None = None,
    ends: float | None = None,
    grouping: Grouping | None = None,
) -> tuple[Launch, Launch | None, int]:
    """The kernel's, that which adds parts up, and the row tiles of a program."""
    from quantkit.kernels.gemm.small_m.small_m_kernel import small_m_gemm as kernel
    from quantkit.kernels.gluon.split_k_reduce import split_k_reduce

    shape = geometry(n, k, scheme, dtype)
    known = with_shared_table(constants(n, k, scheme, dtype, True), scheme, dtype, tile.warps)
    count, chunk = units(tile, shape)
    expert_blocks = () if grouping is None else (grouping.expert_blocks,)
    # Where there are parts, what adds them up gates.
    gates = gate if tile.parts == 1 else ""
    mine = row_tiles(tile, shape, multiprocessors, bool(gates), 1 if grouping is None else grouping.usual)
    rows = rows_of_x(m)
    roots = 0 if ends is None else root_bytes(m)
    has = room(tile, shape, m, scheme, memory, table_bytes(scheme, dtype), roots)
    main = Launch(
        kernel,
        # Segments of an expert run next to each other, and share its weights in the cache.
        (*expert_blocks, -(-shape.row_tiles // mine) * tile.parts),
        **{name: known[name] for name in kernel.arg_names if name in known},
        HAS_BIAS=bias,
        ENDS=ends,
        GATE=gates,
        W=tile.warps,
        BM=rows,
        PARTS=tile.parts,
        UNITS=count,
        CHUNK=chunk,
        SPARE=has.spare,
        EVEN=is_even(tile, shape),
        HELD=blocks_held(tile, shape) if has.holds else 0,
        AHEAD=tile.ahead,
        LOOP=is_loop(tile, shape),
        **known_of(grouping),
        CHAINED=grouping is not None and grouping.chained,
        WGMMA=tile.wgmma,
        num_warps=tile.warps,
        maxnreg=128,
        **overlap(features),
    )
    if tile.parts == 1:
        return main, None, mine
    # Parts of segments have had what comes after the last column.
    after = known if grouping is None else {"GROUPS": 0, "SCALE": "", "HAS_FACTOR": False}
    last = Launch(
        split_k_reduce,
        (shape.row_tiles // (2 if gate else 1), rows // ADDED, *expert_blocks),
        **{name: after[name] for name in ("GROUPS", "SCALE", "HAS_FACTOR")},
        **{name: value for name, value in known_of(grouping).items() if name in split_k_reduce.arg_names},
        HAS_BIAS=bias,
        BM=rows,
        PARTS=tile.parts,
        MR=ADDED,
        BEGINS=begins,
        GATE=gate,
        num_warps=2,
        **overlap(features),
    )
    return main, last, mine


def bind(op: Operands, tile: SmallMTile, features: frozenset[str] = frozenset()) -> Bound:
    """The product y [m, n] for m up to 32, on NVIDIA GPUs that copy to shared memory asynchronously."""
    m, k = op.x.shape
    has_bias, count, grouping = op.bias is not None, op.multiprocessors, op.grouping
    n, expert_blocks = op.n, 1
    if grouping is not None:
        m, n, expert_blocks = grouping.rows, op.n * grouping.matrices, grouping.expert_blocks
    main, last, mine = _launches(
        m,
        n,
        k,
        op.scheme,
        op.x.dtype,
        has_bias,
        tile,
        features,
        count,
        op.shared_memory,
        op.gate,
        op.begins,
        op.ends,
        grouping,
    )
    squares = Y if op.ends is None else op.of_norm(Y)[-1]
    first = main, (X, squares, *op.layout, BIAS, Y, SUMS, m, n, mine, *op.grouped)
    if last is None:
        return bound(op, first)
    _, scale, _, factor, _ = op.layout
    second = last, (SUMS, scale, factor, BIAS, Y, *op.of_norm(Y), m, n, *op.grouped)
    return bound(op, first, second, sums=(expert_blocks, tile.parts, -(-n // ROWS), rows_of_x(m), ROWS))


def run(op: Operands, tile: SmallMTile, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """What `bind` binds, for these operands."""
    return bind(op, tile, features)(op.x, op.bias)
