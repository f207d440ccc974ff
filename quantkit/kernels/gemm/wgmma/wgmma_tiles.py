"""Tiles of `fused-wgmma`: what fits a multiprocessor, the stream-K schedule, and the predicted time."""

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.kernels.gemm.gpu_limits import H200_PROCESSORS, HOPPER_SHARED
from quantkit.kernels.layouts.fragment_layout import Geometry
from quantkit.kernels.layouts.shared_memory import COPIES, undeclared_bytes

#: Bytes of shared memory for all but blocks of x: barriers, and outputs on their way to other threads.
SCRATCH = 8 << 10
#: Columns of a block of x, and of what is multiplied at a time, unless a tile says otherwise.
COLUMNS, TWO_BLOCKS = 128, 256
#: Blocks of x in shared memory, each of the rows of a tile, unless there is room for fewer only.
STAGES = 8
#: Bytes of shared memory that a multiprocessor keeps for each program.
RESERVED = 1 << 10
#: With up to so many rows of x there are registers for two programs on a multiprocessor, with 128 rows of the
#: weight and as many columns at a time, or for codes that are on their way early.
FEW_OF_X = 32
#: Rows of x and of the weight that rules choose from, with the microseconds of 256 columns on an H100, at the
#: pace of the rules.
STEP_US: Mapping[tuple[int, int], float] = {
    (32, 128): 1.1,
    (64, 128): 1.1,
    (128, 128): 1.6,
    (128, 192): 2.15,
    (256, 128): 2.6,
}
#: Those that it takes to add what another program has of such a tile. With these, tiles of the rules take
#: 1.010 of the time of the best of eight (H100, 81 problems).
FIXUP_US = dict(zip(STEP_US, (0.2, 0.3, 1.5, 3.5, 4.0), strict=True))
#: Microseconds of what surrounds all steps.
OVERHEAD_US = 3.0
#: Registers of a thread that `registers` does not count. 14 do for Triton 3.6; 3.9 spills up to 514 then in a
#: loop: int7 with 1024 rows of x takes 1.47 times as long as by the tile that 24 lead to (an H100).
REGISTER_MARGIN = 24


@dataclass(frozen=True)
class WgmmaTile:
    """Rows of x and of the weight of a program, how early codes are loaded, and who has the last tiles.

    Codes are on their way while so many units are multiplied. Where some programs would be idle at the end,
    they may have a `steps_per_program` of the steps of the tiles left. So many `columns` are decoded, and
    multiplied before the next are: few take few registers, many keep the tensor cores busy with few rows of
    x.
    """

    block_m: int = 128
    block_n: int = 128
    prefetch: int = 1
    stream_k: bool = False
    block_k: int = COLUMNS


@dataclass(frozen=True)
class LaunchBounds:
    """How many programs are on a multiprocessor at once, and the registers of their threads.

    A thread is launched with so many at most, None for as many as there are. One that multiplies gets others
    then, as one that copies keeps 24.
    """

    occupancy: int
    max_registers: int | None
    mma_registers: int


def launch_bounds(tile: WgmmaTile) -> LaunchBounds:
    """That of a tile."""
    if tile.block_m <= FEW_OF_X and tile.block_n == 128 and tile.block_k == COLUMNS:
        return LaunchBounds(2, 80, 104)
    return LaunchBounds(1, None, 240 if tile.block_n == 128 else 160)


