"""Bit allocation: the optimum of every choice there is, within the budget, and fast at the size of models."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import UsageError
from quantkit.recipes.knapsack import Option, allocate

#: Few different numbers, so that options tie and dominate each other.
OPTIONS = st.builds(
    Option,
    st.integers(1, 12) | st.integers(1, 10**10),
    st.sampled_from([0.0, 0.1, 0.25, 0.5]) | st.floats(0, 1e3),
)
GROUPS = st.lists(st.lists(OPTIONS, min_size=1, max_size=5), min_size=1, max_size=4)


def total(groups: list[list[Option]], chosen: tuple[int, ...]) -> tuple[int, float]:
    picked = [group[i] for group, i in zip(groups, chosen, strict=True)]
    loss = 0.0
    for option in picked:
        loss += option.loss
    return sum(option.cost for option in picked), loss


def every(groups: list[list[Option]]) -> list[tuple[int, float]]:
    """Cost and loss of every choice there is."""
    return [total(groups, chosen) for chosen in itertools.product(*(range(len(g)) for g in groups))]


@settings(max_examples=200, deadline=None)
@given(GROUPS, st.floats(0, 1))
def test_no_choice_in_the_budget_has_less_loss(groups: list[list[Option]], part: float) -> None:
    choices = every(groups)
    least, most = (f(cost for cost, _ in choices) for f in (min, max))
    budget = least + int(part * (most - least))
    cost, loss = total(groups, allocate(groups, budget))
    assert cost <= budget
    assert loss == min(loss for cost, loss in choices if cost <= budget)


def test_a_budget_for_anything_gets_the_best_of_each() -> None:
    groups = [[Option(3, 0.5), Option(9, 0.0)], [Option(1, 0.25), Option(5, 0.25)], [Option(7, 0.0)]]
    assert allocate(groups, 1000) == (1, 0, 0)


def model(layers: int) -> tuple[list[list[Option]], int]:
    """Groups as large as those of a model, with menus of real bits and losses of no pattern; all weights."""
    bits = (2.125, 2.25, 2.5, 3.125, 3.25, 3.5, 4.125, 4.25, 4.5, 5.125, 5.25, 6.125, 6.25, 7.125, 8.004)
    groups, weights = [], 0
    for layer in range(layers):
        for at, size in enumerate((8192 * 10240, 8192 * 8192, 8192 * 57344, 28672 * 8192)):
            weights += size
            groups.append(
                [
                    Option(
                        int(size * width / 8) + 16 + at,
                        size
                        * 4**-width
                        * (2 + math.sin(37 * layer + 11 * at) + 0.3 * math.sin(layer * i + at)),
                    )
                    for i, width in enumerate(bits)
                ]
            )
    return groups, weights


@pytest.mark.parametrize("asked", [2.4, 4.5])
def test_as_large_as_models(asked: float) -> None:
    """Reached to a thousandth of a bit, and not above the bound of the best multiplier of the constraint."""
    groups, weights = model(80)
    budget = int(asked * weights / 8)
    cost, loss = total(groups, allocate(groups, budget))
    assert asked - 1e-3 < 8 * cost / weights <= asked
    slopes = sorted(
        -(b.loss - a.loss) / (b.cost - a.cost)
        for g in groups
        for a, b in itertools.pairwise(g)
        if b.loss < a.loss
    )
    bound = max(
        sum(min(o.loss + m * o.cost for o in group) for group in groups) - m * budget for m in slopes[::20]
    )
    assert bound <= loss < 1.001 * bound


def test_the_first_of_equal_options() -> None:
    option = Option(3, 0.5)
    assert allocate([[Option(9, 0.5), option, option], [Option(1, 0.0)]], 4) == (1, 0)


def test_no_group_costs_nothing() -> None:
    assert allocate([], 0) == ()


@pytest.mark.parametrize("loss", [-1.0, math.inf, math.nan])
def test_losses_are_numbers(loss: float) -> None:
    with pytest.raises(UsageError, match=r"a loss of .* cannot be allocated; it is a number of at least 0\."):
        allocate([[Option(1, loss)]], 5)


def test_a_budget_below_the_cheapest() -> None:
    with pytest.raises(UsageError, match=r"a budget of 4 is below the 5 of the cheapest options\."):
        allocate([[Option(2, 1.0), Option(8, 0.0)], [Option(3, 1.0)]], 4)
