"""Steps of decoding by graphs. Without a GPU a recorded step is one that runs again on the same tensors."""

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    StaticCache,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import quantkit
from quantkit.kernels.eager import KernelLayout
from quantkit.runtime.cache import static_cache as static_caches
from quantkit.runtime.cache.cache_name import CACHE, OLD_NAME, renamed
from quantkit.runtime.cache.static_cache import static_cache
from quantkit.runtime.cuda_graphs import capture
from quantkit.runtime.cuda_graphs import decode as decode_graphs
from quantkit.runtime.cuda_graphs.decode import GraphedForward
from quantkit.runtime.decoding import forward_of, graphs_of
from quantkit.runtime.fitness import modules_of
from quantkit.runtime.ready import make_ready
from quantkit.runtime.transformers.patches import attention, generation
from quantkit.runtime.transformers.patches.attention import decode_attention_in
from quantkit.runtime.transformers.patches.generation import apply as graph_decoding

from ...support.compare import assert_equal
from ..graphed import (
    DEVICE,
    SEVEN,
    SIZES,
    close,
    count_recordings,
    decode,
    decode_whole,
    ids,
    wait_for_others,
    with_shared_keys,
)

CAPTURE = capture.capture
LAYOUT = KernelLayout("fragments", torch.float16, (torch.zeros(3),))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "int8"
    quantkit.quantize(Path(__file__).parents[3] / "examples" / "stories260K", out, format="int8")
    return out


