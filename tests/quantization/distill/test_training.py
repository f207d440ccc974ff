"""Parts of a training: Adam and the divergence as torch has them, and which sequences a step gets."""

import pytest
import torch

from quantkit.quantization.distill import loss
from quantkit.quantization.distill.adam import BETAS, EPSILON, Adam
from quantkit.quantization.distill.pool import Pool
from quantkit.quantization.distill.residence import Residence
from quantkit.quantization.distill.training import rate_at

HERE = Residence(torch.device("cpu"))


def steps(adam: Adam, start: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    numbers = {name: one.clone() for name, one in start.items()}
    generator = torch.Generator().manual_seed(1)
    for step in range(1, count + 1):
        found = {
            name: 1e-7 * torch.randn(one.shape, generator=generator) + 1e-8 for name, one in start.items()
        }
        adam.step(numbers, found, {"a": 1e-2, "b": 1e-3}, step)
    return numbers


def test_adam_is_that_of_torch() -> None:
    start = {"a": torch.randn(4, 5), "b": torch.randn(7)}
    own = steps(Adam(HERE, torch.float32), start, 30)
    theirs = [torch.nn.Parameter(one.clone()) for one in start.values()]
    optimizer = torch.optim.Adam(
        [{"params": [one], "lr": rate} for one, rate in zip(theirs, (1e-2, 1e-3), strict=True)],
        betas=BETAS,
        eps=EPSILON,
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        for one in theirs:
            one.grad = 1e-7 * torch.randn(one.shape, generator=generator) + 1e-8
        optimizer.step()
    for name, one in zip(start, theirs, strict=True):
        torch.testing.assert_close(own[name], one.detach())
    # Means of 8 bits err by half a percent of a step or so, in no direction.
    short = steps(Adam(HERE), start, 30)
    for name, one in own.items():
        assert float((short[name] - one).abs().max()) < 0.05 * float((one - start[name]).abs().max())


@pytest.mark.parametrize("chunk", [1, 40, 1 << 25])
def test_the_divergence_and_its_gradient_are_those_of_autograd(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS", chunk)
    logits, target = (3 * torch.randn(2, 5, 11) for _ in range(2))
    logits.requires_grad_()
    found = loss.divergence(logits, target)
    expected = torch.nn.functional.kl_div(
        logits.log_softmax(-1), target.log_softmax(-1), reduction="sum", log_target=True
    )
    torch.testing.assert_close(found, expected)
    (expected_gradient,) = torch.autograd.grad(0.5 * expected, logits)
    (gradient,) = torch.autograd.grad(0.5 * found, logits)
    torch.testing.assert_close(gradient, expected_gradient)


def test_all_sequences_come_once_before_any_comes_again() -> None:
    text, own = torch.arange(40)[:, None], 100 + torch.arange(60)[:, None]
    pool = Pool.of(text, own, seed=3)
    assert len(pool.held_out) == 7 and len(pool.own) == 53
    drawn = torch.cat([pool.batch(step, 4, 0.75) for step in range(40)])[:, 0]
    assert (drawn < 100).sum() == 40 and len(set(drawn[drawn < 100].tolist())) == 40
    of_own = drawn[drawn >= 100]
    assert len(set(of_own[:53].tolist())) == 53 and not set(of_own.tolist()) & set(
        pool.held_out[:, 0].tolist()
    )
    again = Pool.of(text, own, seed=3)
    assert torch.equal(again.batch(29, 4, 0.75), pool.batch(29, 4, 0.75))
    assert not torch.equal(Pool.of(text, own, seed=4).batch(0, 4, 0.75), again.batch(0, 4, 0.75))
    assert torch.equal(Pool.of(text[:1], own[:0], 0).batch(0, 2, 0.75), text[[0, 0]])


def test_rates_rise_and_fall_to_zero() -> None:
    rates = [rate_at(step, 1000) for step in range(1000)]
    assert rates[0] == 0.05 and rates[19] == rates[20] == 1.0 and 0 < rates[-1] < 1e-5
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert [rate_at(step, None) for step in range(11)] == rates[:11]
