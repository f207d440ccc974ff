"""Grids under importance: what an exhaustive search finds, and repeated weights."""

import pytest
import torch

from quantkit.calibrate.scale_search import (
    MOST_IMPORTANT,
    ScaleZero,
    mse,
    nearest,
    rounded_scale,
    squared_error,
    unit_of,
    whole_importance,
)
from quantkit.packing.schemes import Scheme, scheme

from ..support.compare import assert_equal

E4M3 = torch.float8_e4m3fn


def problem(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups, and importance as skewed as mean squares of activations are."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(count, size, generator=generator)
    return groups, whole_importance(torch.randn(count, size, generator=generator).mul_(2).exp_())


def error(groups: torch.Tensor, grid: ScaleZero, chosen: Scheme, importance: torch.Tensor) -> torch.Tensor:
    scale = torch.where(grid.scale == 0, 1.0, grid.scale)
    rounded = nearest(groups / scale, grid.zero_point, chosen) * grid.scale
    return ((rounded - groups).double().square() * importance).sum(1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("int4", {"group_size": 128}),
        ("int4", {"group_size": 32, "scale_dtype": E4M3}),
        ("int3", {"group_size": 32}),
        ("int2", {"group_size": 64}),
        ("fp6", {"group_size": 64}),
        ("nf4", {"group_size": 32, "scale_dtype": E4M3}),
        ("ternary", {"group_size": 64}),
    ],
    ids=str,
)
def test_the_search_is_within_two_percent_of_an_exhaustive_one(name, options):
    chosen = scheme(name, **options)
    groups, importance = problem(60, options["group_size"])
    groups = groups * 16
    found = error(groups, mse(groups, chosen, importance), chosen, importance)
    absmax = groups.abs().amax(1, keepdim=True)
    best = torch.full((len(groups),), torch.inf, dtype=torch.float64)
    for ratio in torch.linspace(0.08, 1.3, 500).tolist():
        for sign in (1, -1):
            scale = sign * ratio * absmax / max(chosen.format.max, -chosen.format.min)
            grid = ScaleZero(rounded_scale(scale, chosen))
            best = torch.minimum(best, error(groups, grid, chosen, importance))
    assert found.sum() <= 1.02 * best.sum()


@pytest.mark.parametrize("zero_point", ["none", "integer", "float"])
def test_importance_beats_a_search_without_it(zero_point):
    chosen = scheme("int3", group_size=64, zero_point=zero_point)
    groups, importance = problem(40, 64)
    weighted, plain = mse(groups, chosen, importance), mse(groups, chosen)
    found = error(groups, weighted, chosen, importance)
    assert (found <= error(groups, plain, chosen, importance).amax()).all()
    assert found.sum() < 0.9 * error(groups, plain, chosen, importance).sum()


@pytest.mark.parametrize("name", ["int4", "ternary", "fp6", "mxfp4"])
def test_a_weight_of_importance_n_is_n_weights(name):
    groups, _ = problem(12, 16)
    importance = torch.randint(1, 5, (12, 16), generator=torch.Generator().manual_seed(1)).float()
    chosen = scheme(name, group_size=16)
    grid = mse(groups, chosen)
    repeated = [torch.repeat_interleave(g, i.long()) for g, i in zip(groups, importance, strict=True)]
    unit = unit_of(groups)
    found = squared_error(groups / unit, grid, unit, chosen, importance)
    for row, one in enumerate(repeated):
        alone = ScaleZero(grid.scale[row : row + 1])
        expected = squared_error(one[None] / unit[row], alone, unit[row : row + 1], chosen)
        assert float(found[row]) == pytest.approx(float(expected), rel=1e-6)


def test_equal_importance_is_none():
    groups, _ = problem(30, 64)
    chosen = scheme("int4", group_size=64)
    same = whole_importance(torch.full_like(groups, 0.3))
    assert (same == MOST_IMPORTANT).all()
    for grid, other in ((mse(groups, chosen, same), mse(groups, chosen)),):
        ratio = error(groups, grid, chosen, same).sum() / error(groups, other, chosen, same).sum()
        assert 0.999 < ratio < 1.001


def test_importance_is_whole_numbers_of_any_size():
    for factor in (1e-30, 1.0, 1e30):
        found = whole_importance(torch.tensor([[0.0, 1e-9, 0.5, 1.0]]) * factor)
        assert found.tolist() == [[1, 1, MOST_IMPORTANT / 2, MOST_IMPORTANT]]
    assert whole_importance(torch.zeros(1, 3)).tolist() == [[1, 1, 1]]


def test_a_group_does_not_depend_on_the_others():
    groups, importance = problem(70, 32)
    chosen = scheme("int4", group_size=32, scale_dtype=E4M3)
    whole = mse(groups, chosen, importance)
    part = mse(groups[17:29], chosen, importance[17:29])
    assert_equal(part.scale, whole.scale[17:29])
