"""Packed tensors: codes and weights come back, bytes are counted, nonsense is refused."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from quantkit.calibrate.methods import quantize_tensor
from quantkit.errors import FormatError
from quantkit.packing.formats import FORMATS, CodebookFormat, FittedFormat, IntFormat
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.tensor import PackedTensor, dequantize_codes, spread

from ..support.compare import assert_close, assert_equal
from ..tiny.packed import encode_groups

SHAPES = [(1, 1), (1, 33), (5, 7), (3, 128), (9, 140), (33, 64)]
SCHEMES = [
    Scheme(fmt, size, zero_point, dtype)
    for fmt in FORMATS.values()
    for size in (None, 1, 24, 32)
    for zero_point in ("none", "integer")
    for dtype in (torch.bfloat16, torch.float32)
    if not isinstance(fmt, FittedFormat) and (zero_point == "none" or isinstance(fmt, IntFormat))
]
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
#: Their scales have less digits, their zero-points more, and some a factor for the whole tensor.
BEYOND_PACK_QUANTIZED = [
    scheme("nvfp4"),
    scheme("mxfp4"),
    scheme("mxfp6"),
    scheme("mxfp8"),
    scheme("nf4", group_size=32, scale_dtype=E4M3),
    scheme("int3", group_size=32, scale_dtype=E4M3),
    scheme("ternary", scale_dtype=E8M0),
    *[
        scheme(name, group_size=24, zero_point="float", scale_dtype=dtype)
        for name in ("int2", "int4", "int8")
        for dtype in (torch.bfloat16, torch.float16, E4M3, E8M0)
    ],
    scheme("int4", zero_point="integer", scale_dtype=E4M3),
    Scheme(CodebookFormat("three", 2, book=(-1.0, 0.5, 2.0)), 32),
]

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def random_parts(scheme: Scheme, shape: tuple[int, int], seed: int = 0) -> Parts:
    """Codes, scales as stored and zero-points."""
    generator = torch.Generator().manual_seed(seed)
    top = 2**scheme.format.bits
    per_group = (shape[0], scheme.groups(shape[1]))
    numbers = torch.tensor([c for c, v in enumerate(scheme.format.values) if v == v], dtype=torch.uint8)
    codes = numbers[torch.randint(0, len(numbers), shape, generator=generator)]
    scale = torch.rand(per_group, generator=generator).to(scheme.scale_dtype)
    zero = torch.randint(0, top, per_group, generator=generator, dtype=torch.uint8)
    if scheme.zero_point == "float":
        between = zero + torch.randint(0, 8, per_group, generator=generator) / 8
        return codes, scale, between.to(scheme.zero_point_dtype)
    return codes, scale, zero if scheme.zero_point == "integer" else None


def double_precision(
    scheme: Scheme, codes: torch.Tensor, scale: torch.Tensor, zero: Any, factor: float = 1.0
) -> torch.Tensor:
    """The definition, one weight at a time."""
    rows, columns = codes.shape
    weights = torch.empty(rows, columns, dtype=torch.float64)
    # Numbers of Python, as the element of a tensor takes a hundred times longer.
    numbers, scales = codes.tolist(), scale.double().tolist()
    zeros = None if zero is None else zero.double().tolist()
    for n in range(rows):
        row = []
        for k in range(columns):
            g = 0 if scheme.group_size is None else k // scheme.group_size
            code = numbers[n][k]
            value = scheme.format.values[code] if zeros is None else code - zeros[n][g]
            row.append(value * (scales[n][g] / factor))
        weights[n] = torch.tensor(row, dtype=torch.float64)
    return weights


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_zero_points_and_weights_come_back(scheme: Scheme) -> None:
    for shape in SHAPES:
        codes, scale, zero = random_parts(scheme, shape)
        packed = PackedTensor.from_codes(codes, scale, zero, scheme)
        assert packed.shape == shape
        assert_equal(packed.codes(), codes)
        unpacked_zero = packed.zero_points()
        assert_equal(unpacked_zero, zero)
        expected = double_precision(scheme, codes, scale, zero)
        assert_equal(packed.dequantize(), expected.float())
        if scheme.scale_dtype == torch.bfloat16:  # the product is exact in float32, so one rounding follows
            assert_equal(packed.dequantize(torch.bfloat16), expected.to(torch.bfloat16))


@pytest.mark.parametrize("scheme", BEYOND_PACK_QUANTIZED, ids=str)
def test_small_scales_and_float_zero_points_give_the_weights_of_float64(scheme: Scheme) -> None:
    for wanted in (2.0**-7, 2.0**9, 2688 / 3.1) if scheme.global_scale else (1.0,):
        factor = torch.tensor([wanted]).item()  # as float32
        stored = torch.tensor([factor]) if scheme.global_scale else None
        for shape in SHAPES:
            codes, scale, zero = random_parts(scheme, shape)
            packed = PackedTensor.from_codes(codes, scale, zero, scheme, stored)
            assert_equal(packed.codes(), codes)
            unpacked_zero = packed.zero_points()
            assert_equal(unpacked_zero, zero)
            expected = double_precision(scheme, codes, scale, zero, factor)
            # Where the factor is no power of two, scale / factor and the product are rounded to float32 each.
            rounded_once = factor in (1.0, 2.0**-7, 2.0**9)
            assert_close(packed.dequantize(), expected.float(), rtol=0 if rounded_once else 2.0**-22, atol=0)


@pytest.mark.parametrize("given", [True, False])
def test_a_global_scale_is_there_where_the_scheme_says(given: bool) -> None:
    layout = scheme("mxfp4" if given else "nvfp4")
    codes, scale, _ = random_parts(layout, (4, 64))
    said = "has the parts packed, scale; got packed, scale, global_scale"
    if not given:
        said = "has the parts packed, scale, global_scale; got packed, scale"
    with pytest.raises(FormatError, match=said):
        PackedTensor.from_codes(codes, scale, None, layout, torch.ones(1) if given else None)


def test_a_global_scale_of_another_dtype_is_refused() -> None:
    layout = scheme("nvfp4")
    codes, scale, _ = random_parts(layout, (4, 64))
    with pytest.raises(FormatError, match=r"part 'global_scale' .* torch.bfloat16 \(1,\); expected"):
        PackedTensor.from_codes(codes, scale, None, layout, torch.ones(1, dtype=torch.bfloat16))


def test_bits_per_weight_of_nvfp4() -> None:
    layout = scheme("nvfp4")
    codes, scale, _ = random_parts(layout, (64, 1024))
    packed = PackedTensor.from_codes(codes, scale, None, layout, torch.ones(1))
    assert packed.bits_per_weight == 4.5 + (32 + 128) / (64 * 1024)


@pytest.mark.parametrize("scheme", [SCHEMES[0], scheme("int4", group_size=24, zero_point="integer")], ids=str)
def test_a_slice_of_rows_is_the_slice_of_the_whole(scheme: Scheme) -> None:
    packed = PackedTensor.from_codes(*random_parts(scheme, (9, 70)), scheme)
    whole = packed.dequantize()
    for start, stop in [(0, 9), (0, 1), (3, 8), (8, 9), (4, None), (4, 4)]:
        assert_equal(packed.dequantize(start=start, stop=stop), whole[start:stop])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compressed_tensors_reads_the_same_weights(
    bits: int, group_size: int | None, symmetric: bool, dtype: torch.dtype
) -> None:
    ours = Scheme(FORMATS[f"int{bits}"], group_size, "none" if symmetric else "integer", dtype)
    packed = PackedTensor.from_codes(*random_parts(ours, (11, 96)), ours)
    args = QuantizationArgs(
        num_bits=bits,
        symmetric=symmetric,
        strategy="channel" if group_size is None else "group",
        group_size=group_size,
    )
    state = {f"weight_{part}": tensor for part, tensor in packed.parts()}
    state["weight_shape"] = torch.tensor(packed.shape)
    theirs = PackedQuantizationCompressor.decompress(
        state, QuantizationScheme(targets=["Linear"], weights=args)
    )["weight"]
    assert theirs.dtype == dtype
    assert_equal(packed.dequantize(dtype), theirs)


def test_stored_parts_are_laid_out_row_major() -> None:
    asymmetric = scheme("int4", group_size="channel", zero_point="integer")
    for rows in (1, 5, 33):
        codes, scale, zero = random_parts(asymmetric, (rows, 40))
        packed = PackedTensor.from_codes(codes, scale.expand(rows, 3)[:, 1:2], zero, asymmetric)
        assert all(part.stride() == (part.shape[1], 1) for _, part in packed.parts())


def test_bits_per_weight_counts_every_byte() -> None:
    big = scheme("int4")
    packed = PackedTensor.from_codes(*random_parts(big, (1024, 1024)), big)
    assert packed.nbytes == 1024 * 512 + 1024 * 8 * 2 + 16
    assert packed.bits_per_weight == 4.125 + 16 * 8 / 1024**2
    asymmetric = replace(big, zero_point="integer")
    packed = PackedTensor.from_codes(*random_parts(asymmetric, (1024, 1024)), asymmetric)
    assert packed.bits_per_weight == 4.125 + 4 / 128 + 16 * 8 / 1024**2


def test_bits_per_weight_counts_padding() -> None:
    tiny = scheme("int4", group_size="channel")
    packed = PackedTensor.from_codes(*random_parts(tiny, (1, 1)), tiny)
    assert packed.bits_per_weight == 8 * (4 + 2 + 16)


def test_moving_to_the_same_device_gives_the_same_tensor() -> None:
    packed = PackedTensor.from_codes(*random_parts(SCHEMES[0], (4, 64)), SCHEMES[0])
    packed.kernel_cache["layout"] = object()
    assert packed.to("cpu") is packed
    assert packed.device == torch.device("cpu")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_and_pickles_are_of_what_is_stored(duplicate: Any) -> None:
    packed = PackedTensor.from_codes(
        torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 1, dtype=torch.bfloat16), None, scheme("int4")
    )
    packed.kernel_cache["layout"] = torch.ones(1)
    twin = duplicate(packed)
    assert twin.kernel_cache == {} and packed.kernel_cache
    assert_equal(twin.dequantize(), packed.dequantize())


def test_moving_takes_every_part_along_and_drops_the_kernel_cache() -> None:
    asymmetric = scheme("int4", zero_point="integer", scale_dtype=E4M3)
    packed = PackedTensor.from_codes(*random_parts(asymmetric, (4, 64)), asymmetric, torch.ones(1))
    packed.kernel_cache["layout"] = object()
    moved = packed.to("meta")
    assert {part.device.type for _, part in moved.parts()} == {"meta"}
    assert [name for name, _ in moved.parts()] == ["packed", "scale", "zero_point", "global_scale"]
    assert moved.kernel_cache == {}


def test_a_group_of_zeros_has_scale_zero_and_weights_zero() -> None:
    for original in SCHEMES:
        zero = torch.full((1, 1), 1, dtype=torch.uint8) if original.zero_point == "integer" else None
        codes = encode_groups(torch.zeros(1, 32), torch.zeros(1, 1), zero, original)
        one_group = replace(original, group_size=None)
        weights = dequantize_codes(codes, torch.zeros(1, 1), zero, one_group)
        assert_equal(weights, torch.zeros(1, 32))
        if zero is not None:
            assert codes.unique().tolist() == [1]


def test_spread_cuts_the_last_group() -> None:
    per_group = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    grouped = spread(per_group, 5, scheme("int4", group_size=3))
    assert grouped.tolist() == [[1, 1, 1, 2, 2], [3, 3, 3, 4, 4]]
    assert spread(per_group[:, :1], 5, scheme("int8")).shape == (2, 1)


INT4 = scheme("int4", group_size=32)
ASYMMETRIC = replace(INT4, zero_point="integer")


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("words", "scale", "zero", "scheme", "message"),
    [
        (
            int32(4, 7),
            bf16(4, 2),
            None,
            INT4,
            r"part 'packed' .* is torch.int32 \(4, 7\); expected .*\(4, 8\)",
        ),
        (int32(8, 4).T.long(), bf16(4, 2), None, INT4, r"part 'packed' .* is torch.int64 \(4, 8\); expected"),
        (int32(4, 8), bf16(4, 1), None, INT4, r"part 'scale' .* \(4, 1\); expected torch.bfloat16 \(4, 2\)"),
        (
            int32(4, 8),
            bf16(4, 2).half(),
            None,
            INT4,
            r"part 'scale' .* torch.float16 .* expected torch.bfloat16",
        ),
        (
            int32(4, 8),
            bf16(4, 2),
            int32(4, 2),
            ASYMMETRIC,
            r"part 'zero_point' .* \(4, 2\); expected .*\(1, 2\)",
        ),
        (
            int32(4, 8),
            bf16(4, 2),
            None,
            ASYMMETRIC,
            "has the parts packed, scale, zero_point; got packed, scale",
        ),
    ],
)
def test_parts_that_do_not_fit_the_scheme_are_refused(
    words: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, scheme: Scheme, message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        PackedTensor.from_parts({"packed": words, "scale": scale, "zero_point": zero}, scheme, (4, 64))


def test_a_zero_point_under_a_symmetric_scheme_is_refused() -> None:
    with pytest.raises(
        FormatError, match=r"int4 g32 bfloat16 tensor has the parts packed, scale; got 3 tensors"
    ):
        PackedTensor((int32(4, 8), bf16(4, 2), int32(1, 2)), INT4, (4, 64))


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (-1, 64)])
def test_empty_shapes_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(FormatError, match="at least one row and one column"):
        PackedTensor((int32(4, 8), bf16(4, 2)), INT4, shape)


def test_from_codes_refuses_what_it_would_have_to_guess() -> None:
    codes, scale = torch.zeros(40, 64, dtype=torch.uint8), torch.ones(40, 2)
    with pytest.raises(FormatError, match=r"codes of a packed tensor are \[N, K\], got shape \(2, 20, 64\)"):
        PackedTensor.from_codes(codes.view(2, 20, 64), scale, None, INT4)
    with pytest.raises(FormatError, match=r"codes are torch.uint8, got torch.int8"):
        PackedTensor.from_codes(codes.view(torch.int8), scale, None, INT4)
    with pytest.raises(FormatError, match=r"zero-points of 40 rows .* have shape \(40, 2\), got \(33, 2\)"):
        PackedTensor.from_codes(codes, scale, torch.zeros(33, 2, dtype=torch.uint8), ASYMMETRIC)


def test_a_scale_that_overflows_its_dtype_is_refused() -> None:
    half = replace(INT4, scale_dtype=torch.float16)
    codes = torch.zeros(1, 64, dtype=torch.uint8)
    with pytest.raises(FormatError, match=r"scales up to 1e\+06 are not finite as torch.float16; choose"):
        PackedTensor.from_codes(codes, torch.tensor([[1.0, 1e6]]), None, half)
    small = replace(INT4, scale_dtype=E4M3, global_scale=True)
    with pytest.raises(FormatError, match=r"scales up to 1e\+06 are not finite as torch.float8_e4m3fn"):
        PackedTensor.from_codes(codes, torch.tensor([[1.0, 1e6]]), None, small, torch.ones(1))


@pytest.mark.parametrize("scheme", [*SCHEMES, *BEYOND_PACK_QUANTIZED], ids=str)
def test_rows_that_are_looked_up_are_those_of_the_whole_matrix(scheme: Scheme) -> None:
    # 33 and 70 rows end in a block of zero-points that is not whole.
    for shape in ((1, 33), (33, 64), (70, 40)):
        codes, scale, zero = random_parts(scheme, shape)
        factor = torch.tensor([3.0]) if scheme.global_scale else None
        packed = PackedTensor.from_codes(codes, scale, zero, scheme, factor)
        _assert_rows(packed, torch.tensor([0, shape[0] - 1, 0, shape[0] // 2]))
        _assert_rows(packed, torch.arange(shape[0]).flip(0))


@pytest.mark.parametrize("name", PRESETS)
def test_rows_of_every_format_are_those_of_the_whole_matrix(name: str) -> None:
    weight = torch.randn(37, 96, generator=torch.Generator().manual_seed(0))
    packed = quantize_tensor(weight, name)
    _assert_rows(packed, torch.tensor([36, 0, 5, 5]))
    _assert_rows(packed, torch.tensor([], dtype=torch.int64))


def test_rows_of_one_scale_per_tensor_are_those_of_the_whole_matrix() -> None:
    packed = quantize_tensor(torch.randn(5, 64), "int8", group_size="tensor")
    _assert_rows(packed, torch.tensor([4, 1]))


def test_rows_that_share_scales_are_those_of_the_whole_matrix() -> None:
    packed = quantize_tensor(
        torch.randn(37, 96), Scheme(FORMATS["fp8-e4m3"], 32, scale_dtype=torch.float32, group_rows=16)
    )
    _assert_rows(packed, torch.tensor([36, 0, 15, 16, 31, 32]))


def _assert_rows(packed: PackedTensor, ids: torch.Tensor) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_equal(packed.dequantize_rows(ids, dtype), packed.dequantize(dtype)[ids])