@pytest.fixture
def model(packed: Path) -> Any:
    """Without graphs."""
    found = quantkit.load(packed, device=DEVICE, dtype=torch.float32)
    generation.undo(found)
    return found


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps were recorded."""
    return count_recordings(monkeypatch)[0]


def test_steps_are_recorded_once_and_right(model: Any, recorded: list[int]) -> None:
    graphed = GraphedForward(model)
    for seed, kind in ((0, "ours"), (1, "ours"), (2, "transformers'")):
        prompt = ids(seed=seed)
        cache = (
            static_cache(model, 20) if kind == "ours" else StaticCache(config=model.config, max_cache_len=256)
        )
        close(decode(model, graphed, cache, prompt), decode_whole(model, prompt, 6))
    assert len(recorded) == 1 and not graphed.refused
    # Another batch is another graph.
    close(decode(model, graphed, static_cache(model, 20), ids(3)), decode_whole(model, ids(3), 6))
    assert len(recorded) == 2


def test_steps_of_a_packed_embedding_are_recorded(tmp_path: Path, recorded: list[int]) -> None:
    """Rows are selected on the GPU, and no number of an id is asked for."""
    source = Path(__file__).parents[3] / "examples" / "stories260K"
    quantkit.quantize(source, tmp_path / "out", format="int8", embeddings="int4:32", check=False)
    model = quantkit.load(tmp_path / "out", device=DEVICE, dtype=torch.float32)
    generation.undo(model)
    graphed, prompt = GraphedForward(model), ids()
    close(decode(model, graphed, static_cache(model, 20), prompt), decode_whole(model, prompt, 6))
    assert len(recorded) == 1 and not graphed.refused
    table = model.get_input_embeddings()
    assert_equal(table(prompt), table.packed.dequantize()[prompt])


@torch.no_grad()
@pytest.mark.parametrize("name", dict.fromkeys((CACHE, OLD_NAME)))
def test_caches_are_known_by_the_name_of_any_version(model: Any, recorded: list[int], name: str) -> None:
    graphed, cache = GraphedForward(model), static_cache(model, 20)
    output = model(input_ids=ids(), **{name: cache})
    assert getattr(output, name) is cache
    for _ in range(2):
        output = graphed(input_ids=ids(tokens=1), **{name: cache})
        assert getattr(output, name) is cache
    assert len(recorded) == 1 and not graphed.refused and cache.get_seq_length() == 11


def test_a_cache_by_both_names_is_left_to_the_forward() -> None:
    both = {OLD_NAME: 1, "cache": 2}
    assert renamed(both) == both
    assert renamed({OLD_NAME: 1, "input_ids": 3}) == {CACHE: 1, "input_ids": 3}
    assert renamed({"input_ids": 3}) == {"input_ids": 3}


def test_outputs_are_the_callers_own(model: Any) -> None:
    graphed, cache, prompt = GraphedForward(model), static_cache(model, 20), ids()
    with torch.no_grad():
        model(input_ids=prompt, past_key_values=cache)
        first = graphed(input_ids=prompt[:, -1:], past_key_values=cache).logits
        kept = first.clone()
        graphed(input_ids=prompt[:, :1], past_key_values=cache)
    assert_equal(first, kept)


def test_two_generations_at_a_time_do_not_mix(model: Any, recorded: list[int]) -> None:
    """Both caches are alive, and take turns with one graph."""
    graphed = GraphedForward(model)
    prompts = [ids(seed=1), ids(seed=2, tokens=13)]
    caches = [static_cache(model, 30), static_cache(model, 30)]
    found: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        logits = [
            model(input_ids=prompt, past_key_values=cache).logits[:, -1]
            for prompt, cache in zip(prompts, caches, strict=True)
        ]
        for turn in (0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0):
            token = logits[turn].argmax(-1, keepdim=True)
            logits[turn] = graphed(input_ids=token, past_key_values=caches[turn]).logits[:, -1]
            found[turn].append(logits[turn])
    for steps, prompt in zip(found, prompts, strict=True):
        close(torch.stack(steps), decode_whole(model, prompt, 6))
    assert len(recorded) == 1


def test_threads_that_generate_do_not_mix(model: Any) -> None:
    """A step waits here for the other thread to come along."""
    graphed = GraphedForward(model)
    prompts = [ids(seed=1), ids(seed=2)]
    decode(model, graphed, static_cache(model, 30), prompts[0], 1)
    (graph,) = graphed._graphs.values()
    assert not isinstance(graph, str)
    wait_for_others(graph)
    with ThreadPoolExecutor(2) as threads:
        found = list(
            threads.map(lambda prompt: decode(model, graphed, static_cache(model, 30), prompt, 3), prompts)
        )
    for steps, prompt in zip(found, prompts, strict=True):
        close(steps, decode_whole(model, prompt, 3))


def test_a_cache_that_lost_its_graph_goes_on(model: Any) -> None:
    """After another generation took the tensors over, an eager forward on the first cache is right."""
    graphed, cache, prompt = GraphedForward(model), static_cache(model, 30), ids()
    decode(model, graphed, cache, prompt, 2)
    decode(model, graphed, static_cache(model, 30), ids(seed=5), 3)
    with torch.no_grad():
        tokens = decode_tokens(model, prompt, 3)
        found = model(input_ids=tokens[:, -1:], past_key_values=cache).logits[:, -1]
    close(found, decode_whole(model, prompt, 3)[-1])


def decode_tokens(model: Any, prompt: torch.Tensor, steps: int) -> torch.Tensor:
    """The prompt with the first `steps` tokens after it."""
    with torch.no_grad():
        for _ in range(steps):
            following = model(input_ids=prompt, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            prompt = torch.cat([prompt, following], 1)
    return prompt


def test_graphs_are_few_and_let_caches_go(model: Any, recorded: list[int]) -> None:
    graphed = GraphedForward(model)
    for batch in (1, 2, 3, 1):
        decode(model, graphed, static_cache(model, 20), ids(batch), 2)
    assert len(recorded) == 4 and len(graphed._graphs) == decode_graphs.GRAPHS
    gc.collect()
    assert all(graph.cache() is None for graph in graphed._graphs.values())


def attend_otherwise(model: Any) -> None:
    """By a name that the model does not have yet, as SDPA does, which a graph takes on any device."""
    AttentionInterface.register("another", ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionMaskInterface.register("another", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("another")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64).to(torch.float32),
        lambda model: model.model.layers[0].self_attn.q_proj._layouts.update({"another": LAYOUT}),
        lambda model: setattr(model.model.layers[0], "mlp", copy.deepcopy(model.model.layers[1].mlp)),
        attend_otherwise,
    ],
    ids=["moved", "layouts", "module", "attention"],
)
def test_a_changed_model_is_recorded_anew(
    model: Any, recorded: list[int], change: Callable[[Any], Any]
) -> None:
    graphed = GraphedForward(model)
    decode(model, graphed.renew(), static_cache(model, 20), ids())
    decode(model, graphed.renew(), static_cache(model, 20), ids())
    assert len(recorded) == 1
    change(model)
    close(decode(model, graphed.renew(), static_cache(model, 20), ids()), decode_whole(model, ids(), 6))
    assert len(recorded) == 2


@torch.no_grad()
def test_a_config_may_ask_for_more_than_logits(model: Any, recorded: list[int]) -> None:
    graphed, cache = GraphedForward(model), static_cache(model, 30)
    model(input_ids=ids(), past_key_values=cache)
    for asked in (False, True, False):
        model.config.output_hidden_states = asked
        graphed.renew()
        for _ in range(2):
            output = graphed(input_ids=ids()[:, :1], past_key_values=cache)
            assert ("hidden_states" in output) == asked
    # A GPU sees that before it records, as it traces first.
    assert len(recorded) == (3 if DEVICE == "cpu" else 2)
    assert list(graphed.refused) == ["the model returns hidden_states"]


def test_what_cannot_be_recorded_runs_and_is_said_once(
    model: Any, recorded: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reasons(**inputs: Any) -> str:
        graphed = GraphedForward(model)
        with torch.no_grad(), caplog.at_level(logging.WARNING):
            for _ in range(2):
                graphed(**inputs)
        (reason,) = graphed.refused
        (record,) = [one for one in caplog.records if one.name == "quantkit.model"]
        assert record.getMessage().endswith(reason)
        caplog.clear()
        return reason

    cache = static_cache(model, 40)
    assert "not one token of each sequence" in reasons(input_ids=ids(), past_key_values=cache)
    assert "not one of static layers" in reasons(input_ids=ids(tokens=1))
    assert "cache is empty" in reasons(input_ids=ids(tokens=1), past_key_values=static_cache(model, 9))
    asked = reasons(input_ids=ids(tokens=1), past_key_values=cache, output_hidden_states=True)
    assert asked == "output_hidden_states is asked for"
    # Numbers that no tensor has would be those of the recorded step for ever.
    assert reasons(input_ids=ids(tokens=1), past_key_values=cache, given=[1.0]) == "given is a list"
    assert "given is a dict" in reasons(input_ids=ids(tokens=1), past_key_values=cache, given={"a": object})
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        step = {"input_ids": ids(tokens=1), CACHE: cache}
        assert decode_graphs.why_not(step) == "autocast is asked for"
    recorded.clear()
    monkeypatch.setattr(capture, "capture", failing)
    found = GraphedForward(model)
    close(decode(model, found, static_cache(model, 20), ids()), decode_whole(model, ids(), 6))
    assert list(found.refused) == ["operation not permitted when stream is capturing"]
    assert len(attempts) == 1, "it is not tried again at every step"


def test_other_values_of_inputs_are_other_graphs(model: Any, recorded: list[int]) -> None:
    forward = model.forward

    def scaled(*arguments: Any, by: Any, **inputs: Any) -> Any:
        output = forward(*arguments, **inputs)
        output.logits = output.logits * (by["all"] if isinstance(by, dict) else by)
        return output

    model.forward = scaled
    graphed, cache = GraphedForward(model), static_cache(model, 40)
    given = {"input_ids": ids(tokens=1), CACHE: cache}
    with torch.no_grad():
        model(input_ids=ids(), past_key_values=cache, by=1)
        first, second, third = (graphed(**given, by=by).logits.norm() for by in (1.0, 1000.0, {"all": 0.0}))
    assert second > 100 * first and third == 0 and len(recorded) == 3


def test_a_change_of_any_module_is_seen(model: Any) -> None:
    """Also where one is in several places, in itself, or nowhere."""
    model.extra = torch.nn.Sequential(model.model.norm, torch.nn.ModuleList())
    model.extra.nothing = torch.nn.Dropout()
    model.extra.nothing = None
    model.extra[0].whole = model
    found = modules_of(model)
    assert len(found) == len(set(found)) and set(found) == set(model.modules())


def test_hooks_are_called_at_each_step(model: Any, recorded: list[int]) -> None:
    seen: list[Any] = []
    handle = model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    graph_decoding(model)
    decode(model, forward_of(model), static_cache(model, 20), ids(), 6)
    assert len(seen) == 7 and not recorded
    assert list(forward_of(model).refused) == ["a hook of 'model.norm' is to be called at each; remove it"]
    handle.remove()
    # Once somebody asked for outputs, transformers has hooks that do nothing else.
    model(input_ids=ids(), output_hidden_states=True)
    decode(model, forward_of(model), static_cache(model, 20), ids(), 6)
    assert len(seen) == 7 and len(recorded) == 1


def test_a_step_that_could_not_be_recorded_keeps_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "capture", failing)
    graphed, cache = GraphedForward(model), static_cache(model, 20)
    decode(model, graphed, cache, ids())
    kept = weakref.ref(cache)
    del cache
    gc.collect()
    assert kept() is None


attempts: list[int] = []


def failing(step: Callable[[], Any], rewind: Callable[[], None], device: torch.device) -> Any:
    attempts.append(1)
    step()
    rewind()
    raise capture.NotCaptured("operation not permitted when stream is capturing")


def test_a_gradient_is_not_recorded(model: Any) -> None:
    cache = static_cache(model, 40)
    with torch.no_grad():
        model(input_ids=ids(), past_key_values=cache)
    assert decode_graphs.why_not({"input_ids": ids(tokens=1), CACHE: cache}) == "a gradient is asked for"


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers compiles on GPUs only."""
    monkeypatch.setattr(
        GenerationMixin,
        "_valid_auto_compile_criteria",
        lambda _, inputs, __: getattr(inputs.get(CACHE), "is_compileable", False),
    )


