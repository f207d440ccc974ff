"""Rotary position embedding (arXiv 2104.09864), alone or with KV append, in one launch; references."""

from functools import lru_cache

import torch

from quantkit.kernels.jit.launcher import Launch, launch_features, launching_on, overlap
from quantkit.kernels.layouts.shared_memory import next_power_of_2
from quantkit.kernels.ops.kv_append import append_reference
from quantkit.kernels.ops.norm import HeadNorms, norm_options

#: Pairs of values per program of `rotate`: 8 per thread.
ROTATED = 512
#: Launch options that round products before they are added, as torch does.
ROUNDED = {"enable_fp_fusion": False}


def cos_sin_reference(
    frequencies: torch.Tensor, positions: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of positions times frequencies, [B, T, 2 H] each, by torch: `cos_sin`'s reference.

    `positions` are [B, T] of B sequences and T tokens, `frequencies` [H] of a head of 2 H features. Each
    angle comes twice, once for each half of a head. Results have `dtype` and are multiplied by `scaling`.
    """
    return _cos_sin_reference(positions[..., None].float() * frequencies, scaling, dtype)


def cos_sin_matmul_reference(
    frequencies: torch.Tensor, positions: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of positions times frequencies, times `scaling`, by torch: [B, T, 2 H] each.

    The angles are computed by a matrix product, as transformers 5.12 and 5.17 do. `positions` are [B, T] of B
    sequences and T tokens, `frequencies` [H] of a head of 2 H features. Each angle comes twice, once for each
    half of a head. Results have `dtype`.
    """
    columns = frequencies[None, :, None].expand(positions.shape[0], -1, 1)
    angles = (columns @ positions[:, None, :].float()).transpose(1, 2)
    return _cos_sin_reference(angles, scaling, dtype)


def _cos_sin_reference(
    angles: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of `angles` [B, T, H], times `scaling`: [B, T, 2 H] each, in `dtype`.

    Each angle comes twice, once for each half of a head of 2 H features. There are B sequences of T tokens.
    """
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return cos.to(dtype), sin.to(dtype)


def cos_sin(
    frequencies: torch.Tensor, positions: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of positions times frequencies, times `scaling`: [B, T, 2 H] each, in `dtype`.

    `positions` are [B, T] int64 of B sequences and T tokens, `frequencies` [H] float32 of a head of 2 H
    features. Each angle comes twice, once for each half of a head, as `rotate` reads them. All is float32
    until it is rounded at the end.
    """
    (batch, tokens), half = positions.shape, len(frequencies)
    shape = batch, tokens, 2 * half
    cos = torch.empty(shape, dtype=dtype, device=positions.device)
    sin = torch.empty(shape, dtype=dtype, device=positions.device)
    launch = _cos_sin_launch(batch * tokens, half, scaling, launch_features(positions.device))
    with launching_on(positions.device):
        launch(frequencies, positions, cos, sin, tokens, frequencies.stride(0), *positions.stride())
    return cos, sin


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `x` [B, H, T, D] with rotary position embedding, by torch: `rotate`'s reference.

    The result is x * cos + rotate_half(x) * sin, [B, H, T, D]. For the two halves of a head, rotate_half((a,
    b)) = (-b, a). `cos` and `sin` are [B or 1, 1, T, D]. B are sequences, H heads, T tokens, D features of a
    head.
    """
    half = x.shape[-1] // 2
    rotated_half = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated_half * sin


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `x` [B, H, T, D] with rotary position embedding: x * cos + rotate_half(x) * sin.

    There are B sequences, H heads, T tokens and D features of a head. `cos` and `sin` are [B or 1, 1, T, D].
    For the halves of a head, rotate_half((a, b)) = (-b, a). The result is a new tensor, allocated by
    `empty_heads`.
    """
    batch, heads, tokens, size = x.shape
    y = empty_heads(x)
    x, cos, sin = (part if part.stride(-1) == 1 else part.contiguous() for part in (x, cos, sin))
    cos, sin, c_b, c_t = angles(cos, sin)
    launch = _rotate_launch(batch * tokens, heads, size // 2, launch_features(x.device))
    with launching_on(x.device):
        launch(x, cos, sin, y, tokens, *x.stride()[:3], c_b, c_t, *y.stride()[:3])
    return y


def rotate_append_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cache_length: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate q and k, append k and v to the cache in place, by torch; return (rotated q, keys, values).

    The reference of `rotate_append`, without norms. To rotate is to apply rotary position embedding.

        q              [B, H, T, D]              cos, sin  [B or 1, 1, T, D]
        k              [B, H', T, D]             keys      [B, H', L, D], cache
        v              [B, H', T, V]             values    [B, H', L, V], cache
        cache_length   [] int64: tokens already in the cache, which has room for L

    There are B sequences, H query heads, H' key heads and T tokens; D and V are features of keys and values.
    """
    rotated = rotate_reference(q, cos, sin)
    return rotated, *append_reference(keys, values, cache_length, rotate_reference(k, cos, sin), v)


def rotate_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cache_length: torch.Tensor,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate q and k, append k and v to the cache in place; return (rotated q, keys, values).

        q              [B, H, T, D]              cos, sin  [B or 1, 1, T, D]
        k              [B, H', T, D]             keys      [B, H', L, D], cache
        v              [B, H', T, V]             values    [B, H', L, V], cache
        cache_length   [] or [1] int64: tokens already in the cache, which has room for L
        norms          RMSNorms of the heads of q and k, computed before rotation; None for no norms

    To rotate is to apply rotary position embedding. There are B sequences, H query heads, H' key heads and T
    tokens; D and V are features of keys and values. A token without room in the cache is not written, and its
    row of q becomes NaN. The previous kernel must not write weights of norms, which are read while that
    kernel may still run (PDL).
    """
    batch, queries, tokens, size = q.shape
    heads, width = k.shape[1], v.shape[-1]
    q, k, v, cos, sin = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v, cos, sin))
    cos, sin, c_b, c_t = angles(cos, sin)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q_weight, k_weight, how = (q, k, None) if norms is None else (norms.q, norms.k, norms.how)
    launch = _rotate_append_launch(
        batch * tokens, queries, heads, size // 2, width, how, launch_features(q.device)
    )
    strides, cached = (
        [stride for part in parts for stride in part.stride()[:3]] for parts in ((q, k, v), (keys, values))
    )
    with launching_on(q.device):
        launch(
            *(q, k, v, cos, sin, cache_length, y, keys, values, q_weight, k_weight, tokens, keys.shape[2]),
            *(*strides, c_b, c_t, *cached),
        )
    return y, keys, values


def empty_heads(x: torch.Tensor) -> torch.Tensor:
    """Allocate an uninitialized [B, H, T, D] like `x`, in the same order of heads and tokens in memory.

    The heads of a token are adjacent if those of `x` are. There are B sequences, H heads, T tokens and D
    features of a head.
    """
    batch, heads, tokens, size = x.shape
    if x.stride(1) < x.stride(2):
        shape = batch, tokens, heads, size
        return torch.empty(shape, dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def angles(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return `cos` and `sin` [B or 1, 1, T, D] with equal strides, then the strides of B and of T.

    The stride of B is 0 if B is 1. There are B sequences, T tokens and D features of a head.
    """
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(2)


@lru_cache(maxsize=256)
def _cos_sin_launch(tokens: int, half: int, scaling: float, features: frozenset[str]) -> Launch:
    """Build the launch of `cos_sin` for `tokens` tokens of all sequences and `half` frequencies.

    Results are multiplied by `scaling`. `features` are of the device (`device_features`).
    """
    from quantkit.kernels.ops.rope_kernels import cos_sin

    sizes = {"H": half, "HP": next_power_of_2(half)}
    return Launch(cos_sin, (tokens,), SCALING=scaling, **sizes, **overlap(features), num_warps=1)


@lru_cache(maxsize=256)
def _rotate_launch(tokens: int, heads: int, half: int, features: frozenset[str]) -> Launch:
    """Build the launch of `rotate` for `tokens` tokens of all sequences, and `heads` heads.

    A head has 2 * `half` features. `features` are of the device (`device_features`).
    """
    from quantkit.kernels.ops.rope_kernels import rotate

    padded = next_power_of_2(half)
    part = min(next_power_of_2(heads), max(1, ROTATED // padded))
    return Launch(
        rotate,
        (tokens, -(-heads // part)),
        HEADS=heads,
        PART=part,
        H=half,
        HP=padded,
        **ROUNDED,
        **overlap(features),
        num_warps=max(1, part * padded // 256),
    )


@lru_cache(maxsize=256)
def _rotate_append_launch(
    tokens: int,
    queries: int,
    heads: int,
    half: int,
    width: int,
    norms: tuple[float, str] | None,
    features: frozenset[str],
) -> Launch:
    """Build the launch of `rotate_append` for `tokens` tokens of all sequences.

    queries    number of query heads
    heads      number of key heads
    half       half of the number of features of a head of q or k
    width      features of a head of v
    norms      (eps, kind) of norms of heads of q and k; None for none
    features   of the device (`device_features`)
    """
    from quantkit.kernels.ops.rope_kernels import rotate_append

    return Launch(
        rotate_append,
        (tokens, queries + 2 * heads),
        QUERIES=queries,
        HEADS=heads,
        H=half,
        HP=next_power_of_2(half),
        V=width,
        VP=next_power_of_2(width),
        **norm_options(norms),
        **ROUNDED,
        **overlap(features),
        num_warps=1,
    )