def stages(tile: WgmmaTile, table: int = 0) -> int:
    """Blocks of x in shared memory: as many as there is room for beside a table of so many bytes, up to what
    memory takes to answer, or to what has Triton ask for room for the table.
    """
    mine = (HOPPER_SHARED + RESERVED) // launch_bounds(tile).occupancy - RESERVED
    block = 2 * tile.block_m * COLUMNS
    found = min(STAGES, (mine - table - SCRATCH) // block)
    return found + -(-undeclared_bytes(found * block, table) // block)


def copies(tile: WgmmaTile) -> int:
    """Of a table of values in shared memory: as many as leave room for a third block of x, and none for two
    programs, whose threads lack the registers.
    """
    return 0 if launch_bounds(tile).occupancy > 1 else 16 if tile.block_m == 256 else COPIES


def step_columns(shape: Geometry, tile: WgmmaTile) -> int:
    """Columns of a step of `wgmma_gemm`: twice what it loads at a time."""
    return 2 * max(tile.block_k, shape.span)


def stream_k_schedule(tiles: int, steps: int, programs: int, fixup_steps: float) -> tuple[int, int, int]:
    """How many of `tiles` are done whole, and for the others the steps of a program and from tile to tile.

    Each of the latter is divided among as many programs, unless it is sooner to give all programs the same,
    some of which have parts of two tiles then. To add a part takes as long as `fixup_steps`, so that a tile
    may have fewer than there are programs for.
    """
    others = tiles % programs
    if others == 0:
        return tiles, 0, steps

    lengths = [-(-steps // count) for count in range(1, programs // others + 1)]
    apart = [(each, -(-steps // each) * each) for each in lengths]
    even = (-(-others * steps // programs), steps)

    def length(schedule: tuple[int, int]) -> float:
        return schedule[0] + fixup_steps * fixups_per_tile(steps, *schedule)

    steps_per_program, tile_stride = min([*apart, even], key=length)
    if steps_per_program == steps:
        return tiles, 0, steps
    return tiles - others, steps_per_program, tile_stride


def splits_single_tiles(steps_per_program: int, tile_stride: int) -> bool:
    """Whether programs have parts of one tile each, by what `stream_k_schedule` gives."""
    return steps_per_program > 0 and tile_stride % steps_per_program == 0


def fixups_per_tile(steps: int, steps_per_program: int, tile_stride: int) -> float:
    """How many parts who writes a tile adds on average, by what `stream_k_schedule` gives: if programs have
    parts of two tiles, about half of the tiles have one more.
    """
    single = splits_single_tiles(steps_per_program, tile_stride)
    return -(-steps // steps_per_program) - (1.0 if single else 0.5)


def step_us(shape: Geometry, tile: WgmmaTile) -> float:
    """Microseconds of a step."""
    return _of_tile(STEP_US, tile) * step_columns(shape, tile) / 256


def fixup_us(tile: WgmmaTile) -> float:
    """Microseconds that a part of a tile takes to be added."""
    return _of_tile(FIXUP_US, tile)


def _of_tile(us: Mapping[tuple[int, int], float], tile: WgmmaTile) -> float:
    """What is known of a tile, or of one with 128 rows of the weight or 32 of x."""
    found = us.get((tile.block_m, tile.block_n))
    return us[max(tile.block_m, FEW_OF_X), 128] * tile.block_n / 128 if found is None else found


def tile_schedule(
    shape: Geometry, m: int, tile: WgmmaTile, multiprocessors: int
) -> tuple[int, int, int, int]:
    """Return the steps of a tile, and `stream_k_schedule` for m rows of x; all whole without `stream_k`."""
    columns = shape.spans * shape.span
    tiles = -(-shape.n // tile.block_n) * -(-m // tile.block_m)
    steps = -(-columns // step_columns(shape, tile))
    if not tile.stream_k:
        return steps, tiles, 0, steps
    programs = multiprocessors * launch_bounds(tile).occupancy
    return steps, *stream_k_schedule(tiles, steps, programs, fixup_us(tile) / step_us(shape, tile))


def tile_time(shape: Geometry, m: int, tile: WgmmaTile, multiprocessors: int = H200_PROCESSORS) -> float:
    """Microseconds for m rows of x by what a step of each tile in `STEP_US` was measured to take."""
    steps, whole_tiles, steps_per_program, tile_stride = tile_schedule(shape, m, tile, multiprocessors)
    resident = launch_bounds(tile).occupancy
    mine = -(-whole_tiles // (multiprocessors * resident)) * steps + steps_per_program
    fixups = fixups_per_tile(steps, steps_per_program, tile_stride) if steps_per_program else 0.0
    return mine * resident * step_us(shape, tile) + OVERHEAD_US + fixup_us(tile) * fixups


def registers(shape: Geometry, tile: WgmmaTile, zeros: bool) -> int:
    """About how many registers a thread that multiplies has for sums, weights, codes and their scales and
    zero-points, of which those in use take two each, for two rows.
    """
    unit, values = max(tile.block_k, shape.span), (shape.groups > 1) + zeros
    loaded = unit * shape.bits // 64 + values * max(1, unit // shape.group)
    used = tile.block_k // 4 + 2 * values * max(1, tile.block_k // shape.group)
    return tile.block_m // 2 + used + tile.prefetch * loaded


def has_registers(shape: Geometry, tile: WgmmaTile, zeros: bool) -> bool:
    """Whether there are as many."""
    return registers(shape, tile, zeros) + REGISTER_MARGIN <= launch_bounds(tile).mma_registers
