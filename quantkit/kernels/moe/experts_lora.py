"""LoRA beside the packed matrices of fused experts, in the layout in which PEFT stores it.

Each expert e has its own A_e [r, K] and B_e [N, r]. PEFT keeps all of them in two matrices:

    a [E r, K]    rows of expert 0, then of expert 1, and so on
    b [N, r E]    columns of rank 0 of all experts, then of rank 1, and so on
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from quantkit.kernels.lora.lora_linear import Lora

#: Most numbers in one temporary tensor of `lora_of_pairs`.
MOST_NUMBERS = 1 << 26


class ExpertsLora(NamedTuple):
    """LoRA of `experts` experts: y = x W_e^T + factor * (x A_e^T) B_e^T, with `a` and `b` as above."""

    a: torch.Tensor
    b: torch.Tensor
    factor: float
    experts: int

    def by_expert(self) -> list[Lora]:
        """Return views of A_e [r, K] and B_e [N, r] for each expert."""
        rows = self.a.view(self.experts, -1, self.a.shape[1]).unbind(0)
        columns = self.b.view(len(self.b), -1, self.experts).unbind(-1)
        return [Lora(a, b, self.factor) for a, b in zip(rows, columns, strict=True)]

    def of_pairs(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return factor * (x A_e^T) B_e^T [P, N] for all pairs of a token and its expert, P = T * top_k.

        `x` is [T, K] or [P, K], and `index` [T, top_k] has the experts. Pairs without an expert get the
        numbers of another.
        """
        chosen = index.flatten().long().clamp(0, self.experts - 1)
        rows = torch.arange(len(chosen), device=x.device) // max(1, len(chosen) // max(1, len(x)))
        low = F.linear(x.to(self.a.dtype), self.a).view(len(x), self.experts, -1)[rows, chosen]
        # Zeros for all other experts make one dense product of it, without a gather of B.
        own = chosen[:, None] == torch.arange(self.experts, device=x.device)
        spread = (low[:, :, None] * own[:, None]).flatten(1)
        return F.linear(spread, self.b) * self.factor


def lora_of_pairs(
    loras: Sequence[ExpertsLora], y: torch.Tensor, x: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """Return y [P, N] plus the outputs of `loras` for x [T, K] or [P, K], in the dtype of y.

    `index` [T, top_k] has the experts of each token. Long inputs are computed in parts, to save memory.
    """
    tokens, each = index.shape
    for lora in loras:
        most = max(1, MOST_NUMBERS // max(1, each * len(lora.a)))
        parts = [
            lora.of_pairs(x[start * len(x) // tokens : stop * len(x) // tokens], index[start:stop])
            for start, stop in ((start, min(tokens, start + most)) for start in range(0, tokens, most))
        ]
        if parts:
            y = (y + (parts[0] if len(parts) == 1 else torch.cat(parts))).to(y.dtype)
    return y