@pytest.mark.usefixtures("compiling")
def test_generate_of_transformers_runs_on_graphs(model: Any, recorded: list[int]) -> None:
    prompt = ids()
    expected = model.generate(prompt, **SEVEN)
    assert not recorded
    graph_decoding(model)
    for more in ({}, {"max_new_tokens": 5}, {"generation_config": GenerationConfig(max_length=16)}):
        found = model.generate(prompt, **{**SEVEN, **more} if "generation_config" not in more else more)
        assert_equal(found, expected[:, : found.shape[1]])
    # Lengths that differ a little have one graph.
    assert len(recorded) == 1
    padded = torch.nn.functional.pad(prompt, (3, 0))
    mask = (padded != 0).long()
    assert_equal(model.generate(padded, attention_mask=mask, **SEVEN)[:, 3:], expected)


@pytest.mark.usefixtures("compiling")
def test_generate_takes_caches_and_ways_that_need_their_own(model: Any, recorded: list[int]) -> None:
    prompt = ids(batch=1)
    expected = model.generate(prompt, **SEVEN)
    graph_decoding(model)
    others: list[dict[str, Any]] = [
        {"past_key_values": DynamicCache(config=model.config)},
        {"cache_implementation": "dynamic"},
        {"use_cache": False},
        {"assistant_model": copy.deepcopy(model)},
        {"prompt_lookup_num_tokens": 2},
    ]
    for other in others:
        assert_equal(model.generate(prompt, **SEVEN, **other), expected, other)
    assert not recorded
    assert_equal(model.generate(prompt, num_beams=2, **SEVEN)[:, : prompt.shape[1]], prompt)


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("window", [None, 5])
def test_the_cache_that_a_generation_returns_has_room_for_more(window: int | None) -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(sliding_window=window, **SIZES)).to(DEVICE).eval()
    options = SEVEN | {"max_new_tokens": static_caches.BUCKET}

    def turns() -> torch.Tensor:
        first = model.generate(ids(), **SEVEN, return_dict_in_generate=True)
        tokens = torch.cat([first.sequences, ids(seed=1)], 1)
        found: torch.Tensor = model.generate(tokens, past_key_values=first.past_key_values, **options)
        return found

    expected = turns()
    graph_decoding(model)
    assert_equal(turns(), expected)


