"""One scale per tensor: values are counted right, and the scale is what slow searches over weights find."""

import math

import pytest
import torch

from quantkit.calibrate import methods
from quantkit.calibrate.methods import METHODS, quantize_rows, quantize_tensor
from quantkit.calibrate.parameters import fit_parameters
from quantkit.calibrate.scale_search import ScaleZero, rtn, squared_error
from quantkit.calibrate.tensor_scale import count_values, plain, search
from quantkit.errors import FormatError
from quantkit.packing.formats import FORMATS, FittedFormat
from quantkit.packing.schemes import Scheme

from ..support.compare import assert_close, assert_equal

NAMES = [name for name, row in FORMATS.items() if not isinstance(row, FittedFormat)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def weights(*shape: int, tail: bool = False, seed: int = 0) -> torch.Tensor:
    """Gaussian, or Student's t with 3 degrees of freedom."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(*shape, generator=generator)
    if not tail:
        return normal
    return normal / torch.randn(3, *shape, generator=generator).square().mean(0).sqrt()


def per_tensor(name: str, scale_dtype: torch.dtype = torch.bfloat16) -> Scheme:
    return Scheme(FORMATS[name], "tensor", scale_dtype=scale_dtype)


def error_of(weight: torch.Tensor, scale: float, chosen: Scheme) -> float:
    """The squared error of all weights as one group, by the measure that groups have."""
    groups = weight.float().view(1, -1)
    return float(squared_error(groups, ScaleZero(torch.tensor([[scale]])), torch.ones(1, 1), chosen))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_of_16_bits_are_counted_exactly(dtype):
    weight = weights(50, 70, tail=True).to(dtype)
    weight[0, :4] = torch.tensor([0.0, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4])
    counted = count_values(weight.split(7))
    values, counts = torch.unique(weight.float(), return_counts=True)
    order = counted.values.argsort()
    # The two zeros are different values here.
    found = counted.values[order].tolist()
    assert found.count(0.0) == 2 and set(found) == set(values.tolist())
    by_value = dict.fromkeys(values.tolist(), 0.0)
    for value, count in zip(counted.values.tolist(), counted.counts.tolist(), strict=True):
        by_value[value] += count
    assert list(by_value.values()) == counts.tolist()
    assert counted.absmax == float(weight.abs().max())
    assert counted.absmean == pytest.approx(float(weight.double().abs().mean()), rel=1e-12)


def test_float32_is_counted_with_12_digits_and_its_largest_as_it_is():
    weight = weights(50, 70)
    weight[0, :3] = torch.tensor([3.3e38, 1e-39, -3.3e38])
    weight[1, 0] = torch.finfo(torch.float32).max
    counted = count_values([weight])
    assert counted.counts.sum() == weight.numel() and bool(counted.values.isfinite().all())
    # Rounding keeps the order, so the sorted weights are the values as often as they are counted.
    order = counted.values.argsort()
    spelled_out = counted.values[order].repeat_interleave(counted.counts[order].long())
    exact = weight.flatten().sort().values
    assert_close(spelled_out, exact, rtol=2.0**-12, atol=2.0**-137)
    assert bool((spelled_out.view(torch.int32) % 2**12 == 0)[1:-1].all())
    assert counted.absmax == spelled_out[-1] == torch.finfo(torch.float32).max


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_and_their_order_do_not_matter(dtype):
    weight = weights(41, 33).to(dtype)
    whole = count_values([weight])
    for chunks in (weight.split(1), [*reversed(weight.split(5))], [weight.T]):
        cut = count_values(chunks)
        assert cut.absmax == whole.absmax
        assert_equal(cut.values, whole.values)
        assert_equal(cut.counts, whole.counts)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_counted_and_the_rows_say_where(value):
    weight = weights(40, 33)
    weight[20, 3] = value
    assert count_values(weight.split(8)) is None
    counts = "1 NaN and 0" if math.isnan(value) else "0 NaN and 1"
    for method in ("rtn", "mse"):
        with pytest.raises(FormatError, match=f"^{counts} infinite weights"):
            quantize_tensor(weight, "fp8", group_size="tensor", method=method)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_plain_rounding_is_that_of_one_group(name, dtype):
    weight, chosen = weights(40, 33).to(dtype), per_tensor(name, torch.float32)
    expected = float(rtn(weight.float().view(1, -1), chosen).scale)
    exact = chosen.format.rounding_statistic == "absmax"
    assert plain(count_values([weight]), chosen) == pytest.approx(expected, rel=0 if exact else 1e-5)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(2)
def test_the_search_ends_where_trying_every_scale_does(name, tail):
    weight, chosen = weights(48, 64, tail=tail).bfloat16(), per_tensor(name)
    found = search(count_values([weight]), chosen)
    absmax, absmean = float(weight.float().abs().max()), float(weight.float().abs().mean())
    cover = max(chosen.format.max, -chosen.format.min)
    octaves = range(-30, 12)
    every = [m * 2.0**e for e in octaves for m in range(128, 256)]
    every = [scale for scale in every if absmean / 2 < scale * cover < 2 * absmax]
    if not chosen.format.is_symmetric:
        every += [-scale for scale in every]
    best = min(error_of(weight, scale, chosen) for scale in every)
    assert error_of(weight, found, chosen) < 1.005 * best
    assert error_of(weight, found, chosen) <= error_of(weight, plain(count_values([weight]), chosen), chosen)


def test_an_outlier_does_not_keep_the_search_from_the_others():
    weight = weights(128, 128)
    weight[5, 7] = 60
    errors = [
        float((quantize_tensor(weight, "int4", group_size="tensor", method=m).dequantize() - weight).norm())
        for m in ("rtn", "mse")
    ]
    assert errors[1] < 0.6 * errors[0]


def test_the_sign_turns_the_longer_side_of_the_range():
    weight = weights(64, 64).abs()
    weight[::7] *= -0.1
    for side, sign in ((weight, -1), (-weight, 1)):
        assert math.copysign(1, quantize_tensor(side, "int2", group_size="tensor").scale.item()) == sign


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("name", ["int8", "int4", "ternary", "fp8", "nf4"])
def test_a_tensor_is_quantized_as_one_long_row(name, method):
    weight = weights(24, 40).bfloat16()
    packed = quantize_tensor(weight, name, group_size="tensor", method=method)
    assert packed.scale.shape == (1,) and packed.scheme.per_tensor
    row = quantize_tensor(weight.view(1, -1), name, group_size="tensor", method=method)
    assert_equal(packed.codes().reshape(1, -1), row.codes())
    assert_equal(packed.scale, row.scale)
    if method == "rtn":
        row = quantize_tensor(weight.view(1, -1), name, group_size="channel", method=method)
        assert_equal(packed.codes().reshape(1, -1), row.codes())
        assert packed.scale == row.scale[0]


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("name", ["int4", "ternary", "fp8"])
def test_how_a_tensor_is_cut_does_not_change_a_bit(name, method, monkeypatch):
    weight = weights(37, 172)
    whole = quantize_tensor(weight, name, group_size="tensor", method=method)
    threads = torch.get_num_threads()
    monkeypatch.setattr(methods, "CHUNK_WEIGHTS", 5 * 172)
    torch.set_num_threads(3)
    try:
        cut = quantize_tensor(weight, name, group_size="tensor", method=method)
    finally:
        torch.set_num_threads(threads)
    assert_equal(whole.tensors, cut.tensors)


def test_quantized_rows_report_the_error_that_dequantizing_shows():
    weight, chosen, method = weights(20, 172), per_tensor("int4"), METHODS["mse"]
    shared = fit_parameters(
        lambda: [weight], (20, 172), chosen, method.scale_search.fit, method.scale_search.fit_tensor
    )
    rows = quantize_rows(weight, chosen, method, shared)
    stored = quantize_tensor(weight, chosen).dequantize().double()
    assert rows.scale is None
    assert rows.squared_error == pytest.approx(float((stored - weight).square().sum()), rel=1e-5)


def test_tensors_beside_share_the_scale():
    one, other = weights(8, 32), 3 * weights(16, 32, seed=1)
    for name in ("rtn", "mse"):
        method, found = METHODS[name], []
        for weight, beside in ((one, other), (other, one), (torch.cat([one, other]), one[:0])):
            read = [beside] if len(beside) else []
            chunks = (lambda weight=weight: [weight]), (lambda read=read: read)
            found.append(
                fit_parameters(
                    chunks[0],
                    tuple(weight.shape),
                    per_tensor("fp8-e4m3"),
                    method.scale_search.fit,
                    method.scale_search.fit_tensor,
                    chunks[1],
                ).scale
            )
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_zeros_or_of_one_weight_are_stored(name, method):
    zeros = quantize_tensor(torch.zeros(3, 5), per_tensor(name), method=method)
    assert_equal(zeros.dequantize(), torch.zeros(3, 5))
    for value in (-0.3, 1e-30, 1e30):
        one = quantize_tensor(torch.tensor([[value]]), per_tensor(name), method=method)
        assert one.dequantize().item() == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_a_scale_that_overflows_is_refused(method):
    with pytest.raises(FormatError, match=r"a scale of \S+ overflows torch.float16"):
        quantize_tensor(
            1e9 * weights(4, 8), "int4", group_size="tensor", method=method, scale_dtype=torch.float16
        )


def test_hqq_has_no_scale_per_tensor():
    with pytest.raises(
        FormatError, match=r"'hqq' has no way to choose one scale per tensor.*take one of rtn, mse"
    ):
        quantize_tensor(weights(4, 8), "int4", group_size="tensor", method="hqq")
