"""Tiles of `fused-gemv`, how row tiles are shared out, and what the kernel then knows at compile time."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from quantkit.kernels.gemm.decode.decode_config import DecodeConfig, Norm
from quantkit.kernels.gemm.operands import Grouping
from quantkit.kernels.layouts.dequant_ptx import expression, shared_table
from quantkit.kernels.layouts.fragment_layout import Geometry, geometry
from quantkit.kernels.layouts.int8_codes import as_bytes, byte_expression
from quantkit.kernels.layouts.shared_memory import planes_apart, power_of_two
from quantkit.packing.schemes import Scheme

#: Row tiles of a program, times rows of x, that are added up without spilling registers.
MOST_ROW_TILES = 64


@dataclass(frozen=True)
class DecodeTile:
    """Warps of a program, programs of a multiprocessor at once, row tiles that are multiplied with what is
    loaded of x, and how many units of columns codes are loaded ahead at most; and whether products are those
    of integers.
    """

    warps: int = 8
    programs: int = 2
    together: int = 1
    ahead: int = 4
    integers: bool = False


def units(tile: DecodeTile, shape: Geometry) -> int:
    """Units of each warp."""
    return -(-shape.steps // tile.warps)


@dataclass(frozen=True)
class RowTiles:
    """Each of so many programs has `each` times `step` row tiles, and the first `more` have `step` more."""

    programs: int
    each: int
    more: int
    step: int

    @property
    def row_tiles(self) -> int:
        """The most that a program has."""
        return (self.each + (self.more > 0)) * self.step


def share(
    tile: DecodeTile,
    shape: Geometry,
    multiprocessors: int,
    gated: bool = False,
    grouping: Grouping | None = None,
) -> RowTiles:
    """Row tiles shared out among as many programs as run at once; in pairs if they are `gated`.

    Programs i and i + `multiprocessors` have the same multiprocessor, so that the first of them have more. Of
    a `grouping` it is those of one segment, and so many that none has more than it can add up.
    """
    step = 2 if gated else 1
    count, at_once, least = shape.row_tiles // step, multiprocessors * tile.programs, 1
    if grouping is not None:
        at_once //= grouping.usual
        least = -(-shape.row_tiles * grouping.rows // MOST_ROW_TILES)
    programs = min(count, max(least, at_once))
    return RowTiles(programs, *divmod(count, programs), step)


def together(tile: DecodeTile, found: RowTiles) -> int:
    """Row tiles of a turn: no more than there are."""
    return min(tile.together, found.row_tiles)


def is_once(tile: DecodeTile, found: RowTiles) -> bool:
    """Whether a program has the row tiles of one turn."""
    return found.row_tiles <= tile.together


def ahead(tile: DecodeTile, shape: Geometry, found: RowTiles) -> int:
    """Units that codes are loaded ahead: of several turns as many as divide those of each, so that units have
    registers of their own.
    """
    count = units(tile, shape)
    most = min(tile.ahead, count)
    if is_once(tile, found):
        return most
    return next(number for number in range(most, 0, -1) if count % number == 0)


@lru_cache(maxsize=4096)
def decode_config(
    m: int,
    n: int,
    k: int,
    scheme: Scheme,
    dtype: torch.dtype,
    bias: bool,
    tile: DecodeTile,
    overlaps: bool,
    multiprocessors: int,
    norm: Norm | None = None,
    gate: str = "",
    grouping: Grouping | None = None,
) -> DecodeConfig:
    """What the kernel knows of a product and its tile."""
    shape, name = geometry(n, k, scheme, dtype), str(dtype).removeprefix("torch.")
    shared_out = share(tile, shape, multiprocessors, bool(gate), grouping)
    carried, worth = shape.carried != 1.0, 1.0
    found = expression(scheme.format, name, bare=carried)
    if tile.integers:
        way = as_bytes(scheme.format)
        assert way is not None
        worth, found = way.worth, byte_expression(scheme.format, planes_apart(shape.planes, shape.dot))
    else:
        found = shared_table(scheme.format, name, tile.warps, of_planes=True) or found
    assert found is not None
    constraints = found.constraints
    if found.table is not None:
        # Two lanes of 16 bits have two of what the lane of the warp holds, a register has one.
        constraints = constraints.removesuffix(",r")
    return DecodeConfig(
        k=k,
        spans=shape.spans,
        tiles=shape.tiles,
        planes=shape.planes,
        dot=shape.dot,
        groups=shape.groups,
        per_block=shape.per_block,
        in_block=shape.in_block,
        blocks=shape.blocks,
        on_weights=shape.on_weights,
        scale_kind=shape.scale_kind,
        has_zero=scheme.has_zero_point,
        has_factor=scheme.global_scale or carried,
        has_bias=bias,
        norm=norm,
        gate=gate,
        matrices=1 if grouping is None else grouping.matrices,
        top_k=1 if grouping is None else grouping.top_k,
        chained=grouping is not None and grouping.chained,
        dtype_name=name,
        integers=tile.integers,
        worth=worth,
        asm=found.asm,
        constraints=constraints,
        table=found.table,
        fill=found.fill,
        warps=tile.warps,
        rows=power_of_two(m),
        row_tile_room=power_of_two(shared_out.row_tiles),
        units=units(tile, shape),
        together=together(tile, shared_out),
        once=is_once(tile, shared_out),
        ahead=ahead(tile, shape, shared_out),
        overlap=overlaps,
    )
