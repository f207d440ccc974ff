"""Quantizing with calibration data: what a slow twin finds, whatever memory, workers and interruptions."""

import errno
import itertools
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quantkit import memory
from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.calibrate.hessian import Hessian, gram, input_error
from quantkit.calibrate.linear_stats import LinearStats
from quantkit.calibrate.methods import METHODS
from quantkit.calibrate.parameters import TensorParameters
from quantkit.calibrate.quantize_with_hessian import quantize_calibrated_rows
from quantkit.checkpoint.manifest import read_manifest
from quantkit.errors import CheckpointError, FormatError, OutputError, UsageError
from quantkit.files import TEMP_PREFIX
from quantkit.model import blocks, hidden_states
from quantkit.model.distributed import Ranks
from quantkit.model.hidden_states import Home, choose_home
from quantkit.packing.activations import activations_named
from quantkit.packing.schemes import scheme
from quantkit.quantization.blockwise import calibration, layer_quantizer, pipeline
from quantkit.quantization.blockwise.input_groups import stages_of
from quantkit.quantizing import quantize
from quantkit.runtime.load import load
from quantkit.verification.verify import verify

from ...support.compare import assert_equal
from ...tiny.calibrated import LINEARS, data, files_of, interrupted_at, tokens_of, write

ROOT = Path(__file__).parents[3]
BOOKS = ROOT.parent / "shared" / "models" / "books-28m"
MIXED = ROOT.parent / "shared" / "data" / "calib" / "mixed.jsonl"


#: All methods for models with and without biases and a tied head; for others the one that does the most.
TWINS = [
    *((family, method, None) for family in ("llama", "tied") for method in ("imatrix", "gptq", "best")),
    *((family, "best", None) for family in ("qwen2", "qwen3", "mistral", "gemma2")),
    ("llama", "gptq", "int4"),
    ("qwen2", "best", "fp8"),
]


@pytest.mark.parametrize(("family", "method", "activations"), TWINS)
@pytest.mark.sampled(3)
def test_stored_weights_are_those_of_a_twin_with_the_whole_model_in_memory(
    tmp_path, text, family, method, activations
):
    source, out = write(tmp_path, family, num_hidden_layers=2), tmp_path / "out"
    quantize(
        source,
        out,
        format="int4",
        group_size=32,
        method=method,
        activations=activations,
        calibration=data(text),
        lm_head="int4:32",
    )
    found = load(out, dtype=torch.float32, device="cpu")
    tokens = tokens_of(source, text)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    exact = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    rounds = activations_named(activations)
    if rounds is not None:
        for layer, name in itertools.product(range(2), LINEARS):
            linear = model.get_submodule(f"model.layers.{layer}.{name}")
            linear.register_forward_pre_hook(lambda _, inputs: rounds.round(inputs[0]))

    @torch.no_grad()
    def inputs_of(of: Any, name: str) -> torch.Tensor:
        caught: list[torch.Tensor] = []
        hook = of.get_submodule(name).register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        of(input_ids=tokens, use_cache=False)
        hook.remove()
        return caught[0].reshape(-1, caught[0].shape[-1])

    chosen = METHODS[method]
    agree = []
    for layer in range(3):
        # Linears with one input are replaced together: none of them sees another one quantized.
        stages = (LINEARS[:3], LINEARS[3:4], LINEARS[4:6], LINEARS[6:]) if layer < 2 else (("lm_head",),)
        for stage in stages:
            stored = {}
            for name in stage:
                full = f"model.layers.{layer}.{name}" if layer < 2 else name
                x, original = inputs_of(model, full), inputs_of(exact, full)
                hessian = Hessian(
                    gram(x) / len(x),
                    len(x),
                    input_error(original, x) / len(x) if "input_error" in chosen.needs else None,
                )
                weight = model.get_submodule(full).weight.data
                four = scheme("int4", group_size=32).for_columns(weight.shape[1])
                inputs = LinearStats.prepare(hessian, chosen.needs)
                rows = quantize_calibrated_rows(weight, four, chosen, TensorParameters(), inputs).rows
                packed = found.get_submodule(full).packed
                agree.append((packed.codes() == four.unpack(rows.words, weight.shape[1])).double().mean())
                # Continued with what was stored, so that one tie does not part the two for good.
                stored[full] = packed.dequantize()
            for full, weight in stored.items():
                model.get_submodule(full).weight.data = weight
    assert min(agree) > 0.98 and sum(agree) / len(agree) > 0.998


