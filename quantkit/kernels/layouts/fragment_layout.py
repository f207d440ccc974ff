"""The fragment layout: packed codes in the order in which tensor cores want them in registers.

The weights are operand A of `mma.m16n8k16`, W [16, 16] times x^T [16, 8]. Lane 4 r + t of a warp holds, of
rows r and r + 8, four of the 16 columns. 32 consecutive columns are one run, of two products:

    column in its run = 16 p0 + 8 e1 + 2 t + e0       p0: the first or second of the run's two products
                                                      e1, e0: which of the lane's four columns of a product

So x is operand B as it lies in memory: `ldmatrix` and `wgmma` take its rows as they are.

A lane of 16 bits holds one field of each plane (`quantkit.kernels.layouts.dequant_expressions`), plane = 2
run + p0. A tile is 16 rows times 256 lanes of 16 bits, 512 bytes, in the order (r, t, e1, row // 8, e0): a
warp reads 16 bytes per lane and has its fragments. The tiles of a part follow each other, then those of the
next part:

    codes  int16 [N / 16][K / span][tiles][256]    span: the columns of one field in all planes, 16 * planes
    scale        [N / 16][blocks][8 r][groups of a block][2]   as `quantkit.kernels.layouts.fragment_scales`
    has them zero         as scale: zero-point plus the lowest value; bfloat16, or float32 between codes

A block is 128 columns or one group, whichever is longer: a lane loads all scales of one at once.

Scales multiply sums of products, but those of groups of 16 the weights themselves. So do scales of few digits
of small floats, as they can carry a factor that each weight has to be multiplied with anyway: the bits of an
e2m1, say, in the places where a bfloat16 has sign, exponent and mantissa are its value times 2^-126.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from quantkit.kernels.jit.building import refuse_if
from quantkit.kernels.jit.launcher import Launch
from quantkit.kernels.layouts.dequant_expressions import (
    BFLOAT16,
    Field,
    arithmetic,
    bias_factor,
    placement,
    planes,
    registers,
)
from quantkit.kernels.layouts.fragment_scales import carrying, lowered, padding, scale_kind, signs_of
from quantkit.packing.bitpack import parts
from quantkit.packing.formats import FittedFormat, FloatFormat, NumberFormat
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
    #: How scales are to be read (`quantkit.kernels.layouts.fragment_scales`).
    scale_kind: str

    @property
    def groups(self) -> int:
        return -(-self.k // self.group)

    @property
    def k_step(self) -> int:
        """Columns that are decoded at a time: 128, or a span where that is longer."""
        return max(128, self.span)

    @property
    def k_steps(self) -> int:
        """How many units the columns are."""
        return self.spans * self.span // self.k_step

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
    kind = scale_kind(scheme.scale_dtype, on_weights, carried != 1.0)
    tiles, row_tiles = registers(bits), -(-n // ROWS)
    return Geometry(
        n, k, bits, planes(bits), tiles, span, spans, row_tiles, dot, group, on_weights, carried, kind
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


def value_sizes(shape: Geometry, scheme: Scheme) -> tuple[int, int]:
    """Bytes of a scale and of a zero-point as `build` has them; 0 for none, and for the scale of a row."""
    # Those of 8 bits without a kind become bfloat16.
    scale = 1 if shape.scale_kind else max(2, scheme.scale_dtype.itemsize)
    zero = scheme.zero_point_type.kernel_dtype.itemsize if scheme.has_zero_point else 0
    return 0 if shape.groups == 1 else scale, zero


def build(weight: PackedTensor, dtype: torch.dtype, count: int = 1) -> tuple[torch.Tensor, ...]:
    """Codes, scales, zero-points, factor (both empty for none) and values of `weight` in the fragment layout,
    for activations of `dtype`.

    If it is `count` weights of whole row tiles one above the other, what scales carry is a factor of each.
    Raises `FormatError` for codes and 8-bit scales that are no numbers, within `building` when that ends.
    """
    shape = geometry(*weight.shape, weight.scheme, dtype)
    codes = _placed(weight, shape)
    scale, factor, values = weight.row_scale(), weight.part("global_scale"), weight.part("codebook")
    if scale.itemsize == 1:
        refuse_if(scale.float().isnan().any(), f"a {weight.scheme} weight has scales that are NaN. {_VERIFY}")
    if values is None:
        values = _values(weight.scheme.format, shape.carried, weight.device)
    if shape.carried != 1.0:
        found = carrying(scale.reshape(count, -1, scale.shape[1]))
        scale, divisor = found.scale.view(scale.shape), (found.unit / shape.carried).float()
        factor = divisor if factor is None else divisor * factor
    elif scale.itemsize == 1:
        scale = scale.to(torch.bfloat16) if shape.on_weights else scale.view(torch.int8)
    size = weight.scheme.group_columns(shape.k)

    def by_lane(per_group: torch.Tensor, beyond: int = 0) -> torch.Tensor:
        if size != shape.group:
            per_group = per_group.repeat_interleave(size // shape.group, dim=1)[:, : shape.groups]
        return _by_lane(per_group, shape.in_block, beyond)

    zero_point = weight.zeros_in_codes()
    zero = codes.new_empty(0)
    if zero_point is not None:
        lowest = weight.scheme.format.values[0]
        zero = by_lane(zero_point.to(torch.float32) + lowest).to(weight.scheme.zero_point_type.kernel_dtype)
    if factor is None:
        factor = torch.empty(0, device=codes.device)
    return codes, by_lane(scale, padding(shape.scale_kind)), zero, factor, values


def restore(
    layout: Sequence[torch.Tensor], scheme: Scheme, shape: tuple[int, int], scale: torch.Tensor
) -> torch.Tensor:
    """The words [N, W] of a weight of `shape` and `scale` that `build` made `layout` of, for any activations.

    They are the same bits, but that those which no code has are zero, as `docs/format.md` demands.
    """
    n, k = shape
    # All dtypes of activations have the codes in the same order.
    sizes = geometry(n, k, scheme, torch.bfloat16)
    codes, turned = layout[0], layout[1].dtype == torch.int8 and sizes.scale_kind == "e5m3"
    words = torch.empty(n, scheme.words_per_row(k), dtype=torch.int32, device=codes.device)
    step = _rows_at_once(sizes)
    for start in range(0, n, step):
        stop = min(start + step, n)
        rows = read_codes(codes[start // ROWS : -(-stop // ROWS)], scheme.format, sizes)
        rows = rows[: stop - start, :k]
        words[start:stop] = scheme.pack(rows ^ signs_of(scale[start:stop], scheme, k) if turned else rows)
    return words


def join(
    weights: Sequence[tuple[torch.Tensor, ...]],
    rows: Sequence[int],
    scheme: Scheme,
    k: int,
    dtype: torch.dtype,
) -> tuple[tuple[torch.Tensor, ...], tuple[tuple[torch.Tensor, ...], ...]] | None:
    """What `build` made of several weights of one scheme and K, for activations of `dtype`, as that of one,
    and of each as views of it.

    None unless all but the last have whole row tiles, and the same values and factors. Factors may differ
    by powers of two where exponents of scales can make up for it.
    """
    if any(count % ROWS for count in rows[:-1]):
        return None
    codes, scales, zeros, factors, values = (list(parts) for parts in zip(*weights, strict=True))
    if any(other is not values[0] and not torch.equal(values[0], other) for other in values[1:]):
        return None
    factor = factors[0]
    if factor.numel():
        # The only ones that are asked of the device.
        found = torch.cat(factors).tolist()
        kind = geometry(sum(rows), k, scheme, dtype).scale_kind
        factor = factors[found.index(min(found))]
        for i, own in enumerate(found):
            if own == min(found):
                continue
            mantissa, exponent = math.frexp(min(found) / own)
            moved = lowered(scales[i], kind, 1 - exponent) if mantissa == 0.5 else None
            if moved is None:
                return None
            scales[i] = moved
    tiles = [len(part) for part in codes]
    whole = tuple(torch.cat(parts) for parts in (codes, scales, zeros))
    views = [torch.split(part, tiles) if part.numel() else (part,) * len(tiles) for part in whole]
    return (*whole, factor, values[0]), tuple((*own, factor, values[0]) for own in zip(*views, strict=True))


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _values(number_format: NumberFormat, carried: float, device: torch.device) -> torch.Tensor:
    """The value of each code less the factor that is `carried`, float32; 0 for codes that stand for none.

    `build` lets none of the latter pass.
    """
    return torch.tensor(number_format.values, device=device).nan_to_num(0.0) / carried


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _reserved(number_format: NumberFormat, device: torch.device) -> torch.Tensor | None:
    """Which codes stand for no number, uint8; None where all do, or where a code book says what they are."""
    if isinstance(number_format, FittedFormat) or not any(map(math.isnan, number_format.values)):
        return None
    return torch.tensor([math.isnan(value) for value in number_format.values], device=device).byte()


def _rows_at_once(shape: Geometry) -> int:
    return max(1, CHUNK_WEIGHTS // (shape.spans * shape.span) // ROWS) * ROWS


def _placed(weight: PackedTensor, shape: Geometry) -> torch.Tensor:
    """The codes of `weight` in the order of fragments."""
    number_format, device, n = weight.scheme.format, weight.device, weight.shape[0]
    words = torch.empty(shape.row_tiles, shape.spans, shape.tiles, LANES, dtype=torch.int16, device=device)
    reserved = _reserved(number_format, device)
    found = None if reserved is None else torch.zeros(1, dtype=torch.int32, device=device)
    place, step = place_codes if words.is_cuda else repack_codes_reference, _rows_at_once(shape)
    if words.is_cuda and weight.scheme.packing == "bits":
        place_words(words, 0, weight.words, number_format, shape, found)
    else:
        for start in range(0, n, step):
            place(words, start // ROWS, weight.codes(start, start + step), number_format, shape, found)
    if found is not None:
        # Unpack expressions would make up values for them.
        refuse_if(found, f"a {weight.scheme} weight has codes that stand for no number. {_VERIFY}")
    if shape.scale_kind == "e5m3":
        # Codes have the signs of scales. To know whether any is negative, the host would have to wait.
        turned = torch.empty_like(words)
        for start in range(0, n, step):
            signs = signs_of(weight.row_scale(start, start + step), weight.scheme, shape.k)
            place(turned, start // ROWS, signs, number_format, shape)
        words ^= turned
    return words


def place_words(
    words: torch.Tensor,
    first: int,
    stored: torch.Tensor,
    number_format: NumberFormat,
    shape: Geometry,
    found: torch.Tensor | None = None,
) -> None:
    """Write codes into row tiles `first` and on of `words`, int16 [.., spans, tiles, 256].

    `stored` are words of rows in the packing "bits", int32 [rows, W]. What is beyond the rows and columns has
    code 0. `found`, int32 [1], becomes 1 if a code stands for no number.
    """
    _repack(words, first, stored, number_format.bits, number_format, shape, found)


def place_codes(
    words: torch.Tensor,
    first: int,
    codes: torch.Tensor,
    number_format: NumberFormat,
    shape: Geometry,
    found: torch.Tensor | None = None,
) -> None:
    """The same from codes, uint8 [rows, K]."""
    _repack(words, first, codes, 8, number_format, shape, found)


def _repack(
    words: torch.Tensor,
    first: int,
    stored: torch.Tensor,
    bits: int,
    number_format: NumberFormat,
    shape: Geometry,
    found: torch.Tensor | None,
) -> None:
    rows = stored.contiguous().view(torch.uint8)
    reserved = None if found is None else _reserved(number_format, words.device)
    launch = _repack_launch(number_format, shape, bits, len(rows), reserved is not None)
    launch(
        rows,
        words,
        rows if reserved is None else reserved,
        rows if found is None else found,
        first,
        len(rows),
        shape.k,
        rows.shape[1],
        shape.spans,
    )


@lru_cache(maxsize=1024)
def _repack_launch(number_format: NumberFormat, shape: Geometry, bits: int, rows: int, check: bool) -> Launch:
    from quantkit.kernels.layouts.repack_kernel import repack_codes

    grid = -(-rows // ROWS), -(-shape.spans // SPANS_AT_ONCE)
    return Launch(repack_codes, grid, **repack_constants(number_format, shape, bits, check))


@lru_cache(maxsize=256)
def repack_constants(
    number_format: NumberFormat, shape: Geometry, bits: int, check: bool = False
) -> dict[str, Any]:
    """What the layout builder knows at compile time of codes that are stored in `bits`."""
    fields = (
        (plane, *piece)
        for plane, in_plane in enumerate(placement(number_format))
        for field in in_plane
        for piece in _pieces(bits, field)
    )
    return {
        "BITS": bits,
        "TILES": shape.tiles,
        "PLANES": shape.planes,
        "FIELDS": tuple(number for numbers in fields for number in numbers),
        "CHECK": check,
        "C": SPANS_AT_ONCE,
    }


def _pieces(bits: int, field: Field) -> Iterator[tuple[int, ...]]:
    """What each part of codes that are stored in `bits` has of `field`, as `repack_codes` wants it."""
    before = 0
    for width in parts(bits):
        first = max(field.first, before)
        count = min(field.first + field.width, before + width) - first
        if count > 0:
            at = field.at + first - field.first
            yield field.register, at, first, (1 << count) - 1, before, width, first - before
        before += width


def repack_codes_reference(
    words: torch.Tensor,
    first: int,
    codes: torch.Tensor,
    number_format: NumberFormat,
    shape: Geometry,
    found: torch.Tensor | None = None,
) -> None:
    """`place_codes` by operations of torch, in int32."""
    if found is not None:
        reserved = _reserved(number_format, codes.device)
        assert reserved is not None
        found |= reserved[codes.int()].any()
    rows, columns = codes.shape
    padded = F.pad(codes, (0, shape.spans * shape.span - columns, 0, -rows % ROWS))
    # rows 16 | row // 8, r | span | run, p0, e1, t, e0
    axes = padded.view(-1, 2, 8, shape.spans, shape.planes // 2, 2, 2, 4, 2)
    by_plane = axes.permute(4, 5, 0, 3, 2, 7, 6, 1, 8).reshape(shape.planes, -1, shape.spans, LANES).int()
    wide = by_plane.new_zeros(by_plane.shape[1], shape.spans, shape.tiles, LANES)
    for plane, fields in zip(by_plane, placement(number_format), strict=True):
        for field in fields:
            wide[:, :, field.register] |= ((plane >> field.first) & field.mask) << field.at
    # The low 16 bits; a conversion of what does not fit is not defined.
    words[first : first + len(wide)] = wide.view(torch.int16)[..., ::2]


def read_codes(words: torch.Tensor, number_format: NumberFormat, shape: Geometry) -> torch.Tensor:
    """The codes of row tiles, int16 [.., spans, tiles, 256]: uint8 [rows, columns], with their padding."""
    by_plane = torch.zeros(
        shape.planes, len(words), shape.spans, LANES, dtype=torch.uint8, device=words.device
    )
    for plane, fields in enumerate(placement(number_format)):
        for field in fields:
            # A shift copies the sign bit; the mask takes its copies away.
            bits = (words[:, :, field.register] >> field.at) & field.mask
            by_plane[plane] |= bits.to(torch.uint8) << field.first
    # run, p0, rows 16, span, r, t, e1, row // 8, e0
    axes = by_plane.view(shape.planes // 2, 2, -1, shape.spans, 8, 4, 2, 2, 2)
    return axes.permute(2, 7, 4, 3, 0, 1, 6, 5, 8).reshape(len(words) * ROWS, -1)


def _by_lane(per_group: torch.Tensor, in_block: int, beyond: int) -> torch.Tensor:
    """One value per row and group, [N, groups], in the order of `scale` above; `beyond` both are others."""
    rows, groups = per_group.shape
    more = -rows % ROWS, -groups % in_block
    if any(more):
        padded = per_group.new_full((rows + more[0], groups + more[1]), beyond)
        padded[:rows, :groups] = per_group
        per_group = padded
    lanes = per_group.view(-1, 2, 8, per_group.shape[1] // in_block, in_block)
    return lanes.permute(0, 3, 2, 4, 1).contiguous()
