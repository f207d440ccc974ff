"""What is between the linears of a model, in one launch each: embeddings, norms, gates, positions, the cache.

Beside each function is its twin: what models of transformers compute in torch, a kernel for each operation.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from quantkit.kernels.jit.launcher import Launch, launch_features, launching_on, overlap
from quantkit.kernels.layouts.shared_memory import power_of_two

#: The most numbers of a row that a norm is taken of: a program has them in registers.
MOST_COLUMNS = 32768
#: Numbers of a program that copies rows: 16 bytes of a thread in 16 bits.
EMBEDDED = 1024
#: Numbers of a program of a gate.
GATED = 1024
#: Pairs of numbers of a program that rotates heads, of which a thread has eight.
ROTATED = 512
#: Products are rounded before they are added, as torch does it.
ROUNDED = {"enable_fp_fusion": False}


def slow_embed(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The twin of `embed`."""
    return F.embedding(ids, weight)


def slow_padded_embed(ids: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
    """The twin of `embed` of a model with an id for padding, whose row has no gradient."""
    return F.embedding(ids, weight, padding)


def embed(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The rows of `weight` [V, N] that `ids` [...] of int64 name: [..., N].

    An id that is none of a row gets a row of NaN, where torch ends the process on a GPU.
    """
    columns = weight.shape[-1]
    y = torch.empty((*ids.shape, columns), dtype=weight.dtype, device=weight.device)
    launch = _embed_launch(ids.numel(), -(-columns // EMBEDDED), launch_features(weight.device))
    with launching_on(weight.device):
        launch(ids.contiguous(), weight, y, len(weight), columns, *weight.stride())
    return y


def slow_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The twin of `norm` "llama"."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def slow_wide_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The twin of `norm` "olmo": weights are multiplied with before numbers are rounded."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide).to(x.dtype)


def slow_offset_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The twin of `norm` "gemma": weights are what is added to 1."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).type_as(x)


#: For each kind of norm: whether numbers are rounded before weights are multiplied with, and what is added
#: to weights.
NORMS: dict[str, tuple[bool, float]] = {"llama": (True, 0.0), "olmo": (False, 0.0), "gemma": (False, 1.0)}


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: str, late: bool = False) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) times `weight` [N], for rows of `x` [..., N] (RMSNorm, arXiv 1910.07467).

    `weight` is read while the kernels before this one may still run, and what the kernel after it reads early
    as well, unless that is to start `late`.
    """
    return _norm(x, None, weight, eps, kind, late)[1]


def add_norm(
    x: torch.Tensor,
    other: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    kind: str,
    late: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + other, of one shape, and the norm of it."""
    return _norm(x, other, weight, eps, kind, late)


def _norm(
    x: torch.Tensor,
    other: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    kind: str,
    late: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    columns, parts = x.shape[-1], [x] if other is None else [x, other]
    laid = [_rows(part) for part in parts]
    if laid[0][1] != laid[-1][1]:
        laid = [_rows(part.contiguous()) for part in parts]
    # Without another tensor its place is taken by `x`, and not read.
    (x, rows, outer, inner), (added, _, o_outer, o_inner) = laid[0], laid[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if other is not None else y
    features = launch_features(x.device)
    programs, adds = x.numel() // columns, other is not None
    launch = _norm_launch(programs, rows, columns, eps, adds, kind, late, features)
    with launching_on(x.device):
        launch(x, added, weight, total, y, outer, inner, o_outer, o_inner, weight.stride(0))
    return total, y


def slow_silu_gate(x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The twin of `gate` "silu"."""
    return F.silu(x) * up


def slow_gelu_gate(x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The twin of `gate` "gelu": by tanh."""
    return F.gelu(x, approximate="tanh") * up


def gate(x: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """silu(x) * up, or gelu(x) * up, of `x` and `up` [..., N] (GLU variants, arXiv 2002.05202)."""
    columns = x.shape[-1]
    flat, flat_up = (part.reshape(-1, columns) for part in (x, up))
    if flat.stride(-1) != 1 or flat_up.stride(-1) != 1:
        flat, flat_up = flat.contiguous(), flat_up.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch = _gate_launch(len(flat), -(-columns // GATED), kind, launch_features(x.device))
    with launching_on(x.device):
        launch(flat, flat_up, y, flat.stride(0), flat_up.stride(0), columns)
    return y


def slow_cos_sin(
    frequencies: torch.Tensor, positions: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `cos_sin`."""
    return _slow_cos_sin(positions[..., None].float() * frequencies, scaling, dtype)


def slow_cos_sin_of_product(
    frequencies: torch.Tensor, positions: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `cos_sin` in transformers 5.12 and 5.17, where angles are a matrix product."""
    columns = frequencies[None, :, None].expand(positions.shape[0], -1, 1)
    angles = (columns @ positions[:, None, :].float()).transpose(1, 2)
    return _slow_cos_sin(angles, scaling, dtype)


def _slow_cos_sin(
    angles: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return cos.to(dtype), sin.to(dtype)


def cos_sin(
    frequencies: torch.Tensor, positions: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [B, T, 2 H] of angles, times `scaling`, in `dtype`: what `rotate` takes.

    Angles are `positions` int64 [B, T] times `frequencies` float32 [H], once for each half of a head. All is
    float32 until it is rounded at the end.
    """
    (batch, tokens), half = positions.shape, len(frequencies)
    shape = batch, tokens, 2 * half
    cos = torch.empty(shape, dtype=dtype, device=positions.device)
    sin = torch.empty(shape, dtype=dtype, device=positions.device)
    launch = _cos_sin_launch(batch * tokens, half, scaling, launch_features(positions.device))
    with launching_on(positions.device):
        launch(frequencies, positions, cos, sin, tokens, frequencies.stride(0), *positions.stride())
    return cos, sin


def slow_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The twin of `rotate`."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def empty_heads(x: torch.Tensor) -> torch.Tensor:
    """Memory for as many heads as `x` [B, H, T, D] has: a token's lie together if those of `x` do."""
    batch, heads, tokens, size = x.shape
    if x.stride(1) < x.stride(2):
        shape = batch, tokens, heads, size
        return torch.empty(shape, dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` [B, H, T, D], the halves of heads rotated by `cos`, `sin` [B or 1, 1, T, D] (arXiv 2104.09864).

    The result lies as `empty_heads` does.
    """
    batch, heads, tokens, size = x.shape
    y = empty_heads(x)
    x, cos, sin = (part if part.stride(-1) == 1 else part.contiguous() for part in (x, cos, sin))
    cos, sin, c_b, c_t = angles(cos, sin)
    launch = _rotate_launch(batch * tokens, heads, size // 2, launch_features(x.device))
    with launching_on(x.device):
        launch(x, cos, sin, y, tokens, *x.stride()[:3], c_b, c_t, *y.stride()[:3])
    return y


def slow_append(
    keys: torch.Tensor, values: torch.Tensor, held: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write `k`, `v` [B, H, T, D] into `keys`, `values` [B, H, L, D] after the tokens held, of [] or [1]."""
    positions = torch.arange(k.shape[2], device=k.device) + held
    return keys.index_copy_(2, positions, k), values.index_copy_(2, positions, v)


def append(
    keys: torch.Tensor, values: torch.Tensor, held: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`keys` [B, H, L, D] and `values` [B, H, L, V] with `k`, `v` of T tokens written after the `held`.

    `held` is int64 [] or [1]. If there is no room for all, what has none is not written, and the last key
    becomes no number, so that no attention to it is one.
    """
    batch, heads, tokens, size = k.shape
    k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (k, v))
    launch = _append_launch(batch * tokens, heads, size, v.shape[-1], launch_features(k.device))
    strides = [stride for part in (k, v, keys, values) for stride in part.stride()[:3]]
    with launching_on(k.device):
        launch(k, v, held, keys, values, tokens, keys.shape[2], *strides)
    return keys, values


def slow_rotate_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    held: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The twin of `rotate_append`."""
    rotated = slow_rotate(q, cos, sin)
    return rotated, *slow_append(keys, values, held, slow_rotate(k, cos, sin), v)


class HeadNorms(NamedTuple):
    """Norms of the heads of queries and keys: weights [D] of each, the rest as for `norm`."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float
    kind: str

    @property
    def how(self) -> tuple[float, str]:
        """What a launch has to know of them."""
        return self.eps, self.kind


def norm_options(how: tuple[float, str] | None) -> dict[str, Any]:
    """What kernels know of norms, of their eps and kind; None for none."""
    eps, kind = how or (None, "llama")
    rounded, offset = NORMS[kind]
    return {"EPS": eps, "ROUND": rounded, "OFFSET": offset}


def rotate_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    held: torch.Tensor,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`q` rotated; `keys` and `values` with `k`, rotated, and `v` written after the `held` tokens.

    `q` [B, H, T, D], `k` [B, H', T, D] and `v` [B, H', T, V] as for `rotate`; `keys` [B, H', L, D], `values`
    [B, H', L, V], `held` int64 [] or [1]. Where there is no room nothing is written, and `q` becomes no
    numbers. What is rotated are the `norms` of `q` and `k`, if there are any, whose weights are read while
    the kernels before this one may still run.
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
            *(q, k, v, cos, sin, held, y, keys, values, q_weight, k_weight, tokens, keys.shape[2]),
            *(*strides, c_b, c_t, *cached),
        )
    return y, keys, values


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """`x` [..., N] with rows of N numbers, and how many lie apart by the last stride, and both strides.

    `x` is copied if its rows lie in more than two strides.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    merged: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    if len(merged) > 2:
        return x.contiguous(), 1, x.shape[-1], x.shape[-1]
    if len(merged) == 2:
        return x, merged[1][0], merged[0][1], merged[1][1]
    stride = merged[0][1] if merged else x.shape[-1]
    return x, 1, stride, stride


def angles(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """`cos` and `sin` [B or 1, 1, T, D] of the same strides: those of sequences and of tokens."""
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(2)


@lru_cache(maxsize=256)
def _embed_launch(rows: int, parts: int, features: frozenset[str]) -> Launch:
    from quantkit.kernels.ops.glue_kernels import embed

    return Launch(embed, (rows, parts), B=EMBEDDED, **overlap(features), num_warps=4)


@lru_cache(maxsize=256)
def _norm_launch(
    programs: int,
    rows: int,
    columns: int,
    eps: float,
    add: bool,
    kind: str,
    late: bool,
    features: frozenset[str],
) -> Launch:
    from quantkit.kernels.ops.glue_kernels import rms_norm

    padded = power_of_two(columns)
    return Launch(
        rms_norm,
        (programs,),
        ROWS=rows,
        N=columns,
        NP=padded,
        ADD=add,
        LATE=late,
        **norm_options((eps, kind)),
        **overlap(features),
        # Eight numbers of a thread.
        num_warps=min(16, max(1, padded // 256)),
    )


@lru_cache(maxsize=256)
def _gate_launch(rows: int, parts: int, kind: str, features: frozenset[str]) -> Launch:
    from quantkit.kernels.ops.glue_kernels import gate

    return Launch(gate, (rows, parts), KIND=kind, B=GATED, **overlap(features), num_warps=4)


@lru_cache(maxsize=256)
def _cos_sin_launch(tokens: int, half: int, scaling: float, features: frozenset[str]) -> Launch:
    from quantkit.kernels.ops.glue_kernels import cos_sin

    sizes = {"H": half, "HP": power_of_two(half)}
    return Launch(cos_sin, (tokens,), SCALING=scaling, **sizes, **overlap(features), num_warps=1)


@lru_cache(maxsize=256)
def _rotate_launch(tokens: int, heads: int, half: int, features: frozenset[str]) -> Launch:
    from quantkit.kernels.ops.glue_kernels import rotate

    padded = power_of_two(half)
    part = min(power_of_two(heads), max(1, ROTATED // padded))
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
    from quantkit.kernels.ops.glue_kernels import rotate_append

    return Launch(
        rotate_append,
        (tokens, queries + 2 * heads),
        QUERIES=queries,
        HEADS=heads,
        H=half,
        HP=power_of_two(half),
        V=width,
        VP=power_of_two(width),
        **norm_options(norms),
        **ROUNDED,
        **overlap(features),
        num_warps=1,
    )


@lru_cache(maxsize=256)
def _append_launch(tokens: int, heads: int, size: int, width: int, features: frozenset[str]) -> Launch:
    from quantkit.kernels.ops.glue_kernels import append

    sizes = {"D": size, "DP": power_of_two(size), "V": width, "VP": power_of_two(width)}
    return Launch(append, (tokens, heads), **sizes, **overlap(features), num_warps=1)