def test_the_manifest_has_the_errors_of_outputs_and_the_data(tmp_path, text):
    source = write(tmp_path)
    errors = {}
    for method in ("imatrix", "gptq", "best"):
        out = tmp_path / method
        result = quantize(source, out, group_size=32, method=method, calibration=data(text))
        assert not any(check.problems for check in verify(out, reload=False))
        layers = read_manifest(out)["layers"]
        packed = {name: layer for name, layer in layers.items() if layer["scheme"] is not None}
        assert len(packed) == 21
        for name, layer in packed.items():
            assert layer["output_error"] == result.measured[name].output_error and layer["note"] is None
            assert layer["damping"] == (None if method == "imatrix" else 0.01)
        errors[method] = sum(layer["output_error"] for layer in packed.values())
        calibration = read_manifest(out)["calibration"]
        assert calibration.startswith(f"12 samples of 24 tokens from {text}:12, sha256 ")
        assert read_manifest(out)["seed"] == 0
    # Of random weights either may be a little better: by which, depends on the processor's sums.
    assert errors["gptq"] < 0.8 * errors["imatrix"] and errors["best"] < 1.05 * errors["gptq"]
    assert sorted(path.name for path in out.glob("*.safetensors")) == ["model.safetensors"]


CASES: list[dict[str, Any]] = [
    {"format": "int4", "group_size": 48},
    {"format": "int4", "group_size": 32, "zero_point": "integer"},
    {"format": "int2", "group_size": 32, "zero_point": "float"},
    {"format": "int8"},
    {"format": "fp8"},
    {"format": "mxfp4"},
    {"format": "nvfp4"},
    {"format": "book4"},
    {"format": "ternary", "packing": "radix"},
    {"format": "binary"},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.sampled(2)
def test_every_kind_of_scheme_beats_its_rounding(tmp_path, text, options):
    source = write(tmp_path, num_hidden_layers=1)
    errors = {}
    for method in ("imatrix", "gptq", "best"):
        out = tmp_path / method
        result = quantize(source, out, method=method, calibration=data(text), **options)
        errors[method] = sum(one.output_error or 0.0 for one in result.measured.values())
        assert not any(check.problems for check in verify(out, reload=False))
        model = load(out, dtype=torch.float32, device="cpu")
        assert torch.isfinite(model(input_ids=torch.arange(10)[None]).logits).all()
    assert max(errors["gptq"], errors["best"]) < errors["imatrix"]


def test_nothing_depends_on_workers_or_memory(tmp_path, text, monkeypatch, few_scales):
    source = write(tmp_path, "qwen2")
    rules = ("*.layers.1.*=int4:32:awq",)
    options = {"method": "best", "group_size": 32, "calibration": data(text), "rules": rules}
    quantize(source, tmp_path / "one", **options)
    monkeypatch.setattr(calibration, "cpu_workers", lambda: 5)
    monkeypatch.setitem(pipeline.SUSPENDED_MEMORY, "cpu", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    quantize(source, tmp_path / "two", **options)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(threads)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


#: The linears and biases that scaling changes where they are not those of llama.
SCALED = {
    "phi3": {"self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"},
    "glm": {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    | {"mlp.gate_up_proj.weight", "self_attn.v_proj.bias"},
}


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, "awq") for family in ("llama", "tied", "qwen2", "qwen3", "mistral", "phi3", "glm")),
        *((family, "smoothquant") for family in ("tied", "phi3")),
        ("tied", "smoothquant,gptq"),
    ],
)
@pytest.mark.sampled(3)
def test_a_scaled_model_computes_what_the_original_does(
    tmp_path, text, monkeypatch, few_scales, family, method
):
    """Scales folded, nothing rounded: every weight is stored as it is to be quantized."""
    source, out = write(tmp_path, family, torch.float32), tmp_path / "out"
    scaled: dict[str, torch.Tensor] = {}
    weight_of = layer_quantizer.Solver.weight

    def keep(worker: Any, name: str) -> torch.Tensor:
        scaled[name] = weight_of(worker, name).clone()
        return scaled[name]

    monkeypatch.setattr(layer_quantizer.Solver, "weight", keep)
    # Skewed inputs, so that the search finds something.
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith("layernorm.weight"):
            tensors[name].mul_(torch.logspace(-1, 1, 64))
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    quantize(source, out, format="int3", group_size=32, method=method, calibration=data(text))
    monkeypatch.undo()
    original = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    stored, parameters = load_file(out / "model.safetensors"), dict(model.named_parameters())
    moved = set()
    for name, parameter in parameters.items():
        new = scaled.get(name, stored.get(name, parameter.data))
        if (new - parameter.data).abs().max() > 1e-3 * parameter.data.abs().max():
            moved.add(name.split(".", 3)[-1])
        parameter.data = new
    biases = {"self_attn.v_proj.bias"} if family in ("tied", "qwen2", "glm") else set()
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert moved == SCALED.get(family, {f"{name}.weight" for name in LINEARS} | biases) | norms
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        expected, found = (m(input_ids=tokens).logits for m in (original, model))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    changed = [reason for reason in read_manifest(out)["dense"].values() if "changed" in reason]
    assert len(changed) == 3 * (2 + len(biases))


