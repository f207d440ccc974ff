"""Generations to compare, and recording as it is without a GPU: a graph runs again on the same tensors."""

import collections
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import transformers

from quantkit.runtime.cuda_graphs import capture
from quantkit.runtime.passes import fused_forward
from quantkit.runtime.passes.patterns import fused

from ..support.compare import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Of a tiny model.
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
#: Seven tokens, whatever they are.
SEVEN: dict[str, Any] = {
    "max_new_tokens": 7,
    "do_sample": False,
    "eos_token_id": -1,
    "pad_token_id": 0,
}


def with_shared_keys() -> Any:
    """A model of which two of four layers attend to the keys of others."""
    family = pytest.importorskip("transformers.models.gemma3n")
    config = family.Gemma3nTextConfig(
        **SIZES | {"num_hidden_layers": 4},
        vocab_size_per_layer_input=512,
        hidden_size_per_layer_input=8,
        head_dim=8,
        laurel_rank=4,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    torch.manual_seed(0)
    return family.Gemma3nForCausalLM(config).to(DEVICE).eval()


def wait_for_others(graph: Any) -> None:
    """Make each replay of `graph` wait for another thread to come along."""
    run, meeting = graph.run, threading.Barrier(2)

    def slowly() -> None:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.05)
        run()

    graph.run = slowly


def count_recordings(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """One for each step, and one for each prompt, that is recorded from now on."""
    steps: list[int] = []
    prompts: list[int] = []
    real = capture.capture

    def counted(
        step: Callable[[], Any], rewind: Callable[[], None] | None, device: torch.device, pool: Any = None
    ) -> tuple[Any, Callable[[], None]]:
        (prompts if rewind is None else steps).append(1)
        if DEVICE == "cuda":
            return real(step, rewind, device, pool)
        if rewind is not None:
            step()
            rewind()
        output = step()
        if rewind is not None:
            rewind()

        def run() -> None:
            found = step()
            for old, new in zip(_tensors(output), _tensors(found), strict=True):
                old.copy_(new)

        return output, run

    monkeypatch.setattr(capture, "capture", counted)
    monkeypatch.setattr(capture, "captures_on", lambda device: True)
    return steps, prompts


def _tensors(output: Any) -> list[torch.Tensor]:
    """What a graph writes: the tensors of its output, and keys and values."""
    layers = capture.used_layers(output.past_key_values)
    parts = [part for layer in layers for part in (layer.keys, layer.values)]
    return [value for value in output.values() if torch.is_tensor(value)] + parts


def ids(batch: int = 2, tokens: int = 9, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 500, (batch, tokens), generator=generator).to(DEVICE)


@torch.no_grad()
def decode(model: Any, forward: Any, cache: Any, prompt: torch.Tensor, steps: int = 6) -> torch.Tensor:
    """The logits of the steps of a greedy generation."""
    found = []
    output = model(input_ids=prompt, past_key_values=cache, use_cache=True)
    for _ in range(steps):
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        output = forward(input_ids=token, past_key_values=cache, use_cache=True)
        assert output.past_key_values is cache
        found.append(output.logits[:, -1])
    return torch.stack(found)


@torch.no_grad()
def decode_whole(model: Any, prompt: torch.Tensor, steps: int) -> torch.Tensor:
    """The same without a cache: all tokens again for each step."""
    found = []
    logits = model(input_ids=prompt, use_cache=False).logits[:, -1]
    for _ in range(steps):
        prompt = torch.cat([prompt, logits.argmax(-1, keepdim=True)], 1)
        logits = model(input_ids=prompt, use_cache=False).logits[:, -1]
        found.append(logits)
    return torch.stack(found)


#: As close as logits of tiny models are whose sums are in another order.
close = functools.partial(assert_close, rtol=1e-3, atol=1e-3)


def made(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(DEVICE).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def keep_modules(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What steps and prompts become from now on."""
    found: list[Any] = []

    def kept(*arguments: Any) -> Any:
        found.append(fused(*arguments))
        return found[-1]

    monkeypatch.setattr(fused_forward, "fused", kept)
    return found


def only(modules: list[Any]) -> Any:
    """The one module, which a GPU whose kernels are still being compiled makes twice."""
    *earlier, module = modules
    assert not earlier or (DEVICE == "cuda" and [calls(one) for one in earlier] == [calls(module)])
    return module


def calls(module: Any) -> collections.Counter[str]:
    return collections.Counter(
        node.target.__name__ for node in module.graph.nodes if node.op == "call_function"
    )


def step_of(*tensors: torch.Tensor) -> Callable[[Callable[..., Any]], collections.Counter[str]]:
    """The calls that a function of `tensors` becomes; its results stay what they were."""

    def count(function: Callable[..., Any]) -> collections.Counter[str]:
        copies = [tensor.clone() for tensor in tensors]
        expected = function(*copies)
        module = fused(function, [tensor.clone() for tensor in tensors], "functions")
        again = [tensor.clone() for tensor in tensors]
        found = module(*again)
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for one, other in zip(again, copies, strict=True):
            assert_close(one, other)
        return calls(module)

    return count


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)
