"""Read MLX: integers in uint32 words along rows, with scales and biases per group.

This includes 1-bit models such as Bonsai.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.checkpoint.low_bit.grid import GridSpec, StoredGrid
from quantkit.checkpoint.low_bit.pack_quantized import integers
from quantkit.checkpoint.low_bit.weight import (
    LowBitWeight,
    Parts,
    Settings,
    as_matrix,
    expect_shape,
    wrong,
)
from quantkit.checkpoint.tensors import Read, StoredTensor
from quantkit.packing import stream
from quantkit.packing.formats import NumberFormat, number_format


@dataclass(frozen=True)
class Mlx(LowBitWeight):
    """Words [..., N, W], and scales and biases [..., N, G]: weight = `scale * code + bias`.

    1-bit codes with bias = -scale / 2 are read as format `binary` with scale / 2, without biases.
    """

    bits: int

    @classmethod
    def of(cls, parts: Parts, settings: Settings, read: Read | None) -> "Mlx":
        codes, scale, bias = parts["codes"], parts["scale"], parts["bias"]
        if len(codes.shape) not in (2, 3):
            wrong(codes, "expected a matrix, or one for each expert")
        if scale.shape[:-1] != codes.shape[:-1]:
            wrong(scale, f"expected the scales of each row of {codes.name!r} {list(codes.shape)}")
        expect_shape(bias, scale.shape, f"its scales {scale.name!r}")
        own = _own_section(settings, codes)
        mode = own.get("mode", "affine")
        if mode != "affine":
            wrong(codes, f"{settings.where} says mode {mode!r}; quantkit reads 'affine' of MLX")
        size = own.get("group_size")
        if type(size) is not int or not 0 < size <= 1 << 20:
            wrong(codes, f"{settings.where} says group_size {size!r}; expected a number of columns")
        columns = size * scale.shape[-1]
        bits = next((b for b in range(1, 9) if stream.words_per_row(columns, b) == codes.shape[-1]), None)
        if bits is None or own.get("bits", bits) != bits:
            wrong(codes, f"{own.get('bits')!r} bits, as {settings.where} says, do not fit {columns} columns")
        symmetric = bits == 1 and read is not None and _is_symmetric(read, scale, bias)
        number: NumberFormat = number_format("binary") if symmetric else integers(bits)
        spec = GridSpec(
            number,
            (codes.shape[-2], columns),
            group_size=size,
            affine="none" if symmetric else "biases",
            scale_dtype=scale.torch_dtype,
            matrices=codes.shape[0] if len(codes.shape) == 3 else None,
        )
        return cls(parts, spec, bits)

    def read_rows(self, read: Read, start: int, stop: int) -> StoredGrid:
        words = read(as_matrix(self.parts["codes"]), start, stop).view(torch.int32)
        codes = stream.unpack(words, self.bits, self.spec.shape[1])
        scales = read(as_matrix(self.parts["scale"]), start, stop)
        if self.spec.affine == "none":
            return StoredGrid(self.spec, codes, scales / 2)
        biases = read(as_matrix(self.parts["bias"]), start, stop).float()
        return StoredGrid(self.spec, codes, scales, biases=biases)


def _own_section(settings: Settings, codes: StoredTensor) -> Mapping[str, Any]:
    """Return the config section with the settings of the layer of `codes`."""
    own = settings.values.get(codes.name.removesuffix(".weight"))
    return {**settings.values, **own} if isinstance(own, Mapping) else settings.values


def _is_symmetric(read: Read, scale: StoredTensor, bias: StoredTensor) -> bool:
    """Return True if every bias is exactly minus half its scale, and the half is exact."""
    halves, found = read(scale) / 2, read(bias)
    return torch.equal(halves * 2, read(scale)) and torch.equal(-halves, found)
