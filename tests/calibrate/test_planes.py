"""Scales of planes: greedy is what loops compute, the search comes close to trying everything."""

import itertools
import math

import pytest
import torch

from quantkit.calibrate import residual_terms
from quantkit.calibrate.methods import method_named, quantize_tensor
from quantkit.errors import FormatError
from quantkit.packing.formats import FORMATS
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import Scheme, scheme

from ..support.compare import assert_close, assert_equal
from .test_methods import gaussian

BINARY, TERNARY, INT2, FP4 = (FORMATS[name] for name in ("binary", "ternary", "int2", "fp4-e2m1"))
F32, E4M3, E8M0 = torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu
SCHEMES = [
    *[Scheme(BINARY, None, scale_dtype=F32, planes=p) for p in (2, 3)],
    Scheme(BINARY, None, planes=2),
    Scheme(BINARY, None, planes=8),
    Scheme(TERNARY, None, planes=2),
    Scheme(TERNARY, None, planes=2, scale_dtype=E8M0),
    Scheme(INT2, None, planes=2),
    Scheme(FP4, None, planes=2, scale_dtype=torch.float16),
]


def levels_of(scales: list[float], chosen: Scheme) -> list[float]:
    numbers = chosen.format.numbers
    return [
        sum(s * v for s, v in zip(scales, values, strict=True))
        for values in itertools.product(numbers, repeat=chosen.planes)
    ]


def errors(groups: torch.Tensor, scales: torch.Tensor, chosen: Scheme) -> torch.Tensor:
    """The slow twin: the squared error of each group under the nearest levels, float64 [R]."""
    found = []
    for group, own in zip(groups.tolist(), scales.tolist(), strict=True):
        levels = levels_of(own, chosen)
        found.append(sum(min((x - level) ** 2 for level in levels) for x in group))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("chosen", SCHEMES, ids=str)
def test_the_nearest_level_is_stored(chosen):
    groups = gaussian(6, 11)
    for scales in (residual_terms.plain(groups, chosen), residual_terms.search(groups, chosen)):
        codes, values = residual_terms.encode(groups, scales, chosen)
        bits = chosen.format.bits
        parts = [(codes >> (bits * p)) & (2**bits - 1) for p in range(chosen.planes)]
        decoded = sum(chosen.format.decode(part) * scales[:, p, None] for p, part in enumerate(parts))
        assert_close(decoded, values, rtol=1e-5, atol=1e-6)
        measured = (groups.double() - values).square().sum(1)
        assert_close(measured, errors(groups, scales, chosen), rtol=1e-5, atol=1e-10)


def test_greedy_scales_are_what_plain_loops_compute():
    chosen = Scheme(BINARY, None, scale_dtype=F32, planes=3)
    groups = gaussian(5, 9)
    found = residual_terms.plain(groups, chosen)
    for group, scales in zip(groups.tolist(), found.tolist(), strict=True):
        rest = list(group)
        for scale in scales:
            assert scale == pytest.approx(sum(map(abs, rest)) / len(rest), rel=1e-5)
            rest = [x - math.copysign(scale, x) for x in rest]


@pytest.mark.parametrize("chosen", SCHEMES, ids=str)
@pytest.mark.parametrize("kind", ["gaussian", "outlier", "sparse", "constant", "zeros", "tiny", "huge"])
@pytest.mark.sampled(3)
def test_the_search_is_never_worse_than_greedy_and_stores_what_it_measured(chosen, kind):
    groups = gaussian(20, 16)
    if kind == "outlier":
        groups[:, 3] *= 50
    if kind == "sparse":
        groups[groups.abs() < 1] = 0
    if kind == "constant":
        groups[:] = groups[:, :1]
    groups *= {"zeros": 0.0, "tiny": 1e-30, "huge": 1e3}.get(kind, 1.0)
    plain, searched = residual_terms.plain(groups, chosen), residual_terms.search(groups, chosen)
    assert_equal(searched.to(chosen.scale_dtype).float(), searched)
    squares = groups.double().square().sum(1)
    limit = errors(groups, plain, chosen) * (1 + 1e-5) + 1e-12 * squares
    assert (errors(groups, searched, chosen) <= limit).all()


def exhaustive(group: list[float], chosen: Scheme) -> float:
    """The least error of one group over every choice of codes, with the best scales for each."""
    numbers = chosen.format.numbers
    combinations = list(itertools.product(numbers, repeat=chosen.planes))
    x, least = torch.tensor(group, dtype=torch.float64), math.inf
    for codes in itertools.product(combinations, repeat=len(group)):
        values = torch.tensor(codes, dtype=torch.float64)
        fitted = torch.linalg.lstsq(values, x, driver="gelsd").solution
        least = min(least, float((values @ fitted - x).square().sum()))
    return least


