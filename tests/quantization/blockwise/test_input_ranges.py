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
from quantkit.quantizing import quantize
from quantkit.recipes.recipe import Choice, Recipe, Rule
from quantkit.runtime.load import load
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
        ("FP8", "input_scale", "fp8-static", "gptq"),
    ],
)
def test_scales_are_those_of_the_largest_inputs(tmp_path, text, scheme, part, activations, method):
    source, out = write(tmp_path, "llama", num_hidden_layers=2, intermediate_size=96), tmp_path / "out"
    quantize(source, out, scheme=scheme, method=method, calibration=data(text))
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


def test_saved_models_keep_the_number(tmp_path, text):
    source, out, again = write(tmp_path, "llama", num_hidden_layers=1), tmp_path / "out", tmp_path / "again"
    quantize(source, out, scheme="FP8", calibration=data(text))
    load(out, dtype=torch.float32, device="cpu").save_pretrained(again)
    before, after = load_file(out / "model.safetensors"), load_file(again / "model.safetensors")
    for name in before:
        if name.endswith("input_scale"):
            assert_equal(after[name], before[name], name)
