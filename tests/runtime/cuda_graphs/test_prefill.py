"""Prompts by graphs compute what the model does. Without a GPU a graph runs again on the same tensors."""

import contextlib
import copy
import inspect
import logging
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    StaticCache,
)

import quantkit
from quantkit.runtime.cache.static_cache import static_cache
from quantkit.runtime.cuda_graphs import capture, long_prompts, prefill
from quantkit.runtime.cuda_graphs.prefill import bucket
from quantkit.runtime.decoding import forward_of
from quantkit.runtime.generate import last_logits
from quantkit.runtime.transformers.patches.generation import apply as graph_decoding

from ...support.compare import assert_equal
from ..graphed import (
    DEVICE,
    SEVEN,
    SIZES,
    close,
    count_recordings,
    decode_whole,
    ids,
    wait_for_others,
    with_shared_keys,
)

LAST = {"use_cache": True, "logits_to_keep": 1}


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts were recorded."""
    return count_recordings(monkeypatch)[1]


def made(model: type[Any], config: Any) -> Any:
    torch.manual_seed(0)
    found = model(config).to(DEVICE).eval()
    for weight in found.parameters():
        if weight.dim() > 1:
            # Large ones, so that attention matters.
            torch.nn.init.normal_(weight, std=0.2)
    return found


@pytest.fixture
def model() -> Any:
    found = made(LlamaForCausalLM, LlamaConfig(**SIZES))
    graph_decoding(found)
    return found


def prompts_of(model: Any) -> Any:
    """The graphs of its prompts."""
    return forward_of(model)._prompts


@torch.no_grad()
def generate(model: Any, prompt: torch.Tensor, cache: Any, steps: int = 3) -> torch.Tensor:
    """The logits [steps + 1, B, V] of a greedy generation, with the prompt's."""
    output = model(input_ids=prompt, past_key_values=cache, **LAST)
    found = [output.logits[:, -1]]
    for _ in range(steps):
        assert output.past_key_values is cache and output.logits.shape[1] == 1
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        output = forward_of(model)(input_ids=token, past_key_values=cache, **LAST)
        found.append(output.logits[:, -1])
    return torch.stack(found)


@torch.no_grad()
def generate_whole(model: Any, prompt: torch.Tensor, steps: int = 3) -> torch.Tensor:
    """The same without a cache, a graph or padding."""
    first: torch.Tensor = model(input_ids=prompt, use_cache=False).logits[None, :, -1]
    return torch.cat([first, decode_whole(model, prompt, steps)]) if steps else first


def test_buckets_are_few_and_waste_little() -> None:
    lengths = sorted({bucket(tokens) for tokens in range(2, prefill.PROMPT_TOKENS + 1)})
    assert lengths == [
        *(32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512),
        *(640, 768, 896, 1024, 1280, 1536, 1792, 2048),
    ]
    for tokens in range(2, 4 * prefill.PROMPT_TOKENS):
        assert tokens <= bucket(tokens) == bucket(bucket(tokens))
        assert tokens <= 128 or bucket(tokens) - tokens <= min(255, bucket(tokens) / 5)


@pytest.mark.parametrize("tokens", [2, 31, 32, 33, 128, 129])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_prompts_of_every_length_are_right(model: Any, recorded: list[int], tokens: int, kind: str) -> None:
    """The first runs padded, the second is recorded, the third has the same graph."""
    for seed, length in ((0, tokens), (1, tokens), (2, max(2, tokens - 1) if tokens % 32 != 1 else tokens)):
        prompt = ids(tokens=length, seed=seed)
        cache = static_cache(model, length + 9) if kind == "static" else DynamicCache(config=model.config)
        close(generate(model, prompt, cache), generate_whole(model, prompt))
        assert int(cache.get_seq_length()) == length + 3
    assert len(recorded) == 1


