"""Read compressed-tensors `pack-quantized`: integers of 1 to 8 bits in int32 words along rows."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quantkit.checkpoint.low_bit.fields import unpack_fields
from quantkit.checkpoint.low_bit.grid import GridSpec, StoredGrid
from quantkit.checkpoint.low_bit.weight import (
    Blocks,
    LowBitWeight,
    Parts,
    Settings,
    expect_shape,
    weight_arguments,
    wrong,
)
from quantkit.checkpoint.tensors import Read, StoredTensor
from quantkit.packing import stream
from quantkit.packing.formats import CodebookFormat, NumberFormat, number_format

Unpack = Callable[[torch.Tensor, int, int], torch.Tensor]

#: int1 of compressed-tensors has the values -1 and 0.
_INT1 = CodebookFormat("int1", 1, book=(-1.0, 0.0))


def _fields_of(codes: int, bits: int) -> int:
    return -(-codes // (32 // bits))


#: Layouts of codes in words: a dense stream; in older versions no code straddles words.
_LAYOUTS: tuple[tuple[Callable[[int, int], int], Unpack], ...] = (
    (stream.words_per_row, stream.unpack),
    (_fields_of, unpack_fields),
)


def integers(bits: int) -> NumberFormat:
    """Return the number format of two's-complement codes with `bits` bits."""
    return _INT1 if bits == 1 else number_format(f"int{bits}")


@dataclass(frozen=True)
class PackQuantized(LowBitWeight):
    """Words [N, W], scales [N, G], optionally zero-points packed along N or int8, and group numbers [K]."""

    bits: int
    blocks: Blocks
    unpack: Unpack
    words: Callable[[int, int], int]
    groups: torch.Tensor | None

    @classmethod
    def of(cls, parts: Parts, settings: Settings, read: Read | None) -> "PackQuantized":
        codes, scale = parts["codes"], parts["scale"]
        if len(codes.shape) != 2:
            wrong(codes, "expected a matrix of words")
        shape = _shape_from_headers(parts, settings) if read is None else _shape(parts, read)
        widths = _widths(settings) or range(1, 9)
        fits = [
            (bits, words, unpack)
            for bits in widths
            for words, unpack in _LAYOUTS
            if shape[0] == codes.shape[0] and words(shape[1], bits) == codes.shape[1]
        ]
        # Both layouts are equal if no code straddles words.
        distinct = {(bits, 32 % bits == 0 or words) for bits, words, _ in fits}
        if len(distinct) != 1:
            found = "no" if not fits else "more than one"
            wrong(
                codes,
                f"{found} width and layout of codes fits [{shape[0]}, {shape[1]}]; {settings.where} says "
                f"{' or '.join(map(str, widths))} bits",
                "Start from the original checkpoint, or compress it again with num_bits in its config_groups",
            )
        bits, words, unpack = fits[0]
        blocks = Blocks.of(codes, shape, scale)
        group = shape[1] // blocks.grid[1] if shape[1] % blocks.grid[1] == 0 else blocks.size[1]
        zero = parts.get("zero")
        if zero is not None:
            packed = words(shape[0], bits), blocks.grid[1]
            expect_shape(zero, packed if zero.dtype == "I32" else scale.shape, f"its scale {scale.name!r}")
            if zero.dtype == "I32" and blocks.size[0] != 1:
                wrong(zero, "expected packed zero-points only for scales of each row")
        groups = group_numbers(parts.get("groups"), shape[1], group, blocks.grid[1], read)
        spec = GridSpec(
            integers(bits),
            shape,
            group_size=group,
            group_rows=blocks.size[0],
            affine="none" if zero is None else "zeros",
            scale_dtype=scale.torch_dtype,
            permuted=groups is not None,
        )
        return cls(parts, spec, bits, blocks, unpack, words, groups)

    def read_rows(self, read: Read, start: int, stop: int) -> StoredGrid:
        rows, columns = self.spec.shape
        codes = self.unpack(read(self.parts["codes"], start, stop), self.bits, columns)
        scales = self.blocks.rows(read, self.parts["scale"], rows, start, stop)
        zeros = None
        if "zero" in self.parts:
            zeros = self._zeros(read, self.parts["zero"], start, stop)
        return StoredGrid(self.spec, codes, scales, zeros, groups=self.groups)

    def _zeros(self, read: Read, zero: StoredTensor, start: int, stop: int) -> torch.Tensor:
        rows = self.spec.shape[0]
        if zero.dtype != "I32":
            found = self.blocks.rows(read, zero, rows, start, stop).float()
            return found + (1 << (self.bits - 1))
        # 32 codes fill whole words in every layout except fields, which have 32 // bits codes per word.
        unit = 32 if self.words is stream.words_per_row else 32 // self.bits
        low, high = start // unit * unit, min(rows, -(-stop // unit) * unit)
        words = read(zero, self.words(low, self.bits), self.words(high, self.bits))
        codes = self.unpack(words.T.contiguous(), self.bits, high - low)
        return codes.T[start - low : stop - low].float()


def _shape_from_headers(parts: Parts, settings: Settings) -> tuple[int, int]:
    """Return [N, K] without data: the columns that the groups cover, or that fill the words."""
    codes, scale = parts["codes"], parts["scale"]
    for weights in weight_arguments(settings):
        bits, size = weights.get("num_bits"), weights.get("group_size")
        if type(bits) is int and 1 <= bits <= 8:
            columns = codes.shape[1] * 32 // bits
            if type(size) is int and 0 < size < 1 << 20 and len(scale.shape) == 2:
                columns = scale.shape[1] * size
            if any(words(columns, bits) == codes.shape[1] for words, _ in _LAYOUTS):
                return codes.shape[0], columns
    wrong(
        codes,
        f"{settings.where} does not tell its columns, which {parts['shape'].name!r} has as data, and only "
        "headers were downloaded",
        "Download the whole checkpoint with `hf download`",
    )


def _shape(parts: Parts, read: Read) -> tuple[int, int]:
    """Read [N, K], which is stored as data."""
    codes, scale, shape = parts["codes"], parts["scale"], parts["shape"]
    if shape.elements != 2:
        wrong(shape, "expected the two sizes of a matrix")
    rows, columns = read(shape).flatten().tolist()
    # A word has at most 32 codes.
    if rows != codes.shape[0] or not 0 < columns <= 32 * codes.shape[1]:
        wrong(codes, f"{shape.name!r} says [{rows}, {columns}], which needs other words")
    if scale.shape and scale.shape[-1] > columns:
        wrong(scale, f"expected at most one scale for each of {columns} columns")
    return rows, columns


def _widths(settings: Settings) -> list[int]:
    """Return the integer widths that the config names."""
    found = [weights.get("num_bits") for weights in weight_arguments(settings)]
    return sorted({bits for bits in found if type(bits) is int and 1 <= bits <= 8})


def group_numbers(
    stored: StoredTensor | None, columns: int, size: int, count: int, read: Read | None
) -> torch.Tensor | None:
    """Return the group of each of `columns` columns, int64, as `stored`; None if groups are consecutive.

    That is without `stored`, for -1 everywhere, and for `count` groups of `size` columns in order.
    """
    if stored is None or read is None:
        return None
    expect_shape(stored, (columns,), "a group for each column")
    found = read(stored).to(torch.int64)
    if bool((found == -1).all()):
        return None
    if not bool(((found >= 0) & (found < count)).all()):
        wrong(
            stored, f"it has groups from {int(found.min())} to {int(found.max())}; expected 0 to {count - 1}"
        )
    return None if torch.equal(found, torch.arange(columns) // size) else found
