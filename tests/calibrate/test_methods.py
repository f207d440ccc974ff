"""`quantize_tensor` takes any sensible matrix, and each row of the result depends on that row alone."""

import itertools
import math
import re

import pytest
import torch

from quantkit.calibrate import methods
from quantkit.calibrate.methods import METHODS, method_named, quantize_rows, quantize_tensor
from quantkit.errors import FormatError, UsageError
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.packing.zero_points import searched

from ..support.compare import assert_equal

#: Methods that every format can have.
EVERY_FORMAT = ("rtn", "mse")
# int4 and int8 have zero-points, the others show the rest of the formats and scales.
CASES = [
    ("int4", "none"),
    ("int4", "integer"),
    ("int4", "float"),
    ("int8", "none"),
    ("int8", "integer"),
    ("fp6", "none"),
    ("fp6-e3m2", "none"),
    ("binary", "none"),
    ("nvfp4", "none"),
    ("mxfp4", "none"),
    ("ternary", "none"),
    ("nf4", "none"),
]
RELATIVE_ERROR = {"int8": 1e-4, "int4": 0.012, "fp6": 8e-4, "fp6-e3m2": 2.5e-3, "binary": 0.5}
RELATIVE_ERROR |= {"nvfp4": 0.0115, "mxfp4": 0.02, "ternary": 0.3, "nf4": 0.011}


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same(found: PackedTensor, expected: PackedTensor) -> None:
    assert found.scheme == expected.scheme
    assert_equal(dict(found.parts()), dict(expected.parts()))


@pytest.mark.fault(45)
@pytest.mark.parametrize("method", EVERY_FORMAT)
@pytest.mark.parametrize(("name", "zero_point"), CASES)
@pytest.mark.parametrize("shape", [(64, 256), (33, 172), (7, 129), (1, 31), (129, 1)])
def test_error_is_small_at_any_shape(method, name, zero_point, shape):
    weight = gaussian(*shape)
    packed = quantize_tensor(weight, name, group_size=32, method=method, zero_point=zero_point)
    assert packed.shape == shape
    stored = packed.dequantize()
    error = (stored - weight).square().sum() / weight.square().sum()
    assert float(error) < RELATIVE_ERROR[name] * (2 if method == "rtn" else 1)


