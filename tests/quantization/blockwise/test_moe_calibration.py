"""Experts with calibration data: whose tokens, what they become, and what is said of it."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quantkit.calibrate.hessian import Hessian
from quantkit.calibrate.quantize_with_hessian import LinearStats
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.model_record import ModelRecord
from quantkit.errors import CheckpointError, UsageError
from quantkit.quantization.blockwise import block_tasks, calibration, moe_calibration, pipeline
from quantkit.quantization.blockwise.layer_quantizer import Solver
from quantkit.quantization.blockwise.moe_calibration import Routed
from quantkit.quantizing import quantize
from quantkit.runtime.load import load
from quantkit.verification.verify import verify

from ...support.compare import assert_close
from ...tiny.calibrated import data, files_of, interrupted_at, tokens_of, write

MIXTURES = ("mixtral", "qwen3_moe", "qwen2_moe")


def without_expert_3(source: Path) -> Path:
    """The router chooses one expert, and 3 is never it: its logit is the mean of those of the others."""
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 1}))
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[3] = tensor[:3].mean(0)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


@torch.no_grad()
def calls_of(model: Any, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the experts of each layer are called with: inputs and choices."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, call: calls.append((call[0], call[1])))
        for name, module in model.named_modules()
        if name.endswith("mlp.experts")
    ]
    model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize(
    ("family", "method", "everyone"),
    [("mixtral", "best", 16), ("qwen3_moe", "gptq", 1), ("qwen2_moe", "best", 1)],
)
def test_hessians_are_those_of_a_loop_over_tokens(tmp_path, text, monkeypatch, family, method, everyone):
    source, out = write(tmp_path, family, num_hidden_layers=2), tmp_path / "out"
    found: dict[str, Hessian] = {}
    prepare = Solver.prepare

    def keep(solver: Any, hessians: Any, methods: Any) -> Any:
        # What is prepared uses the input errors up.
        found.update({name: one.joined(None, 1.0) for name, one in hessians.items()})
        return prepare(solver, hessians, methods)

    monkeypatch.setattr(Solver, "prepare", keep)
    monkeypatch.setattr(moe_calibration, "TOKENS", 50)
    monkeypatch.setattr(moe_calibration, "EVERYONE", everyone)
    quantize(source, out, group_size=32, method=method, calibration=data(text, samples=4))
    tokens = tokens_of(source, text, samples=4)
    # Inputs come from the quantized part of the model, so the finished one has them all.
    model = load(out, dtype=torch.float32, device="cpu")
    exact = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    calls = zip(calls_of(model, tokens), calls_of(exact, tokens), strict=True)
    for layer, ((x, chosen), (f, _)) in enumerate(calls):
        packed, original = (m.model.layers[layer].mlp.experts for m in (model, exact))
        for expert in range(4):
            gate, up = (one.dequantize() for one in packed.packed("gate_up_proj", expert))
            wide, tall = original.gate_up_proj[expert].detach().chunk(2)
            into_down = [packed.act_fn(gate @ token) * (up @ token) for token in x]
            original_into_down = [packed.act_fn(wide @ token) * (tall @ token) for token in f]
            for matrix, seen, wanted in (("gate", x, f), ("down", into_down, original_into_down)):
                hessian = found[f"model.layers.{layer}.mlp.experts.{expert}.{matrix}"]
                second, shift = loop_over_tokens(expert, chosen, seen, wanted, everyone)
                assert_close(hessian.matrix, second, rtol=1e-3, atol=1e-5)
                assert (hessian.input_error is None) == (method == "gptq")
                if hessian.input_error is not None:
                    assert_close(hessian.input_error, shift, rtol=1e-3, atol=1e-4)


def test_corrections_are_gone_before_there_are_factors(tmp_path, text, monkeypatch):
    gone = []
    factorize = LinearStats.factorize

    def watch(inputs: LinearStats) -> None:
        correction = weakref.ref(inputs.correction)
        factorize(inputs)
        gone.append(correction() is None)

    monkeypatch.setattr(LinearStats, "factorize", watch)
    source = write(tmp_path, "mixtral")
    quantize(source, tmp_path / "out", group_size=32, method="best", calibration=data(text, samples=2))
    assert len(gone) >= 8 and all(gone)


def loop_over_tokens(expert: int, chosen: Any, seen: Any, wanted: Any, everyone: int) -> tuple[Any, Any]:
    """H and D of an expert, by weighing each token."""
    columns, total = len(seen[0]), len(seen)
    standing = [i * total // min(total, everyone * columns) for i in range(min(total, everyone * columns))]
    second, shift, weights = torch.zeros(columns, columns), torch.zeros(columns, columns), 0.0
    for token in range(total):
        weight = float(expert in chosen[token].tolist()) + (token in standing) * 2 * columns / len(standing)
        second += weight * torch.outer(seen[token], seen[token])
        shift += weight * torch.outer(wanted[token] - seen[token], seen[token])
        weights += weight
    return second / weights, shift / weights


@pytest.mark.parametrize("family", (*MIXTURES, "gpt_oss"))
def test_outputs_of_experts_are_closer_than_without_data(tmp_path, text, family):
    source = write(tmp_path, family)
    exact = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    calls = calls_of(exact, tokens_of(source, text))
    errors = {}
    for method in ("mse", "gptq"):
        out = tmp_path / method
        options = {} if method == "mse" else {"calibration": data(text)}
        rules = ("*.self_attn.*=keep",)
        result = quantize(source, out, format="int3", group_size=32, method=method, rules=rules, **options)
        assert not any(check.problems for check in verify(out, reload=False))
        model = load(out, dtype=torch.float32, device="cpu")
        hidden, chosen = calls[0]
        weights = torch.full(chosen.shape, 0.5)
        with torch.no_grad():
            outputs = [m.model.layers[0].mlp.experts(hidden, chosen, weights) for m in (exact, model)]
        errors[method] = ((outputs[1] - outputs[0]).square().sum() / outputs[0].square().sum()).item()
    assert errors["gptq"] < 0.6 * errors["mse"]
    layers = read_manifest(out)["layers"]
    counts = torch.bincount(calls[0][1].flatten(), minlength=4).tolist()
    for leaf in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{leaf}"
        assert layers[name]["expert_tokens"] == counts
        assert (layers[name]["note"] is None) == (min(counts) >= layers[name]["shape"][1])
        assert result.measured[name].expert_tokens == tuple(counts)
        assert 0 < layers[name]["output_error"] < 0.05 and layers[name]["damping"] == 0.01
    shared = [layer for name, layer in layers.items() if "shared_expert." in name]
    assert len(shared) == (9 if family == "qwen2_moe" else 0)
    assert all(layer["output_error"] < 0.05 and layer["expert_tokens"] is None for layer in shared)


@pytest.mark.fault(53)
@pytest.mark.parametrize("method", ["gptq", "best"])
def test_an_expert_without_tokens_gets_the_hessian_of_all_and_a_note(tmp_path, text, method):
    source, out = without_expert_3(write(tmp_path, "qwen3_moe")), tmp_path / "out"
    result = quantize(source, out, format="int3", group_size=32, method=method, calibration=data(text))
    quantize(source, tmp_path / "mse", format="int3", group_size=32, method="mse")
    for name, measured in result.measured.items():
        if "experts" not in name:
            assert measured.note is None and measured.expert_tokens is None
            continue
        assert measured.expert_tokens is not None and measured.expert_tokens[3] == 0
        assert sum(measured.expert_tokens) == 12 * 24
        columns = 64 if name.endswith("gate_up_proj") else 36
        few = [str(i) for i, count in enumerate(measured.expert_tokens) if count < columns]
        assert measured.note is not None and "3" in few
        assert f"chose experts {', '.join(few)} of 4 than the {columns} features" in measured.note
        assert "(1 of them no token)" in measured.note and "more calibration samples" in measured.note
        assert read_manifest(out)["layers"][name]["note"] == measured.note
    # Its weights are those that do best for the tokens of others.
    exact = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    weight = exact.model.layers[0].mlp.experts.gate_up_proj[3].detach()
    errors = []
    for name in ("mse", "out"):
        model = load(tmp_path / name, dtype=torch.float32, device="cpu")
        inputs = calls_of(model, tokens_of(source, text))[0][0]
        halves = model.model.layers[0].mlp.experts.packed("gate_up_proj", 3)
        stored = torch.cat([half.dequantize() for half in halves])
        errors.append(
            ((inputs @ (stored - weight).T).square().sum() / (inputs @ weight.T).square().sum()).item()
        )
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.fault(54)
def test_an_expert_whose_hessian_is_singular_is_named(tmp_path, text):
    source, out = write(tmp_path, "mixtral", num_hidden_layers=1), tmp_path / "out"
    tensors = load_file(source / "model.safetensors")
    name = next(one for one in tensors if one.endswith("experts.2.w3.weight"))
    tensors[name][:] = 0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    result = quantize(source, out, method="best", group_size=32, calibration=data(text))
    noted = {module: one.note for module, one in result.measured.items() if one.note is not None}
    assert list(noted) == ["model.layers.0.mlp.experts.down_proj"]
    assert "mlp.experts.2.down: the Hessian of the inputs is singular" in str(noted[next(iter(noted))])
    model = load(out, dtype=torch.float32, device="cpu")
    assert torch.isfinite(model(input_ids=torch.arange(10)[None]).logits).all()


def test_rules_mix_methods_of_experts(tmp_path, text, few_scales):
    source = write(tmp_path, "mixtral")
    rules = (
        "*.layers.0.mlp.experts.gate_up_proj=int4:32:gptq",
        "*.layers.1.mlp.experts.*=keep",
        "*.layers.2.mlp.experts.*=int4:32:awq",
        "*.experts.*=int8::rtn",
    )
    result = quantize(source, tmp_path / "out", method="best", calibration=data(text), rules=rules)
    assert not any(check.problems for check in verify(tmp_path / "out", reload=False))
    name = "model.layers.{}.mlp.experts.{}_proj".format
    measured = result.measured
    assert measured[name(0, "gate_up")].expert_tokens is not None
    assert measured[name(0, "down")].expert_tokens is None and measured[name(0, "down")].output_error is None
    assert name(1, "down") not in measured
    assert "not scaled" in (measured[name(2, "down")].note or "")


def test_experts_behind_dense_blocks_and_of_any_size(tmp_path, text):
    """A dense first block, experts that are called beside shared ones, and rows of 33 weights."""
    source = write(tmp_path, "deepseek_v3", num_hidden_layers=2)
    errors = {}
    for method in ("imatrix", "gptq"):
        result = quantize(source, tmp_path / method, format="int3", method=method, calibration=data(text))
        of_experts = [one for name, one in result.measured.items() if ".experts." in name]
        assert len(of_experts) == 2 and all(one.expert_tokens is not None for one in of_experts)
        errors[method] = sum(one.output_error or 0.0 for one in of_experts)
    assert errors["gptq"] < 0.8 * errors["imatrix"]


def test_attention_with_data_sees_experts_without(tmp_path, text):
    source = write(tmp_path, "mixtral")
    errors = {}
    for experts in ("int8", "binary"):
        rules = (f"*.experts.*={experts}::mse",)
        result = quantize(source, tmp_path / experts, method="gptq", calibration=data(text), rules=rules)
        errors[experts] = result.measured["model.layers.1.self_attn.q_proj"].output_error
    assert errors["int8"] != errors["binary"]


def test_nothing_depends_on_workers_or_memory(tmp_path, text, monkeypatch, few_scales):
    source = write(tmp_path, "qwen2_moe", num_hidden_layers=2)
    rules = ("*.layers.1.*=int4:32:awq",)
    options = {"method": "best", "group_size": 32, "calibration": data(text, samples=4), "rules": rules}
    quantize(source, tmp_path / "one", lm_head="int8", **options)
    monkeypatch.setattr(calibration, "cpu_workers", lambda: 3)
    monkeypatch.setitem(pipeline.SUSPENDED_MEMORY, "cpu", 0.0)
    monkeypatch.setattr(pipeline, "EXPERTS_MEMORY", 0.0)
    monkeypatch.setattr(pipeline, "FREE", 1)
    quantize(source, tmp_path / "two", lm_head="int8", **options)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["stored", "replayed"])
@pytest.mark.sampled(2)
def test_interrupted_anywhere_and_resumed_it_is_the_same_directory(tmp_path, text, monkeypatch, seconds):
    monkeypatch.setattr(pipeline, "HIDDEN_SECONDS", seconds)
    source = write(tmp_path, "qwen2_moe", num_hidden_layers=2)
    options = {
        "method": "best",
        "group_size": 32,
        "calibration": data(text, samples=2),
        "max_shard_bytes": 20_000,
        "rules": ("*.layers.1.mlp.experts.*=int8::mse",),
        "lm_head": "int4",
    }
    quantize(source, tmp_path / "whole", **options)
    expected = files_of(tmp_path / "whole")
    for stop in (20, 39) if seconds else (13, 41):
        out = tmp_path / f"out{stop}"
        with pytest.raises(KeyboardInterrupt):
            quantize(source, out, progress=interrupted_at(stop), **options)
        quantize(source, out, resume=True, **options)
        assert files_of(out) == expected


# The parts


def test_tokens_of_experts_and_those_that_stand_for_all() -> None:
    generator = torch.Generator().manual_seed(0)
    for total, features in ((1, 4), (10, 4), (57, 3), (300, 2)):
        chosen = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(total)])
        calls = Routed(torch.zeros(total, 3), chosen, None)
        for expert in range(7):
            own = [t for t in range(total) if expert in chosen[t].tolist()]
            assert calls.tokens(expert).tolist() == own
        standing = calls.everyone(features)
        assert len(standing) == min(total, moe_calibration.EVERYONE * features) and standing[0] == 0
        assert (standing.diff() > 0).all() and standing[-1] < total
        assert standing.diff().max() - standing.diff().min() <= 1 if len(standing) > 1 else total == 1


def test_experts_that_are_called_otherwise_are_refused() -> None:
    hidden, chosen = torch.zeros(5, 3), torch.zeros(5, 2, dtype=torch.int64)
    for call in ((hidden,), (hidden, chosen[:4]), (hidden, hidden)):
        with pytest.raises(CheckpointError, match=r"layers\.0\.experts is called with .*--method mse"):
            Routed.of([call], [], "layers.0.experts")
    assert Routed.of([(hidden, chosen, hidden)] * 2, [], "").inputs.shape == (10, 3)


def test_experts_of_an_unknown_layout_are_refused(tmp_path, text, monkeypatch):
    source = write(tmp_path, "mixtral")
    monkeypatch.setattr(block_tasks.Decoder, "expert_part", lambda *_: None)
    with pytest.raises(UsageError, match=r"unknown layout.*'gptq'.*--rule"):
        quantize(source, tmp_path / "out", method="gptq", calibration=data(text))


@pytest.mark.parametrize("tokens", [[1, -1], ["4"], [True], "none"])
def test_a_manifest_with_other_than_counts_is_refused(tmp_path, text, tokens):
    source = write(tmp_path, "mixtral")
    quantize(source, tmp_path / "out", method="imatrix", calibration=data(text, samples=2))
    manifest = read_manifest(tmp_path / "out")
    name = "model.layers.0.mlp.experts.down_proj"
    assert ModelRecord.from_manifest(manifest).layers[name].expert_tokens is not None
    manifest["layers"][name]["expert_tokens"] = tokens
    with pytest.raises(CheckpointError, match="expert_tokens"):
        ModelRecord.from_manifest(manifest)
