"""Tile (launch configuration) of `fused-gemv`, how programs divide the rows of W, and `DecodeConfig`."""

from dataclasses import dataclass
from functools import lru_cache

from quantkit.kernels.gemm.decode.decode_config import DecodeConfig, Norm, Rounding
from quantkit.kernels.gemm.operands import GemmSpec, Grouping
from quantkit.kernels.layouts.dequant_ptx import expression, shared_table
from quantkit.kernels.layouts.geometry import Geometry
from quantkit.kernels.layouts.int8_codes import as_bytes, byte_expression
from quantkit.kernels.layouts.shared_memory import fragment_distance, next_power_of_2

#: Most row tiles of a program, times rows of x, whose sums do not spill registers.
MOST_ROW_TILES = 64


@dataclass(frozen=True)
class DecodeTile:
    """Tile of `fused-gemv`: the configuration of its launch.

    warps           warps of a program, which divide the columns K
    occupancy       programs per multiprocessor
    tiles_per_iter  row tiles (16 rows of W each) that are multiplied with each operand B that is loaded
    prefetch        most k_steps (128 columns or more) by which loads of codes run ahead of their products
    int8_mma        True to multiply int8 codes with the three int8 digits x is split into (`gluon.x_digits`)
    """

    warps: int = 8
    occupancy: int = 2
    tiles_per_iter: int = 1
    prefetch: int = 4
    int8_mma: bool = False


def k_steps_per_warp(tile: DecodeTile, shape: Geometry) -> int:
    """Return the number of k_steps per warp; a k_step is the 128 columns or more dequantized at a time."""
    return -(-shape.k_steps // tile.warps)


@dataclass(frozen=True)
class RowTileSchedule:
    """Division of the rows of W among `programs` programs.

    The unit is `row_tiles_per_output` row tiles (16 rows of W): 1, or 2 if a gate needs one of gate and one
    of up. Each program has `per_program` units, the first `remainder` programs one more.
    """

    programs: int
    per_program: int
    remainder: int
    row_tiles_per_output: int

    @property
    def row_tiles(self) -> int:
        """Return the maximum number of row tiles (16 rows of W each) of a program."""
        return (self.per_program + (self.remainder > 0)) * self.row_tiles_per_output


def schedule_row_tiles(
    tile: DecodeTile,
    shape: Geometry,
    multiprocessors: int,
    gated: bool = False,
    grouping: Grouping | None = None,
) -> RowTileSchedule:
    """Divide the row tiles (16 rows of W each) evenly among as many programs as run at once on the GPU.

    If `gated`, they are divided in pairs, one of gate and one of up. The first programs get the remainder:
    they are on different multiprocessors.

    shape      sizes of the fragment layout of W
    grouping   None, or sizes of a grouped GEMM over experts. The row tiles are then those of one expert
               block, and there are more programs if sums would not fit in registers.
    """
    row_tiles_per_output = 2 if gated else 1
    count, least = shape.row_tiles // row_tiles_per_output, 1
    resident = multiprocessors * tile.occupancy
    if grouping is not None:
        resident //= grouping.usual
        least = -(-shape.row_tiles * grouping.rows // MOST_ROW_TILES)
    programs = min(count, max(least, resident))
    return RowTileSchedule(programs, *divmod(count, programs), row_tiles_per_output)


def tiles_per_iter(tile: DecodeTile, schedule: RowTileSchedule) -> int:
    """Return the number of row tiles (16 rows of W each) multiplied with each operand B that is loaded.

    That is `tile.tiles_per_iter`, but at most the row tiles of a program in `schedule`.
    """
    return min(tile.tiles_per_iter, schedule.row_tiles)


def is_single_iter(tile: DecodeTile, schedule: RowTileSchedule) -> bool:
    """Return True if all row tiles (16 rows of W each) of a program are multiplied in a single iteration.

    `schedule` is the division of row tiles among programs.
    """
    return schedule.row_tiles <= tile.tiles_per_iter


def prefetch(tile: DecodeTile, shape: Geometry, schedule: RowTileSchedule) -> int:
    """Return by how many k_steps (128 columns or more) loads of codes run ahead of their products.

    That is `tile.prefetch`, but at most the k_steps of a warp. If a program in `schedule` has several
    iterations over row tiles, it is the largest such number that divides the k_steps of a warp: each k_step
    is then in the same registers in every iteration.
    """
    count = k_steps_per_warp(tile, shape)
    most = min(tile.prefetch, count)
    if is_single_iter(tile, schedule):
        return most
    return next(number for number in range(most, 0, -1) if count % number == 0)


@lru_cache(maxsize=4096)
def decode_config(
    spec: GemmSpec,
    tile: DecodeTile,
    overlaps: bool,
    multiprocessors: int,
    norm: Norm | None = None,
    gate: str = "",
    grouping: Grouping | None = None,
    rounding: Rounding | None = None,
) -> DecodeConfig:
    """Return the compile-time configuration of `fused-gemv` for a product and a tile.

    spec              sizes and dtypes of the product
    overlaps          True if launched with PDL: it starts while the kernel before it ends
    multiprocessors   number of multiprocessors of the GPU
    norm              part of an RMSNorm to compute, or None
    gate              activation f, if y = f(gate) * up; "" for none
    grouping          sizes of a grouped GEMM over experts, or None for a single weight
    rounding          how x is rounded to 8 bits, or None
    """
    shape, scheme, name = spec.shape, spec.scheme, str(spec.dtype).removeprefix("torch.")
    schedule = schedule_row_tiles(tile, shape, multiprocessors, bool(gate), grouping)
    is_folded, byte_scale = shape.folded_factor != 1.0, 1.0
    found = expression(scheme.format, name, is_folded=is_folded)
    if tile.int8_mma:
        way = as_bytes(scheme.format)
        assert way is not None
        byte_scale, found = (
            way.byte_scale,
            byte_expression(scheme.format, fragment_distance(shape.fragments, shape.dot)),
        )
    else:
        found = shared_table(scheme.format, name, tile.warps, of_fragments=True) or found
    assert found is not None
    constraints = found.constraints
    if found.table is not None:
        # The expression runs on one register here, so its lane value is passed once, not twice.
        constraints = constraints.removesuffix(",r")
    return DecodeConfig(
        k=spec.k,
        spans=shape.spans,
        registers=shape.registers,
        fragments=shape.fragments,
        dot=shape.dot,
        groups=shape.groups,
        per_block=shape.per_block,
        in_block=shape.in_block,
        blocks=shape.blocks,
        on_weights=shape.on_weights,
        scale_kind=shape.scale_kind,
        has_zero=scheme.has_zero_point,
        has_factor=scheme.global_scale or is_folded,
        has_bias=spec.bias,
        norm=norm,
        rounding=rounding,
        gate=gate,
        matrices=1 if grouping is None else grouping.matrices,
        top_k=1 if grouping is None else grouping.top_k,
        chained=grouping is not None and grouping.chained,
        dtype_name=name,
        int8_mma=tile.int8_mma,
        byte_scale=byte_scale,
        asm=found.asm,
        constraints=constraints,
        table=found.table,
        fill=found.fill,
        warps=tile.warps,
        rows=next_power_of_2(spec.m),
        padded_row_tiles=next_power_of_2(schedule.row_tiles),
        k_steps_per_warp=k_steps_per_warp(tile, shape),
        tiles_per_iter=tiles_per_iter(tile, schedule),
        single_iter=is_single_iter(tile, schedule),
        prefetch=prefetch(tile, shape, schedule),
        overlap=overlaps,
    )
