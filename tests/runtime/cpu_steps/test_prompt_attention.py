"""Attention of prompts on a CPU: what a softmax over all keys gives, and where SDPA attends instead."""

import platform
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from quantkit.runtime.cpu_steps import prompt_attention as prompts
from quantkit.runtime.cpu_steps.mapped_memory import mapped_memory
from quantkit.runtime.cpu_steps.prompt_attention import BLOCK, prompt_attention, why_not
from quantkit.runtime.decoding import graphs_of
from quantkit.runtime.fitness import fingerprint, modules_of
from quantkit.runtime.transformers.patches import attention
from quantkit.runtime.transformers.patches.attention import prompt_attention_in

from ...support.compare import assert_close, assert_equal
from .test_flat_steps import packed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="models of these tests are on the GPU then")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prompts of the tiny models be long enough, on every CPU."""
    monkeypatch.setattr(prompts, "FEWEST", 2)
    monkeypatch.setattr("quantkit.runtime.cpu_steps.flat_forward.FEWEST", 2)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k and v [B, heads, tokens, features], strided as views of linears are."""
    batch, heads, groups, tokens, keys, features, of_values = shape
    generator = torch.Generator().manual_seed(0)
    sizes = (tokens, heads, features), (keys, groups, features), (keys, groups, of_values)
    return [torch.randn(batch, *one, generator=generator).to(dtype).transpose(1, 2) for one in sizes]


def slow(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of all queries to all keys in float64, [B, T, H, V]."""
    tokens, share = query.shape[2], query.shape[1] // key.shape[1]
    k, v = (one[:, :, :tokens].double().repeat_interleave(share, 1) for one in (key, value))
    scores = query.double() @ k.mT * scale
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, float("-inf")).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 9, 3, 200, 200, 64, 64),
        (2, 4, 4, BLOCK + 1, BLOCK + 9, 16, 24),
        (3, 4, 1, BLOCK, BLOCK, 8, 8),
        (1, 2, 1, 1, 5, 8, 8),
    ],
    ids=str,
)
def test_blocks_give_the_attention_of_all_keys(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    query, key, value = operands(shape, dtype)
    found, expected = prompt_attention(query, key, value, 0.3), slow(query, key, value, 0.3)
    assert found.dtype == dtype and found.is_contiguous()
    # Half a unit of the dtype, and sums in float32.
    assert_close(found.double(), expected, norm=torch.finfo(dtype).eps / 2 + 1e-6)


def test_blocks_are_less_rounded_than_sdpa() -> None:
    query, key, value = operands((1, 9, 3, 256, 256, 64, 64), torch.bfloat16)
    exact = slow(query, key, value, 0.125)
    sdpa = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.125, enable_gqa=True
    ).transpose(1, 2)
    errors = [(one.double() - exact).norm() for one in (prompt_attention(query, key, value, 0.125), sdpa)]
    assert errors[0] < errors[1]


def test_reasons_for_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    q, k, v = operands((1, 4, 2, 256, 256, 8, 8), torch.bfloat16)
    assert why_not(q, k, v) is None
    assert why_not(q.float(), k.float(), v.float()) == "SDPA computes torch.float32 on cpu"
    assert why_not(q, k, v.half()) == "the dtypes differ"
    assert why_not(q[:, :, :255], k, v) == "SDPA is faster for 255 tokens"
    assert why_not(q, k[:, :, :255], v[:, :, :255]) == "some queries have no key of their own"
    assert why_not(q.clone().requires_grad_(), k, v) == "a gradient is needed"
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert why_not(q, k, v) == "SDPA has matrix instructions"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each call of `prompt_attention` from now on."""
    calls: list[int] = []

    def count(query: torch.Tensor, *more: Any) -> torch.Tensor:
        calls.append(query.shape[2])
        return prompt_attention(query, *more)

    monkeypatch.setattr(prompts, "prompt_attention", count)
    return calls


@torch.no_grad()
def test_prompts_of_a_packed_model_attend_by_blocks(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = packed(), counted(monkeypatch)
    ids = torch.arange(70)[None] % 50
    found = model(input_ids=ids).logits
    assert calls == [70] * model.config.num_hidden_layers and model.config._attn_implementation == "sdpa"
    assert_equal(model(ids).logits, found)
    calls.clear()
    expected = graphs_of(model).plain(input_ids=ids).logits  # type: ignore[union-attr]
    assert not calls
    assert_close(found.float(), expected.float(), norm=0.02)
    # A mask, as of texts of several lengths, and float32, are SDPA's.
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    model(input_ids=ids, attention_mask=mask)
    model.float()(input_ids=ids)
    assert not calls


def test_threads_share_the_name_until_the_last_prompt_ends(small: None) -> None:
    model, inside, leave = packed(), threading.Event(), threading.Event()
    before = fingerprint(model, modules_of(model))

    def run() -> None:
        with prompt_attention_in(model):
            inside.set()
            leave.wait(10)

    other = threading.Thread(target=run)
    with prompt_attention_in(model):
        other.start()
        assert inside.wait(10)
    assert model.config._attn_implementation == attention.PROMPT
    # Captured steps stay, though a prompt of another thread runs.
    assert fingerprint(model, modules_of(model)) == before
    leave.set()
    other.join()
    assert model.config._attn_implementation == "sdpa" and not attention._running


#: Takes and frees 8 MB eight times, outside and inside, and prints the page faults of each.
FAULTS = """
import resource
import torch
from quantkit.runtime.cpu_steps.mapped_memory import mapped_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        tensors = [torch.ones(25_000) for _ in range(80)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.ones(25_000)
outside = faults()
with mapped_memory():
    print(outside, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc's allocator")
def test_memory_that_a_prompt_frees_stays_mapped() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    outside, inside = map(int, done.stdout.split())
    # Once for all, and not each time.
    assert outside > 10_000 and inside < outside / 4


def test_mapped_memory_ends_with_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), mapped_memory():
        raise ValueError("inside")
