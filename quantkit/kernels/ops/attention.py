"""Decode attention on a GPU: one new token to all keys of a KV cache, optionally with its KV append."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from quantkit.kernels.autograd import is_transformed
from quantkit.kernels.jit.launcher import Launch, launch_features, launching_on, overlap
from quantkit.kernels.layouts.shared_memory import next_power_of_2
from quantkit.kernels.ops.norm import HeadNorms, norm_options
from quantkit.kernels.ops.rope import ROUNDED, angles
from quantkit.kernels.problem import device_features, gpu_of

#: Dtypes that tensor cores multiply.
DTYPES = (torch.bfloat16, torch.float16)
#: Most features of a head.
MOST_FEATURES = 256
#: Most splits of the keys of a head that `combine_splits` adds up.
MAX_SPLITS = 64
#: Bytes of a key or value, and query heads per program, that `PLANS` were made for. With more of either, a
#: program takes fewer keys per step.
KEY_BYTES, FEW_HEADS = 256, 8
#: Most query heads per program, and fewest keys of an `mma`.
MOST_HEADS, LEAST_KEYS = 16, 16


@dataclass(frozen=True)
class Plan:
    """Division of the keys of a head among programs, for up to `most` key heads per multiprocessor.

    warps      warps of a program
    keys       keys that a warp attends to per step
    programs   maximum number of programs per multiprocessor; each head has at least one program
    """

    most: float
    warps: int
    keys: int
    programs: int

    def keys_per_step(self, programs: int) -> int:
        """Return the number of keys that `programs` programs of a head attend to in one step."""
        return programs * self.warps * self.keys


#: Fastest on an H200 for 1 to 64 sequences of 100 to 4100 tokens, with 8 key heads of 4 query heads each.
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
    """Return why `decode_attention` does not support these tensors; None if it does.

    `query` is [B, H, T, D], `key` [B, H', L, D], `value` [B, H', L, V]. `mask` should be [B or 1, 1, 1, L]. B
    are sequences, H query heads, H' key heads, T tokens, L keys, D and V features.
    """
    (batch, heads, tokens, size), (_, key_heads, length, _) = query.shape, key.shape
    mask_shape = (1, 1, length)
    same = query.dtype == key.dtype == value.dtype
    reasons = (
        (tokens != 1, f"there are {tokens} new tokens"),
        (not batch * length, f"there are {batch} sequences and {length} keys"),
        (max(size, value.shape[-1]) > MOST_FEATURES, f"heads have more than {MOST_FEATURES} features"),
        (heads % key_heads, f"{heads} query heads are no multiple of {key_heads} key heads"),
        (
            mask is not None and mask.shape[1:] != mask_shape,
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
    """Return attention of one token per sequence, softmax(query key^T * scaling + mask) value: [B, 1, H, V].

        query  [B, H, 1, D]            value  [B, H', L, V]
        key    [B, H', L, D]           mask   None, or [B or 1, 1, 1, L]: bool (True: visible) or addends

    There are B sequences, L keys, H query heads and H' key heads, which divides H; D and V are features of
    keys and values. All strides are allowed. `why_not` must return None. Sums and softmax are float32, in a
    fixed order; the result has the dtype of `query`. torch.compile sees one operator.
    """
    y: torch.Tensor = torch.ops.quantkit.decode_attention(query, key, value, mask, scaling)
    return y


torch.library.define(
    "quantkit::decode_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float scaling) -> Tensor",
)


def _decode_attention_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> torch.Tensor:
    """Return an empty [B, 1, H, V] for B sequences, H query heads and V features, for tracing."""
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
    """Compute the operator `decode_attention`: softmax(query key^T * scaling + mask) value, [B, 1, H, V].

    `query` is [B, H, 1, D], `key` [B, H', L, D], `value` [B, H', L, V], `mask` None or [B or 1, 1, 1, L].
    """
    if query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    return _attention(query, key, value, mask, scaling)


def rotates(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, device: torch.device) -> bool:
    """Return True if `rotated_attention` is faster on `device` than `rotate_append` and `decode_attention`.

    `query` is [B, heads, 1, D], `key` and `value` are [B, kv_heads, L, D], of B sequences and L keys. With
    programmatic dependent launch it is faster in two cases. Either B * kv_heads is at most 1/6 of the
    multiprocessors (the first of `PLANS`), and programs attend to all their keys in one step. Or it is at
    most the multiprocessors, and one program has all keys of a head.

    H200, a layer of Llama-3 8B: 44.7 to 45.5 us instead of 46.4 to 47.0 with 1 sequence, 76.6 to 77.6 instead
    of 78.4 to 79.0 with 16. False for heads of more than `KEY_BYTES`, which would spill registers.
    """
    gpu, sizes, length = gpu_of(device), _Sizes.of(query, key, value), key.shape[2]
    if gpu is None or sizes.heads > FEW_HEADS or sizes.key_bytes > KEY_BYTES:
        return False
    plan, shares = _plan(sizes, length, gpu.multiprocessors)
    heads = sizes.kv_heads * sizes.blocks / gpu.multiprocessors
    single_step = heads <= PLANS[0].most and plan.keys_per_step(shares) >= length
    return "overlap" in device_features(device) and (single_step or (shares == 1 and heads <= 1))


def rotated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cache_length: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    norms: HeadNorms | None = None,
    cache_ready: bool = False,
) -> torch.Tensor:
    """Rotate q and k, append k and v to the KV cache in place, and attend to it: one token, in one launch.

        q               [B, H, 1, D]            cos, sin    [B or 1, 1, 1, D]
        k               [B, H', 1, D]           keys        [B, H', L, D]
        v               [B, H', 1, V]           values      [B, H', L, V]
        mask            [B or 1, 1, 1, L] bool (True: visible), or added to scores; None for none
        cache_length    [] or [1] int64: tokens in the cache, which has room for L
        norms           RMSNorms of the heads of q and k before rotation; None for none
        cache_ready     True to read `keys`, `values`, `cache_length` and `mask` before the wait for the
                        kernel before (PDL)

    There are B sequences, H query heads and H' key heads. Returns attention, [B, 1, H, V], like
    `decode_attention`. Results equal those of `rotate_append` and `decode_attention` to the bit, except that
    squares in `norms` are summed in another order. All tensors but `cache_length` have the dtype of `q`. The
    last strides of `keys` and `values` are 1.

    If `cache_ready`, no kernel since the start of the last such attention may write the tensors that are read
    early. Each kernel with PDL must wait for the one before it.
    """
    q, k, v, cos, sin = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v, cos, sin))
    cos, sin, c_b, _ = angles(cos, sin)
    strides = (*k.stride()[:2], *v.stride()[:2], c_b)
    new = (k, v, cos, sin, cache_length)
    return _attention(q, keys, values, mask, scaling, new, strides, norms, cache_ready)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    new: tuple[torch.Tensor, ...] = (),
    strides: tuple[int, ...] = (0,) * 5,
    norms: HeadNorms | None = None,
    cache_ready: bool = False,
) -> torch.Tensor:
    """Launch `attend`, and `combine_splits` if several programs share a head: return [B, 1, H, V].

    query .. scaling       as in `decode_attention`: query is [B, H, 1, D], key [B, H', L, D]
    new                    (k, v, cos, sin, cache_length) of a token to rotate and append; () for none
    strides                of `new`: sequences of k, heads of k, sequences of v, heads of v, sequences of cos
    norms, cache_ready     as in `rotated_attention`
    """
    batch, heads, _, _ = query.shape
    key_heads, length = key.shape[1], key.shape[2]
    gpu = gpu_of(query.device)
    sizes = _Sizes.of(query, key, value)
    group, width = sizes.group, sizes.width
    plan, shares = _plan(sizes, length, 1 if gpu is None else gpu.multiprocessors)
    kv_heads, splits = sizes.kv_heads, shares * plan.warps
    sums = torch.empty(kv_heads, splits, group, width, dtype=torch.float32, device=query.device)
    stats = torch.empty(kv_heads, splits, 2, group, dtype=torch.float32, device=query.device)
    out = torch.empty(batch, 1, heads, width, dtype=query.dtype, device=query.device)
    single_step = plan.keys_per_step(shares) >= length
    kind = "" if mask is None else "bool" if mask.dtype == torch.bool else "float"
    features = launch_features(query.device)
    weights, how = ((query, query), None) if norms is None else ((norms.q, norms.k), norms.how)
    attend, combine_splits = _launches(
        sizes, plan, shares, scaling, kind, single_step, bool(new), how, cache_ready, features
    )
    mask_data = query if mask is None else mask.view(torch.uint8) if kind == "bool" else mask
    with launching_on(query.device):
        attend(
            query,
            key,
            value,
            mask_data,
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
            mask_data.stride(0) if mask is not None and mask.shape[0] > 1 else 0,
            mask_data.stride(-1),
            *strides,
        )
        if combine_splits is not None:
            combine_splits(sums, stats, out, splits)
    return out


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a decode attention problem: one token per sequence.

    kv_heads       sequences times key heads
    group          query heads that share a key head
    size, width    features of a key, and of a value
    itemsize       bytes of a feature
    """

    kv_heads: int
    group: int
    size: int
    width: int
    itemsize: int

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> "_Sizes":
        """Return the sizes of `query` [B, H, 1, D], `key` [B, H', L, D] and `value` [B, H', L, V].

        B are sequences, H query heads, H' key heads, L keys, D and V features.
        """
        (batch, heads, _, size), key_heads = query.shape, key.shape[1]
        return cls(batch * key_heads, heads // key_heads, size, value.shape[-1], query.dtype.itemsize)

    @property
    def key_bytes(self) -> int:
        """Return the bytes of a head's key or value, the larger, rounded up to a power of two."""
        return next_power_of_2(max(self.size, self.width)) * self.itemsize

    @property
    def heads(self) -> int:
        """Return the number of query heads per program: `MOST_HEADS`, or `FEW_HEADS`.

        It is `FEW_HEADS` if at most that many query heads share a key head. It is also if a key is larger
        than `KEY_BYTES`: registers then have no room for the sums of more heads.
        """
        return FEW_HEADS if self.group <= FEW_HEADS or self.key_bytes > KEY_BYTES else MOST_HEADS

    @property
    def blocks(self) -> int:
        """Return the number of programs among which the query heads of a key head are divided."""
        return -(-self.group // self.heads)


@lru_cache(maxsize=1024)
def _plan(sizes: _Sizes, length: int, multiprocessors: int) -> tuple[Plan, int]:
    """Return the `Plan` for `length` keys, and the number of programs that share the keys of a head."""
    heads = sizes.kv_heads * sizes.blocks
    plan = next(one for one in PLANS if heads <= one.most * multiprocessors)
    is_long = sizes.key_bytes > KEY_BYTES
    if plan.keys > LEAST_KEYS and (is_long or sizes.heads > FEW_HEADS):
        plan = replace(plan, keys=LEAST_KEYS)
    elif is_long:
        plan = replace(plan, warps=max(2, plan.warps // 2))
    steps = -(-length // (plan.warps * plan.keys))
    most = max(1, min(plan.programs * multiprocessors // heads, MAX_SPLITS // plan.warps))
    # Use the fewest programs that do not increase the steps of the longest one.
    longest = -(-steps // most)
    return plan, -(-steps // longest)


@lru_cache(maxsize=1024)
def _launches(
    sizes: _Sizes,
    plan: Plan,
    shares: int,
    scaling: float,
    mask: str,
    single_step: bool,
    new: bool,
    norms: tuple[float, str] | None,
    cache_ready: bool,
    features: frozenset[str],
) -> tuple[Launch, Launch | None]:
    """Build the launch of `attend` for `shares` programs per head, and of `combine_splits` if `shares` > 1.

    mask          kind of mask: "bool", "float", or "" for none
    single_step   True if each program attends to all its keys in one step
    new           True if a token is rotated and appended
    norms         (eps, kind) of RMSNorms of heads, or None
    cache_ready   True if the cache is read before the wait for the kernel before (PDL)

    `features` are those of the device (`device_features`).
    """
    from quantkit.kernels.ops.attention_kernels import attend, combine_splits

    width = max(64, next_power_of_2(sizes.width))
    constexprs = {"GROUP": sizes.group, "V": sizes.width, "VP": width, **overlap(features)}
    first = Launch(
        attend,
        (sizes.kv_heads, shares, sizes.blocks),
        SCALE=scaling,
        G=sizes.heads,
        D=sizes.size,
        DP=max(32, next_power_of_2(sizes.size)),
        W=plan.warps,
        KEYS=plan.keys,
        WHOLE=shares == 1,
        MASK=mask,
        SINGLE_STEP=single_step,
        NEW=new,
        **norm_options(norms),
        CACHE_READY=cache_ready and "overlap" in features,
        PTX="ptx" in features,
        # True if registers hold the keys and values of a step beside the sums.
        EARLY="ptx" in features and sizes.key_bytes <= KEY_BYTES,
        **constexprs,
        **ROUNDED,
        num_warps=plan.warps,
    )
    if shares == 1:
        return first, None
    splits = next_power_of_2(shares * plan.warps)
    return first, Launch(combine_splits, (sizes.kv_heads, sizes.group), S=splits, **constexprs, num_warps=4)
