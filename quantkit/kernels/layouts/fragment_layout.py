"""Fragment layout: packed codes in the order of operand A of `mma.m16n8k16`.

The weights are operand A, W [16, 16], and x^T [16, 8] is operand B, as `ldmatrix` and `wgmma` load it from x.
Warp lane 4 r + t holds rows r and r + 8, and four of the 16 columns of each. These 16 x 16 weights are a
fragment. Two fragments are a run of 32 consecutive columns:

    column of the run = 16 p0 + 8 e1 + 2 t + e0       p0: first or second fragment of the run
                                                      e1, e0: which of the four columns of the warp lane

A 32-bit register has two halfwords. The same halfword of a few registers holds one code of each fragment 2
run + p0 of a span (`layouts.dequant_expressions`). For 16 rows, one such register of all lanes is int16 [256]
in the order (r, t, e1, row // 8, e0). A warp lane reads 16 bytes of it with one load: four registers.

    codes  int16 [N / 16][K / span][registers][256]    span: the columns of its fragments, 16 each
    scale        [N / 16][blocks][8 r][V][2]           V: groups of a scale block; 2: row // 8
    zero         as scale                              zero-point + lowest value; bfloat16, or float32
                                                       for zero-points that are no integers

A scale block is 128 columns, or one group if that is longer. A warp lane loads all scales of a block at once.

Scales (`layouts.fragment_scales`) multiply sums of products. Scales of groups of 16 multiply weights instead,
and so do 8-bit scales of small floats, where the product is exact. Dequantizing small floats leaves out the
correction of the exponent bias, and scales include a power of two for it. For example, the bits of an e2m1,
moved to where a bfloat16 has them, are its value times 2^-126.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from quantkit.kernels.jit.building import refuse_if
from quantkit.kernels.jit.launcher import Launch
from quantkit.kernels.layouts.dequant_expressions import Field, placement
from quantkit.kernels.layouts.fragment_scales import fold_scales, lowered, padding, signs_of
from quantkit.kernels.layouts.geometry import ROWS, Geometry, geometry
from quantkit.packing.bitpack import part_widths
from quantkit.packing.formats import FittedFormat, NumberFormat
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor

#: Halfwords of one register of all 32 lanes: 16 rows (a row tile) need four registers of each lane.
HALFWORDS = 256
_VERIFY = "Run `quantkit verify` on the checkpoint, and download or quantize it again."
#: Weights repacked at a time (on a CPU int32 copies take 64 bytes each); spans per program of `repack_codes`.
WEIGHTS_AT_ONCE = 1 << 25
SPANS_AT_ONCE = 4


def build(weight: PackedTensor, dtype: torch.dtype, count: int = 1) -> tuple[torch.Tensor, ...]:
    """Build the fragment layout of `weight` [N, K] for activations of `dtype`: five tensors for kernels.

        codes     int16 [N / 16, spans, registers, 256]   span: columns whose codes are in the same registers
        scale     [N / 16, blocks, 8, V, 2]               of V groups, and of rows r and r + 8
        zero      as scale, zero-point + lowest value     empty without zero-points
        factor    float32 [count]                         y is divided by it; empty if there is none
        values    float32 [2**bits]                       the value of each code

    The rows of `weight` may be `count` weights one above the other, each of whole row tiles (16 rows) and
    with its own factor. Raises `FormatError` for NaN in codes or 8-bit scales, inside a `building` block at
    its end.
    """
    shape = geometry(*weight.shape, weight.scheme, dtype)
    codes = _placed(weight, shape)
    scale, factor, values = weight.row_scale(), weight.part("global_scale"), weight.part("codebook")
    if scale.itemsize == 1:
        refuse_if(scale.float().isnan().any(), f"a {weight.scheme} weight has scales that are NaN. {_VERIFY}")
    if values is None:
        values = _values(weight.scheme.format, shape.folded_factor, weight.device)
    if shape.folded_factor != 1.0:
        found = fold_scales(scale.reshape(count, -1, scale.shape[1]))
        scale, divisor = found.scale.view(scale.shape), (found.unit / shape.folded_factor).float()
        factor = divisor if factor is None else divisor * factor
    elif scale.itemsize == 1:
        scale = scale.to(torch.bfloat16) if shape.on_weights else scale.view(torch.int8)
    size = weight.scheme.group_columns(shape.k)

    def by_lane(per_group: torch.Tensor, beyond: int = 0) -> torch.Tensor:
        """Reorder scales or zero-points [N, groups] by `_by_lane`; padding gets `beyond`."""
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
    """Return the stored words int32 [N, words per row] of a weight of `shape` [N, K]: the inverse of `build`.

    `layout` are the tensors that `build` returned, `scale` the scales as stored. Unused bits are zero, as
    `docs/format.md` demands; all other bits equal those of the words that `build` read.
    """
    n, k = shape
    # The order of codes is the same for all dtypes of activations.
    sizes = geometry(n, k, scheme, torch.bfloat16)
    codes, has_signs = layout[0], layout[1].dtype == torch.int8 and sizes.scale_kind == "e5m3"
    words = torch.empty(n, scheme.words_per_row(k), dtype=torch.int32, device=codes.device)
    step = _rows_at_once(sizes)
    for start in range(0, n, step):
        stop = min(start + step, n)
        rows = read_codes(codes[start // ROWS : -(-stop // ROWS)], scheme.format, sizes)
        rows = rows[: stop - start, :k]
        if has_signs:
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
    """Concatenate layouts of weights with the same scheme and K along N: (joined tensors, views per weight).

    `weights` has what `build` returned for each weight [rows[i], k], for activations of `dtype`. One product
    with the joined layout computes the products of all. The views share the memory of the joined tensors.

    Returns None if layouts cannot be joined:

        rows       of a weight before the last are not a multiple of 16, or not whole blocks with one scale
        values     of codes differ between weights
        factors    (y is divided by them) differ by more than a power of two that scales can absorb
    """
    if any(count % math.lcm(ROWS, scheme.group_rows) for count in rows[:-1]):
        return None
    codes, scales, zeros, factors, values = (list(tensors) for tensors in zip(*weights, strict=True))
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
    whole = tuple(torch.cat(tensors) for tensors in (codes, scales, zeros))
    views = [torch.split(part, tiles) if part.numel() else (part,) * len(tiles) for part in whole]
    return (*whole, factor, values[0]), tuple((*own, factor, values[0]) for own in zip(*views, strict=True))


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _values(number_format: NumberFormat, folded_factor: float, device: torch.device) -> torch.Tensor:
    """Return the lookup table of a format: the value of each code / `folded_factor`, float32 [2**bits].

    NaN become 0. `folded_factor` is a power of two that scales include instead (`Geometry.folded_factor`).
    """
    return torch.tensor(number_format.values, device=device).nan_to_num(0.0) / folded_factor


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _reserved(number_format: NumberFormat, device: torch.device) -> torch.Tensor | None:
    """Return uint8 [2**bits] with 1 for codes that are NaN; None if no code is, or for a `FittedFormat`."""
    if isinstance(number_format, FittedFormat) or not any(map(math.isnan, number_format.values)):
        return None
    return torch.tensor([math.isnan(value) for value in number_format.values], device=device).byte()


def _rows_at_once(shape: Geometry) -> int:
    """Return the number of rows to repack at a time: a multiple of 16, of about `WEIGHTS_AT_ONCE` weights."""
    return max(1, WEIGHTS_AT_ONCE // (shape.spans * shape.span) // ROWS) * ROWS


def _placed(weight: PackedTensor, shape: Geometry) -> torch.Tensor:
    """Return the codes of `weight` [N, K] in fragment order: int16 [N / 16, spans, registers, 256].

    A span is the columns whose codes are stored in the same registers. The 256 halfwords of a register are
    the places of a 16 x 16 fragment. Raises `FormatError` if a code is NaN.
    """
    number_format, device, n = weight.scheme.format, weight.device, weight.shape[0]
    repacked = torch.empty(
        shape.row_tiles, shape.spans, shape.registers, HALFWORDS, dtype=torch.int16, device=device
    )
    reserved = _reserved(number_format, device)
    found = None if reserved is None else torch.zeros(1, dtype=torch.int32, device=device)
    place, step = place_codes if repacked.is_cuda else repack_codes_reference, _rows_at_once(shape)
    if repacked.is_cuda and weight.scheme.packing == "bits":
        place_words(repacked, 0, weight.words, number_format, shape, found)
    else:
        for start in range(0, n, step):
            place(repacked, start // ROWS, weight.codes(start, start + step), number_format, shape, found)
    if found is not None:
        # Dequantization expressions would give such codes a value.
        refuse_if(found, f"a {weight.scheme} weight has codes that stand for no number. {_VERIFY}")
    if shape.scale_kind == "e5m3":
        # Codes take the signs of scales. To check first for negative scales, the host would have to wait.
        sign_bits = torch.empty_like(repacked)
        for start in range(0, n, step):
            signs = signs_of(weight.row_scale(start, start + step), weight.scheme, shape.k)
            place(sign_bits, start // ROWS, signs, number_format, shape)
        repacked ^= sign_bits
    return repacked


def place_words(
    repacked: torch.Tensor,
    first: int,
    stored: torch.Tensor,
    number_format: NumberFormat,
    shape: Geometry,
    found: torch.Tensor | None = None,
) -> None:
    """Repack stored words int32 [rows, words per row] into rows of `repacked`, on a GPU.

    `repacked` is int16 [row tiles, spans, registers, 256]; row tiles (16 rows) from `first` on are written. A
    span is the columns whose codes are stored in the same registers. Padding gets code 0. `found` int32 [1]
    becomes 1 if a code is NaN; if None, codes are not checked.
    """
    _repack(repacked, first, stored, number_format.bits, number_format, shape, found)


def place_codes(
    repacked: torch.Tensor,
    first: int,
    codes: torch.Tensor,
    number_format: NumberFormat,
    shape: Geometry,
    found: torch.Tensor | None = None,
) -> None:
    """Repack codes uint8 [rows, K], one per byte, into row tiles of `repacked`, on a GPU.

    `repacked` is int16 [row tiles, spans, registers, 256]; row tiles (16 rows) from `first` on are written. A
    span is the columns whose codes are stored in the same registers. `found` int32 [1] becomes 1 if a code is
    NaN; if None, codes are not checked.
    """
    _repack(repacked, first, codes, 8, number_format, shape, found)


def _repack(
    repacked: torch.Tensor,
    first: int,
    stored: torch.Tensor,
    bits: int,
    number_format: NumberFormat,
    shape: Geometry,
    found: torch.Tensor | None,
) -> None:
    """Launch `repack_codes` from `stored`, codes of `bits` bits in words or bytes, to `repacked` int16 [...].

    `stored` is int32 [rows, words per row] or uint8 [rows, K]. Row tiles (16 rows) from `first` on are
    written. `found` int32 [1] becomes 1 if a code is NaN; if None, codes are not checked.
    """
    rows = stored.contiguous().view(torch.uint8)
    reserved = None if found is None else _reserved(number_format, repacked.device)
    launch = _repack_launch(number_format, shape, bits, len(rows), reserved is not None)
    launch(
        rows,
        repacked,
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
    """Build the launch of `repack_codes` for `rows` rows of codes that are stored in `bits` bits each.

    `check` is True if the kernel looks for codes that are NaN.
    """
    from quantkit.kernels.layouts.repack_kernel import repack_codes

    grid = -(-rows // ROWS), -(-shape.spans // SPANS_AT_ONCE)
    return Launch(repack_codes, grid, **repack_constants(number_format, shape, bits, check))


@lru_cache(maxsize=256)
def repack_constants(
    number_format: NumberFormat, shape: Geometry, bits: int, check: bool = False
) -> dict[str, Any]:
    """Return the constexprs of the kernel `repack_codes` for codes that are stored in `bits` bits each.

    `check` is True if the kernel looks for codes that are NaN.
    """
    fields = (
        (fragment, *piece)
        for fragment, in_fragment in enumerate(placement(number_format))
        for field in in_fragment
        for piece in _pieces(bits, field)
    )
    return {
        "BITS": bits,
        "REGISTERS": shape.registers,
        "FRAGMENTS": shape.fragments,
        "FIELDS": tuple(number for numbers in fields for number in numbers),
        "CHECK": check,
        "C": SPANS_AT_ONCE,
    }


def _pieces(bits: int, field: Field) -> Iterator[tuple[int, ...]]:
    """Yield where the bits of `field` go in the layout and where they are stored: 7 integers for each part.

    A code of `bits` bits is stored in parts of 8, 4, 2 and 1 bits: a code of 6 bits as its lowest 4 and the
    other 2. So a bit field of a code may come from several parts. The integers, which `repack_codes` takes as
    FIELDS after the index of the fragment, are:

        register        index of the register that the bits go to
        at              lowest bit that they go to, in a halfword of the register
        first           lowest bit taken, counted in the code
        mask            mask of the bits taken, at bit 0
        before          number of bits of the code in earlier parts
        width           number of bits of the code in this part
        first - before  lowest bit taken, counted in this part
    """
    before = 0
    for width in part_widths(bits):
        first = max(field.first, before)
        count = min(field.first + field.width, before + width) - first
        if count > 0:
            at = field.at + first - field.first
            yield field.register, at, first, (1 << count) - 1, before, width, first - before
        before += width


def repack_codes_reference(
    repacked: torch.Tensor,
    first: int,
    codes: torch.Tensor,
    number_format: NumberFormat,
    shape: Geometry,
    found: torch.Tensor | None = None,
) -> None:
    """Repack codes uint8 [rows, K] to `repacked` int16 [row tiles, spans, registers, 256], by torch.

    The slow reference of `place_codes`, and the way for CPUs. Row tiles (16 rows) from `first` on are
    written. A span is the columns whose codes are stored in the same registers. `found` int32 [1] becomes 1
    if a code is NaN; if None, codes are not checked.
    """
    if found is not None:
        reserved = _reserved(number_format, codes.device)
        assert reserved is not None
        found |= reserved[codes.int()].any()
    rows, columns = codes.shape
    padded = F.pad(codes, (0, shape.spans * shape.span - columns, 0, -rows % ROWS))
    # rows 16 | row // 8, r | span | run, p0, e1, t, e0
    axes = padded.view(-1, 2, 8, shape.spans, shape.fragments // 2, 2, 2, 4, 2)
    by_fragment = (
        axes.permute(4, 5, 0, 3, 2, 7, 6, 1, 8).reshape(shape.fragments, -1, shape.spans, HALFWORDS).int()
    )
    wide = by_fragment.new_zeros(by_fragment.shape[1], shape.spans, shape.registers, HALFWORDS)
    for fragment, fields in zip(by_fragment, placement(number_format), strict=True):
        for field in fields:
            wide[:, :, field.register] |= ((fragment >> field.first) & field.mask) << field.at
    # Take the low 16 bits as a view: converting a number that does not fit is undefined.
    repacked[first : first + len(wide)] = wide.view(torch.int16)[..., ::2]


def read_codes(repacked: torch.Tensor, number_format: NumberFormat, shape: Geometry) -> torch.Tensor:
    """Unpack codes from fragment order, int16 [T, spans, registers, 256], to uint8 [16 * T, columns].

    T is the number of row tiles of 16 rows. A span is the columns whose codes are stored in the same
    registers. Rows and columns of padding are included.
    """
    by_fragment = torch.zeros(
        shape.fragments, len(repacked), shape.spans, HALFWORDS, dtype=torch.uint8, device=repacked.device
    )
    for fragment, fields in enumerate(placement(number_format)):
        for field in fields:
            # The shift copies the sign bit; the mask removes the copies.
            bits = (repacked[:, :, field.register] >> field.at) & field.mask
            by_fragment[fragment] |= bits.to(torch.uint8) << field.first
    # run, p0, rows 16, span, r, t, e1, row // 8, e0
    axes = by_fragment.view(shape.fragments // 2, 2, -1, shape.spans, 8, 4, 2, 2, 2)
    return axes.permute(2, 7, 4, 3, 0, 1, 6, 5, 8).reshape(len(repacked) * ROWS, -1)


def _by_lane(per_group: torch.Tensor, in_block: int, beyond: int) -> torch.Tensor:
    """Reorder one value per row and group, [N, groups], to [N / 16, blocks, 8, V, 2], as lanes load them.

    V = `in_block` is the number of groups of a scale block. The last axes are the row r of lane 4 r + t, the
    group, and row r or row r + 8. Missing rows and groups get `beyond`.
    """
    rows, groups = per_group.shape
    more = -rows % ROWS, -groups % in_block
    if any(more):
        padded = per_group.new_full((rows + more[0], groups + more[1]), beyond)
        padded[:rows, :groups] = per_group
        per_group = padded
    lanes = per_group.view(-1, 2, 8, per_group.shape[1] // in_block, in_block)
    return lanes.permute(0, 3, 2, 4, 1).contiguous()