@torch.no_grad()
def test_a_replay_has_the_numbers_of_the_first_run(model: Any, recorded: list[int]) -> None:
    found = [model(input_ids=ids(), past_key_values=static_cache(model, 9), **LAST).logits for _ in range(3)]
    # The library's products in float32 are others while they are recorded.
    close(found[1], found[0])
    assert_equal(found[1], found[2])
    assert len(recorded) == 1


def test_prompts_that_differ_in_shape_have_graphs_of_their_own(model: Any, recorded: list[int]) -> None:
    for batch, tokens in ((1, 9), (2, 9), (1, 40), (3, 20)) * 2:
        prompt = ids(batch, tokens)
        close(generate(model, prompt, static_cache(model, 60)), generate_whole(model, prompt))
    assert len(recorded) == 4


def test_callers_keep_what_they_have(model: Any) -> None:
    """Caches and logits of one prompt while the same graph runs others, of both kinds of caches."""
    prompts = [ids(seed=seed) for seed in range(4)]
    makers: list[Callable[[], Any]] = [DynamicCache, lambda: static_cache(model, 20)]
    with torch.no_grad():
        caches = [makers[number % 2]() for number in range(4)]
        logits = [
            model(input_ids=prompt, past_key_values=cache, **LAST).logits[:, -1]
            for prompt, cache in zip(prompts, caches, strict=True)
        ]
        for prompt, cache, first in zip(prompts, caches, logits, strict=True):
            following = first.argmax(-1, keepdim=True)
            second = model(input_ids=following, past_key_values=cache, **LAST).logits[:, -1]
            close(torch.stack([first, second]), generate_whole(model, prompt, 1))


@torch.no_grad()
def test_a_cache_that_was_reset_is_an_empty_one(model: Any, recorded: list[int]) -> None:
    cache = static_cache(model, 30)
    for seed in range(3):
        close(generate(model, ids(seed=seed), cache), generate_whole(model, ids(seed=seed)))
        cache.reset()
    assert len(recorded) == 1


@torch.no_grad()
def test_what_is_no_recordable_prompt_runs_as_it_did(model: Any, recorded: list[int]) -> None:
    plain = forward_of(model).plain
    odd: list[dict[str, Any]] = [
        {"logits_to_keep": 0},
        {"logits_to_keep": 2},
        {"logits_to_keep": True},
        {"logits_to_keep": torch.tensor([3], device=DEVICE)},
        {"return_dict": False},
        {"use_cache": False},
        {"output_hidden_states": True},
        {"past_key_values": None},
        {"input_ids": None, "inputs_embeds": model.get_input_embeddings()(ids())},
        {"input_ids": ids(1025, 32)},
        {"input_ids": ids(tokens=1)},
        {"segments": ids()},
    ]
    for inputs in odd:
        every = {"input_ids": ids(), "past_key_values": static_cache(model, 40), **LAST, **inputs}
        for _ in range(3):
            found = model(**copy.deepcopy(every))
        expected = plain(**every)
        assert_equal(found[0], expected[0], inputs)
        assert type(found) is type(expected)
    assert model(ids()).logits.shape[1] == 9
    assert not recorded and prefill.why_not({}, model) is not None


@torch.no_grad()
def test_a_config_may_ask_for_no_cache(recorded: list[int]) -> None:
    """As it does after training; Qwen2 then returns no cache, and fills the one that it was given."""
    model = made(AutoModelForCausalLM.from_config, AutoConfig.for_model("qwen2", **SIZES))
    graph_decoding(model)
    inputs = {"input_ids": ids(), "logits_to_keep": 1}
    for asked in (True, False, True):
        model.config.use_cache = asked
        for _ in range(3):
            cache = DynamicCache()
            found = model(past_key_values=cache, **inputs)
            assert found.past_key_values is (cache if asked else None) and cache.get_seq_length() == 9
            close(found.logits[None, :, -1], generate_whole(model, ids(), 0))
    assert len(recorded) == 1


