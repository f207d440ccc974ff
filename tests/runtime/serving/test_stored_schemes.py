"""Schemes of experts are found by the names that a layer gives, or by usual ones."""

import pytest
from transformers import MixtralConfig

from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.packing.schemes import scheme
from quantkit.runtime.serving.stored_schemes import StoredSchemes

PREFIX = "model.layers.0.block_sparse_moe.experts"
INT3 = scheme("int3")


def stored(*matrices: str) -> StoredSchemes:
    """Schemes of a Mixtral of one layer whose experts have these packed matrices."""
    config = MixtralConfig(
        num_hidden_layers=1,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        vocab_size=64,
        architectures=["MixtralForCausalLM"],
    )
    tensors = [f"{PREFIX}.{expert}.{name}.weight_scale" for expert in range(2) for name in matrices]
    return StoredSchemes(QuantizationConfig("quantkit", INT3, {}), tensors, config.to_dict())


@pytest.mark.parametrize("given", [(), ("w1", "w3", "w2")])
def test_packed_experts_are_found(given: tuple[str, ...]) -> None:
    found = stored("w1", "w3", "w2").experts(PREFIX, given)
    assert [one for _, one in found] == [INT3, INT3, INT3]
    assert [name.rpartition(".")[2] for name, _ in found] == ["gate_up_proj", "gate_up_proj", "down_proj"]


@pytest.mark.parametrize("given", [(), ("w1", "w3", "w2")])
def test_dense_experts_have_no_scheme(given: tuple[str, ...]) -> None:
    assert list(stored().experts(PREFIX, given)) == [(PREFIX, None)]


def test_linears_under_another_name_of_their_owner_are_found() -> None:
    names = ("l.0.mamba.in_proj", "l.0.attn.o_proj", "l.0.mlp.q_proj", "l.0.mlp.k_proj", "l.0.mlp.v_proj")
    tensors = [f"{name}.weight_scale" for name in names]
    schemes = StoredSchemes(QuantizationConfig("quantkit", INT3, {}), [*tensors, "l.0.dense.o_proj.weight"])
    assert schemes.linears("l.0.mixer.in_proj", {}) == [("l.0.mamba.in_proj", INT3)]
    assert [name for name, _ in schemes.linears("l.0.mixer.qkv_proj", {})] == list(names[2:])
    # The files have this one, dense, and none or two of those.
    assert schemes.linears("l.0.dense.o_proj", {}) == [("l.0.dense.o_proj", None)]
    assert schemes.linears("l.0.mixer.router", {}) == [("l.0.mixer.router", None)]
    both = StoredSchemes(
        QuantizationConfig("quantkit", INT3, {}), [*tensors, "l.0.other.in_proj.weight_scale"]
    )
    assert both.linears("l.0.mixer.in_proj", {}) == [("l.0.mixer.in_proj", None)]
