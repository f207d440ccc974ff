"""What quantkit changes of transformers: names of its own, one model's class, nothing of other models."""

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, pipeline
from transformers.core_model_loading import MergeModulelist
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.quantizers import auto

import quantkit
from quantkit.runtime.decoding import graphs_of
from quantkit.runtime.generate import generate
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.replace import packed_modules
from quantkit.runtime.transformers.patches import (
    adapters,
    attention,
    generation,
    loading,
    parallel,
    process_groups,
)
from quantkit.runtime.transformers.patches.table import PATCHES, Patch
from quantkit.runtime.transformers.quantizer import QuantkitConfig, register, unregister

from ...support.compare import assert_close, assert_equal
from ...tiny.packed import VERSION, Tiny, logits_of
from ..graphed import DEVICE, SEVEN, count_recordings, ids

STORIES = Path(__file__).parents[3] / "examples" / "stories260K"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "int4"
    quantkit.quantize(STORIES, out, format="int4")
    return out


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps were recorded."""
    return count_recordings(monkeypatch)[0]


def from_pretrained(path: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, **options)


def registries() -> dict[str, dict[str, Any]]:
    """What transformers knows by name: each entry with the object itself."""
    found = {
        "configs": dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING),
        "quantizers": dict(auto.AUTO_QUANTIZER_MAPPING),
        "attention": dict(ALL_ATTENTION_FUNCTIONS.items()),
        "masks": dict(ALL_MASK_ATTENTION_FUNCTIONS.items()),
    }
    if VERSION >= (5, 17):
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

        found["styles"] = dict(ALL_PARALLEL_STYLES.items())
        found["style attributes"] = {name: dict(vars(one)) for name, one in ALL_PARALLEL_STYLES.items()}
    return found


def test_a_packed_model_changes_nothing_of_a_dense_one(packed: Path, recorded: list[int]) -> None:
    dense = LlamaForCausalLM.from_pretrained(STORIES, dtype=torch.float32).to(DEVICE)
    logits, tokens = logits_of(dense, ids()), dense.generate(ids(), **SEVEN)
    config, attributes, before = dense.config.to_dict(), set(vars(dense)), registries()
    ours = from_pretrained(packed, dtype=torch.float32).to(DEVICE)
    ours.generate(ids(), **SEVEN)
    assert recorded and graphs_of(ours) is not None
    after = registries()
    added = {kind: after[kind].keys() - before[kind].keys() for kind in before}
    assert set().union(*added.values()) <= {attention.NAME, attention.PROMPT}
    for kind, entries in before.items():
        assert all(
            after[kind][name] is value or after[kind][name] == value for name, value in entries.items()
        )
    assert type(dense) is LlamaForCausalLM and set(vars(dense)) == attributes
    assert not {"forward", "generate", "get_compiled_call"} & set(vars(dense))
    assert dense.config.to_dict() == config and dense.config._attn_implementation == "sdpa"
    assert ALL_ATTENTION_FUNCTIONS["sdpa"].__module__.startswith("transformers.")
    recorded.clear()
    assert_equal(logits_of(dense, ids()), logits)
    assert_equal(dense.generate(ids(), **SEVEN), tokens)
    assert not recorded
    # A dense model that is loaded after it is transformers' too.
    again = from_pretrained(STORIES, dtype=torch.float32)
    assert type(again) is LlamaForCausalLM and set(vars(again)) == attributes


def test_what_is_saved_says_nothing_of_patches(packed: Path, recorded: list[int], tmp_path: Path) -> None:
    model = from_pretrained(packed).to(DEVICE)
    model.generate(ids(), **SEVEN)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    for file in tmp_path.glob("*.json"):
        assert "quantkit_" not in file.read_text()


@pytest.fixture
def unregistered() -> Iterator[None]:
    """A test may take the plug-in out."""
    yield
    register()


def _set_a_flag(model: Any) -> None:
    setattr(model.model, loading._MARKED, True)
    model.model._is_hf_initialized = True


class _Conversion:
    def __init__(self) -> None:
        self.operations = [MergeModulelist(0)]


def _merge(model: Any) -> None:
    model._weight_conversions = [_Conversion()]
    loading._replace_operations(model, lambda one: loading._Merge(one.dim))


class _Weights:
    def __init__(self, module: Any) -> None:
        entries = {"safetensors_file": "f", "dtype": "bfloat16"}
        index = {name: dict(entries) for name, _ in module.named_parameters()}
        self.prefix, self.dataset = "", type("Dataset", (), {"index": index})()


def _offload(model: Any) -> None:
    module = next(one for _, one in packed_modules(model))
    module._hf_hook = type("Hook", (), {"weights_map": _Weights(module)})()
    loading.keep_offloaded_dtypes(model)


def _share(model: Any) -> None:
    module = next(one for _, one in packed_modules(model) if isinstance(one, PackedLinear))
    module.forward = parallel.ShareForward(module, module.forward, None)


#: How each patch comes to be on a packed model.
MADE: dict[str, Callable[[Any], object]] = {
    "quantizers": lambda _: register(),
    "adapters": lambda _: adapters.apply(),
    "attention": lambda _: attention.apply(),
    "generation": generation.apply,
    "initialization": _set_a_flag,
    "expert shapes": _merge,
    "offloaded dtypes": _offload,
    "process groups": lambda _: process_groups.apply(),
    "parallel styles": lambda _: parallel._own_style("colwise"),
    "parallel plan": parallel.divide_packed,
    "parallel forward": _share,
}


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_each_patch_can_be_undone(packed: Path, patch: Patch) -> None:
    assert patch.changes and patch.reason and patch.versions.startswith(">=5.")
    if patch.name.startswith("parallel") and VERSION < (5, 17):
        pytest.skip("this transformers has no such styles")
    if patch.name == "adapters":
        pytest.importorskip("peft.tuners.lora.model")
    model = from_pretrained(packed, dtype=torch.float32)
    expected = logits_of(model, ids().cpu())
    patch.undo(model)
    assert not patch.is_applied(model)
    # What an earlier test left of a plan.
    parallel.undo_styles()
    before = registries()
    MADE[patch.name](model)
    assert patch.is_applied(model)
    patch.undo(model)
    assert not patch.is_applied(model)
    patch.undo(model)
    # Those that a plan names, which are a patch of their own.
    parallel.undo_styles()
    assert registries() == before
    vars(next(one for _, one in packed_modules(model))).pop("_hf_hook", None)
    assert_equal(logits_of(model, ids().cpu()), expected)


def test_every_patch_has_a_test() -> None:
    assert [patch.name for patch in PATCHES] == [*dict.fromkeys(patch.name for patch in PATCHES)]
    assert MADE.keys() == {patch.name for patch in PATCHES}


@pytest.mark.usefixtures("unregistered")
def test_the_plug_in_can_be_taken_out(packed: Path) -> None:
    attention.apply()
    unregister()
    found = registries()
    assert "quantkit" not in found["configs"] and attention.NAME not in found["attention"]
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"].__module__.startswith("transformers.")
    unregister()
    register()
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["quantkit"] is QuantkitConfig
    assert any(True for _ in packed_modules(from_pretrained(packed)))


@pytest.mark.usefixtures("unregistered")
def test_registering_changes_only_two_tables() -> None:
    unregister()
    before = registries()
    register()
    after = registries()
    changed = {
        kind: {name for name, value in entries.items() if before[kind].get(name) is not value}
        for kind, entries in after.items()
        if kind != "style attributes"
    }
    assert changed.pop("configs") == changed.pop("quantizers") == {"compressed-tensors", "quantkit"}
    assert not any(changed.values())


def tokens_of(model: Any, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(ids(), **{**SEVEN, **options})
    return found


def test_from_pretrained_is_the_fast_path(packed: Path, recorded: list[int]) -> None:
    """The same graphs, and the same tokens, as those of `quantkit.load`."""
    expected = tokens_of(quantkit.load(packed, device=DEVICE, dtype=torch.float32))
    assert recorded == [1]
    model = from_pretrained(packed, dtype=torch.float32, device_map={"": DEVICE})
    assert_equal(tokens_of(model), expected)
    assert recorded == [1, 1]
    assert isinstance(model, LlamaForCausalLM) and type(model).__name__ == "LlamaForCausalLM"
    # Not for who asks for no graphs.
    assert_equal(tokens_of(model, disable_compile=True), expected)
    assert recorded == [1, 1]
    assert not graphs_of(model)._prompts.graphs


def test_a_text_generation_pipeline_is_the_fast_path(packed: Path, recorded: list[int]) -> None:
    model = from_pretrained(packed, dtype=torch.float32)
    writer = pipeline(
        "text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(packed), device=DEVICE
    )
    made = [
        writer("Once upon a time", max_new_tokens=6, do_sample=False)[0]["generated_text"] for _ in range(2)
    ]
    assert made[0] == made[1] and recorded == [1] and not graphs_of(model).refused


@pytest.mark.parametrize("way", ["moved", "cast", "copied", "pickled"])
def test_a_model_that_changed_place_has_joined_layouts_again(packed: Path, way: str) -> None:
    model = from_pretrained(packed, dtype=torch.float32)
    expected = logits_of(model, ids().cpu())
    if way == "moved":
        model = model.to(DEVICE)
        model._apply(lambda tensor: tensor.clone())
    elif way == "cast":
        model = model.to(torch.bfloat16).to(torch.float32).to(DEVICE)
    else:
        model = copy.deepcopy(model) if way == "copied" else pickle.loads(pickle.dumps(model))
        model = model.to(DEVICE)
    linears = [one for _, one in packed_modules(model)]
    assert all(one.lacks_layouts for one in linears)
    tolerance = 0.05 if way == "cast" else 1e-4
    assert_close(logits_of(model, ids()).cpu(), expected, rtol=tolerance, atol=tolerance)
    assert not any(one.lacks_layouts for one in linears)
    attended = model.model.layers[0].self_attn
    shared = {id(one._shared[0]) for one in (attended.q_proj, attended.k_proj, attended.v_proj)}
    assert len(shared) == 1
    if DEVICE == "cuda":
        assert torch.float32 in attended.q_proj._shared[0]._joined


def _train(model: Any) -> None:
    model.train()


def _hook(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda *_: None)


def _dispatch(model: Any) -> None:
    add_hook_to_module(model.model.norm, AlignDevicesHook(DEVICE))


def _ranks(model: Any) -> None:
    module = next(one for _, one in packed_modules(model))
    module.tensor_parallel = object()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_train, "the model is in training mode; call model.eval()"),
        (_hook, "a hook of 'model.norm' is to be called at each; remove it"),
        (
            _dispatch,
            "the model is divided among devices or offloaded; load it on one GPU, with device_map='cuda:0'",
        ),
        (_ranks, "ranks share the model (tensor parallelism) and sum through no backend, not nccl; load it"),
    ],
)
def test_what_cannot_be_recorded_runs_and_is_said_once(
    packed: Path,
    recorded: list[int],
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Any], None],
    reason: str,
) -> None:
    model = from_pretrained(packed, dtype=torch.float32, device_map={"": DEVICE})
    expected = tokens_of(model)
    recorded.clear()
    caplog.clear()
    change(model)
    for _ in range(2):
        assert_equal(tokens_of(model), expected)
    assert not recorded
    (told,) = [record.getMessage() for record in caplog.records if record.name == "quantkit.model"]
    assert told.startswith(f"decoding steps are launched one kernel at a time: {reason}")


def test_a_model_on_a_cpu_runs_as_transformers_runs_it(
    packed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = from_pretrained(packed, dtype=torch.float32, device_map="cpu")
    prompt = ids().cpu()
    found = model.generate(prompt, **SEVEN, return_dict_in_generate=True)
    assert not graphs_of(model).refused and not [one for one in caplog.records if "quantkit" in one.name]
    generation.undo(model)
    assert_equal(model.generate(prompt, **SEVEN), found.sequences)


def test_a_class_that_somebody_changes_later_is_taken(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = from_pretrained(packed, dtype=torch.float32)
    expected = logits_of(model, ids().cpu())
    forward = LlamaForCausalLM.forward

    def doubled(self: Any, *arguments: Any, **inputs: Any) -> Any:
        output = forward(self, *arguments, **inputs)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)
    assert_equal(logits_of(model, ids().cpu()), 2 * expected)


def test_quantkits_own_loop_is_quiet_on_a_cpu(packed: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(packed)
    model = from_pretrained(packed, dtype=torch.float32, device_map="cpu")
    assert generate(model, tokenizer, "One", max_new_tokens=3).tokens
    assert not [one for one in caplog.records if "quantkit" in one.name]


def test_a_dequantized_model_is_dense(packed: Path) -> None:
    model = from_pretrained(packed, dtype=torch.float32)
    expected = logits_of(model, ids().cpu())
    dense = model.dequantize()
    assert not any(True for _ in packed_modules(dense))
    assert_close(logits_of(dense, ids().cpu()), expected, rtol=1e-4, atol=1e-4)


def test_options_of_torch_compile_are_taken(packed: Path, recorded: list[int]) -> None:
    from transformers import CompileConfig

    model = from_pretrained(packed, dtype=torch.float32, device_map={"": DEVICE})
    found = model.get_compiled_call(CompileConfig(backend="eager"))
    assert found is model._compiled_call and model.get_compiled_call() is graphs_of(model)


def test_a_tiny_of_experts_loads_as_it_did(tiny: Callable[..., Tiny], prompt: torch.Tensor) -> None:
    checkpoint = tiny("mixtral")
    model = from_pretrained(checkpoint.packed, dtype=torch.float32)
    assert graphs_of(model) is not None and model.config._attn_implementation == "sdpa"
    assert_close(logits_of(model, prompt), logits_of(checkpoint.dense_model(), prompt), rtol=1e-3, atol=1e-3)
