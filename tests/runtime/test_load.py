"""`quantkit.load`, generation, and what importing and loading cost."""

import gc
import importlib
import json
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch
import transformers

import quantkit
from quantkit.devices import best_device, pick_device
from quantkit.errors import CheckpointError, EnvironmentProblem, UsageError
from quantkit.model import transformers_version
from quantkit.model.hf_files import explained
from quantkit.runtime.fitness import _devices_of
from quantkit.runtime.generate import Generation, _select, generate, stream
from quantkit.runtime.load import load
from quantkit.runtime.replace import packed_modules
from quantkit.runtime.transformers import quantizer, registration

from ..support.compare import assert_close, assert_equal
from ..tiny.packed import HALF_ON_DISK, VOCAB, logits_of, run_python


@pytest.mark.parametrize("name", ["int4", "fp6"])
def test_a_packed_model_computes_with_the_dequantized_weights(tiny, prompt, name):
    checkpoint = tiny("qwen2", name)
    model = load(checkpoint.packed, device="cpu")
    assert not model.training
    assert any(True for _ in packed_modules(model))
    assert quantkit.load is load
    expected = logits_of(checkpoint.dense_model(), prompt)
    assert_close(logits_of(model, prompt), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the graphs of a model on a GPU refer to it")
def test_a_model_is_freed_without_the_garbage_collector(tiny, prompt, family):
    checkpoint = tiny(family)
    gc.disable()
    try:
        model = load(checkpoint.packed, device="cpu")
        logits_of(model, prompt)
        model.generate(prompt, max_new_tokens=2, do_sample=False)
        model.state_dict()
        held = [weakref.ref(one) for one in (*model.modules(), *model.parameters())]
        del model
        assert [reference() for reference in held] == [None] * len(held)
    finally:
        gc.enable()


def test_a_dense_model_is_loaded_as_by_transformers(tiny, prompt):
    checkpoint = tiny()
    model = load(checkpoint.dense, device="cpu")
    assert_equal(logits_of(model, prompt), logits_of(checkpoint.dense_model(), prompt))


def test_dtype_and_disk_offload(tiny, prompt, tmp_path):
    checkpoint = tiny()
    model = load(checkpoint.packed, device="cpu", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    offloaded = load(
        checkpoint.packed,
        dtype=torch.bfloat16,
        device_map=HALF_ON_DISK,
        offload_folder=tmp_path / "offload",
    )
    assert offloaded.model.layers[1].self_attn.q_proj.weight_packed.is_meta
    expected = logits_of(model, prompt)
    assert_close(logits_of(offloaded, prompt), expected, rtol=0, atol=0.05 * expected.abs().max().item())


def test_max_memory_moves_layers_to_disk(tiny, prompt, tmp_path):
    checkpoint = tiny()
    options = {"device_map": "auto", "max_memory": {"cpu": 80_000}, "offload_folder": tmp_path / "offload"}
    model = load(checkpoint.packed, **options)
    assert {"cpu", "disk"} == set(model.hf_device_map.values())
    expected = logits_of(checkpoint.dense_model(), prompt)
    assert_close(logits_of(model, prompt), expected, rtol=1e-5, atol=1e-5)


def test_a_missing_dense_tensor_is_refused(tiny):
    checkpoint = tiny()
    tensors = checkpoint.tensors()
    del tensors["model.norm.weight"]
    checkpoint.rewrite(tensors)
    with pytest.raises(CheckpointError, match=r"no tensor for 'model.norm.weight'"):
        load(checkpoint.packed, device="cpu")


@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_a_device_that_is_not_there(tiny, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match=f"device '{device}'"):
        load(tiny().packed, device=device)


def test_auto_is_a_gpu_where_there_is_one_and_the_cpu_in_tests(monkeypatch):
    for there, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert best_device() == torch.device(kind)
        assert pick_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, "floaty", "int8", "Tensor"])
def test_a_dtype_that_is_none_of_activations(tiny, dtype):
    with pytest.raises(
        UsageError, match=r"expected torch\.float32, torch\.bfloat16, torch\.float16, or None"
    ):
        load(tiny().packed, dtype=dtype)


def test_a_dtype_has_a_name(tiny):
    packed = tiny().packed
    assert load(packed, device="cpu", dtype="float16").dtype == torch.float16
    assert load(packed, device="cpu", dtype="auto").dtype == load(packed, device="cpu").dtype


def test_contradicting_placement(tiny):
    with pytest.raises(UsageError, match="contradict"):
        load(tiny().packed, device="cpu", device_map="auto")


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(UsageError, match="nowhere"):
        load(tmp_path / "nowhere")


