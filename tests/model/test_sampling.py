"""Sampling draws what transformers draws by its own settings."""

from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from quantkit.model.forward.sampling import continued


def model(kind: str, **settings: Any) -> Any:
    """A small model with random weights."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        **settings,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("min_p", [0.0, 0.3])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Llama", {}),
        # One layer of whole attention among sliding windows that are shorter than the sequence.
        ("Gemma3Text", {"head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 3}),
        ("Qwen3Next", {"head_dim": 16}),
        ("Rwkv", {"attention_hidden_size": 64}),
        # It has a class of caches of its own.
        ("MiniMax", {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}),
    ],
)
def test_tokens_are_those_of_transformers(kind: str, settings: dict[str, Any], min_p: float) -> None:
    one, beginnings = model(kind, **settings), torch.arange(12).view(3, 4)
    found = continued(one, beginnings, 20, 7, min_p)
    how = GenerationConfig(do_sample=True, top_k=0, max_length=20, min_p=min_p or None, pad_token_id=0)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        expected = one.generate(beginnings, attention_mask=torch.ones_like(beginnings), generation_config=how)
    assert found.shape == (3, 20) and torch.equal(found[:, :4], beginnings)
    assert torch.equal(found, expected)


def test_another_seed_draws_other_tokens_and_the_random_state_stays() -> None:
    one, beginnings = model("Llama"), torch.arange(12).view(3, 4)
    before = torch.random.get_rng_state()
    first, again, other = (continued(one, beginnings, 20, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)
