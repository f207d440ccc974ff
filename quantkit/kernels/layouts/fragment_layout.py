"""Fragment layout: packed codes in the order of operand A of `mma.m16n8k16`.

The weights are operand A, W [16, 16], and x^T [16, 8] is operand B, as `ldmatrix` and `wgmma` load it from x.
Warp lane 4 r + t holds rows r and r + 8, and four of the 16 columns of each. Two products are a run of 32
consecutive columns:

    column of the run = 16 p0 + 8 e1 + 2 t + e0       p0: first or second product of the run
                                                      e1, e0: which of the four columns of the warp lane

A 32-bit register has two 16-bit lanes. The same 16-bit lane of a few registers holds one code of each plane,
plane = 2 run + p0 (`layouts.dequant_expressions`). A tile is 16 rows of one such register:
int16 [256] in the order (r, t, e1, row // 8, e0). A warp lane reads its 16 bytes of a tile with one load.

    codes  int16 [N / 16][K / span][tiles][256]        span: columns of a 16-bit lane, 16 * planes
    scale        [N / 16][blocks][8 r][V][2]           V: groups of a block; 2: row // 8
    zero         as scale                              zero-point + lowest value; bfloat16, or float32
                                                       for zero-points that are no integers

A block is 128 columns, or one group if that is longer. A warp lane loads all scales of a block at once.

Scales (`layouts.fragment_scales`) multiply sums of products. Scales of groups of 16 multiply
weights instead, as do 8-bit scales of small floats whose product is exact. The latter carry a power of two
that each weight lacks: bits of an e2m1, moved to where a bfloat16 has them, are its value times 2^-126.
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

#: Rows of a tile, columns of a run, and int16 numbers of a tile.
ROWS = 16
RUN = 32
LANES = 256
_VERIFY = "Run `quantkit verify` on the checkpoint, and download or quantize it again."
#: Weights repacked at a time (on a CPU int32 copies take 64 bytes each); spans per program of `repack_codes`.
CHUNK_WEIGHTS = 1 << 25
SPANS_AT_ONCE = 4


@dataclass(frozen=True)
class Geometry:
    """Sizes of a weight [n, k] in the fragment layout; `tiles` registers hold a code of each plane."""

    n: int
    k: int
    bits: int
    planes: int
    tiles: int
    span: int
    spans: int
    row_tiles: int
    #: Columns whose products are summed before a scale applies: 32, 64 or 128.
    dot: int
    #: Columns that share a scale; k for one scale per channel or tensor.
    group: int
    #: True if scales multiply weights, not sums; then the power of two that they carry, or 1.
    on_weights: bool
    carried: float
    #: Encoding of scales: a result of `fragment_scales.scale_kind`.
    scale_kind: str

    @property
    def groups(self) -> int:
        """Return the number of groups of a row."""
        return -(-self.k // self.group)

    @property
    def k_step(self) -> int:
        """Return the number of columns that a warp dequantizes at a time: 128, or a longer span."""
        return max(128, self.span)

    @property
    def k_steps(self) -> int:
        """Return the number of k_steps of a row."""
        return self.spans * self.span // self.k_step

    @property
    def per_block(self) -> int:
        """Return the number of columns of a block: 128, or one group if that is longer."""
        return max(128, self.group)

    @property
    def in_block(self) -> int:
        """Return V, the number of groups in a block."""
        return 1 if self.groups == 1 else self.per_block // self.group

    @property
    def blocks(self) -> int:
        """Return the number of blocks of a row."""
        return -(-self.groups // self.in_block)


@lru_cache(maxsize=1024)
def geometry(n: int, k: int, scheme: Scheme, dtype: torch.dtype) -> Geometry:
    """Return the sizes of a weight [n, k] for activations of `dtype`. Groups are 16, or multiples of 32."""
    bits = scheme.format.bits
    span = 16 * planes(bits)
    group = scheme.group_columns(k)
    carried = 1.0 if group == k else _carried(scheme, dtype)
    on_weights = group != k and (group == RUN // 2 or carried != 1.0)
    whole = 128 if on_weights or group == k else group
    dot = next(size for size in (128, 64, 32) if whole % size == 0)
    if group != k and 128 % group and group % 128:
        # A group that straddles blocks, such as 96, becomes several groups with the same scale.
        group = next(size for size in (128, 64, 32) if group % size == 0)
    # K is padded to whole blocks, so that no kernel has half a k_step.
    block = max(span, 128)
    spans = -(-k // block) * block // span
    kind = scale_kind(scheme.scale_dtype, on_weights, carried != 1.0)
    tiles, row_tiles = registers(bits), -(-n // ROWS)
    return Geometry(
        n, k, bits, planes(bits), tiles, span, spans, row_tiles, dot, group, on_weights, carried, kind
    )


def _carried(scheme: Scheme, dtype: torch.dtype) -> float:
    """Return the power of two that 8-bit scales carry; 1 unless scale times value is exact in bfloat16."""
    if dtype == torch.float16 or not isinstance(scheme.format, FloatFormat):
        return 1.0
    digits = scheme.format.mantissa_bits + 1 + scheme.scale_type.digits
    if digits > 8 or arithmetic(scheme.format, BFLOAT16) is None:
        return 1.0
    return bias_factor(scheme.format, BFLOAT16)


def value_sizes(shape: Geometry, scheme: Scheme) -> tuple[int, int]:
    """Return the bytes of a scale and of a zero-point; 0 for none, and for one scale per row."""
    # 8-bit scales without a `scale_kind` become bfloat16.
    scale = 1 if shape.scale_kind else max(2, scheme.scale_dtype.itemsize)
    zero = scheme.zero_point_type.kernel_dtype.itemsize if scheme.has_zero_point else 0
    return 0 if shape.groups == 1 else scale, zero


def build(weight: PackedTensor, dtype: torch.dtype, count: int = 1) -> tuple[torch.Tensor, ...]:
    """Build the fragment layout of `weight` [N, K] for activations of `dtype`.

    Returns codes, scales, zero-points, factor and values, as drawn above; zero-points and factor may be
    empty. y is divided by the factor, float32 [count]. Values are float32 [2**bits]. `count` weights of whole
    row tiles may lie one above the other, each with its factor. Raises `FormatError` for NaN in codes or
    8-bit scales; within `building`, at the end of its block.
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
        """Reorder scales or zero-points [N, groups] to the order in which warp lanes load them."""
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
    """Return the words int32 [N, W] of a weight of `shape` [N, K] from its layout and stored `scale`.

    Unused bits are zero, as `docs/format.md` demands; code bits equal those that `build` read.
    """
    n, k = shape
    # The order of codes is the same for all dtypes of activations.
    sizes = geometry(n, k, scheme, torch.bfloat16)
    codes, turned = layout[0], layout[1].dtype == torch.int8 and sizes.scale_kind == "e5m3"
    words = torch.empty(n, scheme.words_per_row(k), dtype=torch.int32, device=codes.device)
    step = _rows_at_once(sizes)
    for start in range(0, n, step):
        stop = min(start + step, n)
        rows = read_codes(codes[start // ROWS : -(-stop // ROWS)], scheme.format, sizes)
        rows = rows[: stop - start, :k]
        if turned:
            rows = rows ^ signs_of(scheme.row_scale(scale, n, start, stop), scheme, k)
        words[start:stop] = scheme.pack(rows)
    return words


def join(
    weights: Sequence[tuple[torch.Tensor, ...]],
    rows: Sequence[int],
    scheme: Scheme,
    k: int,
    dtype: torch.dtype,
) -> tuple[tuple[torch.Tensor, ...], tuple[tuple[torch.Tensor, ...], ...]] | None:
    """Concatenate layouts of weights [N, K] of one scheme and K along N, for activations of `dtype`.

    `rows` has each N. Returns the tensors of the whole, and those of each weight as views. Returns None if a
    weight before the last has no whole row tiles, or if values differ. Factors may differ by powers of two
    that scales can take on.
    """
    if any(count % ROWS for count in rows[:-1]):
        return None
    codes, scales, zeros, factors, values = (list(parts) for parts in zip(*weights, strict=True))
    if any(other is not values[0] and not torch.equal(values[0], other) for other in values[1:]):
        return None
    factor = factors[0]
    if factor.numel():
        # The one place where the host waits for the device.
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
    """Return the value of each code over the factor `carried`, float32 [2**bits]; 0 for NaN."""
    return torch.tensor(number_format.values, device=device).nan_to_num(0.0) / carried


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _reserved(number_format: NumberFormat, device: torch.device) -> torch.Tensor | None:
    """Return 1 for codes that are NaN, uint8 [2**bits]; None without such codes, or for a fitted book."""
    if isinstance(number_format, FittedFormat) or not any(map(math.isnan, number_format.values)):
        return None
    return torch.tensor([math.isnan(value) for value in number_format.values], device=device).byte()


def _rows_at_once(shape: Geometry) -> int:
    """Return the number of rows to repack at a time: whole row tiles of about `CHUNK_WEIGHTS` weights."""
    return max(1, CHUNK_WEIGHTS // (shape.spans * shape.span) // ROWS) * ROWS


def _placed(weight: PackedTensor, shape: Geometry) -> torch.Tensor:
    """Repack the codes of `weight` [N, K] to int16 [row_tiles, spans, tiles, 256]."""
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
        # Dequantization expressions would give such codes a value.
        refuse_if(found, f"a {weight.scheme} weight has codes that stand for no number. {_VERIFY}")
    if shape.scale_kind == "e5m3":
        # Codes take the signs of scales. To check first for negative scales, the host would have to wait.
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
    """Repack words int32 [rows, W] of packing "bits" into `words` int16 [.., spans, tiles, 256].

    Writes row tiles from `first` on. Padding gets code 0. `found` int32 [1] becomes 1 if a code is NaN.
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
    """Repack codes, uint8 [rows, K], as `place_words` does."""
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
    """Launch `repack_codes` for `stored` [rows, W or K], codes of `bits` bits each."""
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
    """Build the launch of `repack_codes` for `rows` rows; `check` looks for codes that are NaN."""
    from quantkit.kernels.layouts.repack_kernel import repack_codes

    grid = -(-rows // ROWS), -(-shape.spans // SPANS_AT_ONCE)
    return Launch(repack_codes, grid, **repack_constants(number_format, shape, bits, check))


@lru_cache(maxsize=256)
def repack_constants(
    number_format: NumberFormat, shape: Geometry, bits: int, check: bool = False
) -> dict[str, Any]:
    """Return the constexprs of `repack_codes` for codes that are stored in `bits` bits."""
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
    """Yield a row of `FIELDS` of `repack_codes`, without the plane, for each stored part of `field`."""
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
    """Repack codes uint8 [rows, columns] as `place_codes`, by torch operations in int32."""
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
    # Take the low 16 bits as a view: converting a number that does not fit is undefined.
    words[first : first + len(wide)] = wide.view(torch.int16)[..., ::2]


def read_codes(words: torch.Tensor, number_format: NumberFormat, shape: Geometry) -> torch.Tensor:
    """Return the codes uint8 [rows, columns] of row tiles int16 [.., spans, tiles, 256], padding included."""
    by_plane = torch.zeros(
        shape.planes, len(words), shape.spans, LANES, dtype=torch.uint8, device=words.device
    )
    for plane, fields in enumerate(placement(number_format)):
        for field in fields:
            # The shift copies the sign bit; the mask removes the copies.
            bits = (words[:, :, field.register] >> field.at) & field.mask
            by_plane[plane] |= bits.to(torch.uint8) << field.first
    # run, p0, rows 16, span, r, t, e1, row // 8, e0
    axes = by_plane.view(shape.planes // 2, 2, -1, shape.spans, 8, 4, 2, 2, 2)
    return axes.permute(2, 7, 4, 3, 0, 1, 6, 5, 8).reshape(len(words) * ROWS, -1)


def _by_lane(per_group: torch.Tensor, in_block: int, beyond: int) -> torch.Tensor:
    """Reorder one value per row and group, [N, groups], to [N / 16, blocks, 8, V, 2]; pad with `beyond`."""
    rows, groups = per_group.shape
    more = -rows % ROWS, -groups % in_block
    if any(more):
        padded = per_group.new_full((rows + more[0], groups + more[1]), beyond)
        padded[:rows, :groups] = per_group
        per_group = padded
    lanes = per_group.view(-1, 2, 8, per_group.shape[1] // in_block, in_block)
    return lanes.permute(0, 3, 2, 4, 1).contiguous()
