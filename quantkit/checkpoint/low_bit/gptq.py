"""Read GPTQ and AWQ: int32 words of codes along columns or rows of the transposed weight, zero-points.

Both store `qweight`, `qzeros` [G, N * bits / 32] and `scales` [G, N]. In GPTQ's `qweight`, [K * bits / 32,
N], a column holds the codes of a row of the weight. In AWQ's, [K, N / 8], a word holds eight rows of the
weight, in the order 0 2 4 6 1 3 5 7.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quantkit.checkpoint.low_bit.fields import nibbles
from quantkit.checkpoint.low_bit.grid import GridSpec, StoredGrid
from quantkit.checkpoint.low_bit.pack_quantized import group_numbers
from quantkit.checkpoint.low_bit.weight import (
    LowBitWeight,
    Parts,
    Settings,
    expect_shape,
    wrong,
)
from quantkit.checkpoint.tensors import Read
from quantkit.packing import bitpack, stream
from quantkit.packing.formats import number_format

Unpack = Callable[[torch.Tensor, int, int], torch.Tensor]

_ELSEWHERE = "Convert the checkpoint to the format gptq_v2 with its own tools, or use the original model"

#: By format name: the number added to stored zero-points, and the layout of codes in words. Version 1 stores
#: the zero-point minus 1, modulo 2**bits. gptq_p stores a code in parts, as `bitpack` does.
_GPTQ: dict[str, tuple[int, Unpack]] = {
    "gptq": (1, stream.unpack),
    "gptq_v2": (0, stream.unpack),
    "gptq_p": (0, bitpack.unpack),
}
#: Row of the code at each place of an AWQ word, lowest bits first.
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
#: Widths whose codes are always stored in parts, whatever the format's name.
_PARTS_ONLY = (5, 6, 7)


@dataclass(frozen=True)
class Gptq(LowBitWeight):
    """Weight of GPTQ: the codes of a row [K] lie down a column of `qweight`, int32 [K * bits / 32, N].

    bits     bits of a code
    added    number added to stored zero-points, modulo 2^bits: 1 for version 1, else 0
    unpack   (words int32 [R, W], bits, columns) -> codes uint8 [R, columns]
    groups   int64 [K], the group of each column (`desc_act`); None if groups are consecutive
    """

    bits: int
    added: int
    unpack: Unpack
    groups: torch.Tensor | None

    @classmethod
    def of(cls, parts: Parts, settings: Settings, read: Read | None) -> "Gptq":
        _check_dimensions(parts)
        codes, scale, zero, numbers = parts["codes"], parts["scale"], parts["zero"], parts.get("groups")
        count, rows = scale.shape
        bits = _width(parts, settings)
        columns = numbers.elements if numbers is not None else codes.shape[0] * 32 // bits
        expect_shape(
            codes, (stream.words_per_row(columns, bits), rows), f"{bits} bits and scales {scale.name!r}"
        )
        expect_shape(
            zero, (count, stream.words_per_row(rows, bits)), f"{bits} bits and scales {scale.name!r}"
        )
        name = _format_name(parts, settings)
        added, unpack = _GPTQ["gptq_p" if bits in _PARTS_ONLY else name]
        size = settings.values.get("group_size")
        if not (type(size) is int and size > 0 and -(-columns // size) == count):
            size = -(-columns // count)
        if -(-columns // size) != count:
            wrong(scale, f"{count} groups of one size do not fit {columns} columns")
        groups = group_numbers(numbers, columns, size, count, read)
        spec = GridSpec(
            number_format(f"int{bits}"),
            (rows, columns),
            group_size=size,
            affine="zeros",
            scale_dtype=scale.torch_dtype,
            permuted=groups is not None,
        )
        return cls(parts, spec, bits, added, unpack, groups)

    def read_rows(self, read: Read, start: int, stop: int) -> StoredGrid:
        rows, columns = self.spec.shape
        words = read(self.parts["codes"], columns=(start, stop))
        codes = self.unpack(words.T.contiguous(), self.bits, columns)
        scales = read(self.parts["scale"], columns=(start, stop)).T.contiguous()
        # 32 codes fill whole words, in every layout.
        low, high = start // 32 * 32, min(rows, -(-stop // 32) * 32)
        inside = stream.words_per_row(low, self.bits), stream.words_per_row(high, self.bits)
        stored = self.unpack(read(self.parts["zero"], columns=inside), self.bits, high - low)
        zeros = (stored[:, start - low : stop - low] + self.added) & ((1 << self.bits) - 1)
        return StoredGrid(self.spec, codes, scales, zeros.T.float(), groups=self.groups)


@dataclass(frozen=True)
class Awq(LowBitWeight):
    """Codes of eight rows of the weight in each word of `qweight`."""

    @classmethod
    def of(cls, parts: Parts, settings: Settings, read: Read | None) -> "Awq":
        _check_dimensions(parts)
        codes, scale, zero = parts["codes"], parts["scale"], parts["zero"]
        count, rows = scale.shape
        columns = codes.shape[0]
        if codes.shape[1] * 8 != rows:
            wrong(codes, f"it fits scales {scale.name!r} {list(scale.shape)} neither as GPTQ nor as AWQ")
        expect_shape(zero, (count, codes.shape[1]), f"its scales {scale.name!r}")
        version = settings.values.get("version", "gemm")
        bits = settings.values.get("bits", settings.values.get("w_bit", 4))
        if str(version).lower() != "gemm" or bits != 4:
            wrong(
                codes,
                f"{settings.where} says version {version!r} and {bits!r} bits; quantkit reads AWQ of version "
                "'gemm' and 4 bits",
                "Use the original model, or an AWQ checkpoint of version gemm",
            )
        if columns % count:
            wrong(scale, f"{count} groups of one size do not fit {columns} columns")
        spec = GridSpec(
            number_format("int4"),
            (rows, columns),
            group_size=columns // count,
            affine="zeros",
            scale_dtype=scale.torch_dtype,
        )
        return cls(parts, spec)

    def read_rows(self, read: Read, start: int, stop: int) -> StoredGrid:
        low, high = start // 8, -(-stop // 8)

        def rows_of(part: str) -> torch.Tensor:
            words = read(self.parts[part], columns=(low, high))
            codes = nibbles(words.view(torch.uint8)).view(len(words), -1, 8).permute(1, 2, 0)
            # Codes of rows 0 to 7, by their place in a word.
            codes = codes[:, [AWQ_ROWS.index(row) for row in range(8)]].flatten(0, 1)
            return codes[start - 8 * low : stop - 8 * low]

        scales = read(self.parts["scale"], columns=(start, stop)).T.contiguous()
        return StoredGrid(self.spec, rows_of("codes"), scales, rows_of("zero").float())


def is_gptq(parts: Parts) -> bool:
    """Return True if words and scales have the shapes of GPTQ."""
    return parts["codes"].shape[-1:] == parts["scale"].shape[-1:]


def _check_dimensions(parts: Parts) -> None:
    if not all(len(parts[role].shape) == 2 for role in ("codes", "scale", "zero")):
        wrong(parts["codes"], "expected matrices of words, scales and zero-points")


def _width(parts: Parts, settings: Settings) -> int:
    """Return the bits of a code, from shapes, or from the config if shapes are ambiguous."""
    codes, scale, zero, numbers = parts["codes"], parts["scale"], parts["zero"], parts.get("groups")
    fits = [
        bits
        for bits in range(2, 9)
        if stream.words_per_row(scale.shape[1], bits) == zero.shape[1]
        and (numbers is None or stream.words_per_row(numbers.elements, bits) == codes.shape[0])
    ]
    said = settings.integer("bits")
    if said in fits:
        return said
    if len(fits) != 1:
        wrong(
            codes,
            f"its shape fits {'no width' if not fits else f'widths {fits}'}, and {settings.where} says "
            f"bits {settings.values.get('bits')!r}",
        )
    return fits[0]


def _format_name(parts: Parts, settings: Settings) -> str:
    values = settings.values
    # AutoRound names the layout, others the method; GPTQ without a format name is version 1.
    stated = (
        values.get("checkpoint_format")
        or values.get("format")
        or values.get("packing_format")
        or settings.method
        or None
    )
    name = str(stated).lower().removeprefix("auto_round:").removeprefix("auto_")
    if name not in _GPTQ:
        wrong(
            parts["codes"],
            f"{settings.where} says format {stated!r}; expected {', '.join(_GPTQ)}, which differ in how they "
            "store zero-points",
            _ELSEWHERE,
        )
    return name
