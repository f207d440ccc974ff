"""Static scales of inputs: measured on the original model, stored beside each weight, read by quantkit."""

import itertools
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from quantkit.checkpoint.manifest import read_manifest
from quantkit.errors import UsageError
from quantkit.packing.activations import activations_named
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantizing import quantize
from quantkit.recipes.recipe import Choice, Recipe, Rule
from quantkit.runtime.cache.cache_name import CACHE
from quantkit.runtime.cache.kv_cache import PackedCache, PackedLayer
from quantkit.runtime.cache.stored_scales import stored_scales
from quantkit.runtime.load import load
from quantkit.targets.packed_source import open_packed
from quantkit.verification.verify import verify

from ...support.compare import assert_close, assert_equal
from ...tiny.calibrated import LINEARS, data, files_of, interrupted_at, tokens_of, write

LAYERS = [f"model.layers.{layer}.{name}" for layer, name in itertools.product(range(2), LINEARS)]


def largest_inputs(source, text, modules):
    """The largest magnitude of the inputs of each linear, with the whole model in memory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    found = {}

    def seeing(name):
        def before(_, inputs):
            found[name] = float(inputs[0].abs().max())

        return before

    for name in modules:
        model.get_submodule(name).register_forward_pre_hook(seeing(name))
    with torch.no_grad():
        model(input_ids=tokens_of(source, text), use_cache=False)
    return found


@pytest.mark.parametrize(
    ("scheme", "part", "activations", "method"),
    [
        ("FP8", "input_scale", "fp8-static", "mse"),
        ("NVFP4", "input_global_scale", "nvfp4", "mse"),
        ("W8A8_STATIC", "input_scale", "int8-static", "mse"),
        ("FP8", "input_scale", "fp8-static", "gptq"),
        ("W8A8_STATIC", "input_scale", "int8-static", "gptq"),
        ("FP8", "input_scale", "fp8-static", "distill"),
    ],
)
def test_scales_are_those_of_the_largest_inputs(tmp_path, text, scheme, part, activations, method):
    source, out = write(tmp_path, "llama", num_hidden_layers=2, intermediate_size=96), tmp_path / "out"
    more = {"distillation": DistillOptions(steps=1)} if method == "distill" else {}
    quantize(source, out, scheme=scheme, method=method, calibration=data(text), **more)
    rounds, stored = activations_named(activations), load_file(out / "model.safetensors")
    expected = largest_inputs(source, text, LAYERS)
    assert {name for name in stored if "input_" in name and "norm" not in name} == {
        f"{name}.{part}" for name in LAYERS
    }
    for name in LAYERS:
        found = stored[f"{name}.{part}"]
        assert found.dtype == torch.float32 and found.shape == (1,)
        assert_close(found, torch.tensor([rounds.fit(expected[name]).stored]), rtol=1e-5, atol=0, name=name)
    # The model is that of its dequantized weights with rounded inputs.
    packed = load(out, dtype=torch.float32, device="cpu")
    twin = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    # Distillation trains the norms too.
    twin.load_state_dict(
        {name: one for name, one in packed.state_dict().items() if "norm" in name}, strict=False
    )
    for name in LAYERS:
        linear, inputs = twin.get_submodule(name), rounds.bind(float(stored[f"{name}.{part}"]))
        linear.weight.data = packed.get_submodule(name).packed.dequantize(torch.float32)
        linear.register_forward_pre_hook(lambda _, x, inputs=inputs: inputs.round(x[0]))
    tokens = tokens_of(source, text)[:2]
    with torch.no_grad():
        assert_close(packed(tokens).logits, twin(tokens).logits, rtol=1e-4, atol=1e-4)
    assert not any(check.problems for check in verify(out, reload=False))
    manifest = read_manifest(out)
    assert "stored" not in json.dumps(manifest["run"]["recipe"])


@pytest.mark.parametrize("stop", [2, 12, 25])
def test_an_interrupted_run_measures_the_same_again(tmp_path, text, stop):
    source, whole, out = (
        write(tmp_path, "llama", num_hidden_layers=2, intermediate_size=96),
        tmp_path / "whole",
        tmp_path / "out",
    )
    options = {"scheme": "FP8", "method": "gptq", "calibration": data(text)}
    quantize(source, whole, **options)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, progress=interrupted_at(stop), **options)
    quantize(source, out, resume=True, **options)
    assert files_of(out) == files_of(whole)


def test_a_static_head_has_a_scale_too(tmp_path, text):
    source, out = write(tmp_path, "llama", num_hidden_layers=1), tmp_path / "out"
    static = Choice("int8", activations="fp8-static")
    quantize(
        source, out, recipe=Recipe(Choice(keep=True), (Rule("lm_head", static),)), calibration=data(text)
    )
    found = load_file(out / "model.safetensors")["lm_head.input_scale"]
    expected = largest_inputs(source, text, ["lm_head"])["lm_head"]
    assert_close(found, torch.tensor([expected / 448]), rtol=1e-5, atol=0)


def test_what_has_no_range_is_refused(tmp_path, text):
    source = write(tmp_path, "llama", num_hidden_layers=1)
    with pytest.raises(
        UsageError, match=r"measured before 'smoothquant' divides the inputs. Choose scales per"
    ):
        quantize(source, tmp_path / "a", scheme="FP8", method="smoothquant", calibration=data(text))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
def test_kv_scales_are_those_of_the_largest_keys_and_values(tmp_path, text, family):
    source, out = write(tmp_path, family, num_hidden_layers=2), tmp_path / "out"
    quantize(source, out, format="int8", kv_scales="fp8", calibration=data(text))
    stored = load_file(out / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokens = tokens_of(source, text)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(input_ids=tokens, use_cache=True, **{CACHE: cache})
    for index, layer in enumerate(cache.layers):
        for name, states in (("k_scale", layer.keys), ("v_scale", layer.values)):
            found = stored[f"model.layers.{index}.self_attn.{name}"]
            assert found.shape == (1,) and found.dtype == torch.float32
            assert_close(found, states.abs().amax()[None] / 448, rtol=1e-5, atol=0, name=f"{index} {name}")
    assert not any(check.problems for check in verify(out, reload=False))
    packed = load(out, dtype=torch.float32, device="cpu")
    found = stored_scales(packed)
    assert sorted(found) == [0, 1]
    own = PackedCache.of_model(packed, "fp8")
    index = next(at for at, layer in enumerate(own.layers) if isinstance(layer, PackedLayer))
    keys, scale = torch.randn(2, 2, 5, 16), found[index][0].scale
    expected = (keys / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    got, _ = own.update(keys, keys, index)
    assert_equal(got, expected)
    # Other formats find scales of their own.
    other = PackedCache.of_model(packed, "int8").update(keys, keys, index)[0]
    assert not torch.equal(other, expected)


def test_measured_scales_are_no_tensors_of_an_export(tmp_path, text):
    source, out = write(tmp_path, "llama", num_hidden_layers=1, intermediate_size=96), tmp_path / "out"
    quantize(source, out, format="int4", group_size=32, kv_scales="fp8", calibration=data(text))
    _, structure = open_packed(out)
    view, _ = open_packed(out)
    assert not any(name.endswith(("_scale", "_packed")) for name in view.tensors)
    assert "model.layers.0.self_attn.k_proj" in structure.linears


def test_kv_scales_need_packed_keys_and_values(tmp_path, text):
    source = write(tmp_path, "llama", num_hidden_layers=1)
    with pytest.raises(UsageError) as error:
        quantize(source, tmp_path / "a", kv_scales="fp8", rules=("*k_proj=keep",), calibration=data(text))
    assert str(error.value) == (
        "--kv-scales stores scales beside the packed k_proj and v_proj of each layer, and no k_proj and "
        "v_proj are packed. Pack them, or leave out --kv-scales: engines then take 1 for each scale."
    )
    other = write(tmp_path, "gpt2")
    with pytest.raises(UsageError, match=r"and this model has no linears of these names\. Pack"):
        quantize(other, tmp_path / "a", kv_scales="fp8", calibration=data(text))
    with pytest.raises(UsageError, match=r"unknown format of KV scales 'int8'; known are fp8"):
        quantize(source, tmp_path / "a", kv_scales="int8", calibration=data(text))


def test_saved_models_keep_the_number(tmp_path, text):
    source, out, again = write(tmp_path, "llama", num_hidden_layers=1), tmp_path / "out", tmp_path / "again"
    quantize(source, out, scheme="FP8", kv_scales="fp8", calibration=data(text))
    load(out, dtype=torch.float32, device="cpu").save_pretrained(again)
    before, after = load_file(out / "model.safetensors"), load_file(again / "model.safetensors")
    half = load(out, dtype=torch.bfloat16, device="cpu")
    attention = half.model.layers[0].self_attn
    assert attention.k_scale.dtype == torch.float32
    assert_equal(attention.k_scale, before["model.layers.0.self_attn.k_scale"])
    assert not any(name.endswith(("k_scale", "input_scale")) for name in half.dequantize().state_dict())
    for name in before:
        if name.endswith(("input_scale", "k_scale", "v_scale")):
            assert_equal(after[name], before[name], name)
