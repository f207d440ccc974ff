"""Attention that rotates and keeps a token in passing: in Triton's interpreter without a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from quantkit.kernels.ops import activation, rope
from quantkit.kernels.ops import attention as kernels
from quantkit.kernels.ops.attention import decode_attention, rotated_attention
from quantkit.kernels.ops.norm import rms_norm_gemma_reference, rms_norm_olmo_reference, rms_norm_reference
from quantkit.runtime.cache.static_cache import static_cache
from quantkit.runtime.decoding import forward_of
from quantkit.runtime.passes import fuse_attention, fused_forward
from quantkit.runtime.passes.patterns import fused
from quantkit.runtime.transformers.patches import attention
from quantkit.runtime.transformers.patches.generation import apply as graph_decoding

from ...support.compare import assert_close, assert_equal
from ..graphed import DEVICE, calls, count_recordings, decode, ids, keep_modules, made, only

pytest.importorskip("triton")

#: One is recorded, the others are replayed; the interpreter, in which no launches overlap, takes long.
STEPS, LAYERS = (2, 3) if DEVICE == "cpu" else (6, 4)
#: Queries, a key, a value, cosines and sines, keys and values of a cache, and how many it holds.
Given = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch, interpreter: bool) -> None:
    """Our attention, and chains of launches, also on a CPU."""

    def why_not(*given: Any) -> str | None:
        found = kernels.why_not(*given)
        return None if found == "it runs on cuda, the tensors are on cpu" else found

    monkeypatch.setattr(attention, "why_not", why_not)
    monkeypatch.setattr(fuse_attention, "rotates", lambda *given: True)
    monkeypatch.setattr(fused_forward, "can_fuse", lambda device: True)
    count_recordings(monkeypatch)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What steps became."""
    return keep_modules(monkeypatch)


@pytest.mark.parametrize(
    ("family", "more", "taken"),
    [
        ("Llama", {}, True),
        ("Qwen2", {}, True),
        ("Qwen3", {"head_dim": 16}, True),
        ("Mistral", {"sliding_window": 5}, True),
        ("Gemma", {"head_dim": 16}, True),
        # Of its heads only a part is rotated.
        ("Phi3", {"pad_token_id": 0}, False),
    ],
)
@pytest.mark.sampled(2, "taken")
def test_steps_of_each_family_attend_in_one_launch(
    family: str, more: dict[str, Any], taken: bool, modules: list[Any]
) -> None:
    model = made(family, **more).half()
    expected = decode(model, model, static_cache(model, 20), ids(), STEPS)
    graph_decoding(model)
    found = decode(model, forward_of(model), static_cache(model, 20), ids(), STEPS)
    assert (found - expected).float().norm() < 2e-2 * expected.float().norm()
    module = only(modules)
    layers = model.config.num_hidden_layers
    attended = {True: "rotated_attention", False: "decode_attention.default"}
    assert calls(module)[attended[taken]] == layers
    assert not {attended[not taken], "rotate_append"} & set(calls(module))
    # The first of a layer, which nothing is added up for; norms of heads, of Qwen3, are not by themselves.
    assert calls(module)["rms_norm"] == 1
    # The mask is made before the first layer, whose attention has none before it.
    assert cache_ready(module) == ([False] + [True] * (layers - 1) if taken else [])


