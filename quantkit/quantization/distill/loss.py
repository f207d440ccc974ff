"""KL(original || student) of predictions over the whole vocabulary, with its gradient."""

from typing import Any

import torch


class _Divergence(torch.autograd.Function):
    """Keeps the gradient, softmax(student) - softmax(original), in place of both distributions."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        student = torch.log_softmax(logits.float(), -1)
        original = torch.log_softmax(target.float(), -1)
        expected = original.exp()
        total = (expected * (original - student)).sum()
        ctx.save_for_backward((student.exp_() - expected).to(logits.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference * gradients[0], None


def divergence(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of KL(original || student), in nats, float32.

    `logits` are the student's, `target` the original's, [..., V] in any float dtype. No gradient reaches
    `target`.
    """
    found: torch.Tensor = _Divergence.apply(logits, target)  # type: ignore[no-untyped-call]
    return found
