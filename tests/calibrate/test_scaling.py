"""Scales of input features: the error that candidates are compared by is that of the outputs."""

from functools import partial

import pytest
import torch

from quantkit.calibrate.hessian import Hessian, gram, largest
from quantkit.calibrate.methods import method_named
from quantkit.calibrate.quantize_with_hessian import stored_nearest
from quantkit.calibrate.scaling import EXPONENTS, WEIGHT_PARTS, Consumer, output_errors, searched, smoothed
from quantkit.packing.schemes import scheme

from ..support.compare import assert_close, assert_equal


def inputs(tokens: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tokens, columns, generator=generator) * torch.logspace(-2, 1, columns)


def rounded(weights: torch.Tensor, importance: torch.Tensor, chosen: object) -> torch.Tensor:
    return torch.round(weights * 4) / 4


def test_the_error_is_that_of_running_the_layer() -> None:
    x, weight = inputs(300, 20), torch.randn(30, 20)
    consumer = Consumer(weight, scheme("int4", group_size=10))
    scales = torch.rand(20) + 0.5
    (found,) = output_errors([consumer, consumer], Hessian(gram(x) / 300, 300), scales[None], rounded)
    outputs = (x / scales) @ rounded(weight * scales, x[0], None).T - x @ weight.T
    assert found == pytest.approx(2 * float(outputs.double().square().sum() / 300), rel=1e-3)


@pytest.mark.parametrize("format", ["int4", "nvfp4"])
def test_candidates_measured_together_have_the_errors_of_each_alone(format: str) -> None:
    """Also the last, ragged group, and what a tensor shares: a global scale."""
    x = inputs(300, 40)
    hessian, chosen = Hessian(gram(x) / 300, 300), scheme(format).for_columns(40)
    consumers = [Consumer(torch.randn(rows, 40), chosen) for rows in (30, 7)]
    stored = partial(stored_nearest, search=method_named("awq").scale_search)
    scales = torch.stack([torch.ones(40), torch.rand(40) + 0.5, 10 * torch.rand(40) + 0.1])
    together = output_errors(consumers, hessian, scales, stored)
    alone = [output_errors(consumers, hessian, one[None], stored)[0] for one in scales]
    assert together == pytest.approx(alone, rel=1e-5) and len(set(together)) == 3


def test_candidates_start_with_one_and_are_shared() -> None:
    x = inputs(300, 24)
    shared = torch.arange(12).view(3, 4).repeat_interleave(2, 0).flatten()
    consumer = Consumer(torch.randn(30, 24), scheme("int4", group_size=10))
    found = searched([consumer], Hessian(gram(x) / 300, 300), shared)
    assert len(found) == 1 + len(WEIGHT_PARTS) * len(EXPONENTS)
    assert_equal(found[0], torch.ones(12))
    for one in found:
        assert one.shape == (12,) and torch.isfinite(one).all() and (one > 0).all()
        assert float(one.log().mean().exp()) == pytest.approx(1, rel=1e-3)
    square = x.square().mean(0)
    pooled = torch.stack([square[shared == i].mean() for i in range(12)]).sqrt()
    # With exponent 1 nothing is left of the weights.
    ratio = found[-2] / pooled
    assert_close(ratio, ratio[0].expand(12), rtol=1e-4, atol=1e-8)


def test_dead_features_and_weights_leave_finite_scales() -> None:
    x, weight = inputs(50, 8), torch.randn(5, 8)
    x[:, 3], weight[:, 4] = 0, 0
    for one in searched(
        [Consumer(weight, scheme("int4", group_size=4))], Hessian(gram(x) / 50, 50), torch.arange(8)
    ):
        assert torch.isfinite(one).all() and (one > 0).all()


@pytest.mark.parametrize("grouped", [False, True])
def test_smoothing_is_what_the_paper_says(grouped: bool) -> None:
    """A slow twin, feature by feature; under grouped-query attention some features have one scale."""
    x, weights = inputs(300, 24), [torch.randn(30, 24), torch.randn(7, 24)]
    shared = torch.arange(12).view(3, 4).repeat_interleave(2, 0).flatten() if grouped else torch.arange(24)
    consumers = [Consumer(weight, scheme("int4", group_size=12)) for weight in weights]
    (found,) = smoothed(consumers, Hessian(gram(x) / 300, 300, largest=largest(x)), shared)
    expected = []
    for i in range(int(shared.max()) + 1):
        columns = (shared == i).nonzero().flatten().tolist()
        of_inputs = max(abs(float(x[t, j])) for t in range(300) for j in columns)
        of_weights = max(abs(float(row[j])) for weight in weights for row in weight for j in columns)
        expected.append(of_inputs**0.5 / of_weights**0.5)
    ratio = found / torch.tensor(expected)
    assert_close(ratio, ratio[0].expand(len(found)), rtol=1e-5, atol=1e-8)
    assert float(found.log().mean()) == pytest.approx(0, abs=1e-5)


def test_smoothing_of_dead_features_and_weights_is_finite() -> None:
    x, weight = inputs(50, 8), torch.randn(5, 8)
    x[:, 3], weight[:, 4] = 0, 0
    hessian = Hessian(gram(x) / 50, 50, largest=largest(x))
    (found,) = smoothed([Consumer(weight, scheme("int4", group_size=4))], hessian, torch.arange(8))
    assert torch.isfinite(found).all() and (found > 0).all()
