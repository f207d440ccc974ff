"""`quantkit merge` of a LoRA of fused experts gives the bits of quantizing what PEFT merges."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import quantkit
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.model_record import ModelRecord
from quantkit.errors import CheckpointError
from quantkit.merging import merge

from ..tiny.calibrated import write
from .test_merging import changed, make_adapter, tensors_of
from .test_merging_calibration import characters

peft = pytest.importorskip("peft", reason="adapters are made by PEFT, of the extra 'test'")

INT4: dict[str, Any] = {"format": "int4", "group_size": 32}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
SHARED = ["gate_proj", "up_proj", "down_proj", "shared_expert_gate"]
#: Targets of the adapter that has all linears of a family.
ALL: dict[str, dict[str, Any]] = {
    # PEFT doubles the rank of gate and up.
    "mixtral": {"target_modules": "all-linear"},
    "qwen2_moe": {
        "target_modules": [*ATTENTION, *SHARED],
        "target_parameters": [*EXPERTS, "mlp.gate.weight"],
        "rank_pattern": {"experts.down_proj": 2, "gate.weight": 1},
        "alpha_pattern": {"down_proj": 16, "mlp.gate": 2},
    },
    # Stored transposed in one tensor, with rows of gate and up in turn.
    "gpt_oss": {"target_modules": ATTENTION, "target_parameters": EXPERTS, "use_rslora": True},
    "qwen3_moe": {"target_modules": [], "target_parameters": EXPERTS[1:]},
}


@pytest.fixture(autouse=True)
def small_products(one_thread: None, few_windows: None) -> None:
    """Also where no command runs."""


def adapted(work: Path, source: Path, targets: dict[str, Any]) -> Path:
    """An adapter of `source` with factors whose products are exact; also writes what PEFT merges."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", **targets)
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    for name, one in model.named_parameters():
        if "lora_" in name:
            one.data = torch.randint(-2, 3, one.shape, generator=generator) / 16
    model.save_pretrained(work / "adapter")
    model.merge_and_unload().save_pretrained(work / "dense")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, work / "dense" / name)
    return work / "adapter"


def differing(one: Path, other: Path) -> set[str]:
    tensors, others = tensors_of(one), tensors_of(other)
    assert tensors.keys() == others.keys()
    return {
        name for name in tensors if not torch.equal(*(x[name].view(torch.uint8) for x in (tensors, others)))
    }


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, "mse") for family in ALL),
        *(("mixtral", "gptq"), ("qwen2_moe", "imatrix"), ("gpt_oss", "best")),
    ],
)
def test_experts_get_the_bits_of_quantizing_what_peft_merges(
    family: str, method: str, tmp_path: Path
) -> None:
    source, options = write(tmp_path, family, torch.float32), {**INT4, "method": method, "check": False}
    if method != "mse":
        options["calibration"] = characters(tmp_path / "text.txt")
    adapter = adapted(tmp_path, source, ALL[family])
    quantkit.quantize(source, tmp_path / "packed", **options)
    quantkit.quantize(tmp_path / "dense", tmp_path / "expected", **options)
    result = merge(tmp_path / "packed", adapter, tmp_path / "out", check=False)
    assert differing(tmp_path / "out", tmp_path / "expected") == set()
    small = {name for name, one in result.methods.items() if one is None}
    assert all(name.endswith((".gate", "shared_expert_gate")) for name in small)
    assert {one for one in result.methods.values() if one is not None} == {method}
    parameter = next(name for name in result.methods if name.endswith("experts.down_proj"))
    layers = [ModelRecord.from_manifest(read_manifest(tmp_path / one)).layers for one in ("out", "expected")]
    one, other = (of[parameter] for of in layers)
    assert one.reason == "default, merged with a LoRA" and one.expert_tokens == other.expert_tokens
    assert one.relative_error == pytest.approx(other.relative_error, rel=1e-6)
    assert (one.output_error, one.damping, one.note) == (other.output_error, other.damping, other.note)


def test_what_the_adapter_leaves_alone_stays(tmp_path: Path) -> None:
    source = write(tmp_path, "mixtral", torch.float32)
    adapter = adapted(tmp_path, source, {"target_modules": [], "target_parameters": EXPERTS[:1]})
    data = characters(tmp_path / "text.txt")
    quantkit.quantize(source, tmp_path / "packed", scheme="FP8", method="gptq", calibration=data)
    result = merge(tmp_path / "packed", adapter, tmp_path / "out", check=False)
    found = differing(tmp_path / "packed", tmp_path / "out")
    assert {name.rpartition(".")[2] for name in found} == {"weight", "weight_scale"}
    assert {name.split(".")[-2] for name in found} == {"w1", "w3"} and len(result.methods) == 3
    assert result.copied == len(tensors_of(source.parent / "packed")) - 3 * 4 * 2 * 2


