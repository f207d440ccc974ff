"""Inputs of later steps are advanced where that is right, and prepared by transformers where it is not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from quantkit.runtime import next_inputs
from quantkit.runtime.next_inputs import NextInputs
from quantkit.runtime.transformers.patches.generation import apply as graph_decoding
from quantkit.runtime.transformers.patches.generation import undo

from ..support.compare import assert_equal
from .graphed import DEVICE, count_recordings, ids, made


@contextmanager
def _prepared(model: Any) -> Iterator[list[int]]:
    """The steps for which `model` is asked to prepare inputs."""
    steps: list[int] = []
    own = model.prepare_inputs_for_generation

    # transformers looks at its signature.
    @wraps(own)
    def counted(*arguments: Any, **options: Any) -> Any:
        steps.append(len(steps))
        return own(*arguments, **options)

    model.prepare_inputs_for_generation = counted
    yield steps
    del model.prepare_inputs_for_generation


def _both(model: Any, prompt: torch.Tensor, mask: torch.Tensor, **options: Any) -> tuple[Any, Any, int]:
    """Tokens by transformers' loop and by graphs, and how often the latter had inputs prepared."""
    asked = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **options}
    expected = model.generate(prompt, **asked)
    graph_decoding(model)
    with _prepared(model) as steps:
        found = model.generate(prompt, **asked)
    undo(model)
    return expected, found, len(steps)


#: The prompt, and steps that are compared before the first that is advanced.
FEW = 4


@pytest.mark.parametrize(
    "family, more, prepared",
    [
        ("Llama", {}, FEW),
        ("Qwen3", {"head_dim": 8}, FEW),
        ("Phi3", {"pad_token_id": 0}, FEW),
        ("Gemma2", {"head_dim": 8, "sliding_window": 64}, FEW),
        # Masks lose columns.
        ("Gemma2", {"head_dim": 8, "sliding_window": 12}, 12),
        ("Mistral", {"sliding_window": 12}, 12),
        ("Mistral", {"sliding_window": None}, FEW),
    ],
)
def test_tokens_are_those_of_transformers(
    family: str, more: dict[str, Any], prepared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_recordings(monkeypatch)
    model = made(family, **more)
    prompt = ids(batch=3)
    mask = torch.ones_like(prompt)
    # Texts of other lengths, padded on the left.
    mask[0, :4], mask[1, :1] = 0, 0
    expected, found, steps = _both(model, prompt, mask)
    assert_equal(found, expected)
    assert steps == prepared


def _every_second(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "position_ids": 2 * given["position_ids"]}


def _with_the_whole_mask(given: dict[str, Any]) -> dict[str, Any]:
    mask = given["attention_mask"]
    if mask.ndim == 4:
        mask = mask[:, 0, -1, : int(given["position_ids"].max()) + 1]
    return {**given, "attention_mask": mask}


@pytest.mark.parametrize("change", [_every_second, _with_the_whole_mask])
def test_what_is_not_as_foreseen_is_prepared_for_each_step(
    change: Callable[[dict[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions go by two, and masks grow."""
    count_recordings(monkeypatch)
    model = made("Llama")
    own = type(model).prepare_inputs_for_generation

    @wraps(own)
    def changed(*arguments: Any, **options: Any) -> Any:
        return change(own(*arguments, **options))

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", changed)
    prompt = ids(batch=2)
    mask = torch.ones_like(prompt)
    mask[0, 0] = 0
    expected, found, steps = _both(model, prompt, mask)
    assert_equal(found, expected)
    assert steps == 12


class _Generates(LogitsProcessor):
    """Has the same model write another text, of another batch, between steps."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._runs = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self._runs and input_ids.shape[1] == 16:
            self._runs = True
            prompt = ids(batch=5, tokens=3)
            self._model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6)
            self._runs = False
        return scores


def test_a_text_between_steps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    count_recordings(monkeypatch)
    model = made("Llama")
    prompt = ids(batch=2)
    expected, found, steps = _both(
        model, prompt, torch.ones_like(prompt), logits_processor=LogitsProcessorList([_Generates(model)])
    )
    assert_equal(found, expected)
    assert steps >= FEW


def test_a_graph_that_was_dropped_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are replaced in the middle of a generation, after which another one has looked at them."""
    recorded, _ = count_recordings(monkeypatch)
    model = made("Llama")

    class Replaces(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == 16:
                head = model.lm_head.weight
                model.lm_head.weight = torch.nn.Parameter(head.detach().flip(0).clone())
                if hasattr(type(model), "class_before"):
                    model.get_compiled_call(None)
            return scores

    prompt = ids(batch=2)
    before = model.lm_head.weight.detach().clone()
    asked: dict[str, Any] = {"logits_processor": LogitsProcessorList([Replaces()])}
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, **asked)
    model.lm_head.weight = torch.nn.Parameter(before)
    graph_decoding(model)
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, **asked)
    assert_equal(found, expected)
    assert len(recorded) == 2


def test_inputs_that_are_advanced_are_new_tensors() -> None:
    config = made("Llama").config
    known = NextInputs(config, 30)
    mask = torch.zeros(1, 1, 1, 8, dtype=torch.bool, device=DEVICE)
    mask[..., :3] = True
    first = {"input_ids": torch.tensor([[5]]), "position_ids": torch.tensor([[2]]), "attention_mask": mask}
    known.compare(first, 3)
    found = known.advance(torch.tensor([9]), 4)
    assert found["input_ids"].tolist() == [[9]] and found["position_ids"].tolist() == [[3]]
    assert found["attention_mask"].sum() == 4 and mask.sum() == 3
    # Numbers that are added to scores: those of keys that are attended to are 0.
    added = torch.full((1, 1, 1, 8), -9.0)
    assert next_inputs._next("attention_mask", {"full_attention": added}, 4)["full_attention"][..., 3] == 0
    assert not known.is_proved and not NextInputs(config, None).is_proved