@torch.no_grad()
def test_a_config_may_ask_for_more_than_logits(model: Any, recorded: list[int]) -> None:
    for asked in (False, True, False):
        model.config.output_hidden_states = asked
        for _ in range(3):
            output = model(input_ids=ids(), past_key_values=static_cache(model, 20), **LAST)
            assert ("hidden_states" in output) == asked
        assert (prompts_of(model).refused is not None) == asked
    assert len(recorded) == 2


def test_gradients_autocast_and_training(model: Any, recorded: list[int]) -> None:
    for _ in range(3):
        logits = model(input_ids=ids(), past_key_values=static_cache(model, 20), **LAST).logits
        logits.sum().backward()
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
            model(input_ids=ids(), past_key_values=DynamicCache(), **LAST)
    assert not recorded and model.lm_head.weight.grad is not None


@torch.no_grad()
def test_tangents_are_not_recorded(model: Any, recorded: list[int]) -> None:
    """A weight that gets one lies where it did."""
    weight = model.lm_head._parameters.pop("weight")
    with forward_ad.dual_level():
        model.lm_head.weight = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        for _ in range(3):
            cache = static_cache(model, 20)
            logits = model(input_ids=ids(), past_key_values=cache, **LAST).logits
            assert forward_ad.unpack_dual(logits).tangent is not None
            forward_of(model)(input_ids=ids()[:, :1], past_key_values=cache, **LAST)
        assert "a tangent" in next(iter(forward_of(model).refused))
    assert not recorded


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_cache_with_tokens_goes_on(model: Any, recorded: list[int], tokens: int) -> None:
    """Prompts in pieces."""
    for cache in (static_cache(model, 30), static_cache(model, 30), DynamicCache()):
        model(input_ids=ids()[:, :tokens], past_key_values=cache, **LAST)
        close(generate(model, ids()[:, tokens:], cache), generate_whole(model, ids()))
    assert len(recorded) == (tokens > 1)


def test_masks_and_positions_of_padded_batches(model: Any, recorded: list[int]) -> None:
    """Masks of tokens, and without padding none, with each kind of cache."""
    prompt = ids()
    for padding in (0, 3):
        padded = torch.nn.functional.pad(prompt, (padding, 0))
        mask = torch.nn.functional.pad(torch.ones_like(prompt), (padding, 0))
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        recorded.clear()
        for _ in range(3):
            with torch.no_grad():
                found = model(
                    input_ids=padded,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=DynamicCache(),
                    **LAST,
                ).logits[:, -1]
            close(found, generate_whole(model, prompt, 0)[0])
        assert len(recorded) == 1


@torch.no_grad()
def test_a_padded_batch_has_the_positions_that_its_model_counts(recorded: list[int]) -> None:
    """Nobody gives them: OPT begins at the first token that is no padding, others at padding."""
    mask = torch.ones_like(ids())
    mask[0, :4] = 0
    for family in ("opt", "llama"):
        config = AutoConfig.for_model(family, **SIZES, ffn_dim=64, word_embed_proj_dim=32)
        model = made(AutoModelForCausalLM.from_config, config)
        graph_decoding(model)
        given = {"input_ids": ids(), **LAST}
        for padding in (mask, torch.ones_like(mask)):
            recorded.clear()
            for _ in range(3):
                found = model(attention_mask=padding, past_key_values=DynamicCache(), **given).logits
                plain = forward_of(model).plain
                close(found, plain(attention_mask=padding, past_key_values=DynamicCache(), **given).logits)
        assert len(recorded) == 1, "without padding they are known"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_padding_is_hidden_and_no_row_is_without_a_key(dtype: torch.dtype) -> None:
    """Padding is hidden from tokens, and no row is without a key: in some kernels that is no number."""
    shown = torch.ones(2, 1, 5, 40, dtype=torch.bool).tril()
    mask = shown if dtype == torch.bool else torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, -60000)
    padded = prefill._padded_mask({"full": mask, "none": None}, 5, 32)
    assert padded["none"] is None and padded["full"].shape == (2, 1, 32, 32)
    found = padded["full"] if dtype == torch.bool else padded["full"] == 0
    assert_equal(found[:, :, :5, :5], shown[..., :5])
    assert not found[:, :, :5, 5:].any()
    assert found.any(-1).all()
    assert prefill._padded_mask(torch.ones(2, 5), 5, 32).shape == (2, 32)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 5])
