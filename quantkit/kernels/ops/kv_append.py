"""Write keys and values to a KV cache in one launch: new tokens of a layer, or a prompt for all layers."""

from functools import lru_cache
from typing import Any

import torch

from quantkit.kernels.jit.launcher import Launch, launch_features, launching_on, overlap
from quantkit.kernels.layouts.shared_memory import next_power_of_2

#: Bytes per copied word, whatever the dtype of the cache.
WORD = 8
#: Tokens per program of `fill`.
TOKENS = 32


def append_reference(
    keys: torch.Tensor, values: torch.Tensor, cache_length: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append `k`, `v` [B, H, T, ...] to caches `keys`, `values` [B, H, L, ...] in place, by torch.

    There are B sequences, H heads and T new tokens. `cache_length` [] int64 is the number of tokens in the
    caches, which have room for L tokens; T more must fit. Returns the caches.
    """
    positions = torch.arange(k.shape[2], device=k.device) + cache_length
    return keys.index_copy_(2, positions, k), values.index_copy_(2, positions, v)


def append(
    keys: torch.Tensor, values: torch.Tensor, cache_length: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append `k` [B, H, T, D] and `v` [B, H, T, V] to a KV cache in place; return (`keys`, `values`).

    There are B sequences, H heads and T new tokens; D and V are features of keys and values. `keys` is [B, H,
    L, D], `values` [B, H, L, V], with room for L tokens. `cache_length` [] or [1] int64 is the number of
    tokens in the cache. A token without room is not written. The last key in the cache then becomes NaN, so
    that attention to it is NaN.
    """
    batch, heads, tokens, size = k.shape
    k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (k, v))
    launch = _append_launch(batch * tokens, heads, size, v.shape[-1], launch_features(k.device))
    strides = [stride for part in (k, v, keys, values) for stride in part.stride()[:3]]
    with launching_on(k.device):
        launch(k, v, cache_length, keys, values, tokens, keys.shape[2], *strides)
    return keys, values


def fill_reference(caches: list[torch.Tensor], states: list[torch.Tensor], clear: bool) -> None:
    """Write `states` [B, H, T, D] to the first T tokens of `caches` [B, H, L, D] in place, by torch.

    The two lists are pairs of tensors of B sequences, H heads and D features; a cache has room for L tokens.
    If `clear`, the other tokens become 0.
    """
    if clear:
        torch._foreach_zero_(caches)
    tokens = states[0].shape[2]
    torch._foreach_copy_([cache[:, :, :tokens] for cache in caches], states)


def fill(caches: list[torch.Tensor], states: list[torch.Tensor], clear: bool) -> None:
    """Write `states` [B, H, T, D] to the first T tokens of `caches` [B, H, L, D] in place, for many pairs.

    There are B sequences, H heads and D features; a cache has room for L tokens. If `clear`, the other tokens
    become 0. A pair has one dtype and device; T is the same for all. One launch copies all pairs of a shape.
    Pairs that cannot be copied in words of 8 bytes use `fill_reference`. The host does not wait for the GPU.
    """
    launches: dict[tuple[Any, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    unaligned: list[tuple[torch.Tensor, torch.Tensor]] = []
    for cache, part in zip(caches, states, strict=True):
        batch, heads, length, size = cache.shape
        key = cache.device, batch, heads, length, size * cache.itemsize
        (launches.setdefault(key, []) if _is_of_words(cache, part) else unaligned).append((cache, part))
    for (device, batch, heads, length, row), pairs in launches.items():
        tokens = pairs[0][1].shape[2]
        end = length if clear else tokens
        launch = _fill_launch(len(pairs), batch * heads, -(-end // TOKENS), row // WORD)
        entries = [_entry(cache, part) for cache, part in pairs]
        # Pinned: the host would wait for a copy from pageable memory.
        table = torch.tensor(entries, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        with launching_on(device):
            launch(table, tokens, length, end, heads)
    if unaligned:
        fill_reference([cache for cache, _ in unaligned], [part for _, part in unaligned], clear)


def _is_of_words(cache: torch.Tensor, states: torch.Tensor) -> bool:
    """Return True if kernel `fill` can copy `states` [B, H, T, D] to `cache` [B, H, L, D] in 8-byte words.

    The cache must be contiguous, and rows and strides of both must be multiples of 8 bytes.
    """
    lies = cache.data_ptr(), states.data_ptr(), *(states.itemsize * stride for stride in states.stride()[:3])
    row = states.shape[3] * states.itemsize
    return cache.is_contiguous() and states.stride(3) == 1 and not any(at % WORD for at in (row, *lies))


def _entry(cache: torch.Tensor, states: torch.Tensor) -> tuple[int, ...]:
    """Return the row of the argument `table` [N, 5] of kernel `fill` for `states` and `cache` [B, H, L, D].

    The row is the addresses of `cache` and `states`, then the strides of sequences, heads and tokens of
    `states`, in words of 8 bytes.
    """
    strides = (stride * states.itemsize // WORD for stride in states.stride()[:3])
    return cache.data_ptr(), states.data_ptr(), *strides


@lru_cache(maxsize=256)
def _append_launch(tokens: int, heads: int, size: int, width: int, features: frozenset[str]) -> Launch:
    """Build the launch of `append` for `tokens` new tokens, of all sequences together, and `heads` heads.

    A key has `size` features, a value `width`.
    """
    from quantkit.kernels.ops.kv_append_kernels import append

    sizes = {"D": size, "DP": next_power_of_2(size), "V": width, "VP": next_power_of_2(width)}
    return Launch(append, (tokens, heads), **sizes, **overlap(features), num_warps=1)


@lru_cache(maxsize=256)
def _fill_launch(tensors: int, heads: int, programs: int, words: int) -> Launch:
    """Build the launch of `fill` for `tensors` caches.

    `heads` is the number of heads of all sequences of a cache together. A head of a token has `words` words
    of 8 bytes; `programs` programs share the tokens of a head.
    """
    from quantkit.kernels.ops.kv_append_kernels import fill

    return Launch(
        fill, (tensors, heads, programs), W=words, WP=next_power_of_2(words), BT=TOKENS, num_warps=4
    )
