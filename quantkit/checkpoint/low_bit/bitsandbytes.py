"""Read bitsandbytes: LLM.int8, and NF4 and FP4 in blocks of the flattened weight.

Block scales may be 8-bit.
"""

import math
from dataclasses import dataclass

import torch

from quantkit.checkpoint.low_bit.grid import GridSpec, StoredGrid
from quantkit.checkpoint.low_bit.weight import (
    LowBitWeight,
    Parts,
    Settings,
    as_bytes,
    expect_shape,
    flat,
    wrong,
)
from quantkit.checkpoint.tensors import Read, StoredTensor
from quantkit.files import from_json, parse_json, shown
from quantkit.packing.formats import CodebookFormat, NumberFormat, number_format

#: Magnitudes of its FP4, by code; codes from 8 on are negative.
_FP4 = (
    0.0,
    0.0052083334885537624,
    0.6666666865348816,
    1.0,
    0.3333333432674408,
    0.5,
    0.1666666716337204,
    0.25,
)
_FP4_VALUES = (*_FP4, *(-value for value in _FP4))
_FP4_BOOK = tuple(sorted(set(_FP4_VALUES)))

#: By type: the number format, its values by stored code, and its code for each stored code.
_TYPES: dict[str, tuple[NumberFormat, tuple[float, ...]]] = {
    "nf4": (number_format("nf4"), number_format("nf4").values),
    "fp4": (CodebookFormat("bitsandbytes-fp4", 4, _FP4_BOOK), _FP4_VALUES),
}
#: Largest JSON of a state in bytes; usual are about 200.
_MOST_JSON = 1 << 16


@dataclass(frozen=True)
class QuantState:
    """Parsed JSON of a `quant_state` tensor of bitsandbytes.

    It has the name of the codes' format, the weights of a block with one scale, and dtype and shape of the
    weight. Scales that are quantized, too, have blocks of `nested_blocksize`, and `nested_offset` is added.
    """

    quant_type: str
    blocksize: int
    dtype: str
    shape: tuple[int, ...]
    nested_blocksize: int = 0
    nested_offset: float = 0.0


@dataclass(frozen=True)
class Bits4(LowBitWeight):
    """Flattened weight with two codes a byte, the high half first, and a scale for each block.

    `state` says what a block, the format of codes, and the shape are.
    """

    state: QuantState

    @classmethod
    def of(cls, parts: Parts, settings: Settings, read: Read | None) -> "Bits4":
        state = _state(parts["state"], read)
        codes, scale = parts["codes"], parts["scale"]
        rows, columns = state.shape
        blocks = -(-rows * columns // state.blocksize)
        if codes.nbytes != -(-rows * columns // 2):
            wrong(codes, f"a weight {list(state.shape)} of 4 bits needs {-(-rows * columns // 2)} bytes")
        if scale.elements != blocks:
            wrong(scale, f"a weight {list(state.shape)} in blocks of {state.blocksize} needs {blocks} scales")
        if scale.dtype == "U8":
            nested = parts.get("nested_scale")
            table = parts.get("nested_map")
            if nested is None or table is None or state.nested_blocksize < 1:
                wrong(scale, "scales of 8 bits need nested_absmax, nested_quant_map and a nested block size")
            expect_shape(table, (256,), "a value for each 8-bit scale")
            if nested.elements != -(-blocks // state.nested_blocksize):
                wrong(nested, f"{blocks} scales in blocks of {state.nested_blocksize} need another number")
        elif scale.dtype != "F32":
            wrong(scale, "expected scales of float32 or 8 bits")
        spec = GridSpec(
            _TYPES[state.quant_type][0],
            (rows, columns),
            # If blocks straddle rows, each group is a common divisor of block and row.
            group_size=math.gcd(columns, state.blocksize),
        )
        return cls(parts, spec, state)

    def read_rows(self, read: Read, start: int, stop: int) -> StoredGrid:
        columns = self.spec.shape[1]
        first, last = start * columns, stop * columns
        data = read(as_bytes(self.parts["codes"]), first // 2, -(-last // 2))
        codes = torch.stack((data >> 4, data & 15), -1).flatten()
        codes = codes[first % 2 : first % 2 + last - first].view(-1, columns)
        number_format, values = _TYPES[self.state.quant_type]
        recoded = torch.tensor([number_format.numbers.index(value) for value in values], dtype=torch.uint8)
        size = self.spec.group_size
        low, high = first // self.state.blocksize, -(-last // self.state.blocksize)
        blocks = torch.arange(first // size, last // size) * size // self.state.blocksize - low
        scales = self._scales(read, low, high)[blocks].view(-1, columns // size)
        return StoredGrid(self.spec, recoded[codes.int()], scales)

    def _scales(self, read: Read, low: int, high: int) -> torch.Tensor:
        """Return the scales of blocks `[low, high)`, float32."""
        stored = read(flat(self.parts["scale"]), low, high)
        if stored.dtype != torch.uint8:
            return stored
        size = self.state.nested_blocksize
        table = read(self.parts["nested_map"]).float()
        first = low // size
        nested = read(flat(self.parts["nested_scale"]), first, -(-high // size)).float()
        of = nested[torch.arange(low, high) // size - first]
        return table[stored.int()] * of + torch.tensor(self.state.nested_offset, dtype=torch.float32)


@dataclass(frozen=True)
class Int8(LowBitWeight):
    """LLM.int8: weight = code * largest magnitude of the row / 127."""

    @classmethod
    def of(cls, parts: Parts, settings: Settings, read: Read | None) -> "Int8":
        codes, scale = parts["codes"], parts["scale"]
        if len(codes.shape) != 2:
            wrong(codes, "expected a matrix")
        if scale.elements != codes.shape[0]:
            wrong(scale, f"expected one scale for each row of {codes.name!r} {list(codes.shape)}")
        rows, columns = codes.shape
        spec = GridSpec(
            number_format("int8"), (rows, columns), group_size=columns, factor=7.874015718698502e-3
        )
        return cls(parts, spec)

    def read_rows(self, read: Read, start: int, stop: int) -> StoredGrid:
        codes = read(self.parts["codes"], start, stop).view(torch.uint8) ^ 128
        scales = read(flat(self.parts["scale"]), start, stop)
        return StoredGrid(self.spec, codes, scales[:, None])


def _state(stored: StoredTensor, read: Read | None) -> QuantState:
    """Parse and check the JSON of a state."""
    if read is None:
        wrong(
            stored,
            "the shapes of bitsandbytes weights are in it, and only headers were downloaded",
            "Download the whole checkpoint with `hf download`",
        )
    if stored.elements > _MOST_JSON or len(stored.shape) != 1:
        wrong(stored, f"expected at most {_MOST_JSON} bytes of JSON")
    try:
        state = from_json(QuantState, parse_json(bytes(read(stored).tolist()), "it"))
    except (ValueError, TypeError) as error:
        wrong(stored, f"it is no state as bitsandbytes writes it ({shown(str(error))})")
    if state.quant_type not in _TYPES or len(state.shape) != 2 or not _are_sizes(state):
        wrong(
            stored,
            f"it says type {shown(state.quant_type)}, shape {shown(state.shape)}, blocks of "
            f"{shown(state.blocksize)}; expected nf4 or fp4, and a matrix",
        )
    return state


def _are_sizes(state: QuantState) -> bool:
    """Return True if shape and block sizes are positive and no index of their product overflows."""
    return (
        all(0 < size < 1 << 31 for size in state.shape)
        and 0 < state.blocksize <= 1 << 16
        and 0 <= state.nested_blocksize <= 1 << 16
        and math.isfinite(state.nested_offset)
    )