def test_generate_of_transformers_with_padding(
    recorded: list[int], window: int | None, attention: str
) -> None:
    """Which makes masks of queries and keys for static caches."""
    model = made(MistralForCausalLM, MistralConfig(sliding_window=window, **SIZES))
    model.set_attn_implementation(attention)
    prompts = [ids(tokens=12, seed=seed) for seed in range(3)]
    masks = [torch.ones_like(prompt) for prompt in prompts]
    for mask, padding in zip(masks, (4, 2, 7), strict=True):
        mask[0, :padding] = 0
    options = SEVEN | {"return_dict_in_generate": True, "output_logits": True}
    expected = [
        model.generate(prompt, attention_mask=mask, **options)
        for prompt, mask in zip(prompts, masks, strict=True)
    ]
    graph_decoding(model)
    for prompt, mask, whole in zip(prompts, masks, expected, strict=True):
        found = model.generate(prompt, attention_mask=mask, **options)
        assert_equal(found.sequences, whole.sequences)
        close(torch.stack(found.logits), torch.stack(whole.logits))
    assert len(recorded) == 1


@torch.no_grad()
def test_windows_are_those_of_the_tokens(recorded: list[int]) -> None:
    """Without a mask, of prompts that are shorter and longer than the window."""
    model = made(MistralForCausalLM, MistralConfig(sliding_window=5, **SIZES))
    graph_decoding(model)
    for tokens in (4, 9, 30, 31):
        prompt = ids(tokens=tokens)
        close(generate(model, prompt, static_cache(model, 40)), generate_whole(model, prompt))
        # transformers' own cache of windows keeps no more than those, which a prompt is not recorded for.
        close(generate(model, prompt, DynamicCache(config=model.config)), generate_whole(model, prompt))
    assert len(recorded) == 1


FAMILIES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 6},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6},
    "phi3": {"pad_token_id": 0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "granite": {},
    "olmo2": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_each_family_are_recorded_and_right(family: str, recorded: list[int]) -> None:
    sizes = SIZES if family != "gpt2" else {"vocab_size": 512}
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES[family]})
    model = made(AutoModelForCausalLM.from_config, config)
    graph_decoding(model)
    for seed, tokens in enumerate((9, 9, 30)):
        prompt = ids(tokens=tokens, seed=seed)
        cache = static_cache(model, 40)
        assert cache is not None
        close(generate(model, prompt, cache), generate_whole(model, prompt))
    assert len(recorded) == 1
    # On a GPU torch groups products of float32 by experts on the host.
    on_the_host = DEVICE == "cuda" and ("moe" in family or family == "mixtral")
    assert on_the_host or prompts_of(model).refused is None


@pytest.mark.skipif(DEVICE == "cpu", reason="a GPU records")
def test_random_numbers_after_a_recording_that_failed() -> None:
    device, held = torch.device("cuda", 0), torch.zeros(3)

    def step() -> Any:
        torch.rand(3, device="cuda")
        return held.cuda()

    for rewind in (None, lambda: None):
        with pytest.raises(capture.NotCaptured):
            capture.capture(step, rewind, device)
        torch.manual_seed(0)
        drawn = torch.rand(3, device="cuda")
        torch.manual_seed(0)
        assert_equal(torch.rand(3, device="cuda"), drawn)
    output, run = capture.capture(lambda: torch.rand(3, device="cuda"), lambda: None, device)
    run()
    assert output.isfinite().all()