@pytest.mark.fault(70)
@pytest.mark.parametrize("version", ["4.57.1", "5.11.0", "6.0.0.dev0"])
def test_other_versions_of_transformers(monkeypatch, tiny, version):
    monkeypatch.setattr(transformers_version.metadata, "version", lambda name: version)
    with pytest.raises(EnvironmentProblem, match=rf">=5.12,<6.0; found {version}.*pip install"):
        load(tiny().packed)
    with pytest.warns(UserWarning, match="not registered"):
        registration.register_plugin()


def test_without_transformers_the_remedy_is_said(monkeypatch):
    def missing(name: str) -> str:
        raise transformers_version.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(transformers_version.metadata, "version", missing)
    with pytest.raises(EnvironmentProblem, match="found none"):
        transformers_version.require_transformers()


# Generation


def test_greedy_generation_is_that_of_transformers(tiny, words):
    checkpoint = tiny("gemma3")
    model = load(checkpoint.packed, device="cpu")
    pieces: list[str] = []
    result = generate(model, words, "w5 w6 w7", max_new_tokens=12, on_text=pieces.append)
    ids = words("w5 w6 w7", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    assert list(result.tokens) == expected
    # The text continues the prompt: the space between them is part of it.
    assert "".join(pieces) == result.text
    assert "w5 w6 w7" + result.text == words.decode([5, 6, 7, *expected], skip_special_tokens=True)
    assert result.prompt_tokens == 3
    assert len(pieces) > 1
    assert result.seconds >= result.decode_seconds > 0
    assert result.tokens_per_second == pytest.approx((len(expected) - 1) / result.decode_seconds)


def test_sampling_is_reproducible(tiny, words):
    model = load(tiny().packed, device="cpu")
    options = {"max_new_tokens": 10, "temperature": 2.0}
    first, second = (generate(model, words, "w5", seed=3, **options).tokens for _ in range(2))
    assert first == second
    assert generate(model, words, "w5", seed=4, **options).tokens != first


@pytest.mark.parametrize("temperature", [1e-30, 1e-31, 1e-45])
def test_the_likeliest_token_at_temperatures_near_0(tiny, words, temperature):
    model = load(tiny().packed, device="cpu")
    greedy = generate(model, words, "w5", max_new_tokens=5).tokens
    assert generate(model, words, "w5", max_new_tokens=5, temperature=temperature).tokens == greedy


@pytest.mark.parametrize("family", ["MambaConfig", "Mamba2Config"])
def test_a_cache_with_another_name(words, family):
    sizes = {"num_heads": 4, "head_dim": 32, "n_groups": 1} if family == "Mamba2Config" else {}
    config = getattr(transformers, family)(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.nn.init.normal_(model.lm_head.weight)
    tokens = generate(model, words, "w5 w6 w7", max_new_tokens=6).tokens
    ids = torch.tensor([[5, 6, 7, *tokens]])
    with torch.no_grad():
        assert list(tokens) == model(ids, use_cache=False).logits[0, 2:-1].argmax(-1).tolist()


def test_a_model_that_returns_no_cache(words):
    config = transformers.RecurrentGemmaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        lru_width=32,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(
        UsageError, match=r"RecurrentGemmaForCausalLM returns no (past_key_values|cache); use its own"
    ):
        generate(model, words, "w5 w6")


def test_generation_ends_at_the_end_token(tiny, words):
    model = load(tiny().packed, device="cpu")
    tokens = generate(model, words, "w5 w6", max_new_tokens=5).tokens
    model.generation_config.eos_token_id = [2, tokens[2]]
    assert generate(model, words, "w5 w6", max_new_tokens=5).tokens == tokens[: tokens.index(tokens[2]) + 1]
    model.generation_config.eos_token_id = None
    assert len(generate(model, words, "w5 w6", max_new_tokens=5).tokens) == 5


def test_characters_of_several_tokens_are_held_back():
    class Bytes:
        """A token per byte."""

        def __call__(self, prompt, return_tensors):
            ids = torch.tensor([list(prompt.encode())])
            return transformers.BatchEncoding({"input_ids": ids})

        def decode(self, tokens, skip_special_tokens):
            return bytes(tokens).decode(errors="replace")

    text = "a€ü🙂b"

    class Model:
        device = torch.device("cpu")
        generation_config = transformers.GenerationConfig()
        config = transformers.LlamaConfig()

        def forward(self, input_ids, past_key_values, use_cache):
            at = past_key_values or 0
            logits = torch.zeros(1, 1, 256)
            logits[0, 0, text.encode()[at]] = 1
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits, past_key_values=at + 1)

        __call__ = forward

    count = len(text.encode())
    assert list(stream(Model(), Bytes(), "x", max_new_tokens=count)) == list(text)
    cut = generate(Model(), Bytes(), "x", max_new_tokens=2)
    assert cut.text == "a\ufffd"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "no tokens"),
        ({"prompt": "w5", "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompt": "w5", "temperature": -1.0}, "temperature -1.0"),
        ({"prompt": "w5", "temperature": float("nan")}, "temperature nan"),
        ({"prompt": "w5 \udcff"}, "the prompt is no Unicode text: surrogates not allowed"),
    ],
)
def test_wrong_arguments_of_generate_are_refused(tiny, words, arguments, message):
    with pytest.raises(UsageError, match=message):
        generate(load(tiny().packed, device="cpu"), words, **arguments)


