"""Differences of tensors are found, and the message says where and by how much."""

import math
import re

import pytest
import torch

from .compare import assert_close, assert_equal

ONES = torch.ones(2, 3)


def changed(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ones [2, 3] with `value` at [1, 2]."""
    tensor = ONES.to(dtype, copy=True)
    tensor[1, 2] = value
    return tensor


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        (
            changed(1.5),
            ONES,
            "tensors differ: 1 of 6 elements; "
            "most at [1, 2]: found 1.5, expected 1, 0.5 apart, 1.13e-05 allowed",
        ),
        (
            changed(math.nan),
            ONES,
            "at [1, 2]: found nan, expected 1, nan apart, 1.13e-05 allowed; NaN: 1 found, 0 exp",
        ),
        (changed(math.inf), ONES, "at [1, 2]: found inf, expected 1, inf apart"),
        (changed(-math.inf), changed(math.inf), "at [1, 2]: found -inf, expected inf"),
        (ONES, changed(math.inf), "at [1, 2]: found 1, expected inf"),
        (changed(math.nan), changed(math.nan), "1 of 6 elements; most at [1, 2]: found nan, expected nan"),
        (changed(7, torch.uint8), ONES.to(torch.uint8), "at [1, 2]: found 7, expected 1, 6 apart, 0 allowed"),
        (ONES, ONES.double(), "differ in dtype: found torch.float32, expected torch.float64"),
        (ONES[0], ONES, "differ in shape: found (3,), expected (2, 3)"),
        (3, ONES, "found a int, expected a tensor"),
        ((ONES, changed(2)), (ONES, ONES), "[1] differ: 1 of 6 elements"),
        ((ONES,), (ONES, ONES), "has 1 items, expected 2"),
        ({"a": [changed(2)]}, {"a": [ONES]}, "['a'][0] differ"),
        ({"a": ONES}, {"b": ONES}, "has keys ['a'], expected ['b']"),
        (0.5, 0.25, "found 0.5, expected 0.25"),
        ((ONES, None), (ONES, 3), "[1]: found None, expected 3"),
    ],
)
def test_a_difference_is_said_with_its_place_and_size(found: object, expected: object, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_close(found, expected)
    with pytest.raises(AssertionError, match="int4"):
        assert_close(found, expected, name="int4")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
def test_default_tolerances_are_those_of_torch(dtype: torch.dtype) -> None:
    for step in (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1):
        one = changed(1 + step, dtype)
        results = []
        for compare in (assert_close, torch.testing.assert_close):
            try:
                compare(one, ONES.to(dtype))
                results.append(True)
            except AssertionError:
                results.append(False)
        assert results[0] == results[1], step


def test_each_element_may_have_a_bound_of_its_own() -> None:
    bound = torch.zeros(2, 3)
    bound[1, 2] = 0.5
    assert_close(changed(1.5), ONES, rtol=0, atol=bound)
    with pytest.raises(AssertionError, match=r"at \[1, 2\].* 0.75 apart, 0.5 allowed"):
        assert_close(changed(1.75), ONES, rtol=0, atol=bound)
    with pytest.raises(AssertionError, match=r"at \[0, 0\]"):
        assert_close(2 * ONES, ONES, rtol=0, atol=bound)


def test_the_norm_of_a_difference_has_a_bound() -> None:
    assert_close(changed(1.5), ONES, norm=0.5 / 6**0.5 + 1e-9)
    message = (
        "differ by 0.204 of the norm, 0.2 allowed; 1 of 6 elements; most at [1, 2]: found 1.5, expected 1"
    )
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_close(changed(1.5), ONES, norm=0.2)
    with pytest.raises(AssertionError, match=r"by nan of the norm.*NaN: 1 found, 0 expected"):
        assert_close(changed(math.nan), ONES, norm=0.2)


def test_equal_values_are_equal_whatever_they_are() -> None:
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.bool, torch.uint8, torch.int64, torch.complex64):
        assert_equal(ONES.to(dtype), ONES.to(dtype))
        with pytest.raises(AssertionError):
            assert_equal(ONES.to(dtype), (0 * ONES).to(dtype))
    assert_equal(changed(math.inf), changed(math.inf))
    assert_equal(torch.tensor([2**62 + 1]), torch.tensor([2**62 + 1]))
    with pytest.raises(AssertionError, match="found 4611686018427387905"):
        assert_equal(torch.tensor([2**62 + 1]), torch.tensor([2**62]))
    assert_close(changed(math.nan), changed(math.nan), equal_nan=True)
    assert_equal(torch.empty(0, 3), torch.empty(0, 3))
    assert_equal((), ())
