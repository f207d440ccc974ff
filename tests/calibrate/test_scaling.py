"""Scales of input features: the error that candidates are compared by is that of the outputs."""

import pytest
import torch

from quantkit.calibrate.moments import Moments, gram
from quantkit.calibrate.scaling import EXPONENTS, WEIGHT_PARTS, Consumer, candidates, output_error
from quantkit.packing.schemes import scheme


def inputs(tokens: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tokens, columns, generator=generator) * torch.logspace(-2, 1, columns)


def rounded(weights: torch.Tensor, importance: torch.Tensor, chosen: object) -> torch.Tensor:
    return torch.round(weights * 4) / 4


def test_the_error_is_that_of_running_the_layer() -> None:
    x, weight = inputs(300, 20), torch.randn(30, 20)
    consumer = Consumer(weight, scheme("int4", group_size=10))
    scales = torch.rand(20) + 0.5
    found = output_error([consumer, consumer], Moments(gram(x) / 300, 300), scales, rounded)
    outputs = (x / scales) @ rounded(weight * scales, x[0], None).T - x @ weight.T
    assert found == pytest.approx(2 * float(outputs.double().square().sum() / 300), rel=1e-3)


def test_candidates_start_with_one_and_are_shared() -> None:
    x = inputs(300, 24)
    shared = torch.arange(12).view(3, 4).repeat_interleave(2, 0).flatten()
    consumer = Consumer(torch.randn(30, 24), scheme("int4", group_size=10))
    found = candidates([consumer], Moments(gram(x) / 300, 300), shared)
    assert len(found) == 1 + len(WEIGHT_PARTS) * len(EXPONENTS) and torch.equal(found[0], torch.ones(12))
    for one in found:
        assert one.shape == (12,) and torch.isfinite(one).all() and (one > 0).all()
        assert float(one.log().mean().exp()) == pytest.approx(1, rel=1e-3)
    square = x.square().mean(0)
    pooled = torch.stack([square[shared == i].mean() for i in range(12)]).sqrt()
    # With exponent 1 nothing is left of the weights.
    ratio = found[-2] / pooled
    assert torch.allclose(ratio, ratio[0].expand(12), rtol=1e-4)


def test_dead_features_and_weights_leave_finite_scales() -> None:
    x, weight = inputs(50, 8), torch.randn(5, 8)
    x[:, 3], weight[:, 4] = 0, 0
    for one in candidates(
        [Consumer(weight, scheme("int4", group_size=4))], Moments(gram(x) / 50, 50), torch.arange(8)
    ):
        assert torch.isfinite(one).all() and (one > 0).all()
