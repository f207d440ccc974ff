"""LoRA of PEFT on packed linears: numbers and gradients of a dense model of the same values."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import quantkit
from quantkit.errors import UsageError
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.replace import packed_modules

from ...support.compare import assert_close, assert_equal
from ...tiny.packed import Tiny, logits_of
from ..trained_adapters import check_loss_falls

peft = pytest.importorskip("peft")

EXAMPLES = Path(__file__).parents[3] / "examples"
IDS = torch.arange(3, 40)[None]


@pytest.fixture
def checkpoint(tiny: Any) -> Tiny:
    found: Tiny = tiny("llama", "int4")
    return found


def loaded(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def adapted(model: Any, targets: Any = "all-linear", **options: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, **options))


def trained(model: Any, steps: int = 2) -> list[torch.Tensor]:
    """Train the adapter; return its gradients in the last step."""
    weights = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    return [one.grad for one in weights]


def test_a_lora_trains_as_on_the_dense_model(checkpoint: Tiny) -> None:
    ours, dense = adapted(loaded(checkpoint.packed)), adapted(checkpoint.dense_model())
    names = [[name for name, one in model.named_parameters() if one.requires_grad] for model in (ours, dense)]
    assert names[0] == names[1] and len(names[0]) == 2 * 7 * 2
    assert not any("lm_head" in name for name in names[0])
    for found, expected in zip(trained(ours), trained(dense), strict=True):
        assert (found - expected).norm() <= 1e-2 * expected.norm()
    assert_close(logits_of(ours.eval(), IDS), logits_of(dense.eval(), IDS), rtol=1e-2, atol=1e-2)


def test_adapters_are_saved_loaded_and_taken_off(checkpoint: Tiny, tmp_path: Path) -> None:
    model = loaded(checkpoint.packed)
    before = logits_of(model, IDS)
    model = adapted(model)
    trained(model)
    expected = logits_of(model.eval(), IDS)
    assert not torch.equal(expected, before)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(loaded(checkpoint.packed), tmp_path).eval()
    assert_equal(logits_of(again, IDS), expected)
    with again.disable_adapter():
        assert_equal(logits_of(again, IDS), before)
    unloaded = again.unload()
    assert type(unloaded.model.layers[0].mlp.up_proj) is PackedLinear
    assert_equal(logits_of(unloaded, IDS), before)
    merged = peft.PeftModel.from_pretrained(
        loaded(checkpoint.packed).dequantize(), tmp_path
    ).merge_and_unload()
    assert_close(logits_of(merged, IDS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "DoraLinearVariant may read or change the dense weight"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' reads or changes the dense weight"),
    ],
)
def test_what_takes_the_dense_weight_is_refused(checkpoint: Tiny, options: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        adapted(loaded(checkpoint.packed), ["q_proj"], **options)


def test_the_weight_of_a_packed_linear_is_refused_as_a_parameter(tiny: Any) -> None:
    model = loaded(tiny("qwen3_moe", "int4").packed)
    module = r"model\.layers\.0\.self_attn\.q_proj\.weight"
    with pytest.raises(UsageError, match=f"'{module}' is packed, as PackedLinear, which takes no LoRA"):
        adapted(model, [], target_parameters=["q_proj.weight"])


def test_linears_beside_packed_experts_train(tiny: Any) -> None:
    model = adapted(loaded(tiny("qwen3_moe", "int4").packed), ["q_proj", "o_proj"])
    assert all(bool(gradient.isfinite().all()) for gradient in trained(model))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_trainer_of_transformers_trains(checkpointing: bool, tmp_path: Path) -> None:
    """The smallest real model learns other tokens than it was trained on."""
    packed = tmp_path / "packed"
    quantkit.quantize(EXAMPLES / "stories260K", packed, format="int4")
    model = adapted(loaded(packed), task_type="CAUSAL_LM")
    rows = [{"input_ids": torch.arange(9 * i % 300, 9 * i % 300 + 64), "labels": None} for i in range(24)]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    options = {"gradient_checkpointing": checkpointing, "use_cpu": True}
    check_loss_falls(model, rows, tmp_path / "run", max_steps=6, **options)
    packed_layer = model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    assert isinstance(packed_layer, PackedLinear) and packed_layer.weight.dtype == torch.int32


def test_merging_is_refused_and_changes_nothing(checkpoint: Tiny) -> None:
    model = adapted(loaded(checkpoint.packed), ["q_proj"])
    trained(model)
    expected = logits_of(model.eval(), IDS)
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(UsageError, match=r"cannot be merged into a packed linear.*model\.dequantize\(\)"):
            merge()
    assert_equal(logits_of(model, IDS), expected)


def test_adapters_are_where_the_scales_are_once_words_are_freed(checkpoint: Tiny) -> None:
    model = loaded(checkpoint.packed)
    for _, module in packed_modules(model):
        if isinstance(module, PackedLinear):
            words = module.words.to("meta")
            module._parameters[module._words_key] = torch.nn.Parameter(words, requires_grad=False)
    devices = {one.device for one in adapted(model).parameters() if one.requires_grad}
    assert devices == {torch.device("cpu")}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_adapter_trains_after_the_model_has_run_on_a_gpu(checkpoint: Tiny) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint.packed, dtype=torch.bfloat16, device_map="cuda")
    ids = IDS.cuda()
    model(input_ids=ids)
    assert any(module.is_freed("weight") for _, module in packed_modules(model))
    model = adapted(model)
    weights = [one for one in model.parameters() if one.requires_grad]
    before = float(model(input_ids=ids, labels=ids).loss)
    optimizer = torch.optim.Adam(weights, lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert all(bool(one.grad.isfinite().all()) for one in weights)
    assert float(model(input_ids=ids, labels=ids).loss) < before


def test_only_packed_linears_are_wrapped_by_quantkit(checkpoint: Tiny) -> None:
    dense = adapted(checkpoint.dense_model(), ["q_proj"])
    layer = dense.base_model.model.model.layers[0].self_attn.q_proj
    assert type(layer) is peft.tuners.lora.layer.Linear
    packed = copy.deepcopy(adapted(loaded(checkpoint.packed), ["q_proj"]))
    assert type(packed.base_model.model.model.layers[0].self_attn.q_proj.base_layer) is PackedLinear
