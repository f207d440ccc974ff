"""Folding: which rows feed which columns, and what is divided multiplies out."""

from typing import Any

import pytest
import torch
import transformers

from quantkit.model.architectures import LLAMA_LIKE
from quantkit.quantization.blockwise.fold_scales import FOLDS, Factors, Fold, fold_into, shared_rows

from ...support.compare import assert_close, assert_equal
from ...tiny.calibrated import write

#: What the folds of each family go into.
ATTENTION = {"input_layernorm", "self_attn.v_proj"}
DENSE = {*ATTENTION, "post_attention_layernorm", "mlp.up_proj"}
FOLDED: dict[str, set[str]] = {
    "llama": DENSE,
    "llama-biases": DENSE,
    "tied": DENSE,
    "mistral": DENSE,
    "qwen2": DENSE,
    "qwen2-window": DENSE,
    "qwen3": DENSE,
    "granite": DENSE,
    "smollm3": DENSE,
    "phi3": {"input_layernorm", "post_attention_layernorm"},
    "glm": {*ATTENTION, "post_attention_layernorm"},
    "mixtral": ATTENTION,
    "qwen3_moe": ATTENTION,
    "qwen2_moe": {*ATTENTION, "mlp.shared_expert.up_proj"},
}


def test_query_heads_of_a_group_share_the_rows_of_their_key_value_head() -> None:
    config = {"hidden_size": 12, "num_attention_heads": 6, "head_dim": 2}
    value, up = (
        next(fold for fold in FOLDS if fold.producer == name) for name in ("self_attn.v_proj", "mlp.up_proj")
    )
    assert shared_rows(value, 4, 12, config).tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    assert shared_rows(value, 4, 12, {**config, "head_dim": None}).tolist() == [
        0,
        1,
        0,
        1,
        0,
        1,
        2,
        3,
        2,
        3,
        2,
        3,
    ]
    assert shared_rows(up, 5, 5, config).tolist() == list(range(5))


def test_what_is_folded_multiplies_out_exactly() -> None:
    stored, scales = torch.randn(40).to(torch.bfloat16), torch.rand(40) * 5 + 0.1
    stored[7] = 0
    divided, exact = fold_into(stored, scales)
    assert divided.dtype == torch.bfloat16
    assert_close(divided.float() * exact, stored.float(), rtol=1e-6, atol=1e-8)
    assert exact[7] == 1
    assert_close(exact, torch.where(stored == 0, 1.0, scales), rtol=0.01, atol=1e-8)


def test_factors_scale_columns_and_rows() -> None:
    weight = torch.randn(3, 4).to(torch.bfloat16)
    rows, columns = torch.rand(3), torch.rand(4)
    found = Factors(columns, rows).apply(weight)
    assert_close(found, weight.float() * columns * rows[:, None], rtol=1e-5, atol=1e-8)
    assert_equal(Factors().apply(weight), weight.float())


def folds_of(layer: Any) -> list[Fold]:
    """Those whose operations a block has."""
    names = dict(layer.named_modules())
    return [fold for fold in FOLDS if {fold.producer, *fold.consumers} <= set(names)]


def fold(layer: Any, one: Fold, config: dict[str, Any], powers: bool) -> None:
    """Scale the input features of a fold's consumers, by powers of two or anything else."""
    producer, consumers = layer.get_submodule(one.producer), [layer.get_submodule(n) for n in one.consumers]
    rows, columns = producer.weight.shape[0], consumers[0].weight.shape[1]
    scales = torch.randint(-6, 7, (rows,)).float().exp2() if powers else torch.randn(rows).mul(2).exp()
    shared = shared_rows(one, rows, columns, config)
    parameter = getattr(producer, one.changed.rpartition(".")[2])
    if not one.is_norm:
        producer.weight.data = Factors(rows=1 / scales).apply(producer.weight.data)
    if parameter is not None:
        parameter.data, exact = fold_into(parameter.data, scales)
        scales = exact if one.is_norm else scales
    for consumer in consumers:
        consumer.weight.data = Factors(columns=scales[shared]).apply(consumer.weight.data)


def test_every_family_that_is_folded_is_tested(tmp_path) -> None:
    types = {transformers.AutoConfig.from_pretrained(write(tmp_path, family)).model_type for family in FOLDED}
    assert types == LLAMA_LIKE


@pytest.mark.parametrize("powers", [True, False], ids=["powers", "others"])
@pytest.mark.parametrize("family", FOLDED)
@pytest.mark.sampled(2)
def test_a_folded_model_computes_what_the_original_does(tmp_path, family, powers) -> None:
    """Before any rounding: with biases, tied embeddings, norms of q and k, windows, partial rotary."""
    source = write(tmp_path, family, torch.float32)
    original, model = (
        transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, experts_implementation="eager"
        ).eval()
        for _ in range(2)
    )
    torch.manual_seed(1)
    producers = set()
    with torch.no_grad():
        for layer in model.model.layers:
            for one in folds_of(layer):
                fold(layer, one, model.config.to_dict(), powers)
                producers.add(one.producer)
        tokens = torch.randint(0, 96, (2, 24))
        expected, found = (m(input_ids=tokens).logits for m in (original, model))
    assert producers == FOLDED[family]
    before, after = (dict(m.named_parameters()) for m in (original, model))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert (found - expected).abs().max() <= (0.0 if powers else 2e-5) * expected.abs().max()
