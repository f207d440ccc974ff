"""What an embedding makes of the rows of its table is told by what it computes."""

import pytest
import torch
from torch import nn
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from quantkit.model.linears import Lookup, lookup_of


class Shifted(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids + 1)


class WithBias(nn.Embedding):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.bias = nn.Parameter(torch.zeros(columns))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_factor_is_found(device: str) -> None:
    with torch.device(device):
        assert lookup_of(nn.Embedding(7, 3, padding_idx=6)) == Lookup()
        # Of a tensor, the factor has the dtype of the rows; a number of Python has not.
        assert lookup_of(Gemma3TextScaledWordEmbedding(7, 3, 6, 33.94)) == Lookup(33.94, is_rounded=True)
        assert lookup_of(BartScaledWordEmbedding(7, 3, 6, 33.94)) == Lookup(33.94)


def test_anything_else_is_no_lookup() -> None:
    assert lookup_of(Shifted(7, 3)) is None
    assert lookup_of(WithBias(7, 3)) is None
    assert lookup_of(nn.Embedding(7, 3, max_norm=1.0)) is None
    assert lookup_of(nn.Linear(7, 3)) is None