def test_layers_that_share_keys_stay_empty(recorded: list[int]) -> None:
    model = with_shared_keys()
    graph_decoding(model)
    for seed in range(3):
        cache = static_cache(model, 20)
        close(generate(model, ids(seed=seed), cache), generate_whole(model, ids(seed=seed)))
        assert cache is not None and [layer.is_initialized for layer in cache.layers] == [
            True,
            True,
            False,
            False,
        ]
    # A constant comes from the host in this family, which no graph can have.
    assert len(recorded) == 1 and (prompts_of(model).refused is None) == (DEVICE == "cpu")


@torch.no_grad()
def test_no_position_is_looked_up_that_a_model_has_not(recorded: list[int]) -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=512, n_embd=32, n_layer=2, n_head=4, n_positions=40)
    model = made(AutoModelForCausalLM.from_config, config)
    graph_decoding(model)
    for tokens in (32, 32, 36, 36, 36):
        prompt = ids(tokens=tokens)
        close(generate(model, prompt, static_cache(model, 40)), generate_whole(model, prompt))
    assert len(recorded) == 1


@torch.no_grad()
def test_padding_is_at_no_other_positions(recorded: list[int]) -> None:
    """Frequencies are others from the 25th token on."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [30.0] * 4, "factor": 4.0}
    config = AutoConfig.for_model(
        "phi3",
        **SIZES,
        pad_token_id=0,
        max_position_embeddings=96,
        original_max_position_embeddings=24,
        rope_parameters=rope,
    )
    model = made(AutoModelForCausalLM.from_config, config)
    graph_decoding(model)
    for tokens in (20, 20, 20, 26):
        prompt = ids(tokens=tokens)
        close(generate(model, prompt, static_cache(model, 40)), generate_whole(model, prompt))


def test_models_whose_prompts_cannot_be_padded(recorded: list[int]) -> None:
    """Forwards that take the number of logits alone, or none, that are not causal, or remember images."""

    def forward(
        input_ids: Any, position_ids: Any, attention_mask: Any, cache: Any, past_key_values: Any
    ) -> None:
        """Without logits to keep."""

    def number(
        input_ids: Any,
        position_ids: Any,
        attention_mask: Any,
        cache: Any,
        past_key_values: Any,
        logits_to_keep: int,
    ) -> None:
        """With a number of them."""

    model = made(LlamaForCausalLM, LlamaConfig(**SIZES))
    assert prefill.why_never(model, model.forward) is None
    assert prefill.why_never(model, forward) == "the model takes no logits_to_keep"
    assert prefill.why_never(model, number) == "the model takes logits_to_keep as a number alone"
    text = model.config
    for name, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        setattr(text, name, value)
        assert prefill.why_never(model, model.forward) == "tokens attend to those after them"
        delattr(text, name)
    model.config.get_text_config = lambda decoder: None
    assert "images" in str(prefill.why_never(model, model.forward))
    del text.get_text_config
    graph_decoding(model)
    model.config.layer_types = ["linear_attention", "full_attention"]
    for _ in range(3):
        generate(model, ids(), DynamicCache())
    assert not recorded


def test_hooks_are_called_for_each_prompt(model: Any, recorded: list[int]) -> None:
    seen: list[Any] = []
    handle = model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(3):
        generate(model, ids(), static_cache(model, 20), 0)
    assert len(seen) == 3 and not recorded
    handle.remove()
    for _ in range(3):
        generate(model, ids(), static_cache(model, 20), 0)
    assert len(recorded) == 1


def test_a_changed_model_is_recorded_anew(model: Any, recorded: list[int]) -> None:
    """Nobody says so: each prompt looks for itself."""
    for _ in range(3):
        generate(model, ids(), static_cache(model, 20), 0)
    for weight in model.parameters():
        weight.data = weight.data * 1.5
    for _ in range(3):
        close(generate(model, ids(), static_cache(model, 20)), generate_whole(model, ids()))
    assert len(recorded) == 2


def test_graphs_are_few(model: Any, recorded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "KEPT_TOKENS", 160)
    monkeypatch.setattr(long_prompts, "SHAPES", 2)
    for batch in (1, 1, 2, 2, 3, 3, 1, 1):
        generate(model, ids(batch), static_cache(model, 20), 0)
    assert len(recorded) == 4
    assert [graph.tokens for graph in prompts_of(model).graphs.values()] == [96, 32]
    for batch in (5, 6, 7, 5, 6, 7):
        generate(model, ids(batch), static_cache(model, 20), 0)
    assert len(recorded) == 4, "shapes are forgotten that do not come again soon"


@pytest.mark.parametrize(
    "error",
    [capture.NotCaptured("not permitted when stream is capturing"), torch.OutOfMemoryError("none left")],
)
def test_prompts_that_could_not_be_recorded_run(
    model: Any,
    error: Exception,
    recorded: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        generate(model, ids(), static_cache(model, 20), 0)
    real = capture.capture

    def failing(step: Any, rewind: Any, device: torch.device, pool: Any = None) -> Any:
        if rewind is not None:
            return real(step, rewind, device, pool)
        recorded.append(1)
        step()
        raise error

    monkeypatch.setattr(capture, "capture", failing)
    with caplog.at_level(logging.WARNING, "quantkit.model"):
        for tokens in (40, 40, 40, 9, 70, 70):
            prompt = ids(tokens=tokens)
            close(generate(model, prompt, static_cache(model, 80)), generate_whole(model, prompt))
    (record,) = [one for one in caplog.records if one.name == "quantkit.model"]
    assert record.getMessage().startswith("prompts are launched one kernel at a time: ")
    assert len(recorded) == 2 and not prompts_of(model).graphs
    assert prompts_of(model).refused in (
        "not permitted when stream is capturing",
        "there is too little memory for graphs",
    )


@torch.no_grad()
def test_a_prompt_that_fits_without_padding_runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = forward_of(model).plain

    def narrow(**inputs: Any) -> Any:
        if inputs["input_ids"].shape[1] > 9:
            raise torch.OutOfMemoryError("none left")
        return plain(**inputs)

    monkeypatch.setattr(prompts_of(model), "_forward", narrow)
    cache = static_cache(model, 20)
    close(generate(model, ids(), cache), generate_whole(model, ids()))
    assert prompts_of(model).refused == "there is too little memory for graphs"


@torch.no_grad()
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_cache_without_room_is_not_written_twice(
    model: Any, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory runs out as a cache is filled, it has a part of the prompt."""
    for _ in range(before):
        generate(model, ids(), static_cache(model, 20), 0)
    cache = static_cache(model, 20)
    assert cache is not None

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(cache.layers[1], "lazy_initialization", full)
    with pytest.raises(torch.OutOfMemoryError):
        generate(model, ids(), cache, 0)
    close(generate(model, ids(), static_cache(model, 20)), generate_whole(model, ids()))


