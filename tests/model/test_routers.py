"""Linears that choose experts are found by where their outputs go."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from quantkit.model.routers import choosing_linears

SMALL = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2},
}
#: A linear router of each family, by config class: its name in a block, and fields of the config.
ROUTERS = {
    "PhimoeConfig": ("mlp.router", {"num_local_experts": 4}),
    "Llama4TextConfig": (
        "feed_forward.router",
        {"num_local_experts": 4, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 48},
    ),
    "Gemma4TextConfig": (
        "router.proj",
        {
            **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20},
            **{"global_head_dim": 16, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0},
        },
    ),
    "AfmoeConfig": (
        "mlp.router.gate",
        {"num_experts": 4, "moe_intermediate_size": 20, "num_dense_layers": 1},
    ),
    "HunYuanMoEV1Config": ("mlp.gate.wg", {"head_dim": 16, "num_experts": 4, "moe_topk": 2}),
    "LongcatFlashConfig": (
        "mlp.router.classifier",
        {
            **{"num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 20, "n_routed_experts": 4},
            **{
                "zero_expert_num": 2,
                "moe_topk": 2,
                "kv_lora_rank": 16,
                "q_lora_rank": 16,
                "qk_rope_head_dim": 8,
            },
            **{"qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8},
        },
    ),
    "NllbMoeConfig": (
        "ffn.router.classifier",
        {
            **{"d_model": 32, "num_experts": 4, "encoder_layers": 1, "decoder_layers": 1},
            **{
                "encoder_ffn_dim": 48,
                "decoder_ffn_dim": 48,
                "encoder_sparse_step": 1,
                "decoder_sparse_step": 1,
            },
            **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
        },
    ),
}


def model_of(config: str, fields: dict) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModel.from_config(getattr(transformers, config)(**{**SMALL, **fields}))


@pytest.mark.parametrize("config", ROUTERS)
def test_routers_of_transformers_are_found_and_nothing_else(config):
    leaf, fields = ROUTERS[config]
    found = choosing_linears(model_of(config, fields))
    assert found and all(name.endswith(f".{leaf}") for name in found), found


@pytest.mark.parametrize("config", ["LlamaConfig", "GPT2Config", "MambaConfig", "Qwen2MoeConfig"])
def test_models_without_linear_routers_have_none(config):
    assert not choosing_linears(model_of(config, {}))


def test_lightning_attention_does_not_choose():
    kinds = {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "head_dim": 16}
    model = model_of("MiniMaxConfig", kinds)
    assert type(model.layers[0].self_attn).__name__ == "MiniMaxLightningAttention"
    assert not choosing_linears(model)


class Block(nn.Module):
    """Linears with the names of routers that are none, and a router by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.select, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        self.unused(x)
        weight = self.select(x).softmax(-1).topk(2).values.sum(-1, keepdim=True)
        return weight * self.down(F.silu(self.gate(x)) * self.up(x))


class Called(nn.Module):
    """Calls its block with more than hidden states, so that only the block itself can run alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x, needed):
        return self.inner(x) + needed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Called(), Called()])


class Stack(nn.Module):
    """A router of several linears, and maxima that select nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x):
        logits = self.last(F.gelu(self.first(x)))
        return (logits - logits.max(-1, keepdim=True).values).exp()


class Choosing(Stack):
    def forward(self, x):
        return super().forward(x).max(-1).indices + 1


def test_a_module_that_only_chooses_is_a_router_as_a_whole():
    with torch.device("meta"):
        model = Model()
        model.layers[0], model.layers[1] = Choosing(), Stack()
    assert choosing_linears(model) == {"layers.0.first", "layers.0.last"}


def test_linears_before_a_router_of_another_module_are_none():
    """All linears of the layer lead to the selection, which a module without any makes by its own weight."""

    class Select(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 8))

        def forward(self, x):
            return F.linear(x, self.weight).topk(2).values.sum(-1, keepdim=True)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.select = nn.Linear(8, 8), Select()

        def forward(self, x):
            x = x + self.mix(x)
            return x * self.select(x)

    with torch.device("meta"):
        model = Model()
        model.layers[1] = Layer()
    assert choosing_linears(model) == {"layers.0.inner.select"}


def test_a_router_is_known_by_the_selection_not_by_its_name():
    with torch.device("meta"):
        model = Model()
    assert choosing_linears(model) == {"layers.0.inner.select", "layers.1.inner.select"}


def test_code_of_a_model_that_fails_or_talks_is_let_be(caplog):
    class Failing(Block):
        def forward(self, x):
            raise RuntimeError("not like this")

    with torch.device("meta"):
        model = Model()
        model.layers[1] = Failing()
    assert choosing_linears(model) == {"layers.0.inner.select"}
    assert not caplog.records
