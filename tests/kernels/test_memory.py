"""What is outside of a launch's tensors is noticed in the interpreter, as compute-sanitizer would."""

import pytest
import torch

from ..support.compare import assert_equal

triton = pytest.importorskip("triton")
tl = triton.language
InterpreterError = pytest.importorskip("triton.runtime.errors").InterpreterError
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU checks no address")


@triton.jit
def copy(x, y, begin, end, B: tl.constexpr):
    i = tl.arange(0, B)
    there = (i >= begin) & (i < end)
    tl.store(y + i, tl.load(x + i, mask=there), mask=there)


@triton.jit
def copy_behind(table, y):
    tl.store(y, tl.load(tl.load(table).to(y.dtype)))


def test_what_is_in_tensors_may_be_read_and_written() -> None:
    x, y = torch.randn(40), torch.zeros(40)
    copy[(1,)](x[10:20], y[3:13], 0, 10, 16)
    assert_equal(y[3:13], x[10:20])
    assert not y[13:].any() and not y[:3].any()


@pytest.mark.parametrize(
    ("x", "y", "begin", "message"),
    [
        (10, 12, 0, r"reads 1 of 11 addresses that are in no tensor, the first 0 bytes past"),
        (12, 10, 0, r"writes 1 of 11 addresses that are in no tensor, the first 0 bytes past"),
        (8, 12, 9, r"reads 2 of 2 addresses that are in no tensor, the first 4 bytes past"),
    ],
)
def test_what_is_behind_them_is_not(x: int, y: int, begin: int, message: str) -> None:
    """Though it is memory of this process, of the same storage even."""
    memory = torch.zeros(2, 64)
    with pytest.raises(InterpreterError, match=message):
        copy[(1,)](memory[0, :x], memory[1, :y], begin, 11, 16)


def test_what_is_found_by_address_is_told(by_address: list[torch.Tensor]) -> None:
    x, y = torch.randn(1), torch.zeros(1)
    table = torch.tensor([x.data_ptr()])
    with pytest.raises(InterpreterError, match="reads 1 of 1"):
        copy_behind[(1,)](table, y)
    by_address.append(x)
    copy_behind[(1,)](table, y)
    assert_equal(x, y)