@pytest.mark.parametrize("method", EVERY_FORMAT)
@pytest.mark.parametrize("size", [128, 32])
@pytest.mark.parametrize("zero_point", searched())
def test_the_tail_group_is_fitted_on_its_own(method, size, zero_point):
    weight = gaussian(40, 172)
    tail = weight[:, 172 // size * size :] * 1000
    weight[:, -tail.shape[1] :] = tail
    packed = quantize_tensor(weight, "int4", group_size=size, method=method, zero_point=zero_point)
    alone = quantize_tensor(tail, "int4", group_size="channel", method=method, zero_point=zero_point)
    assert_equal(packed.dequantize()[:, -tail.shape[1] :], alone.dequantize())
    assert packed.scale.shape == (40, math.ceil(172 / size))


@pytest.mark.parametrize("method", EVERY_FORMAT)
@pytest.mark.parametrize(("name", "zero_point"), CASES)
@pytest.mark.parametrize("size", [32, "channel"])
@pytest.mark.sampled(2)
def test_the_whole_is_its_rows(monkeypatch, method, name, zero_point, size):
    weight = gaussian(37, 172)
    options = {"group_size": size, "method": method, "zero_point": zero_point}
    whole = quantize_tensor(weight, name, **options)
    monkeypatch.setattr(methods, "CHUNK_WEIGHTS", 5 * 172)
    assert_same(whole, quantize_tensor(weight, name, **options))
    if whole.scheme.global_scale:
        return  # rows then depend on the absmax of the tensor, and on nothing else
    rows = [quantize_tensor(weight[i : i + 1], name, **options) for i in range(37)]
    assert_equal(whole.words, torch.cat([row.words for row in rows]))
    assert_equal(whole.scale, torch.cat([row.scale for row in rows]))
    if zero_point != "none":
        assert_equal(whole.zero_points(), torch.cat([row.zero_points() for row in rows]))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_a_bit(threads):
    weight = gaussian(1, 70_000)
    expected = quantize_tensor(weight, "int4", group_size="channel")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same(expected, quantize_tensor(weight, "int4", group_size="channel"))
    finally:
        torch.set_num_threads(before)


@pytest.mark.fault(47)
@pytest.mark.parametrize("method", EVERY_FORMAT)
@pytest.mark.parametrize(("name", "zero_point"), CASES)
def test_strides_do_not_matter(method, name, zero_point):
    wide = gaussian(48, 300, seed=1)
    views = [wide.T, wide[:, 3:99], wide[::3], wide[:1].expand(48, 300), wide[:, 7:8]]
    for view in views:
        options = {"group_size": "channel", "method": method, "zero_point": zero_point}
        contiguous = view.clone(memory_format=torch.contiguous_format)
        assert_same(quantize_tensor(view, name, **options), quantize_tensor(contiguous, name, **options))


@pytest.mark.parametrize("shape", [(3, 5), (40, 64), (1, 1)])
@pytest.mark.parametrize("zero_point", searched())
def test_every_part_can_be_viewed_as_bytes(shape, zero_point):
    packed = quantize_tensor(gaussian(*shape), "int4", group_size="channel", zero_point=zero_point)
    for _, tensor in packed.parts():
        assert tensor.reshape(-1).view(torch.uint8).numel() == tensor.nbytes
        assert tensor.stride() == torch.empty(tensor.shape).stride()


@pytest.mark.fault(47)
def test_a_parameter_is_read_and_left_alone():
    weight = torch.nn.Parameter(gaussian(8, 64))
    before = weight.detach().clone()
    packed = quantize_tensor(weight)
    assert not packed.dequantize().requires_grad
    assert_equal(weight.detach(), before)
    assert weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_quantized_as_their_float32_values(dtype):
    weight = gaussian(16, 128).to(dtype)
    expected = quantize_tensor(weight.float(), scale_dtype=torch.bfloat16)
    assert_same(quantize_tensor(weight, scale_dtype=torch.bfloat16), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float16_weights_have_float16_scales_and_all_others_bfloat16(dtype):
    expected = torch.float16 if dtype is torch.float16 else torch.bfloat16
    assert quantize_tensor(gaussian(4, 64).to(dtype)).scale.dtype is expected


@pytest.mark.parametrize(
    "weight",
    [
        torch.empty(4, 4, device="meta"),
        torch.zeros(4, 4, dtype=torch.int8),
        torch.zeros(2, 4, 4),
        torch.zeros(4),
        torch.zeros(0, 4),
        torch.zeros(4, 0),
        torch.zeros(4, 4, dtype=torch.complex64),
    ],
    ids=lambda weight: f"{weight.dtype}-{tuple(weight.shape)}-{weight.device}",
)
def test_what_is_no_floating_point_matrix_is_refused(weight):
    with pytest.raises(FormatError, match=rf"the weight is {weight.dtype} .* expected a non-empty floating"):
        quantize_tensor(weight)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="unknown method 'sqrt'; known are rtn, mse"):
        quantize_tensor(gaussian(2, 32), method="sqrt")
    with pytest.raises(FormatError, match=r"unknown format 'int9'; known are int8, int7, .*binary"):
        quantize_tensor(gaussian(2, 32), "int9")


@pytest.mark.parametrize("size", [0, -5, 1 << 31])
def test_group_sizes_out_of_range_are_refused(size):
    with pytest.raises(FormatError, match=f"group size {size} is out of range"):
        quantize_tensor(gaussian(2, 32), group_size=size)


@pytest.mark.parametrize("name", ["fp6", "binary"])
def test_zero_points_are_for_ints(name):
    with pytest.raises(FormatError, match="has no zero-point"):
        quantize_tensor(gaussian(2, 32), name, zero_point="integer")


def test_a_scheme_is_used_as_it_is_and_takes_no_more_options():
    chosen = scheme("int4", group_size=16, zero_point="integer", scale_dtype=torch.float32)
    assert quantize_tensor(gaussian(4, 64), chosen).scheme == chosen
    with pytest.raises(UsageError, match="leave out group_size"):
        quantize_tensor(gaussian(4, 64), chosen, group_size=32)


def test_a_group_longer_than_the_row_is_the_row():
    weight = gaussian(4, 64)
    assert_same(quantize_tensor(weight, group_size=128), quantize_tensor(weight, group_size="channel"))


@pytest.mark.fault(42)
@pytest.mark.parametrize("name", ["int4", "binary"])
@pytest.mark.parametrize("magnitude", [1e-9, 1e-42])
def test_what_is_below_the_scale_dtype_counts_as_lost(name, magnitude):
    weight = torch.randn(5, 32) * magnitude
    chosen = scheme(name, group_size=16, scale_dtype=torch.float16)
    rows = quantize_rows(weight, chosen, METHODS["rtn"])
    expected = float(weight.double().square().sum())
    assert rows.squared_error == pytest.approx(expected, rel=1e-5)
    assert rows.squared_norm == pytest.approx(expected, rel=1e-5)


def test_quantized_rows_report_the_error_that_dequantizing_shows():
    weight = gaussian(20, 172)
    chosen = scheme("int4", group_size=32, zero_point="integer")
    rows = quantize_rows(weight, chosen, METHODS["mse"])
    stored = quantize_tensor(weight, chosen).dequantize().double()
    assert rows.squared_error == pytest.approx(float((stored - weight).square().sum()), rel=1e-5)
    assert rows.squared_norm == pytest.approx(float(weight.double().square().sum()))


# A weight of 2**31 elements takes 4 GB and is not made here. Rows are quantized in chunks of at most
# `CHUNK_WEIGHTS` weights, or one row, and offsets are Python integers, so no index passes 2**31 unless a
# single row has that many.


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_a_block_is_quantized_as_one_row_of_its_weights(monkeypatch, method, name):
    """Also the last ones, which are smaller, and however many rows are in work."""
    weight = gaussian(37, 70)
    packed = quantize_tensor(weight, name, group_size="16x32", method=method)
    codes = packed.codes()
    for i, j in itertools.product(range(0, 37, 16), range(0, 70, 32)):
        block = weight[i : i + 16, j : j + 32]
        row = quantize_tensor(block.reshape(1, -1), name, group_size="channel", method=method)
        assert_equal(codes[i : i + 16, j : j + 32], row.codes().view(block.shape))
        assert_equal(packed.scale[i // 16, j // 32], row.scale[0, 0])
    monkeypatch.setattr(methods, "CHUNK_WEIGHTS", 3 * 70)
    assert_same(quantize_tensor(weight, name, group_size="16x32", method=method), packed)


def test_methods_with_data_choose_no_scales_of_blocks():
    with pytest.raises(FormatError, match="scales of blocks of rows"):
        METHODS["gptq"].check(scheme("fp8", group_size="128x128"))


@pytest.mark.parametrize("last", ["imatrix", "gptq"])
@pytest.mark.parametrize("first", ["awq", "smoothquant"])
def test_inputs_are_scaled_before_the_steps_of_another_method(first, last):
    joined, alone = method_named(f"{first},{last}"), METHODS[last]
    assert joined.input_scaling == METHODS[first].input_scaling
    assert joined.steps == (joined.input_scaling, *alone.steps)
    assert joined.needs == METHODS[first].input_scaling.needs | alone.needs
    assert joined.needs_data and first not in METHODS[last].summary


@pytest.mark.parametrize(
    "name",
    [
        "gptq,smoothquant",
        "awq,smoothquant",
        "awq,awq",
        "awq,mse",
        "gptq,best",
        "awq,gptq,best",
        "smoothquant,best",
        "awq,signround",
    ],
)
def test_methods_that_do_not_go_together_are_named(name):
    message = (
        f"methods '{name}' cannot be combined: the first of two is awq or smoothquant, the second "
        "imatrix or gptq."
    )
    with pytest.raises(UsageError, match=re.escape(message)):
        method_named(name)


@pytest.mark.parametrize(("name", "unknown"), [("awq,", ""), (",gptq", ""), ("awq, gptq", " gptq")])
def test_a_part_that_is_no_method_is_named(name, unknown):
    with pytest.raises(UsageError, match=f"unknown method '{unknown}'; known are rtn, mse"):
        method_named(name)


@pytest.mark.parametrize("name", [*METHODS, "awq,gptq", "smoothquant,gptq", "awq,distill", "mse,distill"])
def test_a_method_that_changes_other_tensors_names_one_that_does_not(name: str) -> None:
    method = method_named(name)
    if method.distill is None and method.input_scaling is None:
        assert method.alone is None
        return
    assert method.alone is not None
    alone = METHODS[method.alone]
    assert alone.alone is None and alone.distill is None and alone.input_scaling is None
    kept = [step for step in method.transforms if step is not method.input_scaling]
    assert alone.transforms == tuple(kept) and alone.scale_search == method.scale_search