@pytest.mark.usefixtures("compiling")
def test_generate_under_autocast_has_the_cache_of_transformers(model: Any, recorded: list[int]) -> None:
    with torch.autocast(DEVICE, torch.bfloat16):
        expected = model.generate(ids(), **SEVEN)
        graph_decoding(model)
        assert_equal(model.generate(ids(), **SEVEN), expected)
    assert not recorded and list(forward_of(model).refused) == ["autocast is asked for"]


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("family", ["mpt", "openai-gpt"])
def test_models_that_need_another_cache_have_theirs(family: str, recorded: list[int]) -> None:
    """Biases of positions that are as long as the keys; models that take no cache at all."""
    sizes = {"vocab_size": 512, "n_layer": 2, "n_head": 4, "n_layers": 2, "n_heads": 4}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **{"d_model" if family == "mpt" else "n_embd": 32})
    model = AutoModelForCausalLM.from_config(config).to(DEVICE).eval()
    for weight in model.parameters():
        # Large ones, so that attention matters.
        torch.nn.init.normal_(weight, std=0.2)
    options = SEVEN | {"return_dict_in_generate": True, "output_logits": True, "use_cache": True}
    expected = model.generate(ids(), **options).logits
    graph_decoding(model)
    close(torch.stack(model.generate(ids(), **options).logits), torch.stack(expected))
    assert not recorded and "with a static cache" in next(iter(forward_of(model).refused))


