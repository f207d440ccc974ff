"""Attention of one new token to all keys of a cache, on a GPU."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from quantkit.kernels.launcher import Launch, launch_features, launching_on, overlap, power_of_two
from quantkit.kernels.problem import ACTIVATION_DTYPES, gpu_of
from quantkit.kernels.transforms import is_transformed

#: The most features that a head may have.
MOST_FEATURES = 256
#: The most parts that the keys of a head are divided into.
MOST_CHUNKS = 64
#: Bytes of a key, or a value, that plans are for: of longer ones a program has fewer at a time.
KEY_BYTES = 256
#: Bytes of shared memory for keys and values on their way.
STAGE_BYTES = 56 << 10


@dataclass(frozen=True)
class Plan:
    """How keys are shared among programs where a multiprocessor has up to `most` of all heads.

    A program takes `step` keys at a time with so many warps, in a pipeline of so many `stages`. There are
    `programs` for a multiprocessor, as far as there are keys.
    """

    most: float
    step: int
    warps: int
    stages: int
    programs: int


#: With few keys it matters how soon they come, with many how many are on their way.
PLANS = (Plan(64, 64, 8, 1, 8), Plan(512, 64, 4, 1, 4), Plan(math.inf, 16, 1, 3, 8))


def why_not(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> str | None:
    """None if `decode_attention` takes these, else the reason it does not."""
    (batch, heads, tokens, size), (_, key_heads, length, _) = query.shape, key.shape
    wanted = (1, 1, length)
    same = query.dtype == key.dtype == value.dtype
    reasons = (
        (tokens != 1, f"there are {tokens} new tokens"),
        (max(size, value.shape[-1]) > MOST_FEATURES, f"heads have more than {MOST_FEATURES} features"),
        (heads % key_heads, f"{heads} query heads are no multiple of {key_heads} key heads"),
        (
            mask is not None and mask.shape[1:] != wanted,
            f"the mask {None if mask is None else list(mask.shape)} is not [batch, 1, 1, {length}]",
        ),
        (
            mask is not None and mask.dtype != torch.bool and not mask.is_floating_point(),
            f"the mask is {None if mask is None else mask.dtype}",
        ),
        (
            any(part.shape[0] != batch for part in (key, value))
            or (mask is not None and mask.shape[0] not in (1, batch)),
            "it has other sequences than keys, values or the mask",
        ),
        (
            not same or query.dtype not in ACTIVATION_DTYPES,
            f"it is of {query.dtype}, {key.dtype} and {value.dtype}",
        ),
        (
            torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value)),
            "gradients are asked for",
        ),
        (is_transformed(query), "tangents or transforms of torch.func are asked for"),
        (query.device.type != "cuda", f"it runs on cuda, the tensors are on {query.device.type}"),
    )
    return next((reason for refused, reason in reasons if refused), None)


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """softmax(query key^T * scaling + mask) value for `query` [B, H, 1, D], [B, 1, H, V] of its dtype.

    `key` [B, H', L, D] and `value` [B, H', L, V], with H a multiple of H', of any strides. `mask`
    [B or 1, 1, 1, L] says which keys are seen, or what is added to scores. `why_not` must be None. Scores are
    summed and weighed in float32; the order of all sums is fixed. torch.compile sees one operator.
    """
    y: torch.Tensor = torch.ops.quantkit.decode_attention(query, key, value, mask, scaling)
    return y


torch.library.define(
    "quantkit::decode_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float scaling) -> Tensor",
)


def _decode_attention_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[-1])


torch.library.register_fake("quantkit::decode_attention", _decode_attention_fake)


@torch.library.impl("quantkit::decode_attention", "default")
def _decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    batch, heads, _, size = query.shape
    key_heads, length = key.shape[1], key.shape[2]
    group = heads // key_heads
    width = value.shape[-1]
    gpu = gpu_of(query.device)
    sizes = _Sizes(batch * key_heads, group, size, width, query.dtype.itemsize)
    plan, chunk = _plan(sizes, length, 1 if gpu is None else gpu.multiprocessors)
    parts, chunks = sizes.parts, -(-length // chunk)
    if query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    sums = torch.empty(parts, chunks, group, width, dtype=torch.float32, device=query.device)
    stats = torch.empty(parts, chunks, 2, group, dtype=torch.float32, device=query.device)
    out = torch.empty(batch, 1, heads, width, dtype=query.dtype, device=query.device)
    kind = "" if mask is None else "bool" if mask.dtype == torch.bool else "float"
    features = launch_features(query.device)
    attend, gather = _launches(sizes, plan, chunks, scaling, kind, features)
    seen = query if mask is None else mask.view(torch.uint8) if kind == "bool" else mask
    with launching_on(query.device):
        attend(
            query,
            key,
            value,
            seen,
            sums,
            stats,
            length,
            key_heads,
            chunk,
            *query.stride()[:2],
            *key.stride()[:3],
            *value.stride()[:3],
            seen.stride(0) if mask is not None and mask.shape[0] > 1 else 0,
            seen.stride(-1),
        )
        gather(sums, stats, out, chunks)
    return out


@dataclass(frozen=True)
class _Sizes:
    """Key heads of all sequences, query heads that share one, features of keys and values, bytes of each."""

    parts: int
    group: int
    size: int
    width: int
    itemsize: int

    @property
    def key_bytes(self) -> int:
        return _block(max(self.size, self.width)) * self.itemsize


@lru_cache(maxsize=1024)
def _plan(sizes: _Sizes, length: int, multiprocessors: int) -> tuple[Plan, int]:
    """The plan for keys of such sizes, and how many keys a program has, in whole steps."""
    plan = next(one for one in PLANS if sizes.parts * length <= one.most * multiprocessors)
    step = max(16, min(plan.step, plan.step * KEY_BYTES // sizes.key_bytes))
    stages = max(1, min(plan.stages, STAGE_BYTES // (2 * step * sizes.key_bytes)))
    warps = min(8, plan.warps * max(1, sizes.key_bytes // KEY_BYTES) * _block(sizes.group) // 16)
    plan = replace(plan, step=step, stages=stages, warps=warps)
    chunks = min(MOST_CHUNKS, max(1, plan.programs * multiprocessors // sizes.parts))
    return plan, max(step, -(-length // (chunks * step)) * step)


@lru_cache(maxsize=1024)
def _launches(
    sizes: _Sizes, plan: Plan, chunks: int, scaling: float, mask: str, features: frozenset[str]
) -> tuple[Launch, Launch]:
    from quantkit.kernels.fused.attention import attend, gather

    known = {"GROUP": sizes.group, "V": sizes.width, "VP": _block(sizes.width), **overlap(features)}
    return (
        Launch(
            attend,
            (sizes.parts, chunks),
            SCALE=scaling,
            G=_block(sizes.group),
            D=sizes.size,
            DP=_block(sizes.size),
            BN=plan.step,
            STAGES=plan.stages,
            MASK=mask,
            **known,
            num_warps=plan.warps,
        ),
        Launch(gather, (sizes.parts, sizes.group), S=_block(chunks), **known, num_warps=4),
    )


def _block(number: int) -> int:
    """The size of a block of so many: products of the tensor cores have 16 rows or columns at least."""
    return max(16, power_of_two(number))
