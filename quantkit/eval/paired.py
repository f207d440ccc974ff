"""Two models on the same items: how often one is right where the other is wrong, and whether that is chance.

Errors of differences are paired (Miller 2024, arXiv 2411.00640): items that both models get right or both get
wrong say nothing of the difference and add nothing to its error. Flips are counted as by Dutta et al. 2024
(arXiv 2407.09141): near-equal accuracy may hide many answers that changed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """`correct` items of a model against those of its reference, in parts of all items.

    delta     accuracy less that of the reference
    delta_se  standard error of `delta`, None for a single item
    gained    items that only the model gets right, lost: only the reference
    flips     the part of items that changed either way
    p_value   McNemar's exact test (1947): how likely a split of the flips at least as uneven is by chance
    """

    reference: float
    delta: float
    delta_se: float | None
    gained: int
    lost: int
    flips: float
    p_value: float


def compare(correct: Sequence[bool], reference: Sequence[bool]) -> Paired:
    """`correct` and `reference` say, item by item (one or more, as many of both), who was right."""
    items = len(correct)
    assert items == len(reference) > 0
    gained = sum(mine and not theirs for mine, theirs in zip(correct, reference, strict=True))
    lost = sum(theirs and not mine for mine, theirs in zip(correct, reference, strict=True))
    delta = (gained - lost) / items
    # Differences are -1, 0 and 1, so that their squares count the flips.
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
    """Standard error of the part of `correct` items that are true; None for a single item."""
    items, right = len(correct), sum(correct)
    return None if items < 2 else math.sqrt(right / items * (1 - right / items) / (items - 1))


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided p-value of McNemar's exact test: the binomial one of an even split of `gained` + `lost`."""
    flips = gained + lost
    term, tail = 1, 0  # the binomial coefficients of 0, 1, ... and their sum
    for i in range(min(gained, lost) + 1):
        tail += term
        term = term * (flips - i) // (i + 1)
    # Whole numbers, however large, divide exactly rounded.
    return min(1.0, 2 * tail / (1 << flips))