def cache_ready(module: Any) -> list[bool]:
    """Whether each attention that rotates reads what was there before the one before it."""
    nodes = module.graph.find_nodes(op="call_function", target=rotated_attention)
    return [node.kwargs.get("cache_ready", False) for node in nodes]


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.sampled(2)
def test_reading_early_changes_no_bit(
    modules: list[Any], monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """Counters have one dimension in transformers 5.12.1."""
    made_by = []
    for is_ready in (fuse_attention._is_cache_ready, lambda *given: False):
        monkeypatch.setattr(fuse_attention, "_is_cache_ready", is_ready)
        model = made("Llama", num_hidden_layers=LAYERS).half()
        graph_decoding(model)
        cache = static_cache(model, 40)
        for layer in cache.layers:
            layer.cumulative_length = layer.cumulative_length.reshape(shape)
        made_by.append(decode(model, forward_of(model), cache, ids(), STEPS))
    assert [sum(cache_ready(module)) for module in modules] == [LAYERS - 1, 0]
    assert_equal(*made_by)


def given(dtype: torch.dtype = torch.float16) -> Given:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    held = torch.tensor(7, device=DEVICE)
    heads = numbers(2, 4, 1, 32), numbers(2, 2, 1, 32), numbers(2, 2, 1, 32)
    return (
        *heads,
        numbers(2, 1, 1, 32),
        numbers(2, 1, 1, 32),
        numbers(2, 2, 20, 32),
        numbers(2, 2, 20, 32),
        held,
    )


def attended(*given: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(20, device=DEVICE).expand(2, 1, 1, 20) <= 7
    return decode_attention(*rope.rotate_append_reference(*given), mask, 0.25)


def rotated(*given: torch.Tensor) -> Any:
    return rope.rotate_append_reference(*given)


def twice(*given: torch.Tensor) -> Any:
    q, keys, values = rotated(*given)
    return decode_attention(q, keys, values, None, 1.0), decode_attention(q, keys, values, None, 0.5)


def with_queries(*given: torch.Tensor) -> Any:
    q, keys, values = rotated(*given)
    return decode_attention(q, keys, values, None, 1.0), q


def with_keys(*given: torch.Tensor) -> Any:
    q, keys, values = rotated(*given)
    return decode_attention(q, keys, values, None, 1.0), keys + 1


def exchanged(*given: torch.Tensor) -> Any:
    q, keys, values = rotated(*given)
    return decode_attention(q, values, keys, None, 1.0)


def of_two(*given: torch.Tensor) -> Any:
    """Values of another layer."""
    q, keys, _ = rotated(*given)
    _, _, values = rotated(*given[:5], torch.zeros_like(given[5]), given[6] * 1, given[7])
    return decode_attention(q, keys, values, None, 1.0)


def counted_before(*given: torch.Tensor) -> Any:
    q, keys, values = rotated(*given)
    given[7].mul_(2)
    return decode_attention(q, keys, values, None, 1.0)


def read_before(*given: torch.Tensor) -> Any:
    q, keys, values = rotated(*given)
    seen = given[5].isfinite().all(-1)[:, :1, None]
    return decode_attention(q, keys, values, seen, 1.0)


def changed_before(*given: torch.Tensor) -> Any:
    q, keys, values = rotated(*given)
    given[6].mul_(2)
    return decode_attention(q, keys, values, None, 1.0)


@pytest.mark.parametrize(
    ("step", "taken"),
    [
        (attended, True),
        (twice, False),
        (with_queries, False),
        (with_keys, False),
        (exchanged, False),
        (of_two, False),
        (counted_before, False),
        (read_before, False),
        (changed_before, False),
    ],
)
def test_it_is_taken_where_it_computes_the_same(step: Any, taken: bool) -> None:
    module = fused(step, given(), "steps")
    assert (calls(module)[rotated_attention.__name__] == 1) is taken
    caches = given(), given()
    expected, found = step(*caches[0]), module(*caches[1])
    assert_close(found, expected)
    for one, other in zip(*caches, strict=True):
        assert_close(one, other)


def with_norms(
    *given: torch.Tensor,
    norm: Callable[..., torch.Tensor] = rms_norm_reference,
    other_eps: float = 1e-3,
    turned: bool = False,
    late: bool = False,
) -> tuple[torch.Tensor, ...]:
    """What `rotate_append` is given, of heads whose norms are taken, and both norms."""
    q, k, v, cos, sin, keys, values, held, *weights = given
    if turned:
        q, k = (one.transpose(1, 2).contiguous() for one in (q, k))
    normed = norm(q, weights[0], 1e-3), norm(k, weights[1], other_eps)
    if late:
        q.mul_(2)
    q, k = (one.transpose(1, 2) for one in normed) if turned else normed
    return (q, k, v, cos, sin, keys, values, held), normed


def take_norms(*given: torch.Tensor, **how: Any) -> Any:
    return rope.rotate_append_reference(*with_norms(*given, **how)[0])


def norms_shown(*given: torch.Tensor) -> Any:
    new, normed = with_norms(*given)
    return *rope.rotate_append_reference(*new), normed[0]


def norms_of_values(*given: torch.Tensor) -> Any:
    """Values are the keys before they are rotated."""
    (q, k, _, *rest), _ = with_norms(*given)
    return rope.rotate_append_reference(q, k, k, *rest)


def norms_that_are_values(*given: torch.Tensor) -> Any:
    """Of keys of one head: values are the norm itself, keys its heads and tokens exchanged."""
    _, k, _, *rest, keys, values, held = given[:8]
    normed, _ = with_norms(*given)[1]
    normed_k = rms_norm_reference(k[:, :1].contiguous(), given[9], 1e-3)
    caches = keys[:, :1], values[:, :1]
    return rope.rotate_append_reference(normed, normed_k.transpose(1, 2), normed_k, *rest, *caches, held)


def norms_of_queries(*given: torch.Tensor) -> Any:
    q, _, *rest = given[:8]
    return rope.rotate_append_reference(rms_norm_reference(q, given[8], 1e-3), given[1], *rest)


@pytest.mark.parametrize(
    ("step", "taken"),
    [
        (take_norms, True),
        (partial(take_norms, norm=rms_norm_gemma_reference), True),
        (partial(take_norms, norm=rms_norm_olmo_reference), True),
        (partial(take_norms, turned=True), True),
        (partial(take_norms, other_eps=1e-4), False),
        (partial(take_norms, late=True), False),
        (norms_shown, False),
        (norms_of_values, False),
        (norms_that_are_values, False),
        (norms_of_queries, False),
    ],
)
def test_norms_of_heads_are_taken_where_they_are_for_nothing_else(step: Any, taken: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(32, generator=generator).to(DEVICE, torch.float16) for _ in range(2)]
    module = fused(step, (*given(), *weights), "steps")
    assert (calls(module)["rms_norm"] == 0) is taken and calls(module)["rotate_append"] == 1
    caches = (*given(), *weights), (*given(), *weights)
    expected, found = step(*caches[0]), module(*caches[1])
    assert_close(found, expected)
    for one, other in zip(*caches, strict=True):
        assert_close(one, other)


Second = Callable[[torch.Tensor, torch.Tensor, Given, Given], Given]
#: What the attention of a second layer is given of the mask, how many tokens are held, and the caches of the
#: first layer and its own; and whether it may read all that early.
SECOND: dict[str, tuple[Second, bool]] = {
    "a cache of its own": (lambda mask, held, first, own: (*own, held, mask), True),
    "no mask": (lambda mask, held, first, own: (*own, held, None), True),
    "the cache of the first": (lambda mask, held, first, own: (*first, held, mask), False),
    "a new cache": (lambda mask, held, first, own: (own[0] * 1, own[1] * 1, held, mask), False),
    "another mask": (lambda mask, held, first, own: (*own, held, mask & True), False),
    "a changed mask": (lambda mask, held, first, own: (*own, held, mask.logical_not_()), False),
    "a mask that a launch makes": (
        lambda mask, held, first, own: (
            *own,
            held,
            activation.silu_gate_reference(mask.to(own[0].dtype), (~mask).to(own[0].dtype)),
        ),
        False,
    ),
    "another number": (lambda mask, held, first, own: (*own, held + 1, mask), False),
}


@pytest.mark.parametrize("name", SECOND)
def test_only_what_the_attention_before_found_is_read_early(name: str) -> None:
    second, expected = SECOND[name]

    def step(*tensors: torch.Tensor) -> Any:
        *new, keys, values, held, own_keys, own_values = tensors
        mask = torch.arange(20, device=DEVICE).expand(2, 1, 1, 20) <= held
        made = decode_attention(*rope.rotate_append_reference(*new, keys, values, held), mask, 0.25)
        *cache, mask = second(mask, held, (keys, values), (own_keys, own_values))
        return made, decode_attention(*rope.rotate_append_reference(*new, *cache), mask, 0.25)

    module = fused(step, (*given(), *given()[5:7]), "steps")
    assert any(cache_ready(module)) is expected
