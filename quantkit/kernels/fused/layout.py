"""The fragment layout: packed codes in the order in which tensor cores want them in registers.

The weights are operand A of `mma.m16n8k16`, W [16, 16] times x^T [16, 8]. Lane 4 r + t of a warp holds, of
rows r and r + 8, four of the 16 columns. Any order of the columns gives the same product as long as x has it
too. Here 32 consecutive columns are one run, of which lane t has eight in a row, so that x is loaded as it
lies in memory:

    column in its run = 8 t + 4 p0 + 2 e1 + e0        p0: the first or second of the run's two products
                                                      e1, e0: which of the lane's four columns of a product

With groups of 16 columns, a product is a group, and the column 16 p0 + 4 t + 2 e1 + e0.

A lane of 16 bits holds one field of each plane (`quantkit.kernels.fused.expressions`), plane = 2 run + p0. A
tile is 16 rows times 256 lanes of 16 bits, 512 bytes, in the order (r, t, e1, row // 8, e0): a warp reads 16
bytes per lane and has its fragments. The tiles of a part follow each other, then those of the next part:

    codes  int16 [N / 16][K / span][tiles][256]    span: the columns of one field in all planes, 16 * planes
    scale        [N / 16][blocks][8 r][groups of a block][2]   in their own dtype, 8-bit ones as int8;
                                                               those that multiply weights as bfloat16
    zero         as scale: zero-point plus the lowest value; bfloat16, or float32 between codes

A block is 128 columns or one group, whichever is longer: a lane loads all scales of one at once.

Scales multiply sums of products, but those of groups of 16 the weights themselves. So do scales of few digits
of small floats, as they can carry a factor that each weight has to be multiplied with anyway: the bits of an
e2m1, say, in the places where a bfloat16 has sign, exponent and mantissa are its value times 2^-126.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from quantkit.errors import FormatError
from quantkit.kernels.fused.expressions import BFLOAT16, arithmetic, bias_factor, placement, planes, registers
from quantkit.packing.formats import FloatFormat, NumberFormat
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor

#: Rows of a tile, columns of a run, and 16-bit lanes of a tile.
ROWS = 16
RUN = 32
LANES = 256
_VERIFY = "Run `quantkit verify` on the checkpoint, and download or quantize it again."
#: Weights whose codes are ordered at a time: on a CPU their int32 copies take 64 bytes each.
CHUNK_WEIGHTS = 1 << 25
#: Spans that a program of the layout builder has.
SPANS_AT_ONCE = 4


@dataclass(frozen=True)
class Geometry:
    """Sizes of a weight [n, k] in the fragment layout.

    `dot` columns have one scale in every row and are multiplied before it is applied.
    """

    n: int
    k: int
    bits: int
    planes: int
    tiles: int
    span: int
    spans: int
    row_tiles: int
    dot: int
    #: Columns that share a scale; all of them for one scale per channel or tensor.
    group: int
    #: Whether scales multiply weights rather than sums, and what they carry besides.
    on_weights: bool
    carried: float

    @property
    def groups(self) -> int:
        return -(-self.k // self.group)

    @property
    def steps(self) -> int:
        """Steps of 128 columns, or of a span where that is longer."""
        return self.spans * self.span // max(self.span, 128)

    @property
    def per_block(self) -> int:
        """Columns of a block: those whose scales a lane loads at once, 128 or one group."""
        return max(128, self.group)

    @property
    def in_block(self) -> int:
        """Groups of a block."""
        return 1 if self.groups == 1 else self.per_block // self.group

    @property
    def blocks(self) -> int:
        return -(-self.groups // self.in_block)


@lru_cache(maxsize=1024)
def geometry(n: int, k: int, scheme: Scheme, dtype: torch.dtype) -> Geometry:
    """The layout of a weight [n, k] for activations of `dtype`; groups are half a run or whole runs."""
    bits = scheme.format.bits
    span = 16 * planes(bits)
    group = scheme.group_columns(k)
    carried = 1.0 if group == k else _carried(scheme, dtype)
    on_weights = group != k and (group == RUN // 2 or carried != 1.0)
    whole = 128 if on_weights or group == k else group
    dot = next(size for size in (128, 64, 32) if whole % size == 0)
    if group != k and 128 % group and group % 128:
        # Groups that straddle blocks, of 96 say, become several of one dot with the same scale.
        group = next(size for size in (128, 64, 32) if group % size == 0)
    # Whole blocks, so that no kernel has half a step.
    block = max(span, 128)
    spans = -(-k // block) * block // span
    return Geometry(
        n, k, bits, planes(bits), registers(bits), span, spans, -(-n // ROWS), dot, group, on_weights, carried
    )


def _carried(scheme: Scheme, dtype: torch.dtype) -> float:
    """The factor that bare unpack expressions lack, if scales can carry it; else 1.

    They can where their products with the format's values are exact: a bfloat16 has eight digits.
    """
    if dtype == torch.float16 or not isinstance(scheme.format, FloatFormat):
        return 1.0
    digits = scheme.format.mantissa_bits + 1 + scheme.scale_type.digits
    if digits > 8 or arithmetic(scheme.format, BFLOAT16) is None:
        return 1.0
    return bias_factor(scheme.format, BFLOAT16)


def build(weight: PackedTensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Codes, scales, zero-points, factor (both empty for none) and values of `weight` in the fragment layout,
    for activations of `dtype`.

    Raises `FormatError` for codes and 8-bit scales that are no numbers.
    """
    shape = geometry(*weight.shape, weight.scheme, dtype)
    codes = torch.empty(
        shape.row_tiles, shape.spans, shape.tiles, LANES, dtype=torch.int16, device=weight.device
    )
    place = place_codes if codes.is_cuda else place_codes_by_torch
    step = max(1, CHUNK_WEIGHTS // (shape.spans * shape.span) // ROWS) * ROWS
    for start in range(0, weight.shape[0], step):
        rows = _checked(weight.codes(start, start + step), weight)
        place(codes, start // ROWS, rows, weight.scheme.format, shape)
    scale = weight.row_scale()
    if scale.itemsize == 1:
        if bool(scale.float().isnan().any()):
            raise FormatError(f"a {weight.scheme} weight has scales that are NaN. {_VERIFY}")
        scale = scale.to(torch.bfloat16) if shape.on_weights else scale.view(torch.int8)
    factor, values = weight.part("global_scale"), _values(weight)
    if shape.carried != 1.0:
        # What sums are divided by brings the largest scale to where bfloat16 ends.
        largest = float(scale.float().abs().max())
        unit = 2.0 ** (125 - math.floor(math.log2(largest))) if largest else 1.0
        scale, values = (scale.double() * unit).to(torch.bfloat16), values / shape.carried
        divisor = torch.tensor([unit / shape.carried], device=scale.device)
        factor = divisor if factor is None else divisor * factor
    size = weight.scheme.group_columns(shape.k)

    def by_lane(per_group: torch.Tensor) -> torch.Tensor:
        if size != shape.group:
            per_group = per_group.repeat_interleave(size // shape.group, dim=1)[:, : shape.groups]
        return _by_lane(per_group, shape.in_block)

    zero_point = weight.zero_points()
    empty = codes.new_empty(0)
    zero = empty
    if zero_point is not None:
        lowest = weight.scheme.format.values[0]
        # Integers are exact in bfloat16, floats between codes need not be.
        dtype = torch.float32 if weight.scheme.zero_point == "float" else torch.bfloat16
        zero = by_lane(zero_point.to(torch.float32) + lowest).to(dtype)
    return codes, by_lane(scale), zero, empty.float() if factor is None else factor, values


def _values(weight: PackedTensor) -> torch.Tensor:
    """The value of each code, float32; 0 for codes that stand for none, of which `build` lets none pass."""
    book = weight.part("codebook")
    if book is not None:
        return book
    return torch.tensor(weight.scheme.format.values, device=weight.device).nan_to_num(0.0)


def _checked(codes: torch.Tensor, weight: PackedTensor) -> torch.Tensor:
    """`codes`, all of which stand for numbers: unpack expressions would make up values for the others."""
    if weight.part("codebook") is None and any(math.isnan(value) for value in weight.scheme.format.values):
        reserved = torch.tensor([math.isnan(v) for v in weight.scheme.format.values], device=codes.device)
        if bool(reserved[codes.int()].any()):
            raise FormatError(f"a {weight.scheme} weight has codes that stand for no number. {_VERIFY}")
    return codes


def place_codes(
    words: torch.Tensor, first: int, codes: torch.Tensor, number_format: NumberFormat, shape: Geometry
) -> None:
    """Write codes, uint8 [rows, K], into row tiles `first` and on of `words`, int16 [.., spans, tiles, 256].

    What is beyond the rows and columns has code 0.
    """
    from quantkit.kernels.fused.order import order_codes

    rows, columns = codes.shape
    order_codes[(-(-rows // ROWS), -(-shape.spans // SPANS_AT_ONCE))](
        codes.contiguous(),
        words,
        first,
        rows,
        columns,
        shape.spans,
        **order_constants(number_format, shape),
    )


@lru_cache(maxsize=256)
def order_constants(number_format: NumberFormat, shape: Geometry) -> dict[str, Any]:
    """What the layout builder knows at compile time."""
    fields = (
        (plane, field.register, field.at, field.first, field.mask)
        for plane, in_plane in enumerate(placement(number_format))
        for field in in_plane
    )
    return {
        "TILES": shape.tiles,
        "PLANES": shape.planes,
        "FIELDS": tuple(number for numbers in fields for number in numbers),
        "HALVES": shape.group == RUN // 2,
        "C": SPANS_AT_ONCE,
    }


def place_codes_by_torch(
    words: torch.Tensor, first: int, codes: torch.Tensor, number_format: NumberFormat, shape: Geometry
) -> None:
    """The same by operations of torch, in int32."""
    rows, columns = codes.shape
    padded = F.pad(codes, (0, shape.spans * shape.span - columns, 0, -rows % ROWS))
    halves = shape.group == RUN // 2
    in_run = (2, 4, 2, 2) if halves else (4, 2, 2, 2)
    axes = padded.view(-1, 2, 8, shape.spans, shape.planes // 2, *in_run)
    # rows 16 | row // 8, r | span | run, p0, t, e1, e0
    axes = axes if halves else axes.transpose(5, 6)
    by_plane = axes.permute(4, 5, 0, 3, 2, 6, 7, 1, 8).reshape(shape.planes, -1, shape.spans, LANES).int()
    wide = by_plane.new_zeros(by_plane.shape[1], shape.spans, shape.tiles, LANES)
    for plane, fields in zip(by_plane, placement(number_format), strict=True):
        for field in fields:
            wide[:, :, field.register] |= ((plane >> field.first) & field.mask) << field.at
    # The low 16 bits; a conversion of what does not fit is not defined.
    words[first : first + len(wide)] = wide.view(torch.int16)[..., ::2]


def _by_lane(per_group: torch.Tensor, in_block: int) -> torch.Tensor:
    """One value per row and group, [N, groups], in the order of `scale` above; both are padded with zeros."""
    rows, groups = per_group.shape
    padded = per_group.new_zeros(-(-rows // ROWS) * ROWS, -(-groups // in_block) * in_block)
    padded[:rows, :groups] = per_group
    return padded.view(-1, 2, 8, padded.shape[1] // in_block, in_block).permute(0, 3, 2, 4, 1).contiguous()
