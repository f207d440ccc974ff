"""Where the parts of a packed weight can be cut so that the pieces are weights of the same scheme."""

import math

import pytest
import torch

from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.tensor import PackedTensor

from ..support.compare import assert_equal

ROWS, COLUMNS = 64, 480

SCHEMES = {
    **{name: scheme(name, group_size=None if name.startswith(("mx", "nv")) else 40) for name in PRESETS},
    **{f"int{bits} asym": scheme(f"int{bits}", group_size=32, zero_point="integer") for bits in (8, 6, 4, 3)},
    "int4 asym-float": scheme("int4", group_size=32, zero_point="float"),
    "int4 channel": scheme("int4", group_size="channel"),
    "int8 tensor": scheme("int8", group_size="tensor"),
    "fp8 blocks": Scheme(scheme("fp8").format, 40, group_rows=8),
    "ternary radix": scheme("ternary", group_size=60, packing="radix"),
    **{f"int{bits} stream": scheme(f"int{bits}", group_size=40, packing="stream") for bits in (3, 6)},
    "rank one in groups": Scheme(scheme("binary").format, 32, column_scale=True),
}


def random_weight(scheme: Scheme) -> PackedTensor:
    """Words, scales and zero-points without a meaning, and all different."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for part, (dtype, shape) in scheme.storage_shapes((ROWS, COLUMNS)).items():
        if part == "packed":
            known = codes_of(scheme)
            chosen = torch.randint(len(known), (ROWS, COLUMNS), generator=generator)
            tensors.append(scheme.pack(known[chosen]))
        elif part != "shape":
            words = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator).to(torch.int32)
            numbers = torch.rand(shape, generator=generator) + 0.5
            tensors.append(words if dtype == torch.int32 else numbers.to(dtype))
    return PackedTensor(tuple(tensors), scheme, (ROWS, COLUMNS))


def codes_of(scheme: Scheme) -> torch.Tensor:
    """Every code that is a number."""
    codes = range(2**scheme.code_bits)
    if scheme.planes == 1 and not scheme.is_fitted:
        codes = [code for code in codes if not math.isnan(scheme.format.values[code])]
    return torch.tensor(codes, dtype=torch.uint8)


def piece(packed: PackedTensor, axis: int, pieces: int, number: int) -> PackedTensor:
    """Piece `number` of a weight: every part that is shorter in one is cut there."""
    shape = [ROWS, COLUMNS]
    shape[axis] //= pieces
    small = packed.scheme.for_columns(shape[1])
    parts = []
    for part, whole in packed.parts():
        tensor = whole
        expected = small.storage_shapes((shape[0], shape[1]))[part][1]
        for dim, length in enumerate(expected):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, number * length, length)
        parts.append(tensor.contiguous())
    return PackedTensor(tuple(parts), small, (shape[0], shape[1]))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("axis", [0, 1])
def test_pieces_between_units_are_the_weight(name, axis):
    packed = random_weight(SCHEMES[name].for_columns(COLUMNS))
    units = packed.scheme.row_units() if axis == 0 else packed.scheme.column_units(COLUMNS)
    unit, whole = math.lcm(*units.values()), packed.dequantize()
    length = packed.shape[axis]
    counts = [count for count in range(2, 17) if length % count == 0 and length // count % unit == 0]
    assert counts
    for count in counts:
        for number, expected in enumerate(whole.chunk(count, axis)):
            assert_equal(piece(packed, axis, count, number).dequantize(), expected)


@pytest.mark.parametrize(
    ("name", "axis", "units"),
    [
        ("int4", 0, {}),
        ("int4", 1, {"groups of 40": 40, "words of 8 codes": 8}),
        ("int4 asym", 0, {"words of 8 zero-points": 8}),
        ("int3 asym", 0, {"words of 32 zero-points": 32}),
        ("int6", 1, {"groups of 40": 40, "words of 32 codes": 32}),
        ("fp8", 1, {"groups of 40": 40, "words of 4 codes": 4}),
        ("int4 channel", 1, {"words of 8 codes": 8}),
        ("int8 tensor", 1, {"words of 4 codes": 4}),
        ("ternary radix", 1, {"groups of 60": 60, "words of 20 codes": 20}),
        ("int3 stream", 1, {"groups of 40": 40, "words of 32 codes": 32}),
        ("int6 stream", 1, {"groups of 40": 40, "words of 16 codes": 16}),
        ("binary-residual", 1, {"groups of 40": 40, "words of 16 codes": 16}),
    ],
)
def test_units_of_rows_and_columns_are_those_of_the_layout(name, axis, units):
    assert (SCHEMES[name].row_units() if axis == 0 else SCHEMES[name].column_units(COLUMNS)) == units


def test_a_group_as_long_as_the_row_is_no_unit():
    assert scheme("int4", group_size=128).column_units(128) == {"words of 8 codes": 8}
    assert scheme("int4", group_size=128).column_units(96) == {"words of 8 codes": 8}


def test_pieces_within_a_word_are_others():
    packed = random_weight(SCHEMES["int6"])
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        assert_equal(piece(packed, 1, 10, 1).dequantize(), packed.dequantize().chunk(10, 1)[1])
