"""Prompts too long for a graph compute what the model does, in fewer launches. Here a few tokens are long."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import quantkit.runtime.passes.fused_forward as fused_forward
from quantkit.runtime.cache.static_cache import static_cache
from quantkit.runtime.cuda_graphs import capture, long_prompts, prefill
from quantkit.runtime.decoding import forward_of
from quantkit.runtime.transformers.patches.generation import apply as graph_decoding

from ...support.compare import assert_equal
from ..graphed import calls, close, count_recordings, ids, keep_modules, made, only

LAST = {"use_cache": True, "logits_to_keep": 1}
#: The interpreter runs one program after the other, one for each head of a token.
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch, interpreter: bool) -> list[int]:
    """How many prompts were recorded; those of more than 32 tokens, padded, are long."""
    monkeypatch.setattr(prefill, "PROMPT_TOKENS", 32)
    monkeypatch.setattr(fused_forward, "can_fuse", lambda device: True)
    fused_forward.warn_unchanged.cache_clear()
    return count_recordings(monkeypatch)[1]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What prompts became."""
    return keep_modules(monkeypatch)


@pytest.fixture
def model() -> Any:
    found = made("Llama", **SMALL)
    graph_decoding(found)
    return found


def caches(model: Any, tokens: int) -> list[Any]:
    """An empty cache of each kind."""
    return [DynamicCache(), static_cache(model, tokens)]


@torch.no_grad()
def prompt(forward: Callable[..., Any], tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    """The logits of the last token [B, V]."""
    logits: torch.Tensor = forward(input_ids=tokens, past_key_values=cache, **LAST).logits
    assert logits.shape[1] == 1
    return logits[:, -1]


def prompts_are_right(model: Any, tokens: torch.Tensor) -> None:
    """Logits, keys and values of a prompt [B, T] in each kind of cache are those of the plain forward."""
    expected = DynamicCache()
    logits = prompt(forward_of(model).plain, tokens, expected)
    for cache in caches(model, tokens.shape[1]):
        close(prompt(model, tokens, cache), logits)
        assert int(cache.get_seq_length()) == tokens.shape[1]
        for one, other in zip(cache.layers, expected.layers, strict=True):
            for name in ("keys", "values"):
                close(getattr(one, name)[:, :, : tokens.shape[1]], getattr(other, name))


def test_long_prompts_are_fused_from_the_second_of_a_shape_on(
    model: Any, modules: list[Any], recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, tokens in enumerate((40, 33, 64)):
        prompts_are_right(model, ids(1, tokens, seed))
    found = calls(only(modules))
    names = ("add_rms_norm", "rms_norm", "gate", "rotate", "embed", "cos_sin")
    assert [found[name] for name in names] == [2, 1, 1, 2, 1, 1]
    assert not recorded
    # The modules of the model do not run any more.
    monkeypatch.setattr(type(model.model), "forward", None)
    prompt(model, ids(1, 50), DynamicCache())


def test_callers_keep_what_they_have(model: Any) -> None:
    tokens = [ids(1, 40, seed) for seed in range(5)]
    made_of = [caches(model, 40)[number % 2] for number in range(5)]
    found = [prompt(model, one, cache) for one, cache in zip(tokens, made_of, strict=True)]
    plain = forward_of(model).plain
    for one, cache, logits in zip(tokens, made_of, found, strict=True):
        expected = DynamicCache()
        close(logits, prompt(plain, one, expected))
        close(cache.layers[0].keys[:, :, :40], expected.layers[0].keys)


def test_batches_and_lengths_have_forwards_of_their_own(
    model: Any, modules: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_prompts, "SHAPES", 2)
    for batch, tokens in ((1, 40), (2, 20), (1, 70)):
        prompts_are_right(model, ids(batch, tokens))
    assert len(modules) == 3
    prompts_are_right(model, ids(2, 20))
    assert len(modules) == 3, "two are kept"
    prompts_are_right(model, ids(1, 40))
    assert len(modules) == 4


def test_prompts_with_a_mask_or_too_many_tokens_run_plainly(
    model: Any, modules: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "FUSED_TOKENS", 64)
    mask = torch.ones_like(ids(1, 40))
    mask[:, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    plain = forward_of(model).plain
    for given in (
        {"input_ids": ids(1, 40), "attention_mask": mask, "position_ids": positions},
        {"input_ids": ids(2, 40)},
    ):
        with torch.no_grad():
            expected = plain(**given, past_key_values=DynamicCache(), **LAST).logits
            for _ in range(3):
                assert_equal(model(**given, past_key_values=DynamicCache(), **LAST).logits, expected)
    assert not modules


def test_a_changed_model_is_fused_anew(model: Any, modules: list[Any]) -> None:
    prompts_are_right(model, ids(1, 40))
    with torch.no_grad():
        for weight in model.parameters():
            weight.data = weight.data * 1.5
    prompts_are_right(model, ids(1, 40))
    assert len(modules) == 2


def test_prompts_that_cannot_be_fused_run_plainly(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Any] = []

    def fails(*arguments: Any) -> None:
        asked.append(arguments)
        raise TypeError("no such thing")

    monkeypatch.setattr(fused_forward, "fused", fails)
    with caplog.at_level(logging.WARNING, "quantkit.model"):
        for tokens in (40, 50, 70):
            prompts_are_right(model, ids(1, tokens))
    assert len(asked) == 1
    assert caplog.text.count("long prompts run as they are, with more launches: no such thing") == 1


@pytest.mark.parametrize("when", ["tracing", "running", "copying"])
def test_prompts_without_memory_for_it_run_plainly(
    when: str,
    model: Any,
    modules: list[Any],
    recorded: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Shorter ones are recorded nevertheless, and the cache that lacked memory is filled plainly."""

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    if when == "running":
        prompts_are_right(model, ids(1, 40))
        monkeypatch.setattr(long_prompts, "copy_tensors", fails)
    elif when == "copying":
        prompts_are_right(model, ids(1, 40))
        real = capture.own_output

        def fails_once(output: Any, cache: Any) -> Any:
            monkeypatch.setattr(capture, "own_output", real)
            raise torch.OutOfMemoryError("none left")

        # All layers have been filled by then.
        monkeypatch.setattr(capture, "own_output", fails_once)
    else:
        monkeypatch.setattr(long_prompts, "fused_forward", fails)
    for tokens in (40, 50, 70):
        prompts_are_right(model, ids(1, tokens))
    assert len(modules) == (when != "tracing")
    assert caplog.text.count("too little memory for one with fused launches") == 1
    prompts_are_right(model, ids(1, 20))
    assert len(recorded) == 1
