"""Allocate bits: choose an option for every group of tensors, with the least sum of losses in a budget.

This multiple-choice knapsack problem is solved exactly by dynamic programming over the groups. The states are
the pairs (cost, loss) that no other pair beats in both. A state is dropped if a lower bound shows that it
cannot lead to a better result than the best known one. The bound is the linear relaxation of the remaining
groups (Dyer, "An O(n) algorithm for the multiple-choice knapsack linear program", 1984). States and bound are
as in Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", 1995.
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

#: Bounds are sums of floats: their largest rounding error, relative to all losses.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Option:
    """Candidate of a group: its cost, an integer such as bytes, and its loss."""

    cost: int
    loss: float


def allocate(groups: Sequence[Sequence[Option]], budget: int) -> tuple[int, ...]:
    """Return for each group the index of its option, such that the sum of losses is minimal.

    The costs add up to at most `budget`; losses are added in the order of the groups. The first of several
    options with equal cost and loss is chosen. The result depends on the arguments only. Raises `UsageError`
    if even the cheapest options cost too much, or a loss is not finite and at least zero.
    """
    numbers = [_front(options) for options in groups]
    fronts = [[options[i] for i in front] for options, front in zip(groups, numbers, strict=True)]
    cheapest = sum(front[0].cost for front in fronts)
    if cheapest > budget:
        raise UsageError(f"a budget of {budget} is below the {cheapest} of the cheapest options.")
    hulls = [_hull(front) for front in fronts]
    # No sum of losses exceeds that of the cheapest options.
    limit = _rounded(hulls, budget) + _ROUNDING * sum(front[0].loss for front in fronts)
    costs, losses = np.zeros(1, np.int64), np.zeros(1)
    steps: list[tuple[Ints, Ints]] = []
    for front, rest in zip(fronts, _relaxations(hulls), strict=True):
        costs, losses, chosen, parents = _extended(costs, losses, front)
        kept = losses + rest.below(budget - costs) <= limit
        costs, losses = costs[kept], losses[kept]
        steps.append((chosen[kept], parents[kept]))
    # Losses decrease along the states.
    at, found = len(losses) - 1, list[int]()
    for (chosen, parents), front_numbers in zip(reversed(steps), reversed(numbers), strict=True):
        found.append(front_numbers[int(chosen[at])])
        at = int(parents[at])
    return tuple(reversed(found))


def _front(options: Sequence[Option]) -> list[int]:
    """Return the indices of the options on the Pareto front, by rising cost and falling loss."""
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
    """Return the options on the lower convex hull of a front."""
    hull: list[Option] = []
    for option in front:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(before: Option, after: Option) -> float:
    """Return the loss difference per cost of a step between two options of a front, which is negative."""
    return (after.loss - before.loss) / (after.cost - before.cost)


def _steps(hull: Sequence[Option]) -> list[tuple[float, int, float]]:
    """Return for every step along a hull: loss difference per cost, cost difference and loss difference."""
    return [(_slope(a, b), b.cost - a.cost, b.loss - a.loss) for a, b in pairwise(hull)]


@dataclass(frozen=True, eq=False)
class _Relaxation:
    """Least loss of some groups as a function of the budget, if options may be mixed; convex, decreasing.

    costs   float64 [S], rising: the corners
    losses  float64 [S]: the loss at each corner
    """

    costs: Floats
    losses: Floats

    def below(self, budgets: Ints) -> Floats:
        """Return a lower bound of the loss for `budgets` [n]; infinite if the budget is too small."""
        found: Floats = np.interp(budgets.astype(np.float64), self.costs, self.losses)
        found[budgets < self.costs[0]] = np.inf
        return found


def _relaxations(hulls: Sequence[Sequence[Option]]) -> list[_Relaxation]:
    """Return for each group the linear relaxation of all groups after it."""
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
    """Return the loss of a feasible choice: steps of all hulls, steepest first, within the budget."""
    at = [0] * len(hulls)
    left = budget - sum(hull[0].cost for hull in hulls)
    steps = sorted(
        (slope, g, i) for g, hull in enumerate(hulls) for i, (slope, _, _) in enumerate(_steps(hull))
    )
    for _, group, step in steps:
        cost = hulls[group][step + 1].cost - hulls[group][step].cost
        # Steps of a hull are taken in order: after one that did not fit, its group takes none.
        if at[group] == step and cost <= left:
            at[group], left = step + 1, left - cost
    return sum(hull[i].loss for hull, i in zip(hulls, at, strict=True))


def _extended(costs: Ints, losses: Floats, options: Sequence[Option]) -> tuple[Ints, Floats, Ints, Ints]:
    """Combine all states with all options of one more group, and keep those on the Pareto front.

    Returns their costs, rising, their losses, falling, and for each its option and its previous state.
    """
    count = len(costs)
    all_costs = np.concatenate([costs + option.cost for option in options])
    all_losses = np.concatenate([losses + option.loss for option in options])
    order = np.lexsort((all_losses, all_costs))
    ordered = all_losses[order]
    best_before = np.minimum.accumulate(np.concatenate([[np.inf], ordered[:-1]]))
    order = order[ordered < best_before]
    return all_costs[order], all_losses[order], order // count, order % count