def test_scaling_lowers_the_error_of_outputs_and_says_where_it_cannot(tmp_path, text):
    source = write(tmp_path, num_hidden_layers=2)
    errors = {}
    for method in ("imatrix", "awq"):
        result = quantize(
            source, tmp_path / method, format="int3", group_size=32, method=method, calibration=data(text)
        )
        errors[method] = sum(one.output_error or 0.0 for one in result.measured.values())
        assert all(one.note is None for one in result.measured.values())
        assert not any(check.problems for check in verify(tmp_path / method, reload=False))
    assert errors["awq"] < errors["imatrix"]
    partly = quantize(
        source, tmp_path / "partly", method="awq", calibration=data(text), rules=("*.k_proj=keep",)
    )
    noted = {name.split(".", 3)[-1] for name, one in partly.measured.items() if one.note is not None}
    assert noted == {"self_attn.q_proj", "self_attn.v_proj"}
    source_of_gemma = write(tmp_path, "gemma2", num_hidden_layers=2)
    gemma = quantize(source_of_gemma, tmp_path / "gemma", method="awq", calibration=data(text))
    assert all("not scaled" in (one.note or "") for one in gemma.measured.values())
    # Linears with one input have one scaling, or none.
    mixed = quantize(
        source,
        tmp_path / "mixed",
        method="awq",
        calibration=data(text),
        rules=("*.k_proj=int4::smoothquant",),
    )
    noted = {name.split(".", 3)[-1] for name, one in mixed.measured.items() if one.note is not None}
    assert noted == {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}


def test_what_a_block_does_to_inputs_that_it_has_read_does_not_matter(
    tmp_path, text, monkeypatch, few_scales
):
    source = write(tmp_path)

    def quantized(out: Path) -> dict[str, bytes]:
        quantize(source, out, format="int3", group_size=32, method="awq", calibration=data(text))
        return files_of(out)

    expected = quantized(tmp_path / "apart")
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    own = attention.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = own(self, hidden_states, *args, **options)
        hidden_states.fill_(1.0)
        return found

    monkeypatch.setattr(attention, "forward", forward)
    assert quantized(tmp_path / "over") == expected


