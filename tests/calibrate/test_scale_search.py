"""Scales are storable, `rtn` is plain rounding, and `mse` is as good as searching everything."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.calibrate.methods import quantize_tensor
from quantkit.calibrate.scale_search import ScaleZero, global_scale, mse, rtn
from quantkit.errors import FormatError
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.zero_points import searched

from ..support.compare import assert_close, assert_equal
from ..tiny.packed import encode_groups

INT_FORMATS = ("int8", "int4", "int2")
FORMATS = (*INT_FORMATS, "fp8", "fp6-e2m3", "fp6-e3m2", "fp4", "nf4", "ternary", "binary")
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator(seed))


def student_t(rows: int, columns: int, seed: int = 0, freedom: int = 4) -> torch.Tensor:
    squares = torch.stack([gaussian(rows, columns, seed + i).square() for i in range(1, freedom + 1)]).sum(0)
    return gaussian(rows, columns, seed) / (squares / freedom).sqrt()


def stored(groups: torch.Tensor, grid: ScaleZero, scheme: Scheme) -> torch.Tensor:
    """float64 values that the codes of `groups` on `grid` stand for."""
    codes = encode_groups(groups, grid.scale, grid.zero_point, scheme)
    values = scheme.format.decode(codes) if grid.zero_point is None else codes.float() - grid.zero_point
    return values.double() * grid.scale.double()


def errors(groups: torch.Tensor, grid: ScaleZero, scheme: Scheme) -> torch.Tensor:
    """Squared error of each group, float64 [R]."""
    return (stored(groups, grid, scheme) - groups.double()).square().sum(1)


def relative_error(weight: torch.Tensor, *args: object, **options: object) -> float:
    packed = quantize_tensor(weight, *args, **options)  # type: ignore[arg-type]
    difference = packed.dequantize().double() - weight.double()
    return float(difference.square().sum() / weight.double().square().sum())


def rtn_reference(group: list[float], scheme: Scheme) -> tuple[float, int]:
    """Scale, before it is stored, and zero-point of one group."""
    if scheme.zero_point != "none":
        levels = 2**scheme.format.bits - 1
        low, high = min(0.0, *group), max(0.0, *group)
        return (high - low) / levels, 0
    magnitudes = [abs(x) for x in group]
    if scheme.format.rounding_statistic == "absmean":
        return sum(magnitudes) / len(group) / scheme.format.absmax, 0
    return max(magnitudes) / scheme.format.absmax, 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("zero_point", searched())
def test_rtn_is_what_plain_loops_compute(name, zero_point):
    if zero_point != "none" and name not in INT_FORMATS:
        pytest.skip("only int formats have a zero-point")
    chosen = scheme(name, zero_point=zero_point, scale_dtype=torch.float32)
    groups = student_t(40, 16)
    grid = rtn(groups, chosen)
    codes = encode_groups(groups, grid.scale, grid.zero_point, chosen)
    for row, group in enumerate(groups.tolist()):
        scale, zero = rtn_reference(group, chosen)
        assert grid.scale[row].item() == pytest.approx(scale, rel=1e-6)
        if zero_point != "none":
            assert grid.zero_point is not None
            zero = -min(0.0, *group) / scale
            if zero_point == "integer":
                zero = min(max(round(zero), 0), 2**chosen.format.bits - 1)
            assert grid.zero_point[row].item() == pytest.approx(zero, rel=1e-6)
        for x, code in zip(group, codes[row].tolist(), strict=True):
            values = [v * scale for v in chosen.format.numbers]
            if zero_point != "none":
                values = [(c - zero) * scale for c in range(2**chosen.format.bits)]
            nearest = min(abs(value - x) for value in values)
            stored = chosen.format.values[code] * scale if zero_point == "none" else values[code]
            assert abs(stored - x) <= nearest + 1e-5 * scale * chosen.format.max


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, Scheme]:
    name = draw(st.sampled_from(FORMATS))
    chosen = scheme(
        name,
        group_size=draw(st.sampled_from([1, 2, 7, 32, 128])),
        zero_point=draw(st.sampled_from(tuple(searched()) if name in INT_FORMATS else ["none"])),
        scale_dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, E8M0])),
    )
    seed = draw(st.integers(0, 10_000))
    assert chosen.group_size is not None
    shape = (draw(st.integers(1, 9)), chosen.group_size)
    kind = draw(st.sampled_from(["gaussian", "heavy", "one-sided", "outlier", "sparse", "constant"]))
    groups = gaussian(*shape, seed)
    if kind == "heavy":
        groups = student_t(*shape, seed, freedom=1)
    elif kind == "one-sided":
        groups = groups.abs() + 3
    elif kind == "outlier":
        groups[:, 0] *= 300
    elif kind == "sparse":
        groups[groups.abs() < 1] = 0
    elif kind == "constant":
        groups[:] = groups[:, :1]
    return groups.clamp(-5e4, 5e4) * 2.0 ** draw(st.integers(-8, 0)), chosen


@given(problems())
@settings(max_examples=60, deadline=None)
def test_mse_is_never_worse_than_rtn_and_both_store_what_they_measured(problem):
    groups, chosen = problem
    plain, searched = rtn(groups, chosen), mse(groups, chosen)
    for grid in (plain, searched):
        assert_equal(grid.scale.to(chosen.scale_dtype).float(), grid.scale)
        if chosen.zero_point == "float":
            assert_equal(grid.zero_point.to(chosen.zero_point_dtype).float(), grid.zero_point)
        elif grid.zero_point is not None:
            codes = grid.zero_point
            assert_equal(codes, codes.round().clamp(0, 2**chosen.format.bits - 1))
    limit = errors(groups, plain, chosen) * (1 + 1e-5) + 1e-12 * groups.double().square().sum(1)
    assert (errors(groups, searched, chosen) <= limit).all()


def exhaustive(groups: torch.Tensor, chosen: Scheme, candidates: int = 400) -> float:
    """Total squared error of the best of `candidates` scales of each sign, each measured exactly."""
    absmax = groups.abs().amax(1, keepdim=True)
    best = torch.full((groups.shape[0],), math.inf, dtype=torch.float64)
    for ratio in torch.linspace(0.15, 1.2, candidates).tolist():
        for sign in (1, -1):
            scale = sign * ratio * absmax / max(chosen.format.max, -chosen.format.min)
            scale = scale.to(chosen.scale_dtype).float()
            best = torch.minimum(best, errors(groups, ScaleZero(scale), chosen))
    return float(best.sum())


@pytest.mark.parametrize("distribution", [gaussian, student_t])
@pytest.mark.parametrize(("name", "size"), [("int4", 128), ("int4", 32), ("fp6", 128), ("fp6-e3m2", 128)])
def test_mse_is_within_a_percent_of_an_exhaustive_search(distribution, name, size):
    chosen = scheme(name, group_size=size)
    groups = distribution(12_800 // size, size)
    found = float(errors(groups, mse(groups, chosen), chosen).sum())
    assert found <= 1.01 * exhaustive(groups, chosen)


@pytest.mark.parametrize(
    ("limit", "name", "options"),
    [
        (0.00008, "int8", {}),
        (0.00068, "int6", {}),
        (0.0028, "int5", {}),
        (0.0096, "int4", {}),
        (0.0070, "int4", {"group_size": 32, "scale_dtype": E4M3}),
        (0.0093, "int4", {"zero_point": "integer"}),
        (0.0086, "int4", {"zero_point": "float"}),
        (0.0274, "int3", {"group_size": 32, "scale_dtype": E4M3}),
        (0.0330, "int3", {"zero_point": "float"}),
        (0.1359, "int2", {}),
        (0.1149, "int2", {"zero_point": "float"}),
        (0.1929, "ternary", {}),
        (0.3716, "binary", {}),
        (0.00072, "fp8", {}),
        (0.00064, "fp6", {}),
        (0.0061, "nf4", {"group_size": 32, "scale_dtype": E4M3}),
        (0.00089, "mxfp8", {}),
        (0.00083, "mxfp6", {}),
        (0.0128, "mxfp4", {}),
        (0.0067, "nvfp4", {}),
    ],
    ids=str,
)
def test_error_on_gaussian_weights(limit, name, options):
    assert relative_error(gaussian(256, 1024), name, method="mse", **options) <= limit


def test_nvfp4_has_the_best_of_all_its_scales():
    chosen, groups = scheme("nvfp4"), gaussian(2_000, 16)
    factor = global_scale(float(groups.abs().max()), chosen)
    every = torch.arange(1, 127, dtype=torch.uint8).view(E4M3).float()
    best = torch.stack([errors(groups * factor, ScaleZero(s.expand(2_000, 1)), chosen) for s in every]).amin(
        0
    )
    found = errors(groups * factor, mse(groups * factor, chosen), chosen)
    assert float(found.sum()) <= 1.005 * float(best.sum())


@pytest.mark.parametrize("magnitude", [1e-33, 1e-30, 1e-4, 1e30, 6e37])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_8_bit_scales_fit_weights_of_any_magnitude(name, magnitude):
    ordinary = gaussian(16, 256)
    assert relative_error(ordinary * magnitude, name) == pytest.approx(
        relative_error(ordinary, name), rel=0.2
    )


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4"])
def test_rtn_of_the_mx_formats_is_the_conversion_of_their_specification(name):
    # OCP MX v1.0, 6.3: X is the power of two below the absmax, over that below the largest value.
    chosen, groups = scheme(name), student_t(50, 32)
    expected = [
        2.0 ** (math.floor(math.log2(max(map(abs, group)))) - math.floor(math.log2(chosen.format.max)))
        for group in groups.tolist()
    ]
    assert rtn(groups, chosen).scale.flatten().tolist() == expected


def test_the_factor_of_a_tensor_makes_its_largest_scale_the_largest_there_is():
    packed = quantize_tensor(gaussian(64, 256), "nvfp4", method="rtn")
    assert packed.scale.float().max().item() == 448.0
    factor = packed.part("global_scale")
    assert factor is not None and factor.item() > 1
    zeros = quantize_tensor(torch.zeros(4, 64), "nvfp4")
    assert_equal(zeros.dequantize(), torch.zeros(4, 64))


@pytest.mark.parametrize("zero_point", searched())
def test_a_zero_point_pays_where_the_weights_are_one_sided(zero_point):
    weight = gaussian(64, 256) + 2
    error = relative_error(weight, "int4", zero_point=zero_point)
    assert (error < 0.002) is (zero_point != "none")


@pytest.mark.fault(40)
@pytest.mark.parametrize("method", [rtn, mse])
@pytest.mark.parametrize("name", FORMATS)
def test_zero_groups_are_exactly_zero(method, name):
    groups = torch.zeros(3, 32)
    groups[1] = gaussian(1, 32)[0]
    for kind in searched() if name in INT_FORMATS else ("none",):
        chosen = scheme(name, zero_point=kind)
        values = stored(groups, method(groups, chosen), chosen)
        assert not values[0].any() and not values[2].any() and values[1].any()


@pytest.mark.fault(43)
@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [1.0, -1.0, 3e38, -3e38, 1e6, 1e-30, -3.7])
def test_constant_rows_are_kept_up_to_the_rounding_of_the_scale(method, name, value):
    weight = torch.full((2, 64), value)
    stored_weight = quantize_tensor(weight, name, method=method).dequantize()
    assert_close(stored_weight / value, torch.ones(2, 64), rtol=0, atol=0.005)


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("magnitude", [1e6, 3e38, 1e-30, 1e-36])
def test_extreme_weights_lose_no_more_than_ordinary_ones(method, name, magnitude):
    ordinary = student_t(8, 256).clamp(-6, 6) / 6
    scaled = (ordinary.double() * magnitude).float()
    plain = relative_error(ordinary, name, method=method, scale_dtype=torch.float32)
    extreme = relative_error(scaled, name, method=method, scale_dtype=torch.float32)
    assert extreme == pytest.approx(plain, rel=0.01)


@pytest.mark.fault(42)
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_weights_below_the_range_of_the_scales_become_zero(method):
    tiny = gaussian(4, 128) * 1e-42
    assert_equal(quantize_tensor(tiny, "int4", method=method).dequantize(), torch.zeros(4, 128))
    assert torch.isfinite(quantize_tensor(gaussian(4, 128) * 4e-40, "int4", method=method).dequantize()).all()


@pytest.mark.fault(41)
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_scales_that_overflow_float16_are_refused_and_the_default_holds_them(method):
    weight = gaussian(4, 128) * 1e6
    with pytest.raises(FormatError, match=r"a scale of \S+ overflows torch.float16; .*bfloat16 or float32"):
        quantize_tensor(weight, "int4", method=method, scale_dtype=torch.float16)
    assert relative_error(weight, "int4", method=method) < 0.02


def test_mse_does_not_refuse_what_rtn_can_store():
    # The candidate just above the constant overflows float16, the constant does not.
    weight = torch.full((1, 128), 65504.0, dtype=torch.float16)
    assert_equal(quantize_tensor(weight, "binary").dequantize(torch.float16), weight)


@pytest.mark.fault(43)
@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("name", ["int8", "int4", "fp6"])
def test_one_huge_outlier_is_kept(method, name):
    weight = gaussian(2, 128)
    weight[0, 5] = 1e4
    stored_weight = quantize_tensor(weight, name, method=method).dequantize()
    assert stored_weight[0, 5].item() == pytest.approx(1e4, rel=0.1)


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("name", FORMATS)
def test_one_weight_is_a_group(method, name):
    stored_weight = quantize_tensor(torch.tensor([[-0.3]]), name, method=method).dequantize()
    assert stored_weight.item() == pytest.approx(-0.3, rel=0.005)


@pytest.mark.fault(44)
@pytest.mark.parametrize("name", ["int8", "int4", "fp6"])
def test_negative_zero_stays_a_zero(name):
    weight = torch.tensor([[-0.0, 1.0, -0.0, 0.5]])
    stored_weight = quantize_tensor(weight, name).dequantize()
    assert stored_weight[0, 0].item() == stored_weight[0, 2].item() == 0


@pytest.mark.parametrize("name", FORMATS)
def test_the_grid_of_a_group_does_not_depend_on_the_others(name):
    # Mirrored groups tie exactly between the two signs of the scale, so rounding would decide.
    half = gaussian(100, 16)
    groups = torch.cat([torch.cat([half, -half], 1), student_t(100, 32)])
    chosen = scheme(name, group_size=32)
    together = mse(groups, chosen).scale
    apart = torch.cat([mse(groups[i : i + 1], chosen).scale for i in range(len(groups))])
    assert_equal(together, apart)
    assert_equal(together, mse(groups, chosen).scale)


@pytest.mark.fault(39)
@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("zero_point", searched())
def test_nan_and_infinity_are_counted_and_refused(method, zero_point):
    weight = gaussian(4, 70)
    weight[0, 3] = weight[1, 69] = math.nan
    weight[2, 1] = -math.inf
    with pytest.raises(FormatError, match=r"^2 NaN and 1 infinite weights .*Repair the checkpoint, or keep"):
        quantize_tensor(weight, "int4", group_size=32, method=method, zero_point=zero_point)


def test_float64_beyond_float32_is_refused():
    with pytest.raises(FormatError, match=r"0 NaN and 1 infinite weights \(as float32\)"):
        quantize_tensor(torch.tensor([[1.0, 1e300]], dtype=torch.float64))
