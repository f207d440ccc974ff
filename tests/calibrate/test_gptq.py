"""GPTQ and coordinate descent, against optimal brain surgeon column by column and against brute force."""

import itertools

import pytest
import torch

from quantkit.calibrate import quantize_with_hessian
from quantkit.calibrate.gptq import (
    BLOCK,
    REFIT_COLUMNS,
    Rounded,
    Rows,
    coordinate_descent,
    gptq_round,
    positive_scales,
    refit_scales,
    round_nearest,
    round_refitted,
)
from quantkit.calibrate.hessian import DampedHessian, Hessian, factorize, gram
from quantkit.calibrate.linear_stats import LinearStats
from quantkit.calibrate.methods import METHODS
from quantkit.calibrate.parameters import TensorParameters
from quantkit.calibrate.quantize_with_hessian import CalibratedRows, quantize_calibrated_rows
from quantkit.calibrate.scale_search import mse, nearest
from quantkit.packing.schemes import Scheme, scheme

from ..support.compare import assert_close, assert_equal


def inputs(tokens: int, columns: int) -> torch.Tensor:
    """Correlated features of very different sizes."""
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(tokens, columns, generator=generator) @ torch.randn(
        columns, columns, generator=generator
    )
    return mixed * torch.logspace(-1, 0.5, columns)[torch.randperm(columns, generator=generator)]


def rows_of(chosen: Scheme, columns: int, count: int = 9, seed: int = 0) -> Rows:
    weights = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))
    chosen = chosen.for_columns(columns)
    size = chosen.group_size or columns
    grids = [mse(group.contiguous(), chosen) for group in torch.split(weights, size, dim=1)]
    zeros = [grid.zero_point for grid in grids if grid.zero_point is not None]
    scale = torch.cat([grid.scale for grid in grids], 1)
    return Rows(weights, scale, torch.cat(zeros, 1) if zeros else None, chosen)