def test_another_seed_draws_other_samples(tmp_path, text):
    source = write(tmp_path)
    for seed in (0, 1):
        quantize(source, tmp_path / str(seed), method="gptq", calibration=data(text, seed=seed))
    runs = [read_manifest(tmp_path / str(seed))["run"]["calibration"]["tokens_sha256"] for seed in (0, 1)]
    assert runs[0] != runs[1]


@pytest.mark.fault(63)
@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["stored", "replayed"])
@pytest.mark.parametrize(("method", "stops"), [("awq", (1, 9, 19, 24)), ("best", (1, 9, 15, 19, 21, 24))])
@pytest.mark.sampled(3)
def test_interrupted_anywhere_and_resumed_it_is_the_same_directory(
    tmp_path, text, monkeypatch, few_scales, seconds, method, stops
):
    monkeypatch.setattr(pipeline, "HIDDEN_SECONDS", seconds)
    source = write(tmp_path)
    options = {
        "method": method,
        "group_size": 32,
        "calibration": data(text),
        "max_shard_bytes": 20_000,
        "rules": ("*.layers.1.mlp.*=int8::mse", "*.layers.2.self_attn.o_proj=keep"),
    }
    quantize(source, tmp_path / "whole", **options)
    expected = files_of(tmp_path / "whole")
    seen: list[str] = []
    for stop in stops:
        out = tmp_path / f"out{stop}"
        with pytest.raises(KeyboardInterrupt):
            quantize(source, out, progress=interrupted_at(stop), **options)
        seen.append("+".join(sorted({path.name[:6] for path in out.glob("*.safetensors")})))
        assert not (out / "config.json").exists()
        quantize(source, out, resume=True, **options)
        assert files_of(out) == expected
    assert (
        "" in seen and any("calibr" in kinds for kinds in seen) and any("model-" in kinds for kinds in seen)
    )
    assert (seconds == 0.0) == any("hidden" in kinds for kinds in seen)


@pytest.mark.fault(62)
def test_killed_and_resumed_it_is_the_same_directory(tmp_path, text, monkeypatch):
    monkeypatch.setattr(pipeline, "HIDDEN_SECONDS", 0.0)
    source, out = write(tmp_path), tmp_path / "out"
    options: dict[str, Any] = {"method": "best", "group_size": 32, "calibration": data(text)}
    quantize(source, tmp_path / "whole", **options)
    # Forked with one thread: OpenMP's threads do not survive a fork.
    context, threads = multiprocessing.get_context("fork"), torch.get_num_threads()
    torch.set_num_threads(1)
    for files in (1, 2, 3):
        child = context.Process(target=quantize, args=(source, out), kwargs={**options, "resume": True})
        child.start()
        while child.is_alive() and len(list(out.glob("calibrated-*"))) < files:
            time.sleep(0.001)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    quantize(source, out, resume=True, **options)
    torch.set_num_threads(threads)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_resume_with_other_data_is_refused(tmp_path, text):
    source, out = write(tmp_path), tmp_path / "out"

    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, method="gptq", calibration=data(text), progress=interrupted_at(1))
    with pytest.raises(OutputError, match=r"calibration\.tokens_sha256"):
        quantize(source, out, method="gptq", calibration=data(text, seed=4), resume=True)


def test_rules_mix_methods_and_dense_layers(tmp_path, text):
    source, out = write(tmp_path), tmp_path / "out"
    rules = ("*.layers.0.*=keep", "*.layers.1.*=int8::rtn", "*.mlp.*=int4:32:best", "*.v_proj=int8::gptq")
    quantize(source, out, method="imatrix", calibration=data(text), rules=rules, lm_head="int8")
    layers = read_manifest(out)["layers"]
    methods = {name: layer["method"] for name, layer in layers.items()}
    assert methods["model.layers.0.mlp.up_proj"] is None and methods["lm_head"] == "imatrix"
    assert methods["model.layers.1.mlp.up_proj"] == "rtn"
    assert layers["model.layers.1.mlp.up_proj"]["output_error"] is None
    assert methods["model.layers.2.mlp.up_proj"] == "best"
    assert methods["model.layers.2.self_attn.v_proj"] == "gptq"
    assert methods["model.layers.2.self_attn.q_proj"] == "imatrix"
    assert not any(check.problems for check in verify(out, reload=False))


