"""Paired figures against the definitions written out, and against every possible outcome."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.eval.paired import accuracy_error, compare, mcnemar

ANSWERS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


def mcnemar_twin(gained: int, lost: int) -> Fraction:
    """The part of all ways to split the flips that are at least as uneven."""
    ways = itertools.product((0, 1), repeat=gained + lost)
    uneven = abs(gained - lost)
    return Fraction(sum(abs(2 * sum(way) - gained - lost) >= uneven for way in ways), 2 ** (gained + lost))


@pytest.mark.parametrize("flips", range(11))
def test_mcnemar_counts_the_splits_as_uneven(flips):
    for gained in range(flips + 1):
        assert mcnemar(gained, flips - gained) == float(mcnemar_twin(gained, flips - gained))


def test_mcnemar_at_any_size():
    assert mcnemar(0, 0) == mcnemar(5000, 5000) == 1.0
    assert mcnemar(0, 2000) == 0.0 < mcnemar(0, 1000) < 1e-300
    # The normal approximation with a continuity correction.
    expected = math.erfc((abs(5200 - 4800) - 1) / math.sqrt(10_000) / math.sqrt(2))
    assert mcnemar(5200, 4800) == mcnemar(4800, 5200) == pytest.approx(expected, rel=0.01)


@given(ANSWERS)
def test_figures_are_their_definitions(answers):
    mine, theirs = zip(*answers, strict=True)
    found = compare(mine, theirs)
    n = len(answers)
    differences = [int(a) - int(b) for a, b in answers]
    mean = sum(differences) / n
    assert found.delta == pytest.approx(mean)
    assert found.reference == sum(theirs) / n
    assert found.flips == sum(a != b for a, b in answers) / n
    assert found.gained - found.lost == sum(differences)
    if n == 1:
        assert found.delta_se is accuracy_error(mine) is None
        return
    variance = sum((d - mean) ** 2 for d in differences) / (n - 1)
    assert found.delta_se == pytest.approx(math.sqrt(variance / n), abs=1e-12)
    part = sum(mine) / n
    variance = sum((a - part) ** 2 for a in mine) / (n - 1)
    assert accuracy_error(mine) == pytest.approx(math.sqrt(variance / n), abs=1e-12)


@given(ANSWERS)
def test_exchanging_the_models_turns_the_sign(answers):
    mine, theirs = zip(*answers, strict=True)
    found, turned = compare(mine, theirs), compare(theirs, mine)
    assert (turned.delta, turned.gained, turned.p_value) == (-found.delta, found.lost, found.p_value)


def test_the_same_answers_are_no_difference():
    found = compare([True, False, True], [True, False, True])
    assert (found.delta, found.delta_se, found.flips, found.p_value) == (0.0, 0.0, 0.0, 1.0)
