"""Tile (launch configuration) of `fused-wgmma`, its stream-K schedule, and predictions of its time."""

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.kernels.gemm.gpu_limits import H200_PROCESSORS, HOPPER_SHARED
from quantkit.kernels.layouts.geometry import Geometry
from quantkit.kernels.layouts.shared_memory import COPIES, undeclared_bytes

#: Bytes of shared memory besides blocks of x: barriers, and outputs exchanged between threads.
SCRATCH = 8 << 10
#: Columns of a block of x, and the two values of `block_k`.
COLUMNS, TWO_BLOCKS = 128, 256
#: Most blocks of x in shared memory; a block has all rows of a tile.
STAGES = 8
#: Bytes of shared memory that a multiprocessor keeps for each program.
RESERVED = 1 << 10
#: Most rows of x with registers for two programs per multiprocessor (128 rows of the weight, 128 columns), or
#: for codes loaded two steps ahead.
FEW_OF_X = 32
#: Microseconds for 256 columns, measured on an H100: by rows of x and rows of the weight of a tile.
STEP_US: Mapping[tuple[int, int], float] = {
    (32, 128): 1.1,
    (64, 128): 1.1,
    (128, 128): 1.6,
    (128, 192): 2.15,
    (256, 128): 2.6,
}
#: Microseconds to add the partial sums of another program (fix-up), by tile. With these, tiles that rules
#: choose take 1.010 of the time of the best of eight (H100, 81 problems).
FIXUP_US = dict(zip(STEP_US, (0.2, 0.3, 1.5, 3.5, 4.0), strict=True))
#: Microseconds of a launch besides its steps.
OVERHEAD_US = 3.0
#: Registers of a thread that `registers` does not count. 14 suffice for Triton 3.6. Triton 3.9 then spills up
#: to 514 in a loop: int7 with 1024 rows of x takes 1.47 times as long as with 24 (H100).
REGISTER_MARGIN = 24


@dataclass(frozen=True)
class WgmmaTile:
    """Tile of `fused-wgmma`: the configuration of its launch.

    block_m   rows of x of an output tile
    block_n   rows of W of an output tile: 64 per consumer, a group of four warps
    prefetch  k_steps (128 columns or more) by which loads of codes run ahead
    stream_k  True to divide the output tiles of the last wave among all programs, along K
    block_k   columns dequantized, then multiplied: 128 take few registers, 256 suit small M
    """

    block_m: int = 128
    block_n: int = 128
    prefetch: int = 1
    stream_k: bool = False
    block_k: int = COLUMNS


@dataclass(frozen=True)
class LaunchBounds:
    """Number of programs that a multiprocessor runs at once, and the registers of their threads.

    occupancy       programs per multiprocessor
    max_registers   most registers of a thread at the start; None for no limit
    mma_registers   registers of a thread of a consumer, which multiplies; those of the producer keep 24
    """

    occupancy: int
    max_registers: int | None
    mma_registers: int


def launch_bounds(tile: WgmmaTile) -> LaunchBounds:
    """Return how many programs of a tile share a multiprocessor, and the registers of their threads."""
    if tile.block_m <= FEW_OF_X and tile.block_n == 128 and tile.block_k == COLUMNS:
        return LaunchBounds(2, 80, 104)
    return LaunchBounds(1, None, 240 if tile.block_n == 128 else 160)


