"""KL divergence of a student's logits from the original's logits, with its gradient, in one launch."""

from functools import lru_cache

import torch

from quantkit.kernels.jit.launcher import Launch, launching_on
from quantkit.kernels.problem import ACTIVATION_DTYPES, device_features

#: Columns that a program loads at a time, 16 per thread.
COLUMNS, WARPS = 4096, 8


def kl_divergence(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return per row KL(softmax(target) || softmax(logits)), in nats, and its gradient for `logits`.

    `logits` and `target` are [rows, N] of one of `ACTIVATION_DTYPES`. The divergence is float32 [rows]. The
    gradient, softmax(logits) - softmax(target), has the shape and dtype of `logits`.
    """
    rows, columns = logits.shape
    logits, target = logits.contiguous(), target.contiguous()
    divergence = torch.empty(rows, dtype=torch.float32, device=logits.device)
    difference = torch.empty_like(logits)
    with launching_on(logits.device):
        _launch(rows, columns)(logits, target, divergence, difference)
    return divergence, difference


def why_no_kl_divergence(logits: torch.Tensor, target: torch.Tensor) -> str | None:
    """Return why `kl_divergence` cannot run on these logits [rows, N]; None if it can."""
    if not logits.is_cuda or "triton" not in device_features(logits.device):
        return f"{logits.device} runs no Triton kernels"
    dtypes = {logits.dtype, target.dtype} - set(ACTIVATION_DTYPES)
    return f"logits are {dtypes.pop()}" if dtypes else None


@lru_cache(maxsize=256)
def _launch(rows: int, columns: int) -> Launch:
    """Build the launch of `kl_divergence_rows` for logits [rows, columns]."""
    from quantkit.kernels.ops.divergence_kernel import kl_divergence_rows

    return Launch(kl_divergence_rows, (rows,), N=columns, B=COLUMNS, num_warps=WARPS)