def test_one_token_has_no_speed():
    assert Generation("a", (1,), 1, 0.5, 0.0, "positions").tokens_per_second is None


# Costs, each in a process of its own


def forked(*parts, environment=None):
    """What codes print in processes of their own, each forked from one that imported what was named before.

    `parts` are pairs of modules, as after `import`, and of the codes that are run then.
    """
    program = """
import json, os, sys
for modules, codes in json.loads(sys.argv[1]):
    exec(f"import {modules}")
    for code in codes:
        child = os.fork()
        if not child:
            exec(code)
            sys.stdout.flush()
            # To take apart what was imported takes most of a second.
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, code
"""
    return run_python(program, json.dumps(parts), environment=environment).stdout.splitlines()


def test_importing_quantkit_imports_no_heavy_package():
    code = """
import sys, json
import quantkit
heavy = [name for name in ("torch", "transformers", "triton", "accelerate", "lm_eval") if name in sys.modules]
assert quantkit.__version__ and "load" in dir(quantkit)
quantkit.QuantkitError
from quantkit import PackedTensor
import torch
print(json.dumps([heavy, "transformers" in sys.modules, torch.cuda.is_initialized()]))
"""
    assert json.loads(run_python(code).stdout) == [[], False, False]


def test_the_plugin_is_registered_whatever_is_imported_first(tiny):
    first, *others = (
        f"{order}; print(auto.AUTO_QUANTIZER_MAPPING['quantkit'].__name__)"
        for order in (
            "import quantkit; from transformers.quantizers import auto",
            "from transformers.quantizers import auto; import quantkit",
            "import quantkit.runtime.transformers.quantizer; from transformers.quantizers import auto",
            "import quantkit; from transformers.quantizers import auto; "
            "import importlib; importlib.reload(quantkit)",
        )
    )
    # Without compressed-tensors, which transformers imports with its quantizers.
    alone = f"""
sys.modules["compressed_tensors"] = None
import quantkit
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tiny("llama", "int4-asym").packed)!r})
print(type(model.model.layers[0].self_attn.q_proj).__name__)
"""
    names = forked(
        # What transformers imports for the longest time.
        ("torch.distributed.tensor, torch.distributed.fsdp", [first]),
        ("transformers.models.auto.configuration_auto, accelerate", [*others, alone]),
    )
    assert names == ["QuantkitQuantizer"] * 4 + ["PackedLinear"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        quantkit.nonsense  # noqa: B018


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_far_less_memory_than_the_dense_model(tmp_path):
    write_big(tmp_path)
    code = """
import threading, time, psutil
from quantkit.runtime.load import load
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.replace import packed_modules
if not {layouts}:
    PackedLinear.build_kernel_layouts = lambda self, dtype: None
process = psutil.Process()
before, peak, done = process.memory_info().rss, 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
model = load({directory!r}, device="cpu", dtype=torch.{dtype})
done = True
thread.join()
weights = sum(module.in_features * module.out_features for _, module in packed_modules(model))
print(torch.{dtype}.itemsize * weights, peak - before)
"""
    # Without what kernels keep beside the storage, which versions that do not map the file hold twice while
    # they load it; and with it: int4 once more for bfloat16, a byte per weight for float32. The source of the
    # model's classes, in which weights that code reads are found, is 1 % of the first.
    cases = ((False, "float32", 0.42), (True, "bfloat16", 0.9), (True, "float32", 0.7))
    codes = [
        code.format(layouts=layouts, dtype=dtype, directory=str(tmp_path)) for layouts, dtype, _ in cases
    ]
    # Left to itself, malloc keeps a share of what was freed that changes from run to run (63 to 137 MB for
    # the second row): larger blocks go back to the system at once, so that the peak is what the loader held.
    environment = {"MALLOC_MMAP_THRESHOLD_": "131072"}
    modules = "quantkit, torch, transformers, accelerate, transformers.models.llama.modeling_llama"
    for (layouts, dtype, share), found in zip(
        cases, forked((modules, codes), environment=environment), strict=True
    ):
        dense, grown = map(int, found.split())
        assert dense > 150e6
        assert grown < share * dense, (layouts, dtype)


def write_big(directory):
    """A packed model of 80 million weights in random words, written without ever being dense."""
    from safetensors.torch import save_file

    from quantkit.checkpoint.quantization_config import Assignment, QuantizationConfig

    from ..tiny.packed import SCHEMES, config_of

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 5, "head_dim": 64}
    config = config_of("llama", **sizes, num_attention_heads=16, num_key_value_heads=16)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = {name: torch.ones(p.shape) for name, p in model.named_parameters() if "proj" not in name}
    scheme, assignments = SCHEMES["int4"], [Assignment("lm_head", ("lm_head",), (VOCAB, 1024), None)]
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            shape = tuple(module.weight.shape)
            assignments.append(Assignment(name, (name,), shape, scheme))
            for part, (dtype, size) in scheme.storage_shapes(shape).items():
                value = torch.full(size, 0.01).to(dtype)
                if part == "packed":
                    value = torch.randint(-(2**31), 2**31 - 1, size).to(torch.int32)
                tensors[f"{name}.weight_{part}"] = torch.tensor(shape) if part == "shape" else value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    quantization = QuantizationConfig.from_assignments(assignments).to_dict(assignments)
    (directory / "config.json").write_text(
        json.dumps(
            {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
        )
    )


@pytest.mark.parametrize("text", ["{", '{"top_k": 7, "top_k": 8}'])
def test_a_generation_config_that_is_not_one_is_refused(tiny, text):
    # transformers goes on without it, and generates something else.
    checkpoint = tiny()
    path = checkpoint.packed / "generation_config.json"
    path.write_text('{"do_sample": true, "top_k": 7}')
    config = load(checkpoint.packed, device="cpu").generation_config
    assert config.top_k == 7 and config.do_sample
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.packed).generation_config
    assert config.to_dict() == theirs.to_dict()
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load(checkpoint.packed, device="cpu")


