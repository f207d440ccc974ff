"""The largest of each row against torch's: in Triton's interpreter on a CPU, for real on a GPU."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kernels.ops import argmax
from quantkit.kernels.ops.argmax import MOST_COLUMNS, PART, argmax_reference, argmax_tokens, argmax_two_stage

from ...support.compare import assert_equal

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: One number, fewer than a part, parts that are full and not, a vocabulary, and one of an odd size.
COLUMNS = (1, 7, PART - 1, PART, PART + 1, 5 * PART + 3, 128256, 128259)
#: What is larger or smaller than all others, or equal to another.
ODD = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 6e-8, -6e-8, 65504.0, -65504.0)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


def check(x: torch.Tensor) -> None:
    """Places are those that torch finds, and those that are found one number after the other."""
    found = argmax_two_stage(x)
    assert found.dtype == torch.int64 and found.shape == x.shape[:1] and found.device == x.device
    assert_equal(found, argmax_reference(x))
    assert found.tolist() == [first_of_largest(row) for row in x.tolist()]
    assert_equal(found, argmax_two_stage(x))


def first_of_largest(row: list[float]) -> int:
    return max(range(len(row)), key=lambda n: (math.isnan(row[n]), 0 if math.isnan(row[n]) else row[n], -n))


@pytest.mark.parametrize("columns", COLUMNS)
def test_the_largest_of_rows(poisoned: None, columns: int) -> None:
    # Triton itself launches a kernel only the first time.
    for dtype in DTYPES * 2:
        check(numbers(3, columns, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_of_equal_numbers(poisoned: None, dtype: torch.dtype) -> None:
    """Within a thread's numbers, a part, and parts of their own; of all numbers, too."""
    for places in ((5, 6), (5, 900), (PART - 1, PART), (7, 3 * PART), (3 * PART, 3 * PART + 1)):
        for value in (3.0, math.inf, math.nan):
            x = torch.zeros(2, 3 * PART + 2, device=DEVICE, dtype=dtype)
            x[:, places] = value
            check(x)
    for value in ODD:
        check(torch.full((2, PART + 5), value, device=DEVICE, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_of_both_signs_are_equal(poisoned: None, dtype: torch.dtype) -> None:
    x = torch.full((2, PART + 5), -1.0, device=DEVICE, dtype=dtype)
    x[0, 3], x[0, PART + 1] = -0.0, 0.0
    x[1, 3], x[1, PART + 1] = 0.0, -0.0
    check(x)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 2 * PART + 9),
    st.sampled_from(ODD),
    st.dictionaries(st.integers(0, 2 * PART + 8), st.sampled_from(ODD) | st.floats(width=32), max_size=6),
)
def test_the_largest_of_any_numbers_is_torchs(
    dtype: torch.dtype, columns: int, rest: float, others: dict[int, float]
) -> None:
    row = [rest] * columns
    for place, value in others.items():
        row[place % columns] = value
    check(torch.tensor([row], device=DEVICE).to(dtype))


#: Rows of `x` that lie in other ways.
LAID: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last tokens": lambda x: torch.stack([x.new_full(x.shape, math.nan), x], 1)[:, -1],
    "far apart": lambda x: torch.cat([x.new_full((len(x), 5), math.nan), x, x.new_full((len(x), 2), 99)], 1)[
        :, 5:-2
    ],
    "columns": lambda x: x.t().contiguous().t(),
    "every other": lambda x: torch.stack([x, x.new_full(x.shape, math.nan)], 2)[:, :, 0],
    "one for all": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("laid", LAID)
@pytest.mark.parametrize("columns", [1, 7, PART + 5])
def test_rows_may_have_any_strides(poisoned: None, columns: int, laid: str) -> None:
    for dtype in DTYPES:
        check(LAID[laid](numbers(4, columns, dtype=dtype)))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_gradients_are_nothing_to_it(mode: Callable[[], torch.inference_mode]) -> None:
    with mode():
        check(numbers(2, 20).requires_grad_(not torch.is_inference_mode_enabled()))


def test_on_another_stream_than_that_of_the_device() -> None:
    if DEVICE == "cpu":
        pytest.skip("a GPU has streams")
    x = numbers(4, 128256, dtype=torch.bfloat16)
    expected = argmax_reference(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)
        later = x.clone()
        found = argmax_two_stage(later).tolist()
    assert found == expected.tolist()


def test_it_can_be_recorded() -> None:
    if DEVICE == "cpu":
        pytest.skip("a GPU has graphs")
    x = numbers(4, 128256, dtype=torch.bfloat16)
    argmax_two_stage(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = argmax_two_stage(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_equal(found, argmax_reference(x))


def test_kernels_choose_where_there_are_any_else_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels where there are any, and torch where they are not made for the numbers."""
    ran: list[str] = []
    monkeypatch.setattr(
        argmax, "argmax_two_stage", lambda x: ran.append("argmax_two_stage") or argmax_reference(x)
    )
    x = numbers(2, 30)
    assert_equal(argmax_tokens(x), argmax_reference(x))
    assert ran == (["argmax_two_stage"] if DEVICE == "cuda" else [])
    ran.clear()
    for other in (x.double(), x[:, :1].expand(2, MOST_COLUMNS + 1)):
        assert_equal(argmax_tokens(other), argmax_reference(other))
    monkeypatch.setattr(argmax, "device_features", lambda device: frozenset())
    assert_equal(argmax_tokens(x), argmax_reference(x))
    assert not ran