@pytest.mark.parametrize("family", ["llama", "tied"])
def test_a_head_with_data_is_closer_than_without(tmp_path, text, family):
    source = write(tmp_path, family)
    exact = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokens = tokens_of(source, text)
    errors = {}
    for method in ("mse", "gptq", "best", "awq"):
        out = tmp_path / method
        rules = (f"lm_head=int3:32:{method}", "*.layers.0.mlp.up_proj=int8::mse", "*.layers.*=keep")
        options = {} if method == "mse" else {"calibration": data(text)}
        result = quantize(source, out, method=method, rules=rules, **options)
        assert not any(check.problems for check in verify(out, reload=False))
        model = load(out, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            expected, found = (m(input_ids=tokens).logits for m in (exact, model))
        errors[method] = ((found - expected).square().sum() / expected.square().sum()).item()
        assert ("not scaled" in (result.measured["lm_head"].note or "")) == (method == "awq")
        assert list(out.glob("*calibrated*")) == []
    assert max(errors["gptq"], errors["best"]) < 0.6 * errors["mse"] and errors["awq"] < errors["mse"]


def test_dead_features_and_singular_moments_are_survived_and_said(tmp_path, text):
    source, out = write(tmp_path), tmp_path / "out"
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][:7] = 0
    # All inputs of this one are zero.
    tensors["model.layers.1.mlp.up_proj.weight"][:] = 0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    result = quantize(source, out, method="best", group_size=32, calibration=data(text))
    noted = {name for name, one in result.measured.items() if one.note is not None}
    assert noted == {"model.layers.1.mlp.down_proj"}
    assert "singular" in (result.measured["model.layers.1.mlp.down_proj"].note or "")
    model = load(out, dtype=torch.float32, device="cpu")
    assert torch.isfinite(model(input_ids=torch.arange(10)[None]).logits).all()


def test_activations_that_are_not_finite_name_the_layer(tmp_path, text):
    source, out = write(tmp_path), tmp_path / "out"
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"][3] = float("inf")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"model\.layers\.1\.mlp\.gate_proj: .* inputs .*mse"):
        quantize(source, out, method="gptq", calibration=data(text))
    assert not (out / "config.json").exists()


