"""Bit allocation: for every group of tensors one of its options, for the smallest sum of losses in a budget.

This is the multiple-choice knapsack problem, and it is solved exactly: a dynamic programme over the groups,
whose states are the sums of costs and losses that no other is better than in both. Of those it keeps what may
still lead to a better choice than the best one known, by a bound from below: the groups that are left at
their linear relaxation (Dyer, "An O(n) algorithm for the multiple-choice knapsack linear program", 1984).
States and bound are as in Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", 1995.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from quantkit.errors import UsageError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Bounds are sums of floats: what they may be wrong by, in parts of all losses.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Option:
    """A candidate of a group: its cost, a whole number such as bytes, and its loss."""

    cost: int
    loss: float


def allocate(groups: Sequence[Sequence[Option]], budget: int) -> tuple[int, ...]:
    """Return for each group the number of its option, such that the sum of losses is the least possible.

    The costs add up to at most `budget`; losses are added in the order of the groups. Of two options of one
    cost and loss the first is taken. The result depends on the arguments alone. Raises `UsageError` if even
    the cheapest options cost more, or a loss is not a finite number of at least zero.
    """
    numbers = [_front(options) for options in groups]
    fronts = [[options[i] for i in front] for options, front in zip(groups, numbers, strict=True)]
    cheapest = sum(front[0].cost for front in fronts)
    if cheapest > budget:
        raise UsageError(f"a budget of {budget} is below the {cheapest} of the cheapest options.")
    hulls = [_hull(front) for front in fronts]
    # No sum is larger than that of the cheapest options.
    limit = _rounded(hulls, budget) + _ROUNDING * sum(front[0].loss for front in fronts)
    costs, losses = np.zeros(1, np.int64), np.zeros(1)
    steps: list[tuple[Ints, Ints]] = []
    for front, rest in zip(fronts, _relaxations(hulls), strict=True):
        costs, losses, chosen, parents = _extended(costs, losses, front)
        kept = losses + rest.below(budget - costs) <= limit
        costs, losses = costs[kept], losses[kept]
        steps.append((chosen[kept], parents[kept]))
    # Losses fall along the states.
    at, found = len(losses) - 1, list[int]()
    for (chosen, parents), front_numbers in zip(reversed(steps), reversed(numbers), strict=True):
        found.append(front_numbers[int(chosen[at])])
        at = int(parents[at])
    return tuple(reversed(found))


def _front(options: Sequence[Option]) -> list[int]:
    """The numbers of the options that no other beats in both, by rising cost and falling loss."""
    for option in options:
        if not 0 <= option.loss < math.inf:
            raise UsageError(f"a loss of {option.loss} cannot be allocated; it is a number of at least 0.")
    assert options, "a group has at least one option"
    best: list[int] = []
    for number in sorted(range(len(options)), key=lambda i: (options[i].cost, options[i].loss, i)):
        if not best or options[number].loss < options[best[-1]].loss:
            best.append(number)
    return best


def _hull(front: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull of a front: those that mixtures of others do not beat."""
    hull: list[Option] = []
    for option in front:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(before: Option, after: Option) -> float:
    """Loss per cost of a step, negative."""
    return (after.loss - before.loss) / (after.cost - before.cost)


def _steps(hull: Sequence[Option]) -> list[tuple[float, int, float]]:
    """Slope, cost and loss of every step of a hull."""
    return [(_slope(a, b), b.cost - a.cost, b.loss - a.loss) for a, b in pairwise(hull)]


@dataclass(frozen=True, eq=False)
class _Relaxation:
    """The least loss of some groups for a budget, where options may be mixed: a convex, falling function.

    costs   float64 [S], rising: the corners
    losses  float64 [S]: the loss there
    """

    costs: Floats
    losses: Floats

    def below(self, budgets: Ints) -> Floats:
        """Return a lower bound of the loss for `budgets` [n], infinite where there is no choice."""
        found: Floats = np.interp(budgets.astype(np.float64), self.costs, self.losses)
        found[budgets < self.costs[0]] = np.inf
        return found


def _relaxations(hulls: Sequence[Sequence[Option]]) -> list[_Relaxation]:
    """Return the relaxation of the groups after each group."""
    found = []
    steps: list[tuple[float, int, float]] = []
    cost, loss = 0, 0.0
    for hull in reversed(hulls):
        ordered = np.array(steps, dtype=np.float64).reshape(-1, 3)
        found.append(
            _Relaxation(
                np.cumsum(np.concatenate([[cost], ordered[:, 1]])),
                np.cumsum(np.concatenate([[loss], ordered[:, 2]])),
            )
        )
        steps = sorted(steps + _steps(hull))
        cost, loss = cost + hull[0].cost, loss + hull[0].loss
    return found[::-1]


def _rounded(hulls: Sequence[Sequence[Option]], budget: int) -> float:
    """The loss of a choice within the budget: the steps of all hulls, steepest first, as far as they fit."""
    at = [0] * len(hulls)
    left = budget - sum(hull[0].cost for hull in hulls)
    steps = sorted(
        (slope, g, i) for g, hull in enumerate(hulls) for i, (slope, _, _) in enumerate(_steps(hull))
    )
    for _, group, step in steps:
        cost = hulls[group][step + 1].cost - hulls[group][step].cost
        # A step past one that was left out could not be taken alone.
        if at[group] == step and cost <= left:
            at[group], left = step + 1, left - cost
    return sum(hull[i].loss for hull, i in zip(hulls, at, strict=True))


def _extended(costs: Ints, losses: Floats, options: Sequence[Option]) -> tuple[Ints, Floats, Ints, Ints]:
    """All states with all options of one more group, as far as none is better in cost and loss.

    Their costs, rising, their losses, falling, the option that each took and the state that it came from.
    """
    count = len(costs)
    all_costs = np.concatenate([costs + option.cost for option in options])
    all_losses = np.concatenate([losses + option.loss for option in options])
    order = np.lexsort((all_losses, all_costs))
    ordered = all_losses[order]
    best_before = np.minimum.accumulate(np.concatenate([[np.inf], ordered[:-1]]))
    order = order[ordered < best_before]
    return all_costs[order], all_losses[order], order // count, order % count