def stages(tile: WgmmaTile, table: int = 0) -> int:
    """Return the number of buffers of x [block_m, 128] in shared memory: all that fit, up to `STAGES`.

    A lookup table of `table` bytes must fit too. Triton does not count its bytes. Some more buffers are added
    if needed, so that Triton requests enough memory for both.
    """
    program_bytes = (HOPPER_SHARED + RESERVED) // launch_bounds(tile).occupancy - RESERVED
    block = 2 * tile.block_m * COLUMNS
    found = min(STAGES, (program_bytes - table - SCRATCH) // block)
    return found + -(-undeclared_bytes(found * block, table) // block)


def copies(tile: WgmmaTile) -> int:
    """Return the number of copies of a lookup table's values in shared memory: 32, 16, or 0 for no table.

    With 16 copies, a third buffer of 256 rows of x fits. 0 is for two programs per multiprocessor, whose
    threads lack the registers for lookups.
    """
    return 0 if launch_bounds(tile).occupancy > 1 else 16 if tile.block_m == 256 else COPIES


def step_columns(shape: Geometry, tile: WgmmaTile) -> int:
    """Return the number of columns of a step of `wgmma_gemm`: two k_steps, whose codes are loaded in turn."""
    return 2 * max(tile.block_k, shape.span)


def stream_k_schedule(tiles: int, steps: int, programs: int, fixup_steps: float) -> tuple[int, int, int]:
    """Divide `tiles` output tiles of `steps` steps, slices of K, among `programs` programs by stream-K.

    Return (WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE):

        WHOLE_TILES          number of tiles that are not shared: those of full waves, or all
        STEPS_PER_PROGRAM    steps of shared tiles that each program computes; 0 if none is shared
        TILE_STRIDE          steps from the first step of a shared tile to that of the next

    Of two divisions, the faster one is returned. In the first, each shared tile is divided among the same
    number of programs. In the second, all programs get the same number of steps, some of them of two tiles. A
    fix-up, adding another program's sums, takes as long as `fixup_steps` steps. So sharing a tile among all
    free programs may be slower than among fewer.
    """
    shared = tiles % programs
    if shared == 0:
        return tiles, 0, steps

    lengths = [-(-steps // count) for count in range(1, programs // shared + 1)]
    apart = [(each, -(-steps // each) * each) for each in lengths]
    even = (-(-shared * steps // programs), steps)

    def length(schedule: tuple[int, int]) -> float:
        return schedule[0] + fixup_steps * fixups_per_tile(steps, *schedule)

    steps_per_program, tile_stride = min([*apart, even], key=length)
    if steps_per_program == steps:
        return tiles, 0, steps
    return tiles - shared, steps_per_program, tile_stride


def splits_single_tiles(steps_per_program: int, tile_stride: int) -> bool:
    """Return True if output tiles are shared, and no program has steps of two shared tiles.

    A step is a slice of the columns K. `steps_per_program` and `tile_stride` are results of
    `stream_k_schedule`: a shared tile begins `tile_stride` steps after the one before.
    """
    return steps_per_program > 0 and tile_stride % steps_per_program == 0


def fixups_per_tile(steps: int, steps_per_program: int, tile_stride: int) -> float:
    """Return the mean number of fix-ups per shared output tile: additions of another program's partial sums.

    A tile has `steps` steps, slices of the columns K. `steps_per_program` and `tile_stride` are results of
    `stream_k_schedule`. If programs have steps of two tiles, about half of the tiles need an extra fix-up.
    """
    single = splits_single_tiles(steps_per_program, tile_stride)
    return -(-steps // steps_per_program) - (1.0 if single else 0.5)


def step_us(shape: Geometry, tile: WgmmaTile) -> float:
    """Return the microseconds of a step (`step_columns` columns of K) of an output tile on an H100."""
    return _of_tile(STEP_US, tile) * step_columns(shape, tile) / 256


def fixup_us(tile: WgmmaTile) -> float:
    """Return the microseconds of a fix-up on an H100: adding another program's sums of an output tile."""
    return _of_tile(FIXUP_US, tile)


def _of_tile(us: Mapping[tuple[int, int], float], tile: WgmmaTile) -> float:
    """Return the entry of table `us`, in microseconds, for a tile's (block_m, block_n), or an estimate.

    The estimate is the entry for 128 rows of W and at least 32 rows of x, times block_n / 128.
    """
    found = us.get((tile.block_m, tile.block_n))
    return us[max(tile.block_m, FEW_OF_X), 128] * tile.block_n / 128 if found is None else found


def tile_schedule(
    shape: Geometry, m: int, tile: WgmmaTile, multiprocessors: int
) -> tuple[int, int, int, int]:
    """Return (steps of an output tile, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE) for m rows of x.

    A step is a slice of the columns K. The last three are the result of `stream_k_schedule`. If
    `tile.stream_k` is False, no tile is shared.
    """
    columns = shape.spans * shape.span
    tiles = -(-shape.n // tile.block_n) * -(-m // tile.block_m)
    steps = -(-columns // step_columns(shape, tile))
    if not tile.stream_k:
        return steps, tiles, 0, steps
    programs = multiprocessors * launch_bounds(tile).occupancy
    return steps, *stream_k_schedule(tiles, steps, programs, fixup_us(tile) / step_us(shape, tile))


def tile_time(shape: Geometry, m: int, tile: WgmmaTile, multiprocessors: int = H200_PROCESSORS) -> float:
    """Return the predicted microseconds of a product with m rows of x, from times measured on an H100.

    The times are `STEP_US`. An H100 and an H200 have the same number of `multiprocessors`.
    """
    steps, whole_tiles, steps_per_program, tile_stride = tile_schedule(shape, m, tile, multiprocessors)
    resident = launch_bounds(tile).occupancy
    program_steps = -(-whole_tiles // (multiprocessors * resident)) * steps + steps_per_program
    fixups = fixups_per_tile(steps, steps_per_program, tile_stride) if steps_per_program else 0.0
    return program_steps * resident * step_us(shape, tile) + OVERHEAD_US + fixup_us(tile) * fixups


def registers(shape: Geometry, tile: WgmmaTile, zeros: bool) -> int:
    """Return the estimated registers of a thread that multiplies: sums, weights, codes, scales, zero-points.

    Scales and zero-points in use take two registers each, for two rows. `zeros` is True if there are
    zero-points.
    """
    k_step, values = max(tile.block_k, shape.span), (shape.groups > 1) + zeros
    loaded = k_step * shape.bits // 64 + values * max(1, k_step // shape.group)
    used = tile.block_k // 4 + 2 * values * max(1, tile.block_k // shape.group)
    return tile.block_m // 2 + used + tile.prefetch * loaded


def has_registers(shape: Geometry, tile: WgmmaTile, zeros: bool) -> bool:
    """Return True if a thread that multiplies has enough registers for this tile.

    `shape` is that of the weight, `zeros` is True if it has zero-points.
    """
    return registers(shape, tile, zeros) + REGISTER_MARGIN <= launch_bounds(tile).mma_registers
