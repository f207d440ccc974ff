"""Planes, column scales and code books: stored weights are those of the definition."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from quantkit.calibrate.methods import method_named
from quantkit.errors import FormatError
from quantkit.packing.formats import FORMATS, CodebookFormat, FittedFormat
from quantkit.packing.schemes import PARTS, Scheme, scheme
from quantkit.packing.tensor import PackedTensor

from ..support.compare import assert_close, assert_equal

SHAPES = [(1, 1), (1, 33), (5, 7), (3, 128), (9, 140)]
BINARY, TERNARY, INT2 = (FORMATS[name] for name in ("binary", "ternary", "int2"))
BOOK3 = FittedFormat("book3", 3)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
SCHEMES = [
    *[Scheme(BINARY, size, planes=p) for size, p in itertools.product((None, 24, 32), (2, 3, 8))],
    Scheme(TERNARY, 24, planes=2, column_scale=True, scale_dtype=torch.float16),
    Scheme(INT2, 32, planes=4, scale_dtype=E4M3, global_scale=True),
    Scheme(TERNARY, 32, planes=2, scale_dtype=E8M0),
    *[
        Scheme(BINARY, None, column_scale=True, scale_dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
    ],
    Scheme(FORMATS["int4"], 24, "integer", column_scale=True),
    Scheme(FORMATS["int4"], 24, "float", E4M3, True, column_scale=True),
    Scheme(FORMATS["int4"], 24, "minimum", torch.float16),
    Scheme(FORMATS["int5"], 24, "minimum", E4M3, True, column_scale=True),
    Scheme(BOOK3, 24),
    Scheme(BOOK3, 32, "none", E4M3, True, column_scale=True),
    scheme("book4"),
]


def numbers_of(chosen: Scheme) -> list[int]:
    """The codes that a writer may write."""
    values = (0.0,) * 2**chosen.format.bits if chosen.is_fitted else chosen.format.values
    return [
        code
        for code in range(2**chosen.code_bits)
        if not any(math.isnan(values[plane]) for plane in planes_of(code, chosen))
    ]


def planes_of(code: int, chosen: Scheme) -> list[int]:
    return [code // 2 ** (chosen.format.bits * p) % 2**chosen.format.bits for p in range(chosen.planes)]


def example(chosen: Scheme, shape: tuple[int, int]) -> PackedTensor:
    """Random codes; all numbers have few digits, so that float32 holds every product and sum."""
    generator = torch.Generator().manual_seed(0)
    groups, top = chosen.groups(shape[1]), 2**chosen.format.bits
    numbers = torch.tensor(numbers_of(chosen), dtype=torch.uint8)
    per_group = (shape[0], groups * chosen.planes)
    zero = torch.randint(0, top, (shape[0], groups), generator=generator, dtype=torch.uint8)
    zeros = {"none": None, "integer": zero, "float": zero + 0.25, "minimum": zero - 2.25}[chosen.zero_point]
    factors = torch.randint(1, 16, (shape[1],), generator=generator) / 8
    return PackedTensor.from_codes(
        numbers[torch.randint(0, len(numbers), shape, generator=generator)],
        torch.exp2(torch.randint(-3, 4, per_group, generator=generator).float()),
        zeros,
        chosen,
        torch.tensor([4.0]) if chosen.global_scale else None,
        column_scale=factors.to(chosen.column_scale_dtype) if chosen.column_scale else None,
        codebook=torch.linspace(-1, 0.75, top) if chosen.is_fitted else None,
    )


def definition(packed: PackedTensor) -> torch.Tensor:
    """The slow twin of `dequantize`: docs/format.md, one weight at a time."""
    chosen, (rows, columns) = packed.scheme, packed.shape
    codes, zeros = packed.codes(), packed.zero_points()
    book, factors, divisor = (packed.part(p) for p in ("codebook", "column_scale", "global_scale"))
    weights = torch.empty(rows, columns, dtype=torch.float64)
    for n in range(rows):
        for k in range(columns):
            g = 0 if chosen.group_size is None else k // chosen.group_size
            total = 0.0
            for plane, code in enumerate(planes_of(int(codes[n, k]), chosen)):
                value = chosen.format.values[code] if book is None else float(book[code])
                scale = float(packed.scale[n, g * chosen.planes + plane])
                scale /= 1 if divisor is None else float(divisor)
                if zeros is not None:
                    zero = float(zeros[n, g])
                    value = code + zero / scale if chosen.zero_point == "minimum" else code - zero
                total += value * scale
            weights[n, k] = total * (1 if factors is None else float(factors[k]))
    return weights


@pytest.mark.parametrize("chosen", SCHEMES, ids=str)
def test_weights_are_those_of_the_definition(chosen: Scheme) -> None:
    for shape in SHAPES:
        packed = example(chosen, shape)
        expected = definition(packed)
        exact = not chosen.is_fitted
        assert_close(
            packed.dequantize().double(), expected, rtol=0 if exact else 2**-22, atol=0 if exact else 2**-22
        )
        for start, stop in [(0, 1), (shape[0] // 2, shape[0])]:
            assert_equal(packed.dequantize(start=start, stop=stop), packed.dequantize()[start:stop])


@pytest.mark.parametrize("chosen", SCHEMES, ids=str)
def test_parts_have_the_shapes_of_the_scheme_and_are_all_counted(chosen: Scheme) -> None:
    packed = example(chosen, (9, 140))
    shapes = chosen.storage_shapes((9, 140))
    assert [*dict(packed.parts()), "shape"] == list(shapes)
    assert [part for part in PARTS if part in shapes] == list(shapes)
    assert packed.nbytes == sum(dtype.itemsize * math.prod(size) for dtype, size in shapes.values())
    assert PackedTensor.from_parts(dict(packed.parts()), chosen, (9, 140)).tensors == packed.tensors
    assert {part.device.type for part in packed.to("meta").tensors} == {"meta"}
    for part, (dtype, _) in shapes.items():
        cast = replace(chosen, scale_dtype=torch.float32).storage_shapes((9, 140))[part][0]
        assert part in chosen.cast_parts or cast == dtype
    assert {"packed", "global_scale", "codebook", "shape"}.isdisjoint(chosen.cast_parts)


def test_bits_per_weight_of_what_is_new() -> None:
    assert example(scheme("binary-residual"), (64, 256)).bits_per_weight == 2 + 2 * 16 / 128 + 128 / 2**14
    rank_one = example(scheme("binary-rank1"), (64, 256))
    assert rank_one.bits_per_weight == 1 + 16 / 256 + 16 / 64 + 128 / 2**14
    assert example(scheme("book4"), (64, 256)).bits_per_weight == 4.25 + (16 * 32 + 32 + 128) / 2**14


@pytest.mark.parametrize("missing", ["column_scale", "codebook"])
def test_a_part_that_is_missing_is_named(missing: str) -> None:
    chosen = Scheme(BOOK3, 32, column_scale=True)
    parts = {part: tensor for part, tensor in example(chosen, (4, 64)).parts() if part != missing}
    given = ", ".join(part for part in ("packed", "scale", "column_scale", "codebook") if part != missing)
    said = f"has the parts packed, scale, column_scale, codebook; got {given}"
    with pytest.raises(FormatError, match=said):
        PackedTensor.from_parts(parts, chosen, (4, 64))


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("column_scale", torch.ones(63), r"torch.float32 \(63,\); expected torch.bfloat16 \(64,\)"),
        ("codebook", torch.ones(16), r"torch.float32 \(16,\); expected torch.float32 \(8,\)"),
        ("codebook", torch.ones(8).bfloat16(), r"torch.bfloat16 \(8,\); expected torch.float32 \(8,\)"),
    ],
)
def test_a_part_of_another_shape_or_dtype_is_refused(part: str, tensor: torch.Tensor, message: str) -> None:
    chosen = Scheme(BOOK3, 32, column_scale=True)
    parts = {**dict(example(chosen, (4, 64)).parts()), part: tensor}
    with pytest.raises(FormatError, match=rf"part '{part}' of a book3 g32 columns bfloat16 .* is {message}"):
        PackedTensor.from_parts(parts, chosen, (4, 64))


def test_a_fitted_format_has_values_once_it_is_bound() -> None:
    for use in (BOOK3.encode, BOOK3.decode, BOOK3.round):
        with pytest.raises(FormatError, match="'book3' are fitted to each tensor and stored with it; bind"):
            use(torch.zeros(1, dtype=torch.uint8))
    assert (BOOK3.absmax, BOOK3.numbers) == (1.0, ())
    book = tuple((torch.arange(8) / 8).tolist())
    assert BOOK3.bind(book) == CodebookFormat("book3", 3, book)


def test_a_minimum_is_added_and_not_multiplied() -> None:
    """Where z = -minimum / scale is no float, `scale * code + minimum` is still exact."""
    chosen = Scheme(FORMATS["int4"], 16, "minimum", torch.float16)
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 1)
    scale, minimum = torch.tensor([[0.1], [3e-5]]).half(), torch.tensor([[-0.7], [100.0]]).half()
    packed = PackedTensor.from_codes(codes, scale, minimum, chosen)
    exact = scale.double() * codes + minimum.double()
    assert_equal(packed.dequantize(), exact.float())
    zeros = packed.zeros_in_codes()
    assert zeros is not None
    assert bool(((scale.double() * (codes - zeros.double()) - exact).abs() <= 2**-22 * minimum.abs()).all())


def test_a_group_of_scale_0_is_zeros_whatever_its_minimum() -> None:
    chosen = Scheme(FORMATS["int4"], 2, "minimum", torch.float16)
    minimum = torch.ones(1, 2).half()
    packed = PackedTensor.from_codes(torch.ones(1, 4).byte(), torch.tensor([[0.0, 1.0]]), minimum, chosen)
    assert packed.dequantize().tolist() == [[0, 0, 2, 2]]
    zeros = packed.zeros_in_codes()
    assert zeros is not None
    assert zeros.tolist() == [[0, -1]]


def test_no_method_finds_minimums() -> None:
    with pytest.raises(FormatError, match=r"no method quantizes to int4 g32 asym-min.*`convert`"):
        method_named("mse").check(Scheme(FORMATS["int4"], 32, "minimum"))
