"""Converting sources with static scales: linears round their inputs by the numbers of the source."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.low_bit.dequantized import dequantized
from quantkit.checkpoint.low_bit.static_scales import ActivationTensors
from quantkit.checkpoint.low_bit.weight import Settings
from quantkit.checkpoint.source import Checkpoint
from quantkit.converting import ConvertOptions
from quantkit.errors import CheckpointError
from quantkit.packing.activations import activations_named
from quantkit.packing.formats import number_format
from quantkit.quantizing import quantize
from quantkit.runtime.cache.stored_scales import stored_scales
from quantkit.verification.against_source import compare_with_source
from quantkit.verification.description import describe

from ..support.compare import assert_close, assert_equal
from ..tiny.calibrated import data, write

Tensors = dict[str, torch.Tensor]
TOKENS = torch.arange(3, 15).view(2, 6)


def _arguments(bits: int, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "symmetric": True, "dynamic": False} | more


def _compressed(form: str, weights: Any, inputs: Any, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


INT8 = _compressed(
    "int-quantized",
    _arguments(8, type="int", strategy="channel"),
    _arguments(8, type="int", strategy="tensor"),
)
FP8 = _compressed("float-quantized", _arguments(8, strategy="channel"), _arguments(8, strategy="tensor"))
_NVFP4 = _arguments(4, strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
NVFP4 = _compressed("nvfp4-pack-quantized", _NVFP4, _NVFP4 | {"dynamic": "local"})
KV = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
MODELOPT_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


def fp8(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def fp8_tensor(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax() / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def int8(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    return {"weight": (weight / scale).round().clamp(-128, 127).to(torch.int8), "weight_scale": scale}


def nvfp4(weight: torch.Tensor) -> Tensors:
    parts = dict(quantkit.quantize_tensor(weight, "nvfp4").parts())
    return {
        "weight_packed": parts["packed"].view(torch.uint8),
        "weight_scale": parts["scale"],
        "weight_global_scale": parts["global_scale"],
    }


def nvfp4_modelopt(weight: torch.Tensor) -> Tensors:
    parts = nvfp4(weight)
    return {
        "weight": parts["weight_packed"],
        "weight_scale": parts["weight_scale"],
        "weight_scale_2": parts["weight_global_scale"].reciprocal().view(()),
    }


def scale_of(number: int, part: str = "input_scale") -> torch.Tensor:
    """A scale that differs between linears: small enough that some inputs saturate."""
    step = 0.002 + 0.0007 * number
    return torch.tensor(1 / (6 * step) if part == "input_global_scale" else step)


def source_of(
    directory: Path,
    pack: Callable[[torch.Tensor], Tensors] = fp8,
    section: Any = FP8,
    part: str = "input_scale",
    kv: str | None = None,
    change: Callable[[Tensors], object] = lambda tensors: None,
    family: str = "llama",
    beside: Any = None,
    **config: Any,
) -> Path:
    """A model whose linears other than the head are packed, each with an input scale of its own.

    `kv` names the scales of keys and values of a layer, with K in place of the letter. `change` edits the
    tensors; `beside` is a hf_quant_config.json.
    """
    source = write(directory, family, num_hidden_layers=2, intermediate_size=96, **config)
    tensors: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj.weight" not in name and ".w1." not in name:
            tensors[name] = tensor
            continue
        module = name.removesuffix("weight")
        tensors |= {module + key: value.contiguous() for key, value in pack(tensor.float()).items()}
        tensors[module + part] = scale_of(len(tensors), part)
    for layer in range(2) if kv else ():
        for number, letter in enumerate("kv"):
            name = f"model.layers.{layer}.self_attn.{(kv or '').replace('K', letter)}"
            tensors[name] = torch.tensor([0.01 * (2 * layer + number + 1)])
    change(tensors)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    if section is not None:
        config["quantization_config"] = section
    (source / "config.json").write_text(json.dumps(config))
    if beside is not None:
        (source / "hf_quant_config.json").write_text(json.dumps(beside))
    return source


def input_scales(source: Path) -> dict[str, float]:
    stored = load_file(source / "model.safetensors")
    return {
        name.rpartition(".")[0]: float(one)
        for name, one in stored.items()
        if name.endswith((".input_scale", ".input_global_scale", ".activation_scale"))
    }


def twin_of(source: Path, activations: str, numbers: Mapping[str, float]) -> Any:
    """The dense model of the dequantized weights, in float32, whose linears round their inputs."""
    checkpoint = dequantized(Checkpoint.open(source))
    config = transformers.AutoConfig.from_pretrained(source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    exact = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    for name, tensor in checkpoint.tensors.items():
        if (grid := tensor.grid(checkpoint.read_stored, 0, tensor.shape[0])) is not None:
            exact[name] = grid.values()
    model.load_state_dict(exact, strict=False)
    rounds = activations_named(activations)
    assert rounds is not None
    for name, number in numbers.items():
        bound = rounds.bind(number)
        model.get_submodule(name).register_forward_pre_hook(lambda _, x, bound=bound: bound.round(x[0]))
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


CASES: dict[str, tuple[Any, ...]] = {
    "llm-compressor": (fp8, FP8, "input_scale", "fp8-static", "input_scale"),
    "llm-compressor int8": (int8, INT8, "input_scale", "int8-static", "input_scale"),
    "llm-compressor nvfp4": (nvfp4, NVFP4, "input_global_scale", "nvfp4", "input_global_scale"),
    "AutoFP8": (fp8_tensor, AUTO_FP8, "input_scale", "fp8-static", "input_scale"),
    "transformers": (fp8_tensor, AUTO_FP8, "activation_scale", "fp8-static", "input_scale"),
    "modelopt": (fp8_tensor, MODELOPT, "input_scale", "fp8-static", "input_scale"),
    "not in the config": (fp8, None, "input_scale", "fp8-static", "input_scale"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_inputs_are_rounded_by_the_stored_scales(case: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    pack, section, part, activations, written = CASES[case]

    def reshape(tensors: Tensors) -> None:
        tensors |= {name: one.view(shape) for name, one in tensors.items() if name.endswith(part)}

    source = source_of(tmp_path / "in", pack, section, part, change=reshape)
    result = quantkit.convert(source, tmp_path / "out")
    expected = input_scales(source)
    assert len(expected) == 14 and len(set(expected.values())) == 14
    stored = load_file(tmp_path / "out/model.safetensors")
    for name, number in expected.items():
        assert_equal(stored[f"{name}.{written}"], torch.tensor([number]), name=name)
    compared = compare_with_source(tmp_path / "out", source)
    assert (compared.packed, compared.problems) == (14, ())
    packed = quantkit.load(tmp_path / "out", device="cpu", dtype=torch.float32)
    found = logits(packed)
    assert_close(found, logits(twin_of(source, activations, expected)), rtol=1e-4, atol=1e-4)
    # Rounding is seen in the logits.
    assert (found - logits(twin_of(source, activations, {}))).abs().max() > 1e-2
    (note,) = (one for one in result.plan.notes if "static input scales" in one)
    assert "k_proj, " in note or "gate_proj, " in note
    assert "and of 3 more sets differ. quantkit keeps each; engines fuse these linears and take one" in note


def test_modelopt_nvfp4_stores_inverse_factors(tmp_path: Path) -> None:
    """Also in a file beside config.json."""
    beside = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    for name, section, more in (("a", MODELOPT_NVFP4, None), ("b", None, beside)):
        source = source_of(tmp_path / name, nvfp4_modelopt, section, beside=more)
        quantkit.convert(source, tmp_path / f"{name}-out")
        inverse = {module: float(1 / torch.tensor(one)) for module, one in input_scales(source).items()}
        stored = load_file(tmp_path / f"{name}-out/model.safetensors")
        for module, number in inverse.items():
            assert_equal(stored[f"{module}.input_global_scale"], torch.tensor([number]))
        packed = quantkit.load(tmp_path / f"{name}-out", device="cpu", dtype=torch.float32)
        assert_close(logits(packed), logits(twin_of(source, "nvfp4", inverse)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["llm-compressor", "llm-compressor int8", "llm-compressor nvfp4"])
def test_compressed_tensors_computes_the_same(case: str, tmp_path: Path) -> None:
    """Every linear of its own run rounds its inputs to the same numbers; in float32 also the logits agree."""
    quantized = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward").forward_quantize
    pack, section, part, activations, written = CASES[case]

    def as_written(tensors: Tensors) -> None:
        tensors |= {name: one.view(1) for name, one in tensors.items() if name.endswith(part)}

    source = source_of(tmp_path / "in", pack, section, part, change=as_written)
    quantkit.convert(source, tmp_path / "out")
    # compressed-tensors dequantizes NVFP4 to bfloat16.
    dtype = torch.bfloat16 if activations == "nvfp4" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    inputs: Tensors = {}
    for name in input_scales(source):
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, x, name=name: inputs.update({name: x[0].float()})
        )
    theirs, stored = logits(model), load_file(tmp_path / "out/model.safetensors")
    assert len(inputs) == 14
    for name, x in inputs.items():
        module, rounds = model.get_submodule(name), activations_named(activations)
        assert rounds is not None
        right = quantized(module, x, "input", module.quantization_scheme.input_activations)
        assert not torch.equal(right, x)
        assert_equal(rounds.bind(float(stored[f"{name}.{written}"])).round(x), right, name=name)
    if dtype == torch.float32:
        ours = quantkit.load(tmp_path / "out", device="cpu", dtype=dtype)
        assert_close(logits(ours), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv", ["K_scale", "K_proj.K_scale", "K_proj.output_scale"])
def test_scales_of_keys_and_values_are_kept(kv: str, tmp_path: Path) -> None:
    section = FP8 | {"kv_cache_scheme": KV}
    source = source_of(tmp_path / "in", kv=kv, section=section)
    quantkit.convert(source, tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    found = stored_scales(quantkit.load(tmp_path / "out", device="cpu"))
    for layer in range(2):
        for number, letter in enumerate("kv"):
            scale = torch.tensor([0.01 * (2 * layer + number + 1)])
            assert_equal(stored[f"model.layers.{layer}.self_attn.{letter}_scale"], scale)
            assert found[layer][number].scale == float(scale)
    assert compare_with_source(tmp_path / "out", source).problems == ()
    wrong = stored | {"model.layers.1.self_attn.v_scale": torch.tensor([0.5])}
    wrong["model.layers.0.mlp.up_proj.input_scale"] = torch.tensor([0.25])
    save_file(wrong, tmp_path / "out/model.safetensors", {"format": "pt"})
    problems = compare_with_source(tmp_path / "out", source).problems
    assert [text.partition(" is ")[0] for text in problems] == [
        "model.layers.0.mlp.up_proj.input_scale",
        "model.layers.1.self_attn.v_scale",
    ] or [text.partition(" is ")[0] for text in problems] == [
        "model.layers.1.self_attn.v_scale",
        "model.layers.0.mlp.up_proj.input_scale",
    ]


def test_one_scale_of_keys_and_values_is_that_of_both(tmp_path: Path) -> None:
    def both(tensors: Tensors) -> None:
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.kv_scale"] = torch.tensor(0.03)

    source = source_of(tmp_path / "in", fp8_tensor, AUTO_FP8, change=both)
    quantkit.convert(source, tmp_path / "out")
    found = stored_scales(quantkit.load(tmp_path / "out", device="cpu"))
    expected = float(torch.tensor(0.03))
    assert {one.scale for pair in found.values() for one in pair} == {expected} and len(found) == 2


UP = "model.layers.0.mlp.up_proj"
K = "model.layers.0.self_attn.k_scale"


def _set(name: str, value: Any) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.tensor(value)})


def _inputs(**more: Any) -> dict[str, Any]:
    return _compressed("float-quantized", _arguments(8, strategy="channel"), _arguments(8) | more)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "missing": (
        {"change": lambda tensors: tensors.pop(f"{UP}.input_scale")},
        f"there is no tensor '{UP}.input_scale': quantization_config of config.json rounds the inputs of "
        f"'{UP}' by static scales, so one is expected. Convert the weights alone with --without-activations, "
        "or write the source again with its own tool.",
    ),
    "zero": (
        {"change": _set(f"{UP}.input_scale", 0.0)},
        f"tensor '{UP}.input_scale' is F32 []: the static scale is 0.0; expected a positive finite number. "
        "Convert the weights alone with --without-activations",
    ),
    "negative": ({"change": _set(f"{UP}.input_scale", [-1.0])}, "is F32 [1]: the static scale is -1.0; "),
    "nan": ({"change": _set(f"{UP}.input_scale", float("nan"))}, "the static scale is nan; expected a pos"),
    "infinite": ({"change": _set(f"{UP}.input_scale", float("inf"))}, "the static scale is inf; expected"),
    "two": (
        {"change": _set(f"{UP}.input_scale", [0.1, 0.2])},
        f"tensor '{UP}.input_scale' is F32 [2]: expected one float, the static scale of all values. Convert",
    ),
    "integer": ({"change": _set(f"{UP}.input_scale", [1])}, "is I64 [1]: expected one float"),
    "int4 inputs": (
        {"section": _inputs(type="int", num_bits=4, strategy="tensor")},
        "rounds the inputs of 'model.layers.0.mlp.down_proj' by static scales of num_bits 4, type int, "
        "symmetric True, dynamic False, strategy tensor; expected symmetric FP8 or int8 with one scale, or "
        "NVFP4. Convert",
    ),
    "asymmetric": (
        {"section": _inputs(type="int", symmetric=False)},
        "type int, symmetric False, dynamic False; expected symmetric FP8 or int8 with one scale",
    ),
    "per token": ({"section": _inputs(strategy="token")}, "strategy token; expected symmetric FP8 or int8"),
    "zero-point": (
        {"change": _set(f"{UP}.input_zero_point", [3])},
        f"tensor '{UP}.input_zero_point' is a scale or zero-point of activations that the packed linears "
        "cannot store; expected static scales of the inputs",
    ),
    "outputs": ({"change": _set(f"{UP}.output_scale", 0.1)}, f"'{UP}.output_scale' is a scale or zero"),
    "queries": ({"change": _set(K.replace("k_", "q_"), 0.1)}, "q_scale' is a scale or zero-point"),
    "not rounded": (
        {"section": _compressed("float-quantized", _arguments(8, strategy="channel"), None)},
        "input_scale' and 13 more is a scale or zero-point of activations",
    ),
    "keys missing": (
        {"kv": "K_scale", "change": lambda tensors: tensors.pop(K)},
        f"there is no tensor '{K}': quantization_config of config.json stores scales of keys and values by",
    ),
    "keys nan": ({"kv": "K_scale", "change": _set(K, float("nan"))}, f"tensor '{K}' is F32 []: the static"),
    "keys per head": (
        {"kv": "K_scale", "change": _set(K, [[[0.1]], [[0.2]]])},
        "[2, 1, 1]: expected one",
    ),
    "int8 cache": (
        {"kv": "K_scale", "section": FP8 | {"kv_cache_scheme": KV | {"type": "int"}}},
        "has a KV cache in num_bits 8, type int, symmetric True, strategy tensor, dynamic False for "
        "'model.layers.0.self_attn'; expected FP8 with one scale for keys and one for values. Convert",
    ),
    "nvfp4 cache": (
        {"kv": "K_scale", "pack": fp8_tensor, "section": MODELOPT | {"kv_cache_quant_algo": "NVFP4"}},
        "has a KV cache in NVFP4 for",
    ),
    "a pattern of many groups": (
        {
            "section": FP8
            | {
                "config_groups": {
                    "a": {"targets": ["re:" + "(a|a)" * 20 + "b"], "input_activations": _arguments(8)}
                }
            }
        },
        "at most 4 groups and repetitions, none of a group. Convert",
    ),
    "a pattern that may hang": (
        {
            "section": FP8
            | {"config_groups": {"a": {"targets": ["re:(a+)+$"], "input_activations": _arguments(8)}}}
        },
        "the target 're:(a+)+$' in config_groups is no pattern that quantkit matches; expected a valid one",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(case: str, tmp_path: Path) -> None:
    arguments, text = REFUSED[case]
    source = source_of(tmp_path / "in", **arguments)
    with pytest.raises(CheckpointError) as caught:
        quantkit.convert(source, tmp_path / "out")
    assert text in str(caught.value) and "--without-activations" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("odd", [[1], {"a": 1}, "x", 1.5, None, True])
def test_odd_values_in_the_config_are_no_crash(odd: Any) -> None:
    sections: list[dict[str, Any]] = [
        {key: odd}
        for key in ("config_groups", "activation_scheme", "quant_algo", "kv_cache_scheme", "quantization")
    ]
    for key in ("type", "num_bits", "group_size", "strategy", "symmetric", "targets"):
        group = {"targets": ["Linear"], "input_activations": _arguments(8)}
        (group if key == "targets" else group["input_activations"])[key] = odd
        sections.append({"config_groups": {"a": group, "b": odd}})
    for section in sections:
        stored = ActivationTensors(Settings("fp8", section))
        with suppress(CheckpointError):
            stored.of_inputs(UP, number_format("fp8-e4m3"))
        with suppress(CheckpointError):
            stored.check_states("model.layers.0.self_attn")
        assert stored.are_rounded in (True, False)


@pytest.mark.parametrize("case", ["missing", "zero-point", "int4 inputs", "keys missing"])
def test_weights_alone_are_converted(case: str, tmp_path: Path) -> None:
    source = source_of(tmp_path / "in", **REFUSED[case][0])
    result = quantkit.convert(source, tmp_path / "out", ConvertOptions(without_activations=True))
    assert not any(
        "scale" in name and "weight" not in name for name in load_file(tmp_path / "out/model.safetensors")
    )
    assert any(
        "linears of the source round their inputs. Those of the result do not." in one
        for one in result.plan.notes
    )
    packed = quantkit.load(tmp_path / "out", device="cpu", dtype=torch.float32)
    assert_close(logits(packed), logits(twin_of(source, "fp8-static", {})), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "inputs", "refused"),
    [
        ({}, "inputs of 14 linears are rounded to fp8-e4m3 tensor by static scales", None),
        (
            REFUSED["missing"][0],
            "inputs may be rounded by static scales",
            f"there is no tensor '{UP}.input_scale'",
        ),
        ({"section": _inputs(dynamic=True)}, "inputs are rounded by dynamic scales", None),
    ],
)
def test_inspect_tells_how_inputs_are_rounded(
    arguments: dict[str, Any], inputs: str, refused: str | None, tmp_path: Path
) -> None:
    found = describe(source_of(tmp_path / "in", **arguments))
    assert found.inputs == inputs
    assert (refused or "") in (found.not_converted or "") and (refused is None) == (
        found.not_converted is None
    )


def test_each_group_of_the_config_has_its_own_inputs(tmp_path: Path) -> None:
    """A name counts more than a pattern, and a pattern more than the class."""
    weights, static = _arguments(8, strategy="channel"), _arguments(8, strategy="tensor")
    groups = {
        "a": {"targets": ["Linear"], "weights": weights, "input_activations": static},
        "b": {"targets": [r"re:.*mlp\..*_proj$"], "weights": weights, "input_activations": None},
        "c": {"targets": [UP], "weights": weights, "input_activations": static},
    }

    def drop(tensors: Tensors) -> None:
        for name in list(tensors):
            if ".mlp." in name and name.endswith("input_scale") and not name.startswith(UP):
                del tensors[name]

    source = source_of(tmp_path / "in", section=FP8 | {"config_groups": groups}, change=drop)
    quantkit.convert(source, tmp_path / "out")
    kept = {name for name in load_file(tmp_path / "out/model.safetensors") if name.endswith("input_scale")}
    assert (
        len(kept) == 9
        and f"{UP}.input_scale" in kept
        and f"{UP.replace('up', 'gate')}.input_scale" not in kept
    )
    packed = quantkit.load(tmp_path / "out", device="cpu", dtype=torch.float32)
    assert_close(
        logits(packed), logits(twin_of(source, "fp8-static", input_scales(source))), rtol=1e-4, atol=1e-4
    )


def test_dynamic_scales_beside_static_ones_are_left_out_with_a_note(tmp_path: Path) -> None:
    weights, static = _arguments(8, strategy="channel"), _arguments(8, strategy="tensor")
    dynamic = _arguments(8, strategy="token") | {"dynamic": True}
    groups = {
        "a": {"targets": ["re:.*self_attn"], "weights": weights, "input_activations": static},
        "b": {"targets": ["re:.*mlp"], "weights": weights, "input_activations": dynamic},
    }

    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".mlp." in name and name.endswith("input_scale")]:
            del tensors[name]

    source = source_of(tmp_path / "in", section=FP8 | {"config_groups": groups}, change=drop)
    notes = quantkit.convert(source, tmp_path / "out").plan.notes
    assert any("and 5 more linears by dynamic scales, and the result does not" in one for one in notes)


@pytest.mark.parametrize("inputs", [None, _arguments(8, strategy="token") | {"dynamic": True}])
def test_patterns_are_not_matched_for_scales_that_are_not_there(tmp_path: Path, inputs: Any) -> None:
    weights = _arguments(8, strategy="channel")
    group = {"targets": ["re:model.layers.*(_proj)*"], "weights": weights, "input_activations": inputs}

    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("input_scale")]:
            del tensors[name]

    source = source_of(tmp_path / "in", section=FP8 | {"config_groups": {"a": group}}, change=drop)
    quantkit.convert(source, tmp_path / "out")
    assert describe(source).inputs == ("" if inputs is None else "inputs are rounded by dynamic scales")


def test_zero_points_of_zero_and_dynamic_scales_are_left_out(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a", change=_set(f"{UP}.input_zero_point", [0]))
    quantkit.convert(source, tmp_path / "a-out")

    def dynamic(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("input_scale")]:
            del tensors[name]

    source = source_of(tmp_path / "b", section=_inputs(dynamic=True, strategy="token"), change=dynamic)
    result = quantkit.convert(source, tmp_path / "b-out")
    assert any("round their inputs. Those of the result do not." in note for note in result.plan.notes)


EXPERT = re.compile(r"\.experts\.\d+\.\w+\.input_scale$")


def test_scales_of_experts_are_kept_and_a_layer_rounds_by_the_largest(tmp_path: Path) -> None:
    source = source_of(tmp_path / "in", fp8_tensor, AUTO_FP8, family="qwen3_moe")
    result = quantkit.convert(source, tmp_path / "out")
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out/model.safetensors")
    scales = {name: float(one) for name, one in before.items() if EXPERT.search(name)}
    assert len(scales) == 2 * 4 * 3 == len(set(scales.values()))
    for name, number in scales.items():
        assert_equal(after[name], torch.tensor([number]), name=name)
    assert any("all experts of a layer by the largest, as vLLM does." in one for one in result.plan.notes)
    packed = quantkit.load(tmp_path / "out", device="cpu", dtype=torch.float32)
    for layer in range(2):
        experts = packed.model.layers[layer].mlp.experts
        for parameter, leaves in (("gate_up_proj", "gate up"), ("down_proj", "down")):
            own = [
                number
                for name, number in scales.items()
                if name.startswith(f"model.layers.{layer}.")
                and any(f".{leaf}_proj." in name for leaf in leaves.split())
            ]
            assert experts.inputs_of(parameter).stored == max(own)
    assert compare_with_source(tmp_path / "out", source).problems == ()
    changed = next(iter(scales))
    save_file(after | {changed: torch.tensor([0.25])}, tmp_path / "out/model.safetensors", {"format": "pt"})
    (problem,) = compare_with_source(tmp_path / "out", source).problems
    assert problem.startswith(f"{changed} is [0.25], and ")
    quantkit.convert(source, tmp_path / "alone", ConvertOptions(without_activations=True))


def test_experts_of_which_some_have_no_scale_are_refused(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts.2." in name and name.endswith("input_scale")]:
            del tensors[name]

    source = source_of(tmp_path / "in", fp8_tensor, None, family="qwen3_moe", change=drop)
    with pytest.raises(CheckpointError, match=r"have static scales of inputs; expected one of each. Convert"):
        quantkit.convert(source, tmp_path / "out")


def test_a_resumed_conversion_asks_for_the_same_scales(tmp_path: Path) -> None:
    source = source_of(tmp_path / "in")
    quantkit.convert(source, tmp_path / "out", ConvertOptions(without_activations=True))
    with pytest.raises(quantkit.QuantkitError, match="without_activations"):
        quantkit.convert(source, tmp_path / "out", ConvertOptions(resume=True))


@pytest.mark.parametrize(("family", "rules"), [("llama", ()), ("qwen3_moe", ("*.experts.*=fp8:tensor",))])
def test_what_quantkit_wrote_for_llm_compressors_scheme_comes_back(
    tmp_path: Path, text: str, family: str, rules: tuple[str, ...]
) -> None:
    """Without quantkit's section the directory is one of compressed-tensors."""
    source, out = write(tmp_path / "in", family, num_hidden_layers=2, intermediate_size=96), tmp_path / "out"
    quantize(source, out, scheme="FP8", method="rtn", rules=rules, kv_scales="fp8", calibration=data(text))
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]["quantkit"]
    (out / "config.json").write_text(json.dumps(config))
    for name in ("quantkit.json", "quantkit_manifest.json"):
        (out / name).unlink(missing_ok=True)
    before = load_file(out / "model.safetensors")
    quantkit.convert(out, tmp_path / "again")
    after = load_file(tmp_path / "again/model.safetensors")
    assert after.keys() == before.keys()
    for name in before:
        if "input" in name or "k_scale" in name or "v_scale" in name:
            assert_equal(after[name], before[name], name=name)
