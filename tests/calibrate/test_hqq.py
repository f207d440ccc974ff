"""`hqq` never does worse than plain rounding in the norm it minimises, and each group only knows itself."""

import pytest
import torch

from quantkit.calibrate import hqq as hqq_module
from quantkit.calibrate.hqq import P, hqq
from quantkit.calibrate.methods import METHODS, quantize_tensor
from quantkit.calibrate.scale_search import ScaleZero, rtn
from quantkit.errors import FormatError
from quantkit.packing.formats import FORMATS, IntFormat
from quantkit.packing.scale_types import SCALE_TYPES
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.zero_points import searched

from ..support.compare import assert_equal
from ..tiny.packed import encode_groups

INT_FORMATS = [name for name, row in FORMATS.items() if isinstance(row, IntFormat)]


def lp_error(errors: torch.Tensor) -> torch.Tensor:
    """The sum of |e|^p of each group, float64 [R, 1]."""
    return errors.double().abs().pow(P).sum(-1, keepdim=True)


def gaussian(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def student_t(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    chi = torch.randn(5, rows, columns, generator=generator).square().mean(0).sqrt()
    return torch.randn(rows, columns, generator=generator) / chi


def errors(groups: torch.Tensor, grid: ScaleZero, chosen: Scheme) -> torch.Tensor:
    """Stored values minus weights, in steps of the plain scale: float64 [R, g]."""
    codes = encode_groups(groups, grid.scale, grid.zero_point, chosen)
    if grid.zero_point is None:
        values = chosen.format.decode(codes).double()
    else:
        values = codes.double() - grid.zero_point.double()
    return (values * grid.scale.double() - groups.double()) / rtn(groups, chosen).scale.double()


def reference(group: list[float], chosen: Scheme) -> float:
    """The zero-point of one group by the published loop, in plain float64 numbers."""
    grid = rtn(torch.tensor([group]), chosen)
    assert grid.zero_point is not None
    scale, zero, top = grid.scale.item(), grid.zero_point.item(), 2**chosen.format.bits - 1
    best, least, beta = zero, float("inf"), hqq_module.BETA
    for _ in range(hqq_module.ITERATIONS + 1):
        codes = [min(max(round(x / scale + zero), 0), top) for x in group]
        wrong = [x / scale - (q - zero) for x, q in zip(group, codes, strict=True)]
        error = sum(abs(e) ** hqq_module.P for e in wrong)
        if error >= least:
            break
        best, least = zero, error
        shrunk = [
            (1 if e > 0 else -1) * max(abs(e) - abs(e) ** (hqq_module.P - 1) / beta, 0) if e else 0.0
            for e in wrong
        ]
        moved = [q - (x / scale - e) for q, x, e in zip(codes, group, shrunk, strict=True)]
        zero, beta = sum(moved) / len(moved), beta * hqq_module.KAPPA
    return best


def test_it_is_the_published_loop():
    chosen = scheme("int4", zero_point="float", scale_dtype=torch.float32)
    groups = student_t(30, 64)
    found = hqq(groups, chosen)
    assert found.zero_point is not None
    expected = [reference(group, chosen) for group in groups.tolist()]
    assert found.zero_point[:, 0].tolist() == pytest.approx(expected, abs=1e-4)
    assert_equal(found.scale, rtn(groups, chosen).scale)
    assert not torch.equal(found.zero_point, rtn(groups, chosen).zero_point)


@pytest.mark.parametrize("name", INT_FORMATS)
@pytest.mark.parametrize("zero_point", searched())
@pytest.mark.parametrize("scale_dtype", SCALE_TYPES)
@pytest.mark.parametrize("draw", [gaussian, student_t])
def test_never_above_plain_rounding_in_its_own_norm(name, zero_point, scale_dtype, draw):
    chosen = scheme(name, zero_point=zero_point, scale_dtype=scale_dtype)
    groups = draw(60, 128)
    grid, plain = hqq(groups, chosen), rtn(groups, chosen)
    assert_equal(grid.scale, grid.scale.to(scale_dtype).float())
    if grid.zero_point is not None:
        assert_equal(grid.zero_point, grid.zero_point.to(chosen.zero_point_dtype).float())
    found, limit = (lp_error(errors(groups, g, chosen)) for g in (grid, plain))
    assert (found <= limit * (1 + 1e-6)).all()


def test_it_finds_less_than_plain_rounding_where_it_can(record_property):
    groups = student_t(200, 128)
    for zero_point in ("none", "float"):
        chosen = scheme("int4", zero_point=zero_point)
        mine, plain = (errors(groups, fit(groups, chosen), chosen) for fit in (hqq, rtn))
        assert lp_error(mine).sum() < 0.99 * lp_error(plain).sum()
        record_property(f"squared_error_{zero_point}", float(mine.square().sum() / plain.square().sum()))


@pytest.mark.parametrize("zero_point", searched())
@pytest.mark.parametrize("name", ["int8", "int3", "int2"])
def test_each_group_only_depends_on_itself(name, zero_point):
    chosen = scheme(name, zero_point=zero_point)
    groups = torch.cat([student_t(21, 37), torch.zeros(2, 37), gaussian(10, 37) * 1e-3])
    together = hqq(groups, chosen)
    again = hqq(groups.clone(), chosen)
    assert_equal(together.scale, again.scale)
    for at in range(0, len(groups), 5):
        part = hqq(groups[at : at + 5], chosen)
        assert_equal(together.scale[at : at + 5], part.scale)
        if together.zero_point is not None:
            assert_equal(together.zero_point[at : at + 5], part.zero_point)


def test_the_input_is_left_alone():
    groups = student_t(5, 32)
    before = groups.clone()
    for zero_point in searched():
        hqq(groups, scheme("int4", zero_point=zero_point))
    assert_equal(groups, before)


@pytest.mark.parametrize("name", INT_FORMATS)
@pytest.mark.parametrize("zero_point", searched())
def test_constant_groups_and_outliers_have_finite_grids(name, zero_point):
    chosen = scheme(name, zero_point=zero_point)
    outlier = torch.zeros(1, 64)
    outlier[0, 7] = 1000.0
    cases = [
        torch.zeros(3, 16),
        torch.full((2, 16), 0.25),
        torch.full((2, 16), -0.25),
        outlier,
        -outlier,
        gaussian(1, 1),
        torch.full((1, 8), 1e-42),
        gaussian(2, 16) * 1e37,
    ]
    for groups in cases:
        grid, plain = hqq(groups, chosen), rtn(groups, chosen)
        assert torch.isfinite(grid.scale).all()
        assert grid.zero_point is None or torch.isfinite(grid.zero_point).all()
        found, limit = (lp_error(errors(groups, g, chosen)) for g in (grid, plain))
        # Nearly exact groups: |e|^0.7 makes much of the last digit of a float32.
        assert (found <= limit * (1 + 1e-6) + 1e-3).all()
    zeros = quantize_tensor(torch.zeros(3, 16), name, method="hqq", zero_point=zero_point)
    assert not zeros.dequantize().any()


def test_a_scale_at_the_limit_of_its_dtype():
    chosen = scheme("int4", scale_dtype=torch.float16)
    groups = gaussian(20, 64)
    groups *= 7 * 65504 / groups.abs().amax(-1, keepdim=True)
    assert (hqq(groups, chosen).scale.abs() <= 65504).all()


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in INT_FORMATS])
def test_other_formats_are_refused(name):
    with pytest.raises(FormatError, match=r"not evenly spaced, .* take one of rtn, mse"):
        quantize_tensor(gaussian(2, 32), Scheme(FORMATS[name], 32), method="hqq")


@pytest.mark.parametrize("zero_point", searched())
def test_hqq_is_a_method_with_a_small_error(zero_point):
    assert METHODS["hqq"].scale_search.fit is hqq
    packed = quantize_tensor(gaussian(33, 172), "int4", group_size=64, method="hqq", zero_point=zero_point)
    error = (packed.dequantize() - gaussian(33, 172)).square().sum() / gaussian(33, 172).square().sum()
    assert float(error) < 0.02
