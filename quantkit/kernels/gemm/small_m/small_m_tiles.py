"""Tile (launch configuration) of `fused-small-m`, division of a product, and shared memory of a program."""

from dataclasses import dataclass

from quantkit.kernels.layouts.geometry import ROWS, Geometry, value_sizes
from quantkit.kernels.layouts.shared_memory import next_power_of_2, undeclared_bytes
from quantkit.packing.schemes import Scheme

#: Most rows of x.
MOST_ROWS = 32
#: Warps of a multiprocessor, in one program or two; each thread may have 128 registers.
RESIDENT_WARPS = 16
#: Most columns of a split with unrolled code; loading more code takes longer than a loop. Twice as many if a
#: k_step has more than `LOOP_BITS` bits per row: a loop has no registers for two such k_steps.
UNROLLED, LOOP_BITS = 1024, 1024


@dataclass(frozen=True)
class SmallMTile:
    """Tile of `fused-small-m`: the configuration of its launch.

    warps     warps of a program, each with a row tile: 16 rows of W
    split_k   programs that divide the columns K of a row tile
    prefetch  k_steps (128 columns or more) by which loads of codes run ahead
    wgmma     True to multiply with `wgmma`, which is asynchronous, instead of `mma`
    """

    warps: int = 16
    split_k: int = 1
    prefetch: int = 2
    wgmma: bool = False


def rows_of_x(m: int) -> int:
    """Return m rounded up to a number of rows of x that the kernel is compiled for: 8, 16 or 32."""
    return next(size for size in (8, 16, MOST_ROWS) if size >= m)


def rstd_bytes(m: int) -> int:
    """Return the bytes of shared memory for a float32 (1 / RMS) per row of x."""
    return 4 * rows_of_x(m)


def has_wide_codes(shape: Geometry) -> bool:
    """Return True if a loop lacks registers for the codes of two k_steps: for int5 and int7.

    A k_step is what a warp dequantizes at a time: 128 columns or more.
    """
    return shape.k_step * shape.bits > LOOP_BITS


def is_rolled(tile: SmallMTile, shape: Geometry) -> bool:
    """Return True if a program multiplies its split of the columns K in a loop; else the code is unrolled."""
    columns = -(-shape.k_steps // tile.split_k) * shape.k_step
    return columns > (2 * UNROLLED if has_wide_codes(shape) else UNROLLED)


def spills(tile: SmallMTile, shape: Geometry) -> bool:
    """Return True if `wgmma` would spill registers: for int7 in loops, and int5 in loops with split-K."""
    return (
        tile.wgmma
        and has_wide_codes(shape)
        and is_rolled(tile, shape)
        and (tile.split_k > 1 or shape.bits > 6)
    )


def k_steps(tile: SmallMTile, shape: Geometry) -> tuple[int, int]:
    """Return the number of k_steps of a split, and of a chunk of x.

        k_step    what a warp dequantizes at a time: 128 columns or more
        split     the columns K of a program
        chunk     the columns of x that are copied to shared memory together: 512, or 256 if a split is no
                  multiple of 512

    Loops of `wgmma` with a prefetch of 2 always have chunks of 256 columns, two k_steps. Codes then stay in
    the registers to which they were loaded. In longer chunks, 32 rows of x would spill registers.
    """
    found, k_step = -(-shape.k_steps // tile.split_k), shape.k_step
    is_short = tile.wgmma and tile.prefetch == 2 and k_step == 128 and is_rolled(tile, shape)
    chunk = 512 // k_step if found * k_step % 512 == 0 and not is_short else 256 // k_step
    return -(-found // chunk) * chunk, chunk


def has_aligned_splits(tile: SmallMTile, shape: Geometry) -> bool:
    """Return True if all programs have equally many columns K, and each has whole scale blocks.

    A scale block is 128 columns, or one group of more than 128 columns.
    """
    count, _ = k_steps(tile, shape)
    return (
        tile.split_k * count == shape.k_steps
        and count * shape.k_step % shape.per_block == 0
        and shape.k == shape.spans * shape.span
        and shape.blocks * shape.per_block >= shape.k
    )


def staged_scale_blocks(tile: SmallMTile, shape: Geometry) -> int:
    """Return the largest number of scale blocks that the columns of a program (a split of K) touch.

    A scale block is 128 columns, or one group of more than 128 columns.
    """
    columns = k_steps(tile, shape)[0] * shape.k_step
    return -(-columns // shape.per_block) + (1 if tile.split_k > 1 and columns % shape.per_block else 0)


def staged_scale_bytes(tile: SmallMTile, shape: Geometry, scheme: Scheme) -> int:
    """Return the bytes of shared memory for the scales and zero-points of a program."""
    return (
        tile.warps
        * ROWS
        * shape.in_block
        * next_power_of_2(staged_scale_blocks(tile, shape))
        * sum(value_sizes(shape, scheme))
    )


@dataclass(frozen=True)
class SharedMemoryPlan:
    """Use of the shared memory of a program.

    padding_chunks   chunks of x that are allocated, but not used. Triton then requests enough bytes for
                     the lookup table too, which inline PTX allocates and Triton does not count.
    stages_scales    True if scales are staged in shared memory
    nbytes           bytes of x, padding chunks and scales; lookup table and 1 / RMS are not included
    """

    padding_chunks: int
    stages_scales: bool
    nbytes: int


def plan_shared_memory(
    tile: SmallMTile,
    shape: Geometry,
    m: int,
    scheme: Scheme,
    memory: int,
    table: int = 0,
    norm_bytes: int = 0,
) -> SharedMemoryPlan:
    """Plan the shared memory of a program for m rows of x, if a program of 16 warps may use `memory` bytes.

    Scales are staged in shared memory if products are a loop (`is_rolled`) and the scales fit. Without
    staging, a wait for loads of scales would wait for codes too.

    shape, scheme   sizes and scheme of the weight
    table           bytes of the lookup table of code values
    norm_bytes      bytes of 1 / RMS of each row of x
    """
    count, chunk = k_steps(tile, shape)
    size, program_tiles = 2 * chunk * shape.k_step * rows_of_x(m), count // chunk

    def found(staged: int) -> SharedMemoryPlan:
        padding_chunks = -(-undeclared_bytes(program_tiles * size + staged + norm_bytes, table) // size)
        return SharedMemoryPlan(padding_chunks, staged > 0, (program_tiles + padding_chunks) * size + staged)

    staged = staged_scale_bytes(tile, shape, scheme) if is_rolled(tile, shape) else 0
    valid = found(staged)
    return valid if valid.nbytes + table + norm_bytes <= memory_budget(tile, memory) else found(0)


def memory_budget(tile: SmallMTile, memory: int) -> int:
    """Return the bytes of shared memory that a program of this tile may use.

    A program of all 16 warps of a multiprocessor may use `memory` bytes, one of 8 warps half of them.
    """
    return memory * tile.warps // RESIDENT_WARPS


def row_tiles(
    tile: SmallMTile, shape: Geometry, multiprocessors: int, gated: bool = False, weights: int = 1
) -> int:
    """Return the fewest row tiles (16 rows of W each) per program with which all programs run at once.

    A warp has at most one row tile, even if not all programs then run at once. The result is even if `gated`.
    One launch multiplies `weights` weights.
    """
    resident, step = multiprocessors * (RESIDENT_WARPS // tile.warps), 2 if gated else 1

    def programs(count: int) -> int:
        return -(-shape.row_tiles // count) * tile.split_k * weights

    counts = range(step, tile.warps, step)
    return next((count for count in counts if programs(count) <= resident), tile.warps)
