"""Compare two models on the same items: how often only one is right, and if that is chance.

Errors of differences are paired (Miller 2024, arXiv 2411.00640): items that both models get right or both get
wrong add nothing to the difference or its error. Flips are counted as by Dutta et al. 2024 (arXiv
2407.09141): near-equal accuracy may hide many changed answers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """`correct` items of a model compared with its reference, as fractions of all items.

    delta     accuracy minus the reference's accuracy
    delta_se  standard error of `delta`, None for a single item
    gained    items that only the model gets right; `lost`: only the reference
    flips     fraction of items that changed either way
    p_value   McNemar's exact test (1947): probability of a split of the flips at least as uneven by chance
    """

    reference: float
    delta: float
    delta_se: float | None
    gained: int
    lost: int
    flips: float
    p_value: float


def compare(correct: Sequence[bool], reference: Sequence[bool]) -> Paired:
    """Compare which items two models got right, item by item; at least one item.

    `correct` is True for those that the model got right, `reference` for those that the original did.
    """
    items = len(correct)
    assert items == len(reference) > 0
    gained = sum(mine and not theirs for mine, theirs in zip(correct, reference, strict=True))
    lost = sum(theirs and not mine for mine, theirs in zip(correct, reference, strict=True))
    delta = (gained - lost) / items
    # Differences are -1, 0 and 1, so their squares count the flips.
    squares = gained + lost - items * delta**2
    return Paired(
        reference=sum(reference) / items,
        delta=delta,
        delta_se=None if items < 2 else math.sqrt(squares / (items - 1) / items),
        gained=gained,
        lost=lost,
        flips=(gained + lost) / items,
        p_value=mcnemar(gained, lost),
    )


def accuracy_error(correct: Sequence[bool]) -> float | None:
    """Return the standard error of the fraction of true `correct` items; None for a single item."""
    items, right = len(correct), sum(correct)
    return None if items < 2 else math.sqrt(right / items * (1 - right / items) / (items - 1))


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: `gained` of `gained + lost` fair coin flips."""
    flips = gained + lost
    term, tail = 1, 0  # Binomial coefficients of 0, 1, ... and their sum.
    for i in range(min(gained, lost) + 1):
        tail += term
        term = term * (flips - i) // (i + 1)
    # Integers of any size divide with exact rounding.
    return min(1.0, 2 * tail / (1 << flips))
