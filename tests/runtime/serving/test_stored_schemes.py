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
