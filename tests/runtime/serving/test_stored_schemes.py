"""Schemes of experts are found by the names that a layer gives, or by usual ones."""

import pytest
from transformers import MixtralConfig

from quantkit.checkpoint.engines import VLLM
from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.errors import UsageError
from quantkit.packing.schemes import scheme
from quantkit.runtime.serving.stored_schemes import StoredSchemes

PREFIX = "model.layers.0.block_sparse_moe.experts"
INT3 = scheme("int3")
INT3_ZEROS = scheme("int3", group_size=32, zero_point="integer")


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


def test_a_matrix_of_which_the_engine_reorders_some_tensors_is_refused() -> None:
    names = [f"l.0.{one}_proj.weight{end}" for one in "qv" for end in ("", "_scale", "_zero_point", "_shape")]
    config, llama4 = QuantizationConfig("quantkit", INT3_ZEROS, {}), {"model_type": "llama4"}
    StoredSchemes(config, names).check_rows(VLLM)
    StoredSchemes(config, [name for name in names if "_zero" not in name], llama4).check_rows(VLLM)
    expected = (
        r"^'l\.0\.q_proj' is int3 g32 asym bfloat16: vLLM reorders its rows as it loads, and its "
        r"weight_zero_point stays as it is\. Quantize the model with q_proj and k_proj dense"
    )
    with pytest.raises(UsageError, match=expected):
        StoredSchemes(config, names, llama4).check_rows(VLLM)
    bloom = QuantizationConfig("quantkit", scheme("nvfp4"), {})
    names = [f"h.0.query_key_value.weight{end}" for end in ("", "_scale", "_global_scale", "_shape")]
    with pytest.raises(
        UsageError, match="reorders its rows as it loads, and its weight_global_scale has none"
    ):
        StoredSchemes(bloom, names, {"model_type": "bloom"}).check_rows(VLLM)
