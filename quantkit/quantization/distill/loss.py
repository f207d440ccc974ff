"""KL(original || student) of predictions over the whole vocabulary, with its gradient."""

from typing import Any

import torch

from quantkit.kernels.ops.divergence import kl_divergence, why_no_kl_divergence

#: Logits at a time in float32: some 20 bytes each.
CHUNK_LOGITS = 1 << 25


class _Divergence(torch.autograd.Function):
    """Keeps the gradient, softmax(student) - softmax(original), in place of both distributions."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        vocabulary = logits.shape[-1]
        rows, targets = logits.reshape(-1, vocabulary), target.reshape(-1, vocabulary)
        if why_no_kl_divergence(rows, targets) is None:
            of_rows, difference = kl_divergence(rows, targets)
            total = of_rows.sum()
        else:
            total, difference = _by_torch(rows, targets)
        ctx.save_for_backward(difference.view_as(logits))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference.mul_(gradients[0]), None


def _by_torch(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of KL(original || student), float32 [], and its gradient, by torch.

    `logits` [rows, V] are the student's, `target` [rows, V] the original's, the gradient [rows, V] is that of
    `logits`.
    """
    vocabulary = logits.shape[-1]
    difference, total = torch.empty_like(logits), torch.zeros((), device=logits.device)
    step = max(1, CHUNK_LOGITS // vocabulary)
    for start in range(0, len(logits), step):
        student = torch.log_softmax(logits[start : start + step].float(), -1)
        original = torch.log_softmax(target[start : start + step].float(), -1)
        expected = original.exp()
        # Where the original is sure that a token does not follow, both logarithms may be infinite.
        total += (expected * original.sub_(student).masked_fill_(expected == 0, 0.0)).sum()
        difference[start : start + step] = student.exp_().sub_(expected)
    return total, difference


def divergence(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of KL(original || student), in nats, float32.

    `logits` are the student's, `target` the original's, [..., V] in any float dtype. No gradient reaches
    `target`, and the gradient can be taken once.
    """
    found: torch.Tensor = _Divergence.apply(logits, target)  # type: ignore[no-untyped-call]
    return found