def test_the_most_tokens_of_a_generation() -> None:
    def most(**asked: Any) -> int | None:
        return static_caches.max_tokens(asked, GenerationConfig(max_length=100))

    prompt = ids(tokens=9)
    assert most(inputs=prompt) == 120
    assert most(input_ids=prompt, max_new_tokens=7) == 16
    assert most(inputs_embeds=torch.zeros(2, 11, 4), input_ids=prompt, max_new_tokens=7) == 18
    assert most(inputs=prompt, generation_config=GenerationConfig(max_new_tokens=5)) == 14
    assert most(inputs=ids(tokens=110)) == 130
    assert most(inputs=prompt, past_key_values=None, cache_implementation="hybrid") == 120
    assert most(max_new_tokens=7) == 8
    # What an argument says is meant, also where it is nothing.
    defaults = GenerationConfig(max_new_tokens=5)
    assert (
        static_caches.max_tokens({"inputs": prompt, "max_new_tokens": None, "max_length": 300}, defaults)
        == 320
    )


@pytest.mark.usefixtures("compiling")
def test_what_generate_does_is_not_saved(model: Any, tmp_path: Path) -> None:
    graph_decoding(model)
    model.generate(ids(), **SEVEN)
    model.save_pretrained(tmp_path)
    assert "cache_implementation" not in (tmp_path / "generation_config.json").read_text()


def test_copies_have_graphs_of_their_own(model: Any, recorded: list[int]) -> None:
    graph_decoding(model)
    decode(model, forward_of(model), static_cache(model, 20), ids())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert forward_of(twin)._model is twin and not forward_of(twin)._graphs
        assert type(twin) is type(model) and graphs_of(twin) is not graphs_of(model)
    assert forward_of(object.__new__(type("Plain", (), {}))) is not None