@torch.no_grad()
def test_a_cache_that_found_no_room_is_empty_and_may_be_used_later(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        generate(model, ids(), static_cache(model, 20), 0)
    cache = static_cache(model, 20)
    assert cache is not None
    allocate, full = prefill._allocate, [False, True]

    def second_fails(layer: Any, states: Any) -> None:
        allocate(layer, states)
        if full and full.pop(0):
            layer.cumulative_length.fill_(12345)
            raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(prefill, "_allocate", second_fails)
    before = [dict(vars(layer)) for layer in cache.layers]
    with pytest.raises(torch.OutOfMemoryError):
        generate(model, ids(), cache, 0)
    assert [vars(layer) for layer in cache.layers] == before and not full
    close(generate(model, ids(), cache), generate_whole(model, ids()))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["ours", "transformers"])
@pytest.mark.parametrize("fast", [False, True], ids=["torch", "triton"])
def test_caches_are_what_transformers_makes_of_them(
    model: Any, kind: str, fast: bool, recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With zeros where nothing was written, whatever is in memory."""
    if fast:
        pytest.importorskip("triton")
    monkeypatch.setattr(prefill, "can_fuse", lambda device: fast)
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        memory = empty(*shape, **options)
        return memory.fill_(float("nan") if memory.is_floating_point() else 7)

    monkeypatch.setattr(torch, "empty", poisoned)
    for _ in range(3):
        caches = [
            static_cache(model, 20) if kind == "ours" else StaticCache(config=model.config, max_cache_len=20)
            for _ in range(2)
        ]
        model(input_ids=ids(), past_key_values=caches[0], **LAST)
        forward_of(model).plain(input_ids=ids(), past_key_values=caches[1], **LAST)
        for layer, other in zip(caches[0].layers, caches[1].layers, strict=True):
            found, expected = vars(layer), vars(other)
            assert found.keys() == expected.keys() and layer.is_initialized
            for name, value in expected.items():
                if not torch.is_tensor(value):
                    assert found[name] == value, name
                    continue
                close(found[name], value)
                assert found[name].device == value.device and found[name].stride() == value.stride()
                assert vars(found[name]) == vars(value), "torch.compile knows where it lies"
    assert len(recorded) == 1


@torch.no_grad()
@pytest.mark.skipif(DEVICE == "cuda", reason="an index that is none ends all that a GPU runs")
def test_a_cache_that_does_not_fit_is_refused(model: Any) -> None:
    """As transformers does: of other sequences, of another dtype, elsewhere, for less tokens."""
    changes = ["sequences", "dtype", "device", "tokens"]
    with contextlib.suppress(RuntimeError):
        # torch 2.11 takes a tensor on "meta" beside others.
        torch.empty(1, device="meta").index_copy_(0, torch.tensor([0]), torch.ones(1))
        changes.remove("device")
    for _ in range(3):
        for change in changes:
            cache = static_cache(model, 20)
            assert cache is not None
            model(input_ids=ids(), past_key_values=cache, **LAST)
            cache.reset()
            if change == "dtype":
                cache.layers[0].keys = cache.layers[0].keys.double()
            if change == "device":
                cache.layers[0].keys = cache.layers[0].keys.to("meta")
            prompt = ids(1 if change == "sequences" else 2, 300 if change == "tokens" else 9)
            with pytest.raises((RuntimeError, IndexError), match="index"):
                model(input_ids=prompt, past_key_values=cache, **LAST)


@torch.no_grad()
def test_a_graph_keeps_no_more_than_keys_and_values(recorded: list[int]) -> None:
    """Not the product of q, k and v, whose parts they are in Phi-3."""
    config = AutoConfig.for_model("phi3", **SIZES, pad_token_id=0)
    model = made(AutoModelForCausalLM.from_config, config)
    graph_decoding(model)
    for _ in range(3):
        close(generate(model, ids(), static_cache(model, 20)), generate_whole(model, ids()))
    (graph,) = prompts_of(model).graphs.values()
    for layer in graph.output.past_key_values.layers:
        for part in (layer.keys, layer.values):
            assert part.untyped_storage().nbytes() == part.nbytes
    assert len(recorded) == 1


@torch.no_grad()
def test_logits_of_another_token_are_not_taken(model: Any, recorded: list[int]) -> None:
    """A forward that keeps as many logits as the tensor says."""
    plain = forward_of(model).plain

    def last(logits_to_keep: Any, **inputs: Any) -> Any:
        return plain(logits_to_keep=int(logits_to_keep), **inputs)

    prompts_of(model)._forward = last
    close(generate(model, ids(), static_cache(model, 20)), generate_whole(model, ids()))
    assert "the model returns logits of shape (2, 8, 512)" in prompts_of(model).refused


def test_threads_do_not_mix(model: Any) -> None:
    """A prompt waits here for the other thread to come along."""
    for _ in range(2):
        generate(model, ids(), static_cache(model, 20), 0)
    (graph,) = prompts_of(model).graphs.values()
    wait_for_others(graph)
    prompts = [ids(seed=1), ids(seed=2), ids(seed=3)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda prompt: generate(model, prompt, static_cache(model, 20)), prompts))
    for steps, prompt in zip(found, prompts, strict=True):
        close(steps, generate_whole(model, prompt))


def test_a_forward_with_graphs_is_called_as_the_model_is(model: Any) -> None:
    plain = LlamaForCausalLM.forward
    assert list(inspect.signature(model.forward).parameters) == list(inspect.signature(plain).parameters)[1:]
    assert last_logits(model) == {"logits_to_keep": 1}
    before = forward_of(model).plain
    graph_decoding(model)
    assert forward_of(model).plain == before, "graphs do not record graphs"


def test_copies_have_graphs_of_their_own(model: Any, recorded: list[int], tmp_path: Path) -> None:
    generate(model, ids(), static_cache(model, 20))
    generate(model, ids(), static_cache(model, 20))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert forward_of(twin)._model is twin and not prompts_of(twin).graphs
        with torch.no_grad():
            twin.lm_head.weight.mul_(2)
        recorded.clear()
        for _ in range(2):
            close(generate(twin, ids(), static_cache(twin, 20)), generate_whole(twin, ids()))
        assert len(recorded) == 1
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).to(DEVICE)
    assert "forward" not in vars(again)
    close(generate_whole(again, ids()), generate_whole(model, ids()))


@torch.no_grad()
@pytest.mark.parametrize("order", ["before", "after"])
def test_what_others_put_before_a_forward_is_called(model: Any, recorded: list[int], order: str) -> None:
    """As accelerate does, before there are graphs or after; copies have it too."""
    other = made(LlamaForCausalLM, LlamaConfig(**SIZES))
    if order == "after":
        graph_decoding(other)
    forward = other.forward

    def doubled(*arguments: Any, **inputs: Any) -> Any:
        output = forward(*arguments, **inputs)
        output.logits = output.logits * 2
        return output

    doubled.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    other.forward = doubled
    graph_decoding(other)
    for one in (other, copy.deepcopy(other)):
        for _ in range(3):
            close(generate(one, ids(), static_cache(other, 20)), generate_whole(model, ids()) * 2)
    assert bool(recorded) == (order == "after")


@torch.no_grad()
def test_a_compiled_model_is_traced_without_graphs(model: Any, recorded: list[int]) -> None:
    expected = generate_whole(model, ids(), 0)[0]
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        found = compiled(input_ids=ids(), past_key_values=DynamicCache(), **LAST).logits[:, -1]
        close(found, expected)
    assert not recorded


@torch.no_grad()
def test_prompts_of_packed_models_are_recorded_and_right(tmp_path: Path, recorded: list[int]) -> None:
    """Kernels may lay out weights at the first prompt, after which graphs are made anew."""
    quantkit.quantize(
        Path(__file__).parents[3] / "examples" / "stories260K", tmp_path / "int4", format="int4"
    )
    model = quantkit.load(tmp_path / "int4", device=DEVICE, dtype=torch.float32)
    graph_decoding(model)
    for seed, tokens in enumerate((9, 30, 20, 31, 32)):
        prompt = ids(tokens=tokens, seed=seed)
        close(generate(model, prompt, static_cache(model, 40)), generate_whole(model, prompt))
    assert recorded and prompts_of(model).refused is None and len(prompts_of(model).graphs) == 1


@torch.no_grad()
def test_padding_goes_to_experts_and_changes_nothing(recorded: list[int]) -> None:
    model = made(MixtralForCausalLM, MixtralConfig(num_local_experts=4, **SIZES))
    graph_decoding(model)
    for seed, tokens in enumerate((2, 31, 17)):
        prompt = ids(tokens=tokens, seed=seed)
        close(generate(model, prompt, static_cache(model, 40)), generate_whole(model, prompt))
    assert len(recorded) == 1
