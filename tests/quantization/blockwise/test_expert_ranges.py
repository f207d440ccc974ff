"""Static scales of experts: each stores its own, from its tokens, and the layer rounds by the widest."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, UsageError
from quantkit.model.experts import DOWN, MATRICES, chosen_rows, is_fused_experts, spec_of
from quantkit.packing.activations import activations_named
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantizing import quantize
from quantkit.runtime.load import load
from quantkit.verification.verify import verify

from ...support.compare import assert_close, assert_equal
from ...tiny.calibrated import data, tokens_of, write

#: Sizes that groups of 16 divide.
SIZES = {
    "mixtral": {"intermediate_size": 96},
    "qwen3_moe": {"moe_intermediate_size": 48},
    "qwen2_moe": {"moe_intermediate_size": 48},
    "gpt_oss": {"intermediate_size": 96},
    "llama4": {"intermediate_size": 96},
}


def original(source: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(source)
    return transformers.AutoModelForCausalLM.from_pretrained(
        source, config=config, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def experts_of(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if is_fused_experts(module)}


def largest_inputs(model: Any, tokens: torch.Tensor) -> dict[tuple[str, int], float]:
    """The largest input of each expert, by parameter and number, with the whole model in memory."""
    found: dict[tuple[str, int], float] = {}

    def seeing(name: str) -> Any:
        def before(module: Any, inputs: Any) -> None:
            spec = spec_of(module)
            (rows, index, *_), _ = chosen_rows(module, inputs)
            for row, numbers in zip(rows, index.tolist(), strict=True):
                for number in numbers:
                    both = {spec.first: row, DOWN: spec.between(module, number, row)}
                    for leaf, x in both.items():
                        key = f"{name}.{leaf}", number
                        found[key] = max(found.get(key, 0.0), float(x.abs().max()))

        return before

    for name, module in experts_of(model).items():
        module.register_forward_pre_hook(seeing(name))
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    return found


def stored_scales(out: Any, part: str) -> dict[tuple[str, int], list[float]]:
    """The numbers that each expert stores for its matrices, by parameter and number."""
    checkpoint, model = Checkpoint.open(out), load(out, dtype=torch.float32, device="cpu")
    found = {}
    for name, module in model.named_modules():
        for leaf in MATRICES:
            tensor = getattr(module, f"{leaf}_{part}", None)
            if tensor is not None:
                found |= {(f"{name}.{leaf}", number): row.tolist() for number, row in enumerate(tensor)}
    stored = [one for one in checkpoint.tensors if re.search(rf"experts\.\d+\..*\.{part}$", one)]
    assert len(stored) == sum(map(len, found.values()))
    return found


@pytest.mark.parametrize(
    ("family", "scheme", "part", "activations"),
    [
        ("mixtral", "FP8", "input_scale", "fp8-static"),
        ("qwen3_moe", "FP8", "input_scale", "fp8-static"),
        ("mixtral", "NVFP4", "input_global_scale", "nvfp4"),
        ("qwen3_moe", "NVFP4", "input_global_scale", "nvfp4"),
        ("gpt_oss", "W8A8_STATIC", "input_scale", "int8-static"),
        ("llama4", "FP8", "input_scale", "fp8-static"),
    ],
)
def test_each_expert_stores_the_scale_of_its_tokens(tmp_path, text, family, scheme, part, activations):
    source, out = write(tmp_path, family, num_hidden_layers=2, **SIZES[family]), tmp_path / "out"
    quantize(source, out, scheme=scheme, calibration=data(text))
    rounds, stored = activations_named(activations), stored_scales(out, part)
    expected = largest_inputs(original(source), tokens_of(source, text))
    assert expected.keys() <= stored.keys() and len(expected) > len(stored) // 2
    for parameter, number in stored.keys() - expected.keys():
        seen = [value for key, value in expected.items() if key[0] == parameter]
        expected[parameter, number] = max(seen)
    assert len({one for of_one in stored.values() for one in of_one}) > len(stored) // 2
    for key, numbers in stored.items():
        right = torch.tensor([rounds.fit(expected[key]).stored] * len(numbers))
        assert_close(torch.tensor(numbers), right, rtol=1e-5, atol=0, name=str(key))
    assert not any(check.problems for check in verify(out, reload=False))


class Rounding(torch.nn.Module):
    """Experts whose inputs are rounded by one scheme for all of a layer, one pair of token and expert at a
    time."""

    def __init__(self, module: Any, weights: Any, schemes: Any) -> None:
        super().__init__()
        self.module, self.weights, self.schemes = module, weights, schemes

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for token, numbers in enumerate(index.tolist()):
            for slot, number in enumerate(numbers):
                first = F.linear(
                    self.schemes["gate_up_proj"].round(x[token]), self.weights["gate_up_proj"][number]
                )
                gate, up = first.chunk(2)
                between = self.schemes[DOWN].round(F.silu(gate) * up)
                y[token] += weights[token, slot] * F.linear(between, self.weights[DOWN][number])
        return y


@pytest.mark.parametrize("method", ["mse", "gptq"])
@pytest.mark.parametrize(
    ("family", "scheme", "part", "activations"),
    [
        ("mixtral", "FP8", "input_scale", "fp8-static"),
        ("qwen3_moe", "NVFP4", "input_global_scale", "nvfp4"),
    ],
)
def test_a_layer_rounds_by_the_widest_of_its_experts(
    tmp_path, text, family, scheme, part, activations, method
):
    source, out = write(tmp_path, family, num_hidden_layers=2, **SIZES[family]), tmp_path / "out"
    # Only experts, so that nothing else is rounded.
    quantize(source, out, scheme=scheme, method=method, rules=("*self_attn*=keep",), calibration=data(text))
    packed, twin, stored = (
        load(out, dtype=torch.float32, device="cpu"),
        original(source),
        stored_scales(out, part),
    )
    rounds = activations_named(activations)
    for name, module in experts_of(twin).items():
        schemes = {}
        for leaf in ("gate_up_proj", DOWN):
            numbers = [one for key, of_one in stored.items() if key[0] == f"{name}.{leaf}" for one in of_one]
            # As vLLM: the largest scale, which is the smallest factor of NVFP4.
            schemes[leaf] = rounds.bind(max(numbers) if part == "input_scale" else min(numbers))
        weights = packed.get_submodule(name).dense_weights(torch.float32)
        twin.set_submodule(name, Rounding(module, weights, schemes))
    tokens = tokens_of(source, text)[:2]
    with torch.no_grad():
        found, right = packed(tokens).logits, twin(tokens).logits
        assert_close(found, right, rtol=1e-4, atol=1e-4)
        for name in experts_of(original(source)):
            twin.get_submodule(name).schemes = dict.fromkeys(("gate_up_proj", DOWN), rounds.fit(1e-3))
        # The test sees the scales.
        assert (twin(tokens).logits - right).abs().max() > 1e-2


def test_experts_without_tokens_store_the_largest_of_the_layer(tmp_path, text):
    more = {"num_hidden_layers": 2, "num_local_experts": 16, **SIZES["mixtral"]}
    source, out = write(tmp_path, "mixtral", **more), tmp_path / "out"
    few = data(text, samples=1, length=4)
    result = quantize(source, out, scheme="FP8", calibration=few)
    expected = largest_inputs(original(source), tokens_of(source, text, samples=1, length=4))
    stored, fit = stored_scales(out, "input_scale"), activations_named("fp8-static").fit
    unchosen = [key for key in stored if key not in expected]
    counts = [
        len([key for key in unchosen if key[0] == f"model.layers.{i}.mlp.experts.down_proj"]) for i in (0, 1)
    ]
    assert all(8 <= count < 16 for count in counts)
    for parameter, _ in unchosen:
        largest = fit(max(value for key, value in expected.items() if key[0] == parameter)).stored
        assert {
            round(one / largest, 5) for key in unchosen if key[0] == parameter for one in stored[key]
        } == {1.0}
    assert result.plan.warnings == (
        f"no calibration token chose {counts[0]} experts of model.layers.0.mlp.experts, {sum(counts)} in 2 "
        "layers: the scales of their inputs are the largest of their layer. More calibration samples give "
        "them their own.",
    )


def test_experts_of_which_none_has_inputs_are_refused(tmp_path, text):
    source = write(tmp_path, "qwen3_moe", num_hidden_layers=1, **SIZES["qwen3_moe"])
    tensors = load_file(source / "model.safetensors")
    # Without up, all inputs of down are zero.
    zeros = {name: tensor * 0 for name, tensor in tensors.items() if "up_proj" in name}
    assert zeros
    save_file(tensors | zeros, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError) as error:
        quantize(source, tmp_path / "out", scheme="FP8", calibration=data(text))
    assert str(error.value) == (
        "scales of the inputs of 'model.layers.0.mlp.experts.down_proj' are measured on the calibration "
        "data, and the largest is 0.0. Give data on which it runs with --calibration, choose scales per "
        "token (--scheme FP8_DYNAMIC), or keep it dense with --rule 'model.layers.0.mlp.experts.*=keep'."
    )


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_saved_models_keep_the_numbers(tmp_path, text, family):
    source, out = write(tmp_path, family, num_hidden_layers=1, **SIZES[family]), tmp_path / "out"
    quantize(source, out, scheme="FP8", calibration=data(text))
    load(out, dtype=torch.float32, device="cpu").save_pretrained(tmp_path / "again")
    before, after = stored_scales(out, "input_scale"), stored_scales(tmp_path / "again", "input_scale")
    assert before == after and before
    first, second = (load(one, dtype=torch.float32, device="cpu") for one in (out, tmp_path / "again"))
    tokens = tokens_of(source, text)[:1]
    with torch.no_grad():
        assert_equal(first(tokens).logits, second(tokens).logits)


def test_a_missing_number_is_named(tmp_path, text):
    source, out = write(tmp_path, "qwen3_moe", num_hidden_layers=1, **SIZES["qwen3_moe"]), tmp_path / "out"
    quantize(source, out, scheme="FP8", calibration=data(text), check=False)
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.0.mlp.experts.2.up_proj.input_scale"
    del tensors[name]
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(f"tensor '{name}' is missing")):
        load(out, device="cpu")


def test_distilled_experts_round_by_the_scales_of_the_original(tmp_path, text):
    source, out = write(tmp_path, "mixtral", num_hidden_layers=1, **SIZES["mixtral"]), tmp_path / "out"
    options = {"method": "distill", "distillation": DistillOptions(steps=1)}
    quantize(source, out, scheme="FP8", calibration=data(text), **options)
    quantize(source, tmp_path / "plain", scheme="FP8", calibration=data(text))
    assert stored_scales(out, "input_scale") == stored_scales(tmp_path / "plain", "input_scale")
    assert not any(check.problems for check in verify(out, reload=False))


@pytest.mark.parametrize(
    ("rules", "container"), [((), "quantkit"), (("*.experts.*=fp8:tensor",), "compressed-tensors")]
)
def test_engines_read_experts_with_one_scale_per_tensor(tmp_path, text, rules, container):
    source, out = write(tmp_path, "qwen3_moe", num_hidden_layers=1, **SIZES["qwen3_moe"]), tmp_path / "out"
    planned = quantize(source, out, scheme="FP8", rules=rules, calibration=data(text)).plan
    config = QuantizationConfig.from_dict(Checkpoint.open(out).config["quantization_config"])
    assert config.container == planned.config.container == container
    if not rules:
        assert planned.not_portable[0].endswith(
            "compressed-tensors has fp8-e4m3 channel with bfloat16 scales and fp8-e4m3 tensor inputs for "
            "experts, which none of vLLM, SGLang, transformers reads; give the experts one scale per "
            "tensor: --rule '*.experts.*=fp8:tensor'"
        )
