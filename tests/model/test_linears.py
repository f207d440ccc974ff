"""Linears by what they compute, and those whose weight the code of a model reads."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.pytorch_utils import Conv1D

from quantkit.model.linears import is_linear, is_transposed, matrix_shape, plain_linear
from quantkit.model.weight_reads import linears_that_are_read, passes_on

from ..support.compare import assert_close

SMALL: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1}


class Scaled(nn.Linear):
    """A linear and something more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Plain(nn.Module):
    """A linear that knows nothing of `nn.Linear`."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...k,nk->...n", x, self.weight)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_module_computes_says_whether_it_is_a_linear_and_which_axis_is_k(device: str) -> None:
    with torch.device(device):
        for module in (nn.Linear(6, 4), FalconLinear(6, 4), FalconLinear(6, 4, bias=False), Plain(4, 6)):
            assert is_linear(module) and not is_transposed(module) and matrix_shape(module) == (4, 6)
        # Square, so that no shape tells.
        for module in (Conv1D(4, 6), Conv1D(5, 5)):
            assert is_linear(module) and is_transposed(module)
            assert matrix_shape(module) == (module.nf, module.nx)
        router = Llama4Router(transformers.Llama4TextConfig(hidden_size=6, num_local_experts=4))
        for module in (Scaled(6, 4), router, nn.Embedding(6, 4), nn.Bilinear(3, 4, 5), nn.LayerNorm(4)):
            assert not is_linear(module) and not is_transposed(module)


def test_a_plain_linear_computes_the_same() -> None:
    turned = nn.init.normal_(Conv1D(4, 6).weight)
    module = Conv1D(4, 6)
    module.weight.data.copy_(turned)
    plain = plain_linear(module)
    assert plain.weight.is_meta and (plain.in_features, plain.out_features) == (6, 4)
    x = torch.randn(3, 6)
    assert_close(F.linear(x, module.weight.T, module.bias), module(x))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.MambaConfig(**SMALL), {"lm_head", "backbone.layers.0.mixer.dt_proj"}),
        (
            transformers.RwkvConfig(**SMALL, attention_hidden_size=32),
            {"rwkv.blocks.0.attention.output", "rwkv.blocks.0.feed_forward.value"},
        ),
        # Weights that only a branch reads which the config rules out.
        (transformers.BloomConfig(**SMALL, n_head=4), set()),
        (
            transformers.BloomConfig(**SMALL, n_head=4, pretraining_tp=2, slow_but_exact=True),
            {"transformer.h.0.self_attention.dense", "transformer.h.0.mlp.dense_4h_to_h"},
        ),
        # Weights that only training reads, and projections of a name that others' have.
        (transformers.Mamba2Config(**SMALL, num_heads=4, head_dim=16, n_groups=1), {"lm_head"}),
        (transformers.DogeConfig(**SMALL, num_attention_heads=4), set()),
        (transformers.LlamaConfig(**SMALL, num_attention_heads=4), set()),
    ],
    ids=lambda one: type(one).__name__,
)
def test_weights_that_code_reads_are_found_in_its_source(config: Any, expected: set[str]) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    modules = dict(model.named_modules())
    found = {name for name in linears_that_are_read(model) if is_linear(modules[name])}
    assert found == expected


def test_modules_that_a_function_gives_to_another_are_found_in_its_source() -> None:
    setup = transformers.ModernBertForMaskedLM._init_weights
    assert passes_on(setup, "model.layers.0.mlp.Wi") and not passes_on(setup, "W")
    assert not passes_on(transformers.LlamaForCausalLM._init_weights, "model.layers.0.self_attn.q_proj")
