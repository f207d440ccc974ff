"""The quantized KV cache: what it holds, whatever way tokens come, and what transformers does with it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, MistralConfig

from quantkit.calibrate.hadamard import Rotation
from quantkit.calibrate.methods import quantize_tensor
from quantkit.errors import FormatError, UsageError
from quantkit.model.tokenizer import tokenizer
from quantkit.runtime.cache.kv_cache import KV_SCHEMES, PackedCache, PackedLayer
from quantkit.runtime.generate import generate
from quantkit.runtime.load import load

from ...support.compare import assert_close, assert_equal

STORIES = Path(__file__).parents[3] / "examples" / "stories260K"


@pytest.fixture(scope="module")
def model():
    return load(STORIES, device="cpu").eval()


def states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_row(rows: torch.Tensor, format: str, *, rotate: bool) -> torch.Tensor:
    """Every token of a head on its own."""
    turn = Rotation.of(rows.shape[-1]).apply(torch.eye(rows.shape[-1], dtype=torch.float64)).float()
    found = torch.empty_like(rows)
    for index in torch.cartesian_prod(*map(torch.arange, rows.shape[:-1])).tolist():
        row = rows[tuple(index)][None]
        turned = row @ turn if rotate else row
        stored = quantize_tensor(turned, KV_SCHEMES[format], method="rtn").dequantize(torch.float32)
        found[tuple(index)] = (stored @ turn.T if rotate else stored)[0]
    return found


@pytest.mark.parametrize("format", KV_SCHEMES)
@pytest.mark.parametrize("size", [64, 128, 96, 40, 8])
def test_tokens_are_quantized_on_their_own(format: str, size: int) -> None:
    layer = PackedLayer(KV_SCHEMES[format])
    keys, values = states(2, 3, 7, size), states(2, 3, 7, size, seed=1)
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        found = layer.update(keys[:, :, start:stop], values[:, :, start:stop])
    assert_close(found[0], by_row(keys, format, rotate=True), rtol=0, atol=4e-6)
    assert_close(found[1], by_row(values, format, rotate=False), rtol=0, atol=0)
    assert layer.get_seq_length() == 7 and layer.get_mask_sizes(2) == (9, 0)
    at_once = PackedLayer(KV_SCHEMES[format])
    for one, other in zip(found, at_once.update(keys, values), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize(("format", "bits"), [("int8", 8.25), ("fp8", 8.125), ("int4", 5.0)])
def test_bytes_are_those_of_the_format(format: str, bits: float) -> None:
    layer = PackedLayer(KV_SCHEMES[format])
    layer.update(states(2, 4, 10, 128), states(2, 4, 10, 128))
    assert layer.nbytes == 2 * 2 * 4 * 10 * 128 * bits / 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_come_back_in_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    keys = states(1, 2, 5, 64).to(dtype)
    found, _ = PackedLayer(KV_SCHEMES["int8"]).update(keys, keys)
    assert found.dtype == dtype
    assert_close(found.float(), keys.float(), rtol=0, atol=0.03)


def test_what_transformers_does_with_a_cache() -> None:
    keys, values = states(3, 2, 6, 64), states(3, 2, 6, 64, seed=1)

    def filled() -> tuple[PackedLayer, torch.Tensor, torch.Tensor]:
        layer = PackedLayer(KV_SCHEMES["int8"])
        return layer, *layer.update(keys, values)

    def held(layer: PackedLayer) -> torch.Tensor:
        new = states(layer.keys["packed"].shape[0], 2, 1, 64, seed=2)
        return layer.update(new, new)[0][:, :, :-1]

    layer, before, _ = filled()
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert_equal(held(layer), before[[2, 0, 0]])
    layer, before, _ = filled()
    layer.batch_repeat_interleave(2)
    assert_equal(held(layer), before.repeat_interleave(2, 0))
    layer, before, _ = filled()
    layer.batch_select_indices(torch.tensor([1]))
    assert_equal(held(layer), before[1:2])
    layer, before, _ = filled()
    layer.crop(-2)
    assert layer.get_seq_length() == 4
    assert_equal(held(layer), before[:, :, :4])
    layer.offload(), layer.prefetch(), layer.crop(0)
    with pytest.raises(UsageError, match="negative number, got 3"):
        layer.crop(3)
    layer.reset()
    assert layer.get_seq_length() == 0 and not layer.is_initialized
    assert layer.update(keys[:1], values[:1])[0].shape == (1, 2, 6, 64)


@pytest.mark.parametrize("format", KV_SCHEMES)
def test_generation_token_by_token_is_that_of_one_pass(model, format: str) -> None:
    tokens = torch.arange(3, 43)[None]
    with torch.inference_mode():
        once = model(input_ids=tokens, past_key_values=PackedCache(model.config, format)).logits
        cache = PackedCache(model.config, format)
        parts = [model(input_ids=part, past_key_values=cache).logits for part in tokens.split([30, 1, 9], 1)]
        dense = model(input_ids=tokens).logits
    assert_close(torch.cat(parts, 1), once, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(once, dense, atol=1e-4)
    assert (once - dense).abs().mean() < {"int8": 0.02, "fp8": 0.1, "int4": 0.4}[format]
    assert cache.get_seq_length() == 40 and cache.dense_layers == 0
    assert cache.note is None
    dense_bytes = sum(2 * layer.keys.nbytes for layer in _dense_cache(model, tokens).layers)
    # 8 features to a head, in words of 32 codes.
    assert cache.nbytes < dense_bytes * 1.3


def _dense_cache(model, tokens: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=tokens, past_key_values=cache)
    return cache


def test_generate_takes_the_cache(model) -> None:
    words = tokenizer(STORIES)
    plain = generate(model, words, "Once upon a time", max_new_tokens=12)
    packed = generate(model, words, "Once upon a time", max_new_tokens=12, kv_cache="int8")
    assert len(packed.tokens) == 12 and packed.tokens[:6] == plain.tokens[:6]
    cache = PackedCache(model.config, "int8")
    prompt = words("Once upon a time", return_tensors="pt").input_ids
    by_transformers = model.generate(
        prompt, past_key_values=cache, max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert tuple(by_transformers[0, prompt.shape[1] :].tolist()) == packed.tokens
    assert cache.get_seq_length() == prompt.shape[1] + 11
    beams = model.generate(
        prompt, past_key_values=PackedCache(model.config, "int8"), max_new_tokens=5, num_beams=3
    )
    assert beams.shape[1] == prompt.shape[1] + 5


def test_layers_with_a_sliding_window_stay_dense() -> None:
    config = MistralConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        sliding_window=4,
    )
    cache = PackedCache(config, "int8")
    assert cache.dense_layers == 2 and cache.nbytes == 0
    assert cache.note is not None and cache.note.startswith("2 of 2 layers have a sliding window or no keys")
    mistral = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(10)[None]
    with torch.inference_mode():
        assert_close(
            mistral(input_ids=tokens, past_key_values=cache).logits, mistral(input_ids=tokens).logits
        )


def test_states_that_are_no_numbers_are_refused() -> None:
    keys = states(1, 1, 2, 64)
    keys[0, 0, 1, 3] = float("nan")
    with pytest.raises(FormatError, match="keys or values that are not finite"):
        PackedLayer(KV_SCHEMES["int8"]).update(keys, keys)


def test_an_unknown_format_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="unknown KV cache format 'int3'; known are int8, fp8, int4"):
        PackedCache(AutoConfig.from_pretrained(STORIES), "int3")
