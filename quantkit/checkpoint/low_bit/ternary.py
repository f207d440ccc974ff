"""Read BitNet b1.58: four ternary codes a byte, from rows a quarter of the matrix apart, and one scale."""

from dataclasses import dataclass

import torch

from quantkit.checkpoint.low_bit.grid import GridSpec, StoredGrid
from quantkit.checkpoint.low_bit.weight import LowBitWeight, Parts, Settings, flat, wrong
from quantkit.checkpoint.tensors import Read
from quantkit.packing.formats import number_format


@dataclass(frozen=True)
class Ternary(LowBitWeight):
    """Codes [N / 4, K]: row n is in bits 2 (n // (N / 4)) of byte row n % (N / 4).

    The scale multiplies, or with `divides` divides.
    """

    divides: bool

    @classmethod
    def of(cls, parts: Parts, settings: Settings, read: Read | None) -> "Ternary":
        codes, scale = parts["codes"], parts["scale"]
        if len(codes.shape) != 2 or scale.elements != 1:
            wrong(codes, "expected a matrix of bytes and one scale")
        rows, columns = 4 * codes.shape[0], codes.shape[1]
        # transformers' BitLinear divides its outputs by the scale, AutoBitLinear multiplies.
        divides = settings.values.get("linear_class", "bitlinear") == "bitlinear"
        spec = GridSpec(
            number_format("ternary"),
            (rows, columns),
            group_size=columns,
            group_rows=rows,
            scale_dtype=torch.float32 if divides else scale.torch_dtype,
            global_scale=divides,
        )
        return cls({**parts, "global_scale": scale}, spec, divides)

    def read_rows(self, read: Read, start: int, stop: int) -> StoredGrid:
        stored = self.parts["codes"]
        quarter = stored.shape[0]
        pieces = []
        for part in range(start // quarter, (stop - 1) // quarter + 1):
            low, high = max(start, part * quarter), min(stop, (part + 1) * quarter)
            data = read(stored, low - part * quarter, high - part * quarter)
            pieces.append((data >> 2 * part) & 3)
        codes = torch.cat(pieces)
        if bool((codes == 3).any()):
            wrong(stored, "it has the code 3; expected 0, 1 and 2, which are -1, 0 and 1")
        scale = read(flat(self.parts["scale"]))
        if not self.divides:
            return StoredGrid(self.spec, codes, scale.expand(stop - start, 1))
        divisor = scale.float().expand(stop - start)
        return StoredGrid(self.spec, codes, torch.ones(stop - start, 1), global_scale=divisor)