@pytest.mark.usefixtures("compiling")
def test_sliding_windows_come_from_masks(recorded: list[int]) -> None:
    config = MistralConfig(sliding_window=5, **SIZES)
    torch.manual_seed(0)
    model = MistralForCausalLM(config).to(DEVICE).eval()
    cache = static_cache(model, 30)
    assert cache is not None
    close(decode(model, GraphedForward(model), cache, ids(), 9), decode_whole(model, ids(), 9))
    assert len(recorded) == 1
    expected = model.generate(ids(), **SEVEN)
    graph_decoding(model)
    assert_equal(model.generate(ids(), **SEVEN), expected)
    assert len(recorded) == 2
    # transformers' own cache of windows counts on the host.
    graphed = GraphedForward(model)
    own = StaticCache(config=config, max_cache_len=30)
    close(decode(model, graphed, own, ids(), 9), decode_whole(model, ids(), 9))
    assert "not one of static layers" in next(iter(graphed.refused))


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The queries of a sequence in each call of our attention, which here takes float32, and a CPU's.

    In 16 bits it is the real one, by the interpreter on a CPU.
    """
    pytest.importorskip("triton")
    tokens: list[int] = []
    real, reason = attention.decode_attention, attention.why_not

    def decode_attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        tokens.append(query.shape[2])
        if query.dtype != torch.float32:
            return real(query, key, value, mask, scaling)
        found = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
        return found.transpose(1, 2)

    def why_not(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> str | None:
        parts = (part.half() if part.dtype == torch.float32 else part for part in (query, key, value))
        found = reason(*parts, mask)
        return None if found == "it runs on cuda, the tensors are on cpu" else found

    monkeypatch.setattr(attention, "decode_attention", decode_attention)
    monkeypatch.setattr(attention, "why_not", why_not)
    return tokens


def test_layers_that_share_keys_with_others_are_recorded(recorded: list[int]) -> None:
    """Their part of the cache stays empty."""
    model = with_shared_keys()
    graphed = GraphedForward(model)
    for seed in (0, 1):
        prompt = ids(seed=seed)
        close(decode(model, graphed, static_cache(model, 20), prompt), decode_whole(model, prompt, 6))
    # A constant comes from the host at each step of this family, which no graph can have.
    assert len(recorded) == 1 and len(graphed.refused) == (DEVICE == "cuda")


def test_our_attention_is_for_one_token_and_sdpa_for_more(model: Any, attended: list[int]) -> None:
    prompt = ids()
    expected = decode_whole(model, prompt, 4)
    with decode_attention_in(model):
        close(decode(model, model, static_cache(model, 20), prompt, 4), expected)
        close(decode_whole(model, prompt, 4), expected)
    assert attended == [1] * 4 * model.config.num_hidden_layers


@torch.no_grad()
def test_our_attention_computes_what_sdpa_does(attended: list[int], interpreter: bool) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(DEVICE, torch.float16).eval()
    # One token: those after it may be others.
    expected = decode(model, model, static_cache(model, 20), ids(), 1)
    with decode_attention_in(model):
        found = decode(model, model, static_cache(model, 20), ids(), 1)
    assert attended == [1] * model.config.num_hidden_layers
    assert (found - expected).float().norm() < 5e-3 * expected.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_that_computes_in_float32_is_told_that_attention_is_torchs(
    model: Any, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    caplog.clear()
    make_ready(model.to(dtype))
    told = [record.getMessage() for record in caplog.records]
    if dtype == torch.float32:
        assert len(told) == 1 and "the model computes in float32" in told[0]
        assert "Load the model with one of these as dtype" in told[0]
    else:
        assert not told


def test_our_attention_is_that_of_one_model_while_a_step_is_recorded(
    model: Any, attended: list[int], recorded: list[int]
) -> None:
    other = copy.deepcopy(model)
    graph_decoding(model)
    decode(model, forward_of(model), static_cache(model, 20), ids(), 2)
    layers = model.config.num_hidden_layers
    # As often as it runs there, and where graphs run again.
    assert recorded == [1] and attended and len(attended) % layers == 0
    attended.clear()
    decode(model, model, static_cache(model, 20), ids(), 2)
    with decode_attention_in(model):
        decode(other, other, static_cache(other, 20), ids(), 2)
        assert model.config._attn_implementation == attention.NAME
    assert not attended and model.config._attn_implementation == "sdpa"


def test_other_implementations_are_left_as_they_are(model: Any, attended: list[int]) -> None:
    model.set_attn_implementation("eager")
    with decode_attention_in(model):
        decode(model, model, static_cache(model, 20), ids(), 1)
        assert model.config._attn_implementation == "eager"
    assert not attended and model.config._attn_implementation == "eager"


@torch.no_grad()
def test_our_attention_runs_in_mixtures_of_experts(attended: list[int]) -> None:
    """They tell their attention that nobody asked for what routers found."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(num_local_experts=2, **SIZES)).to(DEVICE).eval()
    expected = decode(model, model, static_cache(model, 20), ids(), 2)
    with decode_attention_in(model):
        assert not attended
        close(decode(model, model, static_cache(model, 20), ids(), 2), expected)
    assert attended == [1] * 4