def test_dense_experts_get_the_sum(tmp_path: Path) -> None:
    source = write(tmp_path, "mixtral", torch.float32)
    adapter = adapted(tmp_path, source, {"target_modules": ["q_proj"], "target_parameters": EXPERTS})
    options = {**INT4, "rules": ("*.experts.*=keep",), "check": False}
    quantkit.quantize(source, tmp_path / "packed", **options)
    quantkit.quantize(tmp_path / "dense", tmp_path / "expected", **options)
    merge(tmp_path / "packed", adapter, tmp_path / "out", check=False)
    assert differing(tmp_path / "out", tmp_path / "expected") == set()


def test_an_adapter_that_was_trained_beside_packed_experts_is_kept(tmp_path: Path) -> None:
    source = write(tmp_path, "qwen3_moe", torch.float32)
    quantkit.quantize(source, tmp_path / "packed", **INT4, check=False)
    targets = {"target_modules": ATTENTION, "target_parameters": EXPERTS}
    ids = torch.arange(90, 30, -1)[None]
    adapter = make_adapter(tmp_path / "adapter", tmp_path / "packed", ids, **targets)
    text = tmp_path / "text.txt"
    characters(text)
    result = merge(tmp_path / "packed", adapter, tmp_path / "out", text=text)
    assert result.before is not None and result.after is not None
    assert result.before.kl_mean is not None and result.after.kl_mean is not None
    assert result.after.kl_mean < 1.5 * result.before.kl_mean
    lost = merge(tmp_path / "packed", adapter, tmp_path / "lost", text=text, from_packed=True)
    assert lost.text is not None and len(lost.methods) == len(result.methods) == 3 * 6


@pytest.mark.parametrize(
    ("family", "parameters", "options", "reason"),
    [
        (
            "gpt_oss",
            ["gate_up_proj", "gate_up_proj_bias"],
            {},
            r"experts\.gate_up_proj_bias' cannot be merged: it is no matrix of the experts\. Merge it with",
        ),
        (
            "llama4",
            EXPERTS,
            {},
            r"experts\.gate_up_proj' cannot be merged: Llama4TextExperts stores its matrices transposed",
        ),
        (
            "gpt_oss",
            EXPERTS,
            {"rules": ("*.experts.*=keep",)},
            r"experts\.gate_up_proj' is dense, with all experts in one tensor.*\. Merge it with PEFT into",
        ),
        (
            "gpt2",
            ["c_proj.weight"],
            {"rules": ("transformer.*=keep",), "lm_head": "int8"},
            r"c_proj' is stored transposed, and 'target_parameters' names its weight.*\. Merge it with PEFT",
        ),
    ],
)
def test_parameters_that_cannot_be_merged_are_refused(
    family: str, parameters: list[str], options: Any, reason: str, tmp_path: Path
) -> None:
    source = write(tmp_path, family, torch.float32)
    quantkit.quantize(source, tmp_path / "packed", **{**INT4, **options}, check=False)
    adapter = adapted(tmp_path, source, {"target_modules": [], "target_parameters": parameters})
    with pytest.raises(CheckpointError, match=reason):
        merge(tmp_path / "packed", adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_whose_config_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path, "qwen3_moe", torch.float32)
    quantkit.quantize(source, tmp_path / "packed", **INT4, check=False)
    adapter = adapted(tmp_path, source, {"target_modules": [], "target_parameters": EXPERTS})
    for at, (fields, reason) in enumerate(
        [
            ({"target_parameters": EXPERTS[:1]}, "has factors of 2 parameters, and .* names 1 of it"),
            ({"target_parameters": "experts"}, "'target_parameters' is 'experts'; expected a list of names"),
            ({"r": 2}, "has rank 4, and adapter_config.json says 2"),
        ]
    ):
        other = changed(adapter, tmp_path / f"changed-{at}", **fields)
        with pytest.raises(CheckpointError, match=reason):
            merge(tmp_path / "packed", other, tmp_path / "out")
    other = changed(adapter, tmp_path / "other")
    file = other / "adapter_model.safetensors"
    factors = load_file(file)
    for turned in ("lora_A", "lora_B"):
        name = next(name for name in factors if turned in name)
        save_file({**factors, name: factors[name][:-1].contiguous()}, file)
        with pytest.raises(CheckpointError, match=r"expected lora_A \[r, K\].* of 4 experts|are for \["):
            merge(tmp_path / "packed", other, tmp_path / "out")
    dense = json.loads((adapter / "adapter_config.json").read_text())
    assert sorted(dense["target_parameters"]) == sorted(EXPERTS) and not (tmp_path / "out").exists()
