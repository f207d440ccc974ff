"""Attention of one new token to all keys of a cache, on a GPU, which may take its own key there too."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from quantkit.kernels.autograd import is_transformed
from quantkit.kernels.jit.launcher import Launch, launch_features, launching_on, overlap
from quantkit.kernels.layouts.shared_memory import power_of_two
from quantkit.kernels.ops.glue import ROUNDED, HeadNorms, angles, norm_options
from quantkit.kernels.problem import device_features, gpu_of

#: What tensor cores multiply.
DTYPES = (torch.bfloat16, torch.float16)
#: The most features that a head may have.
MOST_FEATURES = 256
#: The most pieces that are put together by a launch of their own.
MOST_PIECES = 64
#: Bytes of a key, or a value, and query heads of a program that plans are for: of longer ones, or for more of
#: them, a program has fewer keys at a time.
KEY_BYTES, FEW_HEADS = 256, 8
#: The most query heads of a program, and the fewest keys that products take.
MOST_HEADS, LEAST_KEYS = 16, 16


@dataclass(frozen=True)
class Plan:
    """How keys are shared among programs where there are up to `most` key heads for a multiprocessor.

    Each of the `warps` of a program takes so many `keys` at a time. There are up to `programs` for a
    multiprocessor, as far as there are keys, but one for each head.
    """

    most: float
    warps: int
    keys: int
    programs: int

    def at_once(self, programs: int) -> int:
        """The keys that so many programs attend to at a time."""
        return programs * self.warps * self.keys


#: The fastest on an H200 of 1 to 64 sequences of 100 to 4100 tokens, 8 key heads each, that 4 heads share.
PLANS = (
    Plan(1 / 6, 4, 16, 2),
    Plan(3 / 4, 2, 16, 4),
    Plan(1, 8, 16, 1),
    Plan(2, 4, 32, 1),
    Plan(math.inf, 2, 32, 1),
)


def why_not(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> str | None:
    """None if `decode_attention` takes these, else the reason it does not."""
    (batch, heads, tokens, size), (_, key_heads, length, _) = query.shape, key.shape
    wanted = (1, 1, length)
    same = query.dtype == key.dtype == value.dtype
    reasons = (
        (tokens != 1, f"there are {tokens} new tokens"),
        (not batch * length, f"there are {batch} sequences and {length} keys"),
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
            not same or query.dtype not in DTYPES,
            f"it is of {query.dtype}, {key.dtype} and {value.dtype}, not all of bfloat16 or all of float16",
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
    if query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    return _attention(query, key, value, mask, scaling)


def rotates(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, device: torch.device) -> bool:
    """Whether `rotated_attention` is faster than both apart on `device`, of such tensors as `why_not` takes.

    It was, on a GPU where kernels overlap, for the few heads of the first of `PLANS` if programs attend to
    all of their keys at a time, and for up to one head for each multiprocessor if a program has all of it: a
    layer of Llama-3 8B on an H200 takes 44.7 to 45.5 us instead of 46.4 to 47.0 with one sequence, 76.6 to
    77.6 instead of 78.4 to 79.0 with 16. Of larger heads registers would be spilled.
    """
    gpu, sizes, length = gpu_of(device), _Sizes.of(query, key, value), key.shape[2]
    if gpu is None or sizes.heads > FEW_HEADS or sizes.key_bytes > KEY_BYTES:
        return False
    plan, chunks = _plan(sizes, length, gpu.multiprocessors)
    heads = sizes.parts * sizes.blocks / gpu.multiprocessors
    is_once = heads <= PLANS[0].most and plan.at_once(chunks) >= length
    return "overlap" in device_features(device) and (is_once or (chunks == 1 and heads <= 1))


def rotated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    held: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    norms: HeadNorms | None = None,
    settled: bool = False,
) -> torch.Tensor:
    """`decode_attention` of what `rotate_append` returns for one token, T = 1: a launch less.

    To the bit, but for squares of `norms`, which are summed in another order. Tensors are as `rotate_append`
    takes them, all of the dtype of `q` but `held`. `why_not` of `q`, `keys`, `values` and `mask` must be
    None, and the last strides of `keys` and `values` 1. With `settled`, `keys`,
    `values`, `held` and `mask` are read while kernels before this one may still run: none since another such
    attention began may write them, and each that overlaps others must wait for those before it.
    """
    q, k, v, cos, sin = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v, cos, sin))
    cos, sin, c_b, _ = angles(cos, sin)
    strides = (*k.stride()[:2], *v.stride()[:2], c_b)
    return _attention(q, keys, values, mask, scaling, (k, v, cos, sin, held), strides, norms, settled)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    new: tuple[torch.Tensor, ...] = (),
    strides: tuple[int, ...] = (0,) * 5,
    norms: HeadNorms | None = None,
    settled: bool = False,
) -> torch.Tensor:
    """Launch `attend`, with what it takes of a `new` token, if there is one, and its strides."""
    batch, heads, _, _ = query.shape
    key_heads, length = key.shape[1], key.shape[2]
    gpu = gpu_of(query.device)
    sizes = _Sizes.of(query, key, value)
    group, width = sizes.group, sizes.width
    plan, chunks = _plan(sizes, length, 1 if gpu is None else gpu.multiprocessors)
    parts, pieces = sizes.parts, chunks * plan.warps
    sums = torch.empty(parts, pieces, group, width, dtype=torch.float32, device=query.device)
    stats = torch.empty(parts, pieces, 2, group, dtype=torch.float32, device=query.device)
    out = torch.empty(batch, 1, heads, width, dtype=query.dtype, device=query.device)
    once = plan.at_once(chunks) >= length
    kind = "" if mask is None else "bool" if mask.dtype == torch.bool else "float"
    features = launch_features(query.device)
    weights, how = ((query, query), None) if norms is None else ((norms.q, norms.k), norms.how)
    attend, gather = _launches(sizes, plan, chunks, scaling, kind, once, bool(new), how, settled, features)
    seen = query if mask is None else mask.view(torch.uint8) if kind == "bool" else mask
    with launching_on(query.device):
        attend(
            query,
            key,
            value,
            seen,
            sums,
            stats,
            out,
            *(new or (query,) * 5),
            *weights,
            length,
            key_heads,
            *query.stride()[:2],
            *key.stride()[:3],
            *value.stride()[:3],
            seen.stride(0) if mask is not None and mask.shape[0] > 1 else 0,
            seen.stride(-1),
            *strides,
        )
        if gather is not None:
            gather(sums, stats, out, pieces)
    return out


@dataclass(frozen=True)
class _Sizes:
    """Key heads of all sequences, query heads that share one, features of keys and values, bytes of each."""

    parts: int
    group: int
    size: int
    width: int
    itemsize: int

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> "_Sizes":
        (batch, heads, _, size), key_heads = query.shape, key.shape[1]
        return cls(batch * key_heads, heads // key_heads, size, value.shape[-1], query.dtype.itemsize)

    @property
    def key_bytes(self) -> int:
        return power_of_two(max(self.size, self.width)) * self.itemsize

    @property
    def heads(self) -> int:
        """Query heads of a program: as registers hold their sums."""
        return FEW_HEADS if self.group <= FEW_HEADS or self.key_bytes > KEY_BYTES else MOST_HEADS

    @property
    def blocks(self) -> int:
        """Programs that share the query heads of a key head."""
        return -(-self.group // self.heads)


@lru_cache(maxsize=1024)
def _plan(sizes: _Sizes, length: int, multiprocessors: int) -> tuple[Plan, int]:
    """The plan for keys of such sizes, and how many programs share those of a head."""
    heads = sizes.parts * sizes.blocks
    plan = next(one for one in PLANS if heads <= one.most * multiprocessors)
    is_long = sizes.key_bytes > KEY_BYTES
    if plan.keys > LEAST_KEYS and (is_long or sizes.heads > FEW_HEADS):
        plan = replace(plan, keys=LEAST_KEYS)
    elif is_long:
        plan = replace(plan, warps=max(2, plan.warps // 2))
    steps = -(-length // (plan.warps * plan.keys))
    most = max(1, min(plan.programs * multiprocessors // heads, MOST_PIECES // plan.warps))
    # No more than are needed for the steps of the longest.
    longest = -(-steps // most)
    return plan, -(-steps // longest)


@lru_cache(maxsize=1024)
def _launches(
    sizes: _Sizes,
    plan: Plan,
    chunks: int,
    scaling: float,
    mask: str,
    once: bool,
    new: bool,
    norms: tuple[float, str] | None,
    settled: bool,
    features: frozenset[str],
) -> tuple[Launch, Launch | None]:
    """`attend`, and `gather` where several programs share the keys of a head."""
    from quantkit.kernels.ops.attention_kernels import attend, gather

    width = max(64, power_of_two(sizes.width))
    known = {"GROUP": sizes.group, "V": sizes.width, "VP": width, **overlap(features)}
    first = Launch(
        attend,
        (sizes.parts, chunks, sizes.blocks),
        SCALE=scaling,
        G=sizes.heads,
        D=sizes.size,
        DP=max(32, power_of_two(sizes.size)),
        W=plan.warps,
        KEYS=plan.keys,
        WHOLE=chunks == 1,
        MASK=mask,
        ONCE=once,
        NEW=new,
        **norm_options(norms),
        SETTLED=settled and "overlap" in features,
        PTX="ptx" in features,
        # If registers hold keys and values of a step at a time, beside the sums.
        EARLY="ptx" in features and sizes.key_bytes <= KEY_BYTES,
        **known,
        **ROUNDED,
        num_warps=plan.warps,
    )
    if chunks == 1:
        return first, None
    pieces = power_of_two(chunks * plan.warps)
    return first, Launch(gather, (sizes.parts, sizes.group), S=pieces, **known, num_warps=4)