@torch.no_grad()
def test_sparse_attention_stays_sparse(attended: list[int]) -> None:
    """The model chooses keys by a mask, for implementations that it knows by name."""
    family = pytest.importorskip("transformers.models.deepseek_v32")
    sizes = SIZES | {"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4}
    sizes |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    sizes |= {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    sizes |= {"v_head_dim": 8, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 8}
    torch.manual_seed(0)
    model = family.DeepseekV32ForCausalLM(family.DeepseekV32Config(**sizes)).to(DEVICE).eval()
    expected = model(input_ids=ids(), use_cache=False).logits
    with decode_attention_in(model):
        close(model(input_ids=ids(), use_cache=False).logits, expected)
    assert not attended


@pytest.mark.skipif(DEVICE == "cuda", reason="it takes most of the GPU's memory")
def test_continuous_batching_runs(model: Any) -> None:
    graph_decoding(model)
    sizes = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    options = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    (answer,) = model.generate_batch(
        ids(batch=1).tolist(), options, continuous_batching_config=sizes, progress_bar=False
    ).values()
    expected = model.generate(ids(batch=1), **{**SEVEN, "max_new_tokens": 3})
    assert answer.generated_tokens == expected[0, -3:].tolist()


class Gpus:
    """Of `torch.cuda`, what says which device is current and which stream is captured."""

    def __init__(self) -> None:
        self.current = 0
        self.own = SimpleNamespace(device=0, wait_stream=lambda _: None)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, torch.device(device).index
        yield
        self.current = before

    def Stream(self) -> Any:
        return SimpleNamespace(device=self.current, wait_stream=lambda _: None)

    current_stream = Stream

    def stream(self, stream: Any) -> Any:
        return self.device(f"cuda:{stream.device}")

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=None)

    def graph(self, _: Any, stream: Any = None, pool: Any = None) -> Any:
        return self.stream(stream or self.own)


def test_a_step_is_recorded_on_the_gpu_that_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on another than that of the stream is not in the graph."""
    gpus = Gpus()
    monkeypatch.setattr(torch, "cuda", gpus)
    found: list[int] = []
    CAPTURE(lambda: found.append(gpus.current), lambda: None, torch.device("cuda:1"))
    assert found == [1, 1] and gpus.current == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")
def test_graphs_of_another_gpu_than_the_current_one(packed: Path, recorded: list[int]) -> None:
    model = quantkit.load(packed, device="cuda:1", dtype=torch.float32)
    prompt = ids().to("cuda:1")
    found = decode(model, forward_of(model), static_cache(model, 20), prompt)
    close(found, decode_whole(model, prompt, 6))
    assert len(recorded) == 1 and not forward_of(model).refused