@pytest.mark.parametrize(
    ("family", "options", "error", "message"),
    [
        ("llama", {"method": "mse", "calibration": "text"}, UsageError, "no method of the recipe takes any"),
        ("llama", {"method": "gptq", "format": "binary-residual"}, FormatError, "several planes"),
        ("llama", {"method": "gptq", "format": "binary-rank1"}, FormatError, "column scales"),
        ("llama", {"method": "hqq", "format": "fp6"}, FormatError, "hqq"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_before_any_work(tmp_path, text, family, options, error, message):
    source = write(tmp_path, family)
    if "calibration" in options:
        options = {**options, "calibration": data(text)}
    with pytest.raises(error, match=message):
        quantize(source, tmp_path / "out", **options)
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_model_that_takes_more_than_tokens_is_refused(tmp_path, text, monkeypatch):
    def forward(*_: Any, **__: Any) -> None:
        raise ValueError("you have to give pixel_values")

    source = write(tmp_path)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    message = r"'llama': it does not run on tokens alone \(ValueError: you have to give .*--method mse"
    with pytest.raises(CheckpointError, match=message):
        quantize(source, tmp_path / "out", method="gptq", calibration=data(text))
    assert not (tmp_path / "out").exists()


def test_a_pass_that_fails_leaves_no_thread(tmp_path, text, monkeypatch):
    source = write(tmp_path)
    before = {thread.name for thread in threading.enumerate()}

    def fail(*arguments: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(layer_quantizer, "check_finite", fail)
    with pytest.raises(RuntimeError, match="planted"):
        quantize(source, tmp_path / "out", method="gptq", calibration=data(text))
    assert {thread.name for thread in threading.enumerate()} <= before | {"MainThread"}


def test_a_block_read_ahead_is_read_once(tmp_path, monkeypatch):
    from quantkit.checkpoint.source import Checkpoint

    checkpoint = Checkpoint.open(write(tmp_path))
    decoder = blocks.Decoder(checkpoint, torch.device("cpu"), torch.float32)
    found = [decoder.block(name) for name in decoder.block_names]
    reads: list[str] = []
    read = Checkpoint.read

    def counted(self: Checkpoint, name: str) -> torch.Tensor:
        reads.append(name)
        return read(self, name)

    monkeypatch.setattr(Checkpoint, "read", counted)
    decoder.read_ahead(found[1])
    with decoder.cached(found[1]):
        names = [f"{found[1].name}.{name}" for name, _ in found[1].module.named_parameters()]
        for name in names:
            assert_equal(decoder.read(name), read(checkpoint, name), name)
    assert sorted(reads) == sorted(names)


def test_reading_ahead_ends_with_the_last_block_that_has_work_and_changes_nothing(
    tmp_path, text, monkeypatch
):
    source = write(tmp_path)
    options = {"method": "best", "calibration": data(text), "rules": ("*.layers.[12].*=int8::mse",)}
    quantize(source, tmp_path / "one by one", **options)
    ahead: list[str] = []
    read_ahead = blocks.Decoder.read_ahead

    def noted(self: blocks.Decoder, block: blocks.Block) -> None:
        ahead.append(block.name)
        read_ahead(self, block)

    monkeypatch.setitem(pipeline.READS_AHEAD, "cpu", True)
    monkeypatch.setattr(blocks.Decoder, "read_ahead", noted)
    quantize(source, tmp_path / "ahead", **options)
    assert not ahead
    options = {**options, "rules": ("*.layers.2.*=int8::mse",), "overwrite": True}
    quantize(source, tmp_path / "ahead", **options)
    assert ahead == ["model.layers.1"]
    monkeypatch.setitem(pipeline.READS_AHEAD, "cpu", False)
    quantize(source, tmp_path / "one by one", **options)
    assert files_of(tmp_path / "ahead") == files_of(tmp_path / "one by one")


def test_what_cannot_be_read_ahead_ends_the_run_with_its_error(tmp_path, text, monkeypatch):
    from quantkit.checkpoint.source import Checkpoint

    source, out = write(tmp_path), tmp_path / "out"
    options: dict[str, Any] = {"method": "gptq", "calibration": data(text)}
    read = Checkpoint.read

    def failing(self: Checkpoint, name: str, *span: Any) -> torch.Tensor:
        if threading.current_thread().name.startswith("read-ahead") and name.endswith("1.mlp.up_proj.weight"):
            raise CheckpointError("planted")
        return read(self, name, *span)

    with monkeypatch.context() as broken:
        broken.setitem(pipeline.READS_AHEAD, "cpu", True)
        broken.setattr(Checkpoint, "read", failing)
        with pytest.raises(CheckpointError, match="planted"):
            quantize(source, out, **options)
    assert [path.name for path in out.glob("calibrated-*")] == ["calibrated-00000.safetensors"]
    quantize(source, out, resume=True, **options)
    quantize(source, tmp_path / "whole", **options)
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("hidden", "columns", "samples", "length", "on_gpu"),
    [
        (4096, 14336, 128, 2048, True),
        (4096, 14336, 256, 2048, False),
        # The matrices of such columns leave no room within 16 GB.
        (8192, 28672, 128, 512, False),
    ],
)
def test_hidden_states_stay_on_a_gpu_beside_what_quantizing_takes(
    monkeypatch, hidden, columns, samples, length, on_gpu
):
    monkeypatch.setattr(memory, "free_memory", lambda device: 139 << 30)
    device = torch.device("cuda")
    needed = samples * length * hidden * torch.bfloat16.itemsize
    home = choose_home(needed, columns, device, Ranks(), Path())
    assert home == (Home(device) if on_gpu else Home(torch.device("cpu"), locked=True))


@pytest.mark.parametrize("method", ["gptq", "best"])
def test_hidden_states_that_the_host_has_no_room_for_are_on_the_disk(
    tmp_path, text, monkeypatch, caplog, method
):
    source, options = write(tmp_path), {"method": method, "calibration": data(text)}
    quantize(source, tmp_path / "host", **options)
    assert not caplog.records
    made, disk_memory = [], hidden_states.disk_memory

    def noted(directory: Path, size: int) -> Any:
        before = set(directory.iterdir())
        found = disk_memory(directory, size)
        assert set(directory.iterdir()) == before
        made.append(directory)
        return found

    monkeypatch.setattr(hidden_states, "HOST_MEMORY", 0.0)
    monkeypatch.setattr(hidden_states, "disk_memory", noted)
    quantize(source, tmp_path / "disk", **options)
    assert set(made) == {tmp_path / "disk"}
    assert files_of(tmp_path / "disk") == files_of(tmp_path / "host")
    (said,) = caplog.messages
    assert f"of hidden states stay in {tmp_path / 'disk'}, as the host has " in said
    assert "--calibration-samples" in said


def test_a_disk_without_room_for_hidden_states_is_an_error_and_the_run_goes_on_later(
    tmp_path, text, monkeypatch
):
    source, out, options = write(tmp_path), tmp_path / "out", {"method": "gptq", "calibration": data(text)}

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as short:
        short.setattr(hidden_states, "HOST_MEMORY", 0.0)
        short.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            OutputError, match=r"cannot write .*out: No space left .* Free space on that disk"
        ):
            quantize(source, out, **options)
    assert not [path for path in out.iterdir() if path.name.startswith((TEMP_PREFIX, "tmp"))]
    quantize(source, out, resume=True, **options)
    quantize(source, tmp_path / "whole", **options)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_linears_with_one_input_are_one_stage(tmp_path):
    from quantkit.checkpoint.source import Checkpoint

    decoder = blocks.Decoder(Checkpoint.open(write(tmp_path)), torch.device("cpu"), torch.float32)
    assert decoder.block_names == tuple(f"model.layers.{i}" for i in range(3))
    block = decoder.block("model.layers.0")
    with decoder.passes() as start, decoder.loaded(block):
        one = start(torch.arange(10)[None], Home(torch.device("cpu")))
        assert one.block == block.name
        stages = stages_of(block, one.call, LINEARS)
        assert stages == ([LINEARS[:3], LINEARS[3:4], LINEARS[4:6], LINEARS[6:]], [], [])
    assert all(parameter.is_meta for parameter in block.module.parameters())


@pytest.mark.skipif(not (BOOKS.is_dir() and MIXED.is_file()), reason="books-28m is not here")
def test_books_end_to_end(tmp_path):
    """The first block of the real model, with 8 of the 128 samples of docs/accuracy.md, a quarter as long."""
    options = CalibrationOptions(str(MIXED), samples=8, length=128)
    errors = {}
    for method in ("imatrix", "gptq"):
        rules = tuple(f"*.layers.{i}.*=keep" for i in range(1, 8))
        result = quantize(BOOKS, tmp_path / method, method=method, calibration=options, rules=rules)
        errors[method] = [one.output_error or 0.0 for one in result.measured.values()]
    assert len(errors["gptq"]) == 7
    assert sum(errors["gptq"]) < 0.6 * sum(errors["imatrix"])