def brain_surgeon(rows: Rows, hessian: torch.Tensor, order: list[int]) -> torch.Tensor:
    """GPTQ as its paper has it, naively: float64, the whole inverse again for every column."""
    weights, scale = rows.weights.double().clone(), rows.wide(rows.scale).double()
    zero = None if rows.zero_point is None else rows.wide(rows.zero_point)
    left, stored = list(order), torch.zeros_like(weights)
    while left:
        j = left[0]
        inverse = torch.linalg.inv(hessian.double()[left][:, left])
        units = (weights[:, j] / scale[:, j]).float()
        value = nearest(units, None if zero is None else zero[:, j], rows.scheme)
        stored[:, j] = value.double() * scale[:, j]
        error = (weights[:, j] - stored[:, j]) / inverse[0, 0]
        weights[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    return stored


def damped(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """H, damped, as a whole."""
    return DampedHessian.of(hessian, damping).columns(slice(None))


def copied(rounded: Rounded) -> Rounded:
    """In memory that coordinate descent may use."""
    return Rounded(rounded.values.clone(), rounded.scale, rounded.errors.clone())


def loss(errors: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    e = errors.double()
    return ((e @ hessian.double()) * e).sum(1)


SCHEMES = {
    "int4": scheme("int4", group_size=16),
    "int4-asym": scheme("int4", group_size=16, zero_point="integer"),
    "int2-float": scheme("int2", group_size=16, zero_point="float"),
    "int3-e4m3": scheme("int3", group_size=16, scale_dtype=torch.float32),
    "nf4": scheme("nf4", group_size=16),
    "fp6": scheme("fp6", group_size=16),
    "ternary": scheme("ternary", group_size=16),
    "channel": scheme("int4", group_size="channel"),
}


@pytest.mark.parametrize("columns", [1, 16, 40, BLOCK + 21])
@pytest.mark.parametrize("name", SCHEMES)
def test_compensation_is_that_of_optimal_brain_surgeon(name: str, columns: int) -> None:
    rows, hessian = rows_of(SCHEMES[name], columns), gram(inputs(500, columns)) / 500
    factor = factorize(hessian)
    assert factor is not None
    done = gptq_round(rows, factor)
    expected = brain_surgeon(rows, damped(hessian, factor.damping), factor.order.tolist())
    stored = done.values * rows.wide(done.scale)
    # A target within float32's rounding of a tie may go either way, and what follows it with it.
    same = (stored.double() - expected).abs() <= 1e-5
    assert same.all(1).double().mean() >= 8 / 9
    assert_equal(done.errors, rows.weights - stored)
    found, naive = loss(done.errors, hessian).sum(), loss(rows.weights - expected, hessian).sum()
    assert found <= naive * 1.02


def test_compensated_outputs_are_closer_than_rounded_ones() -> None:
    rows, hessian = rows_of(SCHEMES["int4"], 100), gram(inputs(500, 100)) / 500
    factor = factorize(hessian)
    assert factor is not None
    assert (
        loss(gptq_round(rows, factor).errors, hessian).sum()
        < 0.7 * loss(round_nearest(rows).errors, hessian).sum()
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_polishing_never_raises_the_error(name: str) -> None:
    rows, hessian = rows_of(SCHEMES[name], 70), gram(inputs(500, 70)) / 500
    factor = factorize(hessian)
    assert factor is not None
    damped_hessian, target = DampedHessian.of(hessian, factor.damping), damped(hessian, factor.damping)
    before = gptq_round(rows, factor)
    assert coordinate_descent(rows, before, damped_hessian, factor.order, 0) is before
    last = loss(before.errors, target)
    for sweeps in (1, 2, 4):
        done = coordinate_descent(rows, copied(before), damped_hessian, factor.order, sweeps)
        found = loss(done.errors, target)
        assert (found <= last * (1 + 1e-5)).all()
        assert_close(done.errors, rows.weights - done.values * rows.wide(done.scale), rtol=1e-5, atol=1e-6)
        assert_equal(done.scale, rows.scheme.scale_type.round(done.scale))
        last = found
    assert last.sum() < loss(before.errors, target).sum()


def test_polishing_is_descent_on_the_whole_matrix_column_by_column() -> None:
    rows, hessian = rows_of(SCHEMES["int4"], BLOCK + 21), gram(inputs(500, BLOCK + 21)) / 500
    factor = factorize(hessian)
    assert factor is not None
    h = damped(hessian, factor.damping).double()
    before = gptq_round(rows, factor)
    refitted = refit_scales(rows, copied(before), DampedHessian.of(hessian, factor.damping))
    errors, scale = refitted.errors.double(), rows.wide(refitted.scale).double()
    for j in factor.order.tolist():
        others = errors @ h[:, j] - errors[:, j] * h[j, j]
        units = (rows.weights[:, j] + others / h[j, j]) / scale[:, j]
        errors[:, j] = rows.weights[:, j] - nearest(units.float(), None, rows.scheme) * scale[:, j]
    found = coordinate_descent(rows, before, DampedHessian.of(hessian, factor.damping), factor.order, 1)
    expected = rows.weights - errors
    # Codes of one more round of scales are those of the sweep; a tie may go either way.
    assert (((found.values * scale) - expected).abs() <= 1e-5).all(1).double().mean() >= 8 / 9


def test_polishing_comes_close_to_the_best_of_all_codes() -> None:
    """Few weights of few values: every combination of codes is tried."""
    chosen = scheme("ternary", group_size="channel", scale_dtype=torch.float32)
    rows, hessian = rows_of(chosen, 6, count=20), gram(inputs(200, 6)) / 200
    factor = factorize(hessian)
    assert factor is not None
    target = damped(hessian, factor.damping)
    combinations = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=6)))
    errors = rows.weights[:, None] - combinations * rows.scale[:, :, None]
    best = ((errors.double() @ target.double()) * errors).sum(-1).amin(1)
    plain, gptq = (loss(d.errors, target) for d in (round_nearest(rows), gptq_round(rows, factor)))
    assert (gptq >= best * (1 - 1e-5)).all() and gptq.sum() < plain.sum()
    done = coordinate_descent(
        rows, gptq_round(rows, factor), DampedHessian.of(hessian, factor.damping), factor.order, 4
    )
    descended = loss(done.errors, target)
    assert descended.sum() < 1.1 * best.sum()


@pytest.mark.parametrize("columns", [16, 70, 160])
def test_scales_refitted_from_outputs_of_many_groups_are_those_of_one_after_the_other(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, hessian = rows_of(SCHEMES["int4"], columns, count=50), gram(inputs(500, columns)) / 500
    start, damped_hessian = round_nearest(rows), DampedHessian.of(hessian, 0.01)
    alone = refit_scales(rows, copied(start), damped_hessian)
    monkeypatch.setitem(REFIT_COLUMNS, "cpu", 50)
    together = refit_scales(rows, copied(start), damped_hessian)
    # A scale within float32's rounding of a tie may go either way.
    assert (together.scale == alone.scale).all(1).double().mean() >= 0.9
    assert_equal(together.values, alone.values)
    assert not torch.equal(alone.scale, rows.scale)
    assert_equal(together.errors, rows.weights - together.values * rows.wide(together.scale))


def test_a_refitted_scale_is_the_least_squares_one() -> None:
    chosen = scheme("int4", group_size="channel", scale_dtype=torch.float32)
    rows, hessian = rows_of(chosen, 30), gram(inputs(500, 30)) / 500
    start = round_nearest(rows)
    found = refit_scales(rows, copied(start), DampedHessian.of(hessian, 0.0))
    v, h = start.values.double(), hessian.double()
    fitted = ((v @ h) * rows.weights).sum(1) / ((v @ h) * v).sum(1)
    assert_close(found.scale[:, 0].double(), fitted, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("name", SCHEMES)
def test_refitted_rounding_is_never_worse_than_rounding(name: str) -> None:
    rows, hessian = rows_of(SCHEMES[name], 70), gram(inputs(500, 70)) / 500
    target = damped(hessian, 0.01)
    done, plain = round_refitted(rows, DampedHessian.of(hessian, 0.01)), round_nearest(rows)
    once = refit_scales(rows, copied(plain), DampedHessian.of(hessian, 0.01))
    found = loss(done.errors, target)
    assert (found <= loss(once.errors, target) * (1 + 1e-5)).all()
    assert found.sum() < loss(plain.errors, target).sum()
    assert_close(done.errors, rows.weights - done.values * rows.wide(done.scale), rtol=1e-5, atol=1e-6)


def test_scales_that_were_turned_around_are_turned_back() -> None:
    rows = rows_of(scheme("nvfp4"), 64, count=50)
    start = round_nearest(rows)
    sign = torch.where(torch.arange(start.scale.numel()).view(start.scale.shape) % 3 == 0, -1.0, 1.0)
    turned = Rounded(start.values * rows.wide(sign), start.scale * sign, start.errors)
    found = positive_scales(rows, turned)
    assert_equal(found.scale, start.scale)
    assert_equal(found.values, start.values)
    assert positive_scales(rows, start) is start
    # Codes of int4 have no signs.
    other = rows_of(SCHEMES["int4"], 64)
    start = round_nearest(other)
    turned = Rounded(start.values, -start.scale, start.errors)
    assert positive_scales(other, turned) is turned


def test_no_method_stores_negative_scales_of_nvfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of few directions, and groups of very different sizes: what one lacks others make up for."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 4, generator=generator) @ torch.randn(4, 128, generator=generator)
    hessian = gram(x + 0.1 * torch.randn(512, 128, generator=generator)) / 512
    sizes = torch.randn(64, 8, generator=generator).exp().repeat_interleave(16, 1)
    weights, chosen = torch.randn(64, 128, generator=generator) * sizes, METHODS["awq"]
    shared = TensorParameters(global_scale=448 * 6 / weights.abs().amax().reshape(1))

    def quantized() -> CalibratedRows:
        inputs = LinearStats.prepare(Hessian(hessian.clone(), 512), chosen.needs)
        return quantize_calibrated_rows(weights, scheme("nvfp4"), chosen, shared, inputs)

    found = quantized()
    monkeypatch.setattr(quantize_with_hessian, "positive_scales", lambda _, rounded: rounded)
    turned = quantized()
    assert (turned.rows.scale.float() < 0).any() and (found.rows.scale.float() >= 0).all()
    assert_equal(turned.rows.scale.float().abs(), found.rows.scale.float())
    assert found.output_error == turned.output_error


def test_scales_of_zeros_stay() -> None:
    rows = rows_of(SCHEMES["int4"], 32)
    rows.weights[:, :16] = 0
    start = round_nearest(Rows(rows.weights, rows.scale, None, rows.scheme))
    zeroed = Rounded(start.values, start.scale, start.errors)
    found = refit_scales(rows, zeroed, DampedHessian.of(torch.eye(32), 0.0))
    assert_equal(found.scale[:, 0], rows.scale[:, 0])


@pytest.mark.parametrize("name", ["int4", "int2-float"])
def test_rows_do_not_depend_on_each_other(name: str) -> None:
    rows, hessian = rows_of(SCHEMES[name], 90, count=64), gram(inputs(500, 90)) / 500
    factor = factorize(hessian)
    assert factor is not None
    whole = gptq_round(rows, factor)
    half = Rows(
        rows.weights[32:],
        rows.scale[32:],
        None if rows.zero_point is None else rows.zero_point[32:],
        rows.scheme,
    )
    part = gptq_round(half, factor)
    assert (part.values == whole.values[32:]).double().mean() > 0.99