@pytest.mark.parametrize(
    ("chosen", "size"), [(SCHEMES[0], 5), (Scheme(TERNARY, None, scale_dtype=F32, planes=2), 3)]
)
def test_the_search_finds_what_an_exhaustive_one_finds(chosen, size):
    groups = gaussian(12, size)
    found = errors(groups, residual_terms.search(groups, chosen), chosen)
    best = torch.tensor([exhaustive(group, chosen) for group in groups.tolist()])
    squares = groups.double().square().sum()
    # The scales are float32.
    assert (found >= best - 1e-7 * squares).all()
    assert float(found.sum() - best.sum()) < 0.005 * float(squares)


def best_split(group: list[float]) -> float:
    """The least error of two planes of `binary`: its levels are two magnitudes, each of a part."""
    magnitudes = sorted(map(abs, group))

    def spread(part: list[float]) -> float:
        mean = sum(part) / len(part) if part else 0.0
        return sum((x - mean) ** 2 for x in part)

    return min(spread(magnitudes[:at]) + spread(magnitudes[at:]) for at in range(len(group) + 1))


def test_two_planes_of_binary_end_close_to_the_best_split():
    chosen = SCHEMES[0]
    groups = torch.cat([gaussian(100, 128), gaussian(100, 128, seed=1) ** 3])
    found = errors(groups, residual_terms.search(groups, chosen), chosen)
    best = torch.tensor([best_split(group) for group in groups.tolist()], dtype=torch.float64)
    assert (found >= best * (1 - 1e-6)).all()
    assert float((found / best).mean()) < 1.002
    # Lloyd and Max found 0.1175 for four levels; groups of 128 fit a little better.
    assert 0.11 < float(found[:100].sum() / groups[:100].double().square().sum()) < 0.1175


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("shape", [(33, 172), (7, 129), (1, 31), (129, 1)])
@pytest.mark.parametrize("name", ["binary-residual", "binary-rank1", "book4"])
def test_planes_of_any_shape_have_a_small_error(name, shape, method):
    weight = gaussian(*shape)
    packed = quantize_tensor(weight, name, group_size=32, method=method)
    error = (packed.dequantize() - weight).square().sum() / weight.square().sum()
    limits = {"binary-residual": 0.17, "binary-rank1": 0.45, "book4": 0.009}
    assert float(error) < limits[name]
    again = quantize_tensor(weight, name, group_size=32, method=method)
    assert_equal(packed.tensors, again.tensors)


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("name", ["binary-residual", "binary-rank1", "book4"])
def test_groups_of_zeros_stay_zero(name, method):
    weight = gaussian(8, 256)
    weight[3], weight[:, 128:160] = 0, 0
    for case in (weight, torch.zeros(4, 64)):
        packed = quantize_tensor(case, name, group_size=32, method=method)
        assert bool(torch.isfinite(packed.dequantize()).all())
        assert_equal(packed.dequantize()[case == 0], torch.zeros(int((case == 0).sum())))


@pytest.mark.parametrize("name", ["binary-residual", "binary-rank1", "book4"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(name, bad):
    weight = gaussian(8, 96)
    weight[3, 5] = bad
    nan, infinite = (1, 0) if math.isnan(bad) else (0, 1)
    with pytest.raises(FormatError, match=f"^{nan} NaN and {infinite} infinite weights"):
        quantize_tensor(weight, name)


def test_a_method_without_planes_says_which_have_them():
    chosen = Scheme(INT2, 32, planes=2)
    with pytest.raises(
        FormatError, match=r"'hqq' has no way to choose several planes, .* 2-planes .*; take one of rtn, mse"
    ):
        quantize_tensor(gaussian(4, 64), chosen, method="hqq")
    with pytest.raises(FormatError, match=r"'distill' has no .*; take one of rtn,distill, mse,distill\.$"):
        method_named("distill").check(chosen)


@pytest.mark.parametrize("name", PRESETS)
def test_distill_starts_from_what_can_choose_the_scales(name):
    chosen = scheme(name)
    found = method_named("distill").suited(chosen)
    found.check(chosen)
    assert (
        found.distill
        and found.name == ("mse," if chosen.planes > 1 or chosen.column_scale else "") + "distill"
    )
    assert method_named("best").suited(chosen).name == "best"


def test_the_whole_is_its_rows():
    weight = gaussian(9, 172)
    whole = quantize_tensor(weight, "binary-residual", group_size=32)
    rows = [quantize_tensor(weight[i : i + 1], "binary-residual", group_size=32) for i in range(9)]
    assert_equal(whole.scale, torch.cat([row.scale for row in rows]))
    assert_equal(whole.words, torch.cat([row.words for row in rows]))
    assert whole.scale.shape == (9, 12)


def test_scales_are_stored_group_by_group():
    weight = gaussian(3, 64)
    packed = quantize_tensor(weight, scheme("binary-residual", group_size=32))
    for group in (0, 1):
        alone = quantize_tensor(weight[:, 32 * group : 32 * group + 32], scheme("binary-residual"))
        assert_equal(packed.scale[:, 2 * group : 2 * group + 2], alone.scale)