def test_a_lack_of_memory_is_not_a_damaged_file(tiny, monkeypatch):
    checkpoint = tiny()

    def exhausted(*_, **__):
        torch.empty(1 << 60)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", exhausted)
    with pytest.raises(EnvironmentProblem, match=r"the host has too little memory \(4611686\.02 TB needed"):
        load(checkpoint.packed, device="cpu")


@pytest.mark.parametrize("module", ["quantkit", "transformers"])
@pytest.mark.parametrize("kind", [TypeError, AttributeError, IndexError, ValueError, RuntimeError])
def test_only_what_files_can_lead_to_is_a_damaged_file(tiny, monkeypatch, module, kind):
    source = "def packed_modules(model):\n    raise kind('the cause')"
    file = Path(importlib.import_module(module).__file__).parent / "made_up.py"
    names = {"kind": kind}
    exec(compile(source, file, "exec"), names)
    monkeypatch.setattr(quantizer, "packed_modules", names["packed_modules"])
    bug = module == "quantkit" and kind not in (ValueError, RuntimeError)
    with pytest.raises(kind if bug else CheckpointError, match="the cause"):
        load(tiny().packed, device="cpu")


def test_numbers_that_torch_refuses_are_those_of_files(tmp_path):
    # torch.multinomial has no frame of its own.
    with pytest.raises(CheckpointError, match="cannot be opened or run: RuntimeError"), explained(tmp_path):
        _select(torch.full((1, 4), float("nan")), 1.0, torch.Generator())


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(("cuda", "cuda"), 1), (("cuda", "meta"), 1), (("cuda", "cpu"), 2), (("cpu", "meta"), 1)],
)
def test_freed_words_do_not_hide_that_a_model_is_on_one_device(devices, expected):
    parameters = {
        str(i): types.SimpleNamespace(device=torch.device(one), is_meta=one == "meta")
        for i, one in enumerate(devices)
    }
    assert len(_devices_of([types.SimpleNamespace(_parameters=parameters)])) == expected


def test_what_waits_for_a_collection_makes_room_on_a_gpu(monkeypatch):
    before = torch.nn.Module()
    before.generate = before
    left = weakref.ref(before)
    del before

    def from_pretrained(*_, **__):
        assert left() is None
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("quantkit.runtime.load.pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", from_pretrained)
    gc.disable()
    try:
        assert left() is not None
        with pytest.raises(EnvironmentProblem, match="the GPU has too little memory"):
            load(Path(__file__).parents[2] / "examples" / "stories260K")
    finally:
        gc.enable()
