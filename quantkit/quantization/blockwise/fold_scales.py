"""Fold scales of input features into the norm or linear that produces the features."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Fold:
    """Norm or linear of a block, the `producer`, and the linears that are the only consumers of its outputs.

    Scales divide the weight of a norm, or the rows and bias of a linear.
    """

    producer: str
    consumers: tuple[str, ...]
    is_norm: bool

    @property
    def changed(self) -> str:
        """Return the dense parameter that changes: the weight of a norm, or the bias of a linear, if any."""
        return f"{self.producer}.{'weight' if self.is_norm else 'bias'}"


#: Possible folds in blocks of `LLAMA_LIKE` families.
FOLDS = (
    Fold("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), True),
    Fold("input_layernorm", ("self_attn.qkv_proj",), True),
    Fold("self_attn.v_proj", ("self_attn.o_proj",), False),
    Fold("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), True),
    Fold("post_attention_layernorm", ("mlp.gate_up_proj",), True),
    Fold("mlp.up_proj", ("mlp.down_proj",), False),
    Fold("mlp.shared_expert.up_proj", ("mlp.shared_expert.down_proj",), False),
)


def shared_rows(fold: Fold, rows: int, columns: int, config: Mapping[str, Any]) -> torch.Tensor:
    """Return for each of the consumers' `columns` the producer's row that it reads, int64 [columns].

    Attention repeats each key-value head for the query heads of its group.
    """
    if fold.is_norm or rows == columns:
        return torch.arange(columns)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = torch.arange(rows).view(-1, head)
    return heads.repeat_interleave(columns // rows, 0).flatten()


@dataclass(frozen=True, eq=False)
class Factors:
    """Multipliers of a weight [N, K]: columns [K] and rows [N], float32, or None for 1."""

    columns: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the scaled weight, float32."""
        scaled = weight.to(torch.float32)
        if self.columns is not None:
            scaled = scaled * self.columns
        return scaled if self.rows is None else scaled * self.rows[:, None]


def fold_into(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide a norm's weight or a bias by `scales`; return it with the exact divisor after rounding.

    The result has the dtype of `stored`. The divisor is 1 where the result is zero, because the
    feature is zero.
    """
    divided = (stored.to(torch.float32) / scales).to(stored.dtype)
    exact = stored.to(torch.float32) / divided.to(torch.float32)
    return divided, torch.where(exact.isfinite() & (exact > 0), exact, 1.0)
