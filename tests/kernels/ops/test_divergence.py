"""KL divergence of rows and its gradient against torch's: in Triton's interpreter, and for real on a GPU."""

import math

import pytest
import torch

from quantkit.kernels.ops.divergence import COLUMNS, kl_divergence, why_no_kl_divergence
from quantkit.quantization.distill.loss import divergence

from ...support.compare import assert_close, assert_equal

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def by_torch(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64."""
    of_student, of_target = (torch.log_softmax(one.double(), -1) for one in (logits, target))
    terms = of_target.exp() * (of_target - of_student)
    return terms.where(of_target.exp() > 0, 0.0).sum(-1), of_student.exp() - of_target.exp()


def check(logits: torch.Tensor, target: torch.Tensor) -> None:
    found, difference = kl_divergence(logits, target)
    expected, gradient = by_torch(logits, target)
    assert found.dtype == torch.float32 and difference.dtype == logits.dtype
    # Differences of logits of some hundred, whose errors are those of float32.
    assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    unit = torch.finfo(logits.dtype).eps
    assert_close(difference.double(), gradient, rtol=unit, atol=1e-6 if unit < 1e-6 else unit / 100)
    assert_equal(kl_divergence(logits, target)[1], difference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 2, 300, COLUMNS, COLUMNS + 1, 2 * COLUMNS + 17])
def test_rows_of_any_size(poisoned: None, columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    logits, target = (4 * torch.randn(3, columns, generator=generator) for _ in range(2))
    logits[1] += 80
    check(logits.to(DEVICE, dtype), target.to(DEVICE, dtype))


def test_equal_logits_do_not_diverge(poisoned: None) -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found, difference = kl_divergence(logits, logits.clone())
    assert found.tolist() == [0.0, 0.0]
    # Exact in the interpreter; on an H200 it was up to 1e-10, for probabilities of up to 0.06.
    assert_close(difference, torch.zeros_like(difference), rtol=0, atol=1e-9 if DEVICE == "cuda" else 0)
    # A constant in all logits changes no probability.
    found, difference = kl_divergence(logits + 3, logits)
    assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-5)
    assert_close(difference, torch.zeros_like(difference), rtol=0, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_tokens_that_cannot_follow(poisoned: None) -> None:
    logits = torch.zeros(3, 4, device=DEVICE)
    target = torch.zeros(3, 4, device=DEVICE)
    target[0, 1] = -math.inf
    target[1, 2] = logits[1, 2] = -math.inf
    logits[2, 3] = -math.inf
    found, difference = kl_divergence(logits, target)
    assert_close(found[:2], torch.tensor([math.log(4 / 3), 0.0], device=DEVICE), rtol=1e-6, atol=1e-6)
    assert found[2] == math.inf
    assert_close(difference[0].cpu(), torch.tensor([-1 / 12, 1 / 4, -1 / 12, -1 / 12]), rtol=1e-5, atol=1e-7)
    assert not difference[1].any()


def test_logits_that_are_not_contiguous_or_not_numbers(poisoned: None) -> None:
    wide = torch.randn(4, 200, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    check(wide[:, 20:120], wide[:, 100:])
    wide[1, 50] = math.nan
    found, _ = kl_divergence(wide[:, :100], wide[:, 100:])
    assert found.isnan().tolist() == [False, True, False, False]


def test_the_loss_of_a_training_is_the_same_by_torch() -> None:
    generator = torch.Generator().manual_seed(2)
    logits, target = (3 * torch.randn(2, 5, 600, generator=generator) for _ in range(2))
    found = []
    for device in {DEVICE, "cpu"}:
        leaf = logits.to(device, copy=True).requires_grad_()
        loss = divergence(leaf, target.to(device))
        (loss / 7).backward()
        assert leaf.grad is not None
        found.append((loss.detach().cpu(), leaf.grad.cpu()))
    expected, gradient = by_torch(logits.view(10, 600), target.view(10, 600))
    for total, of_leaf in found:
        assert_close(total.double(), expected.sum(), rtol=1e-5, atol=0)
        assert_close(of_leaf.double(), gradient.view_as(logits) / 7, rtol=1e-4, atol=1e-7)


def test_where_it_runs() -> None:
    logits = torch.zeros(1, 4)
    assert why_no_kl_divergence(logits, logits) == "cpu runs no Triton kernels"
    if DEVICE == "cuda":
        logits = logits.cuda()
        assert why_no_kl_divergence(logits, logits) is None
        assert why_no_kl_divergence(logits.double(), logits) == "logits are torch.float64"
