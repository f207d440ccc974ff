"""Biases and activations of experts in one launch, against torch row by row."""

import pytest
import torch
import torch.nn.functional as F

from quantkit.kernels.moe import expert_activation, permute
from quantkit.kernels.moe.expert_activation import activate_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Two routed tokens of each, one of no expert.
INDEX = [[0, 2], [1, 4], [-1, 1], [2, 0]]


@pytest.fixture(autouse=True)
def interpreted(interpreter, monkeypatch):
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


def operands(n: int, biased: bool, dtype: torch.dtype) -> tuple:
    generator = torch.Generator().manual_seed(0)
    y = (3 * torch.randn(8, 2 * n, generator=generator)).to(DEVICE, dtype)
    bias = torch.randn(3, 2 * n, generator=generator).to(DEVICE, dtype) if biased else None
    return y, torch.tensor(INDEX, device=DEVICE), bias


def by_rows(
    y: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    limit: float | None,
    alpha: float,
    interleaved: bool,
) -> torch.Tensor:
    """`activate_experts` by torch, row by row."""
    rows = []
    for row, expert in zip(y.float(), index.flatten().tolist(), strict=True):
        gate, up = row.chunk(2)
        if bias is not None and 0 <= expert < len(bias):
            pairs = bias[expert].float().view(-1, 2).T if interleaved else bias[expert].float().chunk(2)
            gate, up = gate + pairs[0], up + pairs[1]
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        act = {"silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh")}.get(kind)
        rows.append((up + 1) * gate * torch.sigmoid(alpha * gate) if act is None else act(gate) * up)
    return torch.stack(rows).to(y.dtype) if rows else y.chunk(2, -1)[0]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("kind", "limit", "alpha"),
    [("swiglu", 2.0, 1.702), ("swiglu", None, 1.0), ("silu", 1.5, 1.0), ("gelu", None, 1.0)],
)
def test_it_is_what_torch_computes(monkeypatch, kind, limit, alpha, interleaved, biased):
    # Several programs a row, the last not full.
    monkeypatch.setattr(expert_activation, "ACTIVATED", 16)
    expert_activation._launch.cache_clear()
    y, index, bias = operands(20, biased, torch.float32)
    options = (kind, limit, alpha, interleaved)
    found = activate_experts(y, index, bias, *options)
    expected = by_rows(y, index, bias, *options)
    assert found.shape == (8, 20)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    expert_activation._launch.cache_clear()


def test_results_have_the_dtype_of_y_and_are_rounded_once():
    y, index, bias = operands(24, True, torch.bfloat16)
    found = activate_experts(y, index, bias, "swiglu", 2.0, 1.702, True)
    expected = by_rows(y, index, bias, "swiglu", 2.0, 1.702, True)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_numbers_that_are_none_stay_so():
    y, index, _ = operands(4, False, torch.float32)
    y[0, 0] = y[1, 7] = float("nan")
    found = activate_experts(y, index, None, "swiglu", 2.0)
    assert found[0, 0].isnan() and found[1, 3].isnan() and found.isnan().sum() == 2


def test_operator():
    y, index, bias = operands(4, True, torch.float32)
    empty = activate_experts(y[:0], index[:0], bias, "silu", None)
    assert empty.shape == (0, 4)
    given = (y, index, bias, "silu", 1.0, 1.0, False)
    op = torch.ops.quantkit.activate_experts
    torch.library.opcheck(op, given, test_utils=["test_schema", "test_faketensor"])


def test_biases_are_weighed_with_the_rows_of_their_experts():
    y, index, _ = operands(10, False, torch.float32)
    bias = torch.randn(3, 20, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    found = permute.combine_experts(y, index, weights, 3, bias=bias)
    expected = torch.zeros_like(found)
    for token, experts in enumerate(INDEX):
        for slot, expert in enumerate(experts):
            if 0 <= expert < 3:
                expected[token] += weights[token, slot] * (y[2 * token + slot] + bias[expert])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
