"""Packed linear layers against the float64 product of the dequantized weight."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import quantkit
from quantkit.calibrate.methods import quantize_tensor
from quantkit.errors import KernelError
from quantkit.kernels.gemm import unpack
from quantkit.kernels.gemm.unpack import BLOCK_WEIGHTS
from quantkit.kernels.layouts import fragment_layout
from quantkit.kernels.linear import linear, linear_parts
from quantkit.kernels.problem import ACTIVATION_DTYPES, Problem, device_features
from quantkit.kernels.registry import FORCE_VARIABLE, KERNELS, explain
from quantkit.kernels.weight_layouts import build_layout, join_layouts
from quantkit.packing.formats import CodebookFormat, IntFormat, number_format
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import Scheme, parse_token, scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.packing.zero_points import searched

from ..support.compare import assert_close, assert_equal

ROWS_OF_X = (0, 1, 3, 17, 65)
#: Plain, both dimensions odd for the words, ragged groups and less than a block.
SHAPES = ((80, 256), (37, 172), (5, 60))
ERROR = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


#: Presets that every row and shape is tried on; for the others fewer shapes show what is left to show.
THOROUGH = ("int8", "int4", "fp6", "fp6-e3m2", "binary")
#: Names for what another preset is already.
SAME = ("fp8-e4m3", "fp6-e2m3")


def zero_points(name):
    return searched() if isinstance(number_format(PRESETS[name].format), IntFormat) else ("none",)


CASES = [(name, kind) for name in PRESETS if name not in SAME for kind in zero_points(name)]


def integers(m, k, dtype):
    return torch.randint(-4, 5, (m, k), generator=torch.Generator().manual_seed(m)).to(dtype)


def computes(row, packed, m, dtype):
    """Whether the row can be forced on this product."""
    problem = Problem(m, *packed.shape, packed.scheme, dtype, "cpu", device_features("cpu"))
    return "cpu" in row.devices and row.why_unsupported(problem) is None


#: Sums of their values need more digits than float32 has.
INEXACT = ("nf4", "fp8-e5m2", "book4")


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
@pytest.mark.parametrize(("name", "zero_point"), [case for case in CASES if case[0] not in INEXACT])
@pytest.mark.sampled(3)
def test_exact_operands_give_the_exact_product(
    name, zero_point, dtype, row, make_packed, reference, poisoned, monkeypatch
):
    monkeypatch.setenv(FORCE_VARIABLE, row.name)
    thorough = name in THOROUGH and zero_point != "float"
    for shape in SHAPES if thorough else SHAPES[1:2]:
        sizes = ["channel", 32, 64, 128] if thorough else ["channel", 32]
        preset = scheme(name)
        if zero_point == "none" and preset.scale_dtype.itemsize > 1 and preset.planes == 1:
            sizes += [] if preset.column_scale else ["tensor"]
        for group_size in sizes:
            packed = make_packed(name, shape, group_size=group_size, zero_point=zero_point, exact=True)
            for m in ROWS_OF_X if thorough else (1, 17):
                if not computes(row, packed, m, dtype):
                    continue
                x = integers(m, shape[1], dtype)
                y = linear(x, packed)
                assert y.dtype == dtype
                assert_equal(y, reference(x, packed).to(dtype), (shape, group_size, m))
                assert_equal(y, linear(x, packed), "runs differ")


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
@pytest.mark.parametrize(("name", "zero_point"), CASES)
def test_error_on_random_data(name, zero_point, dtype, row, make_packed, reference, monkeypatch):
    monkeypatch.setenv(FORCE_VARIABLE, row.name)
    packed = make_packed(name, (96, 512), zero_point=zero_point)
    if not computes(row, packed, 3, dtype):
        pytest.skip("the row does not compute this")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 512, generator=generator)
    x[:, 7] *= 30  # an outlier channel, as language models have them
    x, bias = x.to(dtype), torch.randn(96, generator=generator).to(dtype)
    assert_close(linear(x, packed).double(), reference(x, packed), norm=ERROR[dtype])
    assert_close(linear(x, packed, bias).double(), reference(x, packed, bias), norm=ERROR[dtype])


@pytest.mark.parametrize(
    "row",
    [row for row in KERNELS if "cpu" in row.devices and not row.rounds_x],
    ids=lambda row: row.name,
)
def test_every_cpu_row_computes_something(row, make_packed):
    tried = [make_packed(name, (64, 256), zero_point=kind) for name, kind in CASES]
    assert any(computes(row, packed, 1, torch.bfloat16) for packed in tried)


@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_what_runs_unforced_is_right_for_every_m(dtype, make_packed, reference):
    for name in ("int4", "int8", "fp6", "binary"):
        packed = make_packed(name, (512, 256))
        for m in ROWS_OF_X[1:]:
            x = torch.randn(m, 256, generator=torch.Generator().manual_seed(m)).to(dtype)
            assert_close(linear(x, packed).double(), reference(x, packed), norm=ERROR[dtype])


def of_blocks(name, shape, scale_dtype=torch.float32):
    """The same weight with scales of blocks of 16 x 32, and with one for each row of a block."""
    rows, columns = shape
    blocks = Scheme(number_format(name), 32, scale_dtype=scale_dtype, group_rows=16)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8)
    scale = torch.exp2(torch.randint(-3, 3, (-(-rows // 16), -(-columns // 32)), generator=generator).float())
    packed = PackedTensor.from_codes(codes, scale, None, blocks)
    of_rows = scale.repeat_interleave(16, 0)[:rows]
    return packed, PackedTensor.from_codes(codes, of_rows, None, replace(blocks, group_rows=1))


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.name)
@pytest.mark.parametrize("name", ["fp8-e4m3", "int8"])
def test_scales_of_blocks_are_those_of_each_row(name, row, monkeypatch):
    """Bit for bit, with ragged last blocks."""
    monkeypatch.setenv(FORCE_VARIABLE, row.name)
    monkeypatch.setitem(BLOCK_WEIGHTS, "cpu", 7 * 172)
    packed, of_rows = of_blocks(name, (37, 172))
    assert packed.scale.numel() < of_rows.scale.numel() / 10
    assert_equal(packed.dequantize(start=5, stop=33), of_rows.dequantize(start=5, stop=33))
    for m, dtype in itertools.product((1, 17), ACTIVATION_DTYPES):
        if computes(row, packed, m, dtype):
            x = torch.randn(m, 172, generator=torch.Generator().manual_seed(m)).to(dtype)
            assert_equal(linear(x, packed), linear(x, of_rows))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
def test_layouts_of_blocks_are_those_of_each_row(scale_dtype):
    """All kernels of GPUs read these layouts; words are restored from them and the stored scales."""
    packed, of_rows = of_blocks("fp8-e4m3", (64, 256), scale_dtype)
    for dtype in ACTIVATION_DTYPES:
        layout = fragment_layout.build(packed, dtype)
        for found, expected in zip(layout, fragment_layout.build(of_rows, dtype), strict=True):
            assert_equal(found, expected)
        assert_equal(fragment_layout.restore(layout, packed.scheme, packed.shape, packed.scale), packed.words)


def test_unpack_crosses_block_boundaries(make_packed, reference, monkeypatch, poisoned):
    monkeypatch.setitem(BLOCK_WEIGHTS, "cpu", 7 * 172)
    monkeypatch.setenv(FORCE_VARIABLE, "unpack")
    packed = make_packed("int4", (37, 172), group_size=32, zero_point="integer", exact=True)
    x, bias = integers(3, 172, torch.float32), integers(1, 37, torch.float32)[0]
    assert_equal(linear(x, packed, bias).double(), reference(x, packed, bias))


@pytest.mark.parametrize("m", [1, 3, 32])
def test_joined_int4_weights_give_what_each_gives(m, make_packed):
    many = [make_packed("int4", (rows, 64), group_size=32, zero_point="integer") for rows in (64, 192, 128)]
    layouts = [build_layout(one, torch.bfloat16) for one in many]
    whole, parts = join_layouts(layouts, [64, 192, 128], many[0].scheme, 64)
    x = torch.randn(m, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    alone = [linear(x, one) for one in many]
    token = many[0].scheme.token
    assert_equal(linear_parts(x, (), None, token, 384, whole), torch.cat(alone, dim=1))
    # The parts are views of the whole.
    for one, part, y in zip(many, parts, alone, strict=True):
        assert part.tensors[0].untyped_storage().data_ptr() == whole.tensors[0].untyped_storage().data_ptr()
        assert_equal(linear_parts(x, one.tensors, None, token, one.shape[0], part), y)
    assert join_layouts(layouts, [64, 192, 100], many[0].scheme, 64) is None


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_unpack_multiplies_in_float32_where_that_is_faster(dtype, slow, make_packed, reference, monkeypatch):
    monkeypatch.setenv(FORCE_VARIABLE, "unpack")
    monkeypatch.setattr(unpack, "is_slower_than_float32", lambda _: slow)
    packed = make_packed("nf4", (37, 172), group_size=32)
    x = torch.randn(3, 172, generator=torch.Generator().manual_seed(0)).to(dtype)
    bias = torch.ones(37, dtype=dtype)
    seen, real = set(), F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: seen.add(x.dtype) or real(x, *rest))
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            y = linear(x, packed, bias)
        assert y.dtype == dtype
        if slow:
            # Rounded once, from float32.
            assert_equal(y, real(x.float(), packed.dequantize(), bias.float()).to(dtype))
        assert_close(y.double(), reference(x, packed, bias), norm=ERROR[dtype])
    assert seen == {torch.float32 if slow else dtype}


@pytest.mark.parametrize(("seconds", "slow"), [(0.5, False), (1.1, False), (2.0, True)])
def test_a_dtype_is_slower_than_float32_by_the_clock(seconds, slow, monkeypatch):
    monkeypatch.setattr(unpack, "_seconds", lambda dtype: 1.0 if dtype == torch.float32 else seconds)
    assert unpack.is_slower_than_float32.__wrapped__(torch.bfloat16) is slow


def test_what_is_timed_is_in_its_dtype_on_the_cpu_wherever_it_is_asked(monkeypatch):
    seen, real = [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, weight: seen.append(real(x, weight)) or seen[-1])
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            assert unpack._seconds(dtype) > 0
            assert {(one.dtype, one.device.type) for one in seen} == {(dtype, "cpu")}
            seen.clear()


def test_leading_dimensions_and_strides(make_packed):
    packed = make_packed("int4", (16, 64), group_size=32, exact=True)
    x = integers(12, 128, torch.float32).view(3, 4, 128)[:, :, ::2]
    y = linear(x, packed)
    assert y.shape == (3, 4, 16)
    assert_equal(y.view(12, 16), linear(x.reshape(12, 64), packed))
    assert linear(x[0, 0], packed).shape == (16,)
    assert linear(x.new_empty(2, 0, 64), packed).shape == (2, 0, 16)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("row", ["int-digits", "unpack"])
def test_non_finite_activations_stay_visible(row, value, make_packed, monkeypatch):
    monkeypatch.setenv(FORCE_VARIABLE, row)
    packed = make_packed("binary", (16, 64), group_size=32)
    x = torch.ones(2, 64)
    x[0, 3] = value
    y = linear(x, packed)
    assert not y[0].isfinite().any()
    assert y[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PRESETS)
def test_activations_that_are_no_numbers_end_as_in_the_dense_model(name, dtype, make_packed):
    """Whatever row runs: an output is a number where the dense model has one."""
    packed = make_packed(name, (32, 128))
    generator = torch.Generator().manual_seed(0)
    for m in (1, 5, 40):
        x = torch.randn(m, 128, generator=generator).to(dtype)
        for row, value in zip(range(0, m, 3), (math.nan, math.inf, -math.inf), strict=False):
            x[row, 5 + row] = value
        dense = x @ packed.dequantize(dtype).T
        assert_equal(linear(x, packed).isfinite(), dense.isfinite())


@pytest.mark.parametrize("part", ["scale", "zero_point", "global_scale", "column_scale", "codebook"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_parts_that_are_no_numbers_stay_visible(part, value, make_packed):
    cases = {
        "scale": {"name": "int4"},
        "zero_point": {"name": "int4", "zero_point": "float"},
        "global_scale": {"name": "nvfp4"},
        "column_scale": {"name": "binary-rank1"},
        "codebook": {"name": "book4"},
    }
    packed = make_packed(cases[part].pop("name"), (32, 128), **cases[part])
    packed.part(part).view(-1)[:1] = value
    weights, x = packed.dequantize(), torch.ones(2, 128)
    # A divisor without bound leaves zeros, which are numbers.
    lost = ~weights.isfinite().all(1)
    assert bool(lost.any()) or (part == "global_scale" and value == math.inf)
    assert not linear(x, packed)[:, lost].isfinite().any()


@pytest.mark.parametrize("magnitude", [0.0, 1e-42, 1e-30, 1e30])
def test_digits_of_extreme_activations(magnitude, make_packed, reference, monkeypatch):
    monkeypatch.setenv(FORCE_VARIABLE, "int-digits")
    packed = make_packed("int4", (16, 64), group_size=32)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)) * magnitude
    # Absolute steps of 2**-126 are all that is promised near zero.
    assert_close(
        linear(x, packed).double(),
        reference(x, packed),
        rtol=1e-4,
        atol=magnitude * 1e-5 + 64 * 12 * 2.0**-126,
    )


def test_layout_is_built_once_and_follows_the_forced_row(make_packed, monkeypatch):
    packed = make_packed("int4", (512, 256))
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    linear(x, packed)
    (first,) = packed.kernel_cache.values()
    linear(x, packed)
    assert packed.kernel_cache[next(iter(packed.kernel_cache))] is first
    monkeypatch.setenv(FORCE_VARIABLE, "unpack")
    linear(x, packed)
    ((forced, layout),) = packed.kernel_cache.values()
    assert (forced, layout) == ("unpack", None)


def test_parts_take_a_token_and_ignore_a_layout_of_another_dtype(make_packed, monkeypatch):
    packed = make_packed("int4", (512, 256), exact=True)
    parts = packed.tensors
    monkeypatch.setenv(FORCE_VARIABLE, "int-digits")
    layout = build_layout(packed, torch.float32)
    assert layout is not None
    monkeypatch.delenv(FORCE_VARIABLE)
    for dtype in (torch.float32, torch.bfloat16):
        x = integers(2, 256, dtype)
        with_layout = linear_parts(x, parts, None, packed.scheme, 512, layout)
        without = linear_parts(x, parts, None, packed.scheme.token, 512, None)
        assert_equal(with_layout, without)


@pytest.mark.parametrize(
    ("name", "zero_point"),
    [
        ("fp6", "none"),
        ("int4", "integer"),
        ("int2", "float"),
        ("nvfp4", "none"),
        ("binary-residual", "none"),
        ("binary-rank1", "none"),
    ],
)
def test_gradients_reach_x_and_bias(name, zero_point, make_packed):
    packed = make_packed(name, (24, 100), group_size=32, zero_point=zero_point, exact=True)
    x = integers(3, 100, torch.float32).requires_grad_()
    bias = torch.zeros(24, requires_grad=True)
    grad = integers(3, 24, torch.float32)
    linear(x, packed, bias).backward(grad)
    assert_equal(x.grad, grad @ packed.dequantize())
    assert_equal(bias.grad, grad.sum(0))


@pytest.mark.parametrize("sizes", [(), (0,), (2, 0), (1, 2)], ids=str)
def test_gradients_of_any_leading_dimensions(sizes, make_packed):
    packed = make_packed("int4", (24, 100), group_size=32, exact=True)
    x = torch.ones(*sizes, 100).requires_grad_()
    bias = torch.zeros(24, requires_grad=True)
    linear(x, packed, bias).sum().backward()
    assert_equal(bias.grad, torch.full((24,), float(math.prod(sizes))))
    assert_equal(x.grad, packed.dequantize().sum(0).expand_as(x))


def test_a_scale_that_wants_a_gradient_is_refused(make_packed):
    packed = make_packed("int4", (16, 64), group_size=32)
    scale = packed.scale.clone().requires_grad_()
    y = linear_parts(torch.ones(1, 64), (packed.words, scale), None, packed.scheme, 16, None)
    with pytest.raises(KernelError, match=r"requires_grad_\(False\)"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.ones(2, 63), None, r"x has shape \(2, 63\).*64 input features"),
        (torch.ones(()), None, r"x has shape \(\)"),
        ([1.0] * 64, None, r"x is a list; expected a tensor: torch\.as_tensor\(x, dtype"),
        (np.ones((2, 64), np.float32), None, r"x is a numpy\.ndarray; expected a tensor"),
        (None, None, r"x is a NoneType; expected a tensor"),
        (torch.ones(2, 64), [1.0] * 16, r"bias is a list; expected a tensor"),
        (torch.ones(2, 64, dtype=torch.float64), None, r"x is torch.float64.*Cast"),
        (torch.ones(2, 64, device="meta"), None, r"x is on meta.*on cpu"),
        (torch.ones(2, 64), torch.ones(15), r"bias has shape \(15,\).*16 output"),
        (torch.ones(2, 64), torch.ones(16, dtype=torch.bfloat16), r"bias is torch.bfloat16.*float32"),
    ],
)
def test_operands_that_do_not_fit(x, bias, message, make_packed):
    packed = make_packed("int4", (16, 64), group_size=32)
    with pytest.raises(KernelError, match=message):
        linear(x, packed, bias)


def test_a_custom_format_needs_no_entry_in_any_table(reference):
    book = CodebookFormat("five", 3, book=(-4.0, -1.0, 0.0, 1.0, 4.0))
    chosen = Scheme(book, 32)
    weight = torch.randn(48, 100, generator=torch.Generator().manual_seed(0))
    packed = quantize_tensor(weight, chosen)
    assert parse_token(packed.scheme.token) == chosen
    values = packed.codes().unique().tolist()
    assert set(values) <= set(range(5)) and len(values) > 3
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    assert_close(quantkit.linear(x, packed).double(), reference(x, packed), norm=ERROR[torch.float32])
    assert_close(packed.dequantize().double(), weight.double(), norm=0.4)


def test_explain_agrees_with_computes(make_packed):
    packed = make_packed("int4", (80, 256))
    problem = Problem(1, 80, 256, packed.scheme, torch.float32, "cpu", device_features("cpu"))
    verdicts = dict(explain(problem))
    assert verdicts["unpack"] is None
    assert "bfloat16" in verdicts["torch-int4"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 5])
def test_minimums_of_q4_1_are_zero_points_to_kernels(bits, dtype, device, monkeypatch):
    """Every kernel that takes float zero-points takes -minimum / scale; also where a group has scale 0."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    generator = torch.Generator().manual_seed(bits)
    chosen = Scheme(number_format(f"int{bits}"), 32, "minimum", torch.float16)
    scale = torch.rand(96, 8, generator=generator) / 64
    minimum = -scale * 2**bits * torch.rand(96, 8, generator=generator)
    scale[3, 2] = 0
    codes = torch.randint(0, 2**bits, (96, 256), generator=generator, dtype=torch.uint8)
    packed = PackedTensor.from_codes(codes, scale, minimum.half(), chosen).to(device)
    for m in (1, 3, 16, 65):
        x = torch.randn(m, 256, generator=generator).to(dtype).to(device)
        expected = x.double() @ packed.dequantize().double().T
        monkeypatch.delenv(FORCE_VARIABLE, raising=False)
        assert_close(linear(x, packed).double(), expected, norm=ERROR[dtype])
        for row in KERNELS:
            problem = Problem(m, 96, 256, chosen, dtype, device, device_features(device))
            if device in row.devices and row.why_unsupported(problem) is None:
                monkeypatch.setenv(FORCE_VARIABLE, row.name)
                assert_close(linear(x, packed).double(), expected, norm=ERROR[dtype])
