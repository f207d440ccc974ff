"""What sends tokens to experts, in few launches: small dense products, and the choice of the largest logits.

Beside each function are its twins: what models of transformers compute in torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from quantkit.kernels.jit.launcher import IndexLaunch, Launch, launch_features, launching_on, overlap
from quantkit.kernels.layouts.shared_memory import power_of_two
from quantkit.kernels.moe.grouped_gemm import pairs_of_segment
from quantkit.kernels.ops.glue import norm_options

#: What `small_linear` is for, as torch takes longer: rows of a weight, numbers of y, and products of numbers,
#: more where y is wide, as torch converts the weight first; and columns of x, for which there are registers.
SMALL_ROWS, SMALL, SMALL_PRODUCTS, WIDE_PRODUCTS, MOST_COLUMNS = 1024, 4096, 8 << 20, 32 << 20, 16384
#: Rows of x up to which `norm_linear` is for them: each program has the norm of its own.
NORMED_ROWS = 2
#: Logits of a token, and those of them that are chosen, that `route` is for.
MOST_EXPERTS, MOST_SLOTS = 4096, 64
#: Bytes of the logits of a token that a warp loads at once: with more, several warps would share a token.
LOADED = 512
#: Pairs that `route_pairs` orders: with more, two launches are as fast.
ORDERED = 32


def slow_small_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The twin of `small_linear`."""
    return F.linear(x, weight)


def slow_wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The twin of `small_linear` that is `wide`."""
    return F.linear(x.type(torch.float32), weight.type(torch.float32))


def small_linear(x: torch.Tensor, weight: torch.Tensor, wide: bool = False) -> torch.Tensor:
    """x [M, K] times dense `weight` [N, K], whose rows lie together: [M, N], summed in float32.

    K is up to `MOST_COLUMNS`. y has the dtype of x, or is `wide`: float32. `weight` is read while the kernels
    before this one may still run.
    """
    assert weight.stride(1) == 1
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty((len(x), len(weight)), dtype=torch.float32 if wide else x.dtype, device=x.device)
    launch = _small_linear_launch(len(x), *weight.shape, None, launch_features(x.device))
    with launching_on(x.device):
        launch(x, x, x, weight, x, x, y, *y.shape, x.stride(0), weight.stride(0))
    return y


def norm_linear(
    x: torch.Tensor,
    other: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    kind: str,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `glue.add_norm` gives of `x`, `other` [..., K] and weights `norm`, and `small_linear` of the norm.

    All tensors are contiguous, but for `weight`, which is as for `small_linear`; both weights are read early.
    """
    columns = x.shape[-1]
    assert weight.shape[1] == columns and weight.stride(1) == 1
    assert all(one.is_contiguous() for one in (x, other, norm))
    rows = x.numel() // columns
    total, made = torch.empty_like(x), torch.empty_like(x)
    y = torch.empty((rows, len(weight)), dtype=torch.float32 if wide else x.dtype, device=x.device)
    launch = _small_linear_launch(rows, *weight.shape, (eps, kind), launch_features(x.device))
    with launching_on(x.device):
        launch(x, other, norm, weight, total, made, y, *y.shape, columns, weight.stride(0))
    return total, made, y


def slow_route_mixtral(logits: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `route`, of the chosen: Mixtral, MiniMax."""
    weights, index = torch.topk(F.softmax(logits.float(), dim=-1), slots, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights, index


def slow_route_qwen(logits: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `route`, of the chosen and rounded: Qwen3-MoE."""
    weights, index = torch.topk(F.softmax(logits, dtype=torch.float, dim=-1), slots, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), index


def slow_route_olmo(logits: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `route`, of all and rounded: OLMoE, Qwen2-MoE."""
    weights, index = torch.topk(F.softmax(logits, dtype=torch.float, dim=-1), slots, dim=-1)
    return weights.to(logits.dtype), index


def slow_route_granite(logits: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `route`, of the chosen and rounded: Granite."""
    largest, index = logits.float().topk(slots, dim=-1)
    return F.softmax(largest, dim=-1).type_as(logits), index


def slow_route_deepseek(
    logits: torch.Tensor, bias: torch.Tensor, slots: int, factor: float, groups: int, kept: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `route` by sigmoids: DeepSeek-V3, GLM-4.5, dots.llm1."""
    experts = logits.shape[1]
    scores = logits.sigmoid()
    choice = scores + bias
    of_groups = choice.view(-1, groups, experts // groups).topk(2, dim=-1)[0].sum(dim=-1)
    of_kept = torch.topk(of_groups, k=kept, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(of_groups)
    mask.scatter_(1, of_kept, 1)
    mask = mask.unsqueeze(-1).expand(-1, groups, experts // groups).reshape(-1, experts)
    choice = choice.masked_fill(~mask.bool(), float("-inf"))
    index = torch.topk(choice, k=slots, dim=-1, sorted=False)[1]
    weights = scores.gather(1, index)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * factor, index


#: Twins of logits, longest chains first, and how `route` is asked for the same.
ROUTERS: tuple[tuple[Callable[..., Any], Mapping[str, bool]], ...] = (
    (slow_route_qwen, {"of_chosen": True, "rounded": True}),
    (slow_route_mixtral, {"of_chosen": True, "rounded": False}),
    (slow_route_granite, {"of_chosen": True, "rounded": True}),
    (slow_route_olmo, {"of_chosen": False, "rounded": True}),
)


@dataclass(frozen=True)
class Routing:
    """How the experts of a token are chosen.

    Without a bias weights are the softmax of all logits, or `of_chosen` those only. With a bias they are
    `factor` times the sigmoids of the logits that were chosen, over the sum of these, and only the `kept` of
    `groups` are chosen from whose two largest scores, sigmoid + bias, add up to the most (arXiv 2412.19437).
    They are float32, or `rounded` to the dtype of logits.
    """

    slots: int
    of_chosen: bool = True
    rounded: bool = False
    factor: float = 1.0
    groups: int = 1
    kept: int = 1


def route(
    logits: torch.Tensor, bias: torch.Tensor | None = None, **routing: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and the experts, int64, of each token with `logits` [T, E]: [T, slots] each.

    The experts with the largest logits, or, with a `bias` [E], scores, by the fields of a `Routing`: the
    largest first, of several that are equal the first expert. What is no number is larger than all that are,
    and makes no number of all weights of its token.
    """
    how = Routing(**routing)
    tokens, experts = logits.shape
    part = min(power_of_two(tokens), 4) if _has_warps(logits) else 1
    features = launch_features(logits.device)
    launch = _route_launch(-(-tokens // part), part, experts, how, bias is not None, None, features)
    operands, weights, index = _operands(logits, bias, how)
    with launching_on(logits.device):
        launch(*operands)
    return weights, index


def orders_pairs(logits: torch.Tensor, slots: int) -> bool:
    """Whether `route_pairs` is for so many tokens and experts."""
    few = power_of_two(len(logits)) * power_of_two(slots) <= ORDERED
    return few and (len(logits) == 1 or _has_warps(logits))


def _has_warps(logits: torch.Tensor) -> bool:
    """Whether each of several tokens of a program has a warp of its own."""
    return power_of_two(logits.shape[1]) * logits.itemsize <= LOADED


def route_pairs(
    logits: torch.Tensor, bias: torch.Tensor | None = None, *, spread: int, **routing: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `route` gives, with the order and the segments of its pairs (`experts.OrderedPairs`): one launch.

    For as many tokens as `orders_pairs` says.
    """
    how = Routing(**routing)
    tokens, experts = logits.shape
    pairs = tokens * how.slots
    order = torch.empty(pairs, dtype=torch.int32, device=logits.device)
    segments = torch.empty((pairs, 3), dtype=torch.int32, device=logits.device)
    size = pairs_of_segment(pairs, experts, spread)
    features = launch_features(logits.device)
    launch = _route_launch(1, power_of_two(tokens), experts, how, bias is not None, size, features)
    operands, weights, index = _operands(logits, bias, how)
    with launching_on(logits.device):
        launch(*operands, order, segments)
    return weights, index, order, segments


def _operands(
    logits: torch.Tensor, bias: torch.Tensor | None, how: Routing
) -> tuple[tuple[Any, ...], torch.Tensor, torch.Tensor]:
    """What the kernel takes but for order and segments, and memory for weights and experts."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    size = len(logits), how.slots
    weights = torch.empty(size, dtype=logits.dtype if how.rounded else torch.float32, device=logits.device)
    index = torch.empty(size, dtype=torch.int64, device=logits.device)
    # Without a bias its place is taken by `logits`, and not read.
    bias = logits if bias is None else bias.contiguous()
    return (logits, bias, weights, index, len(logits), logits.stride(0)), weights, index


@lru_cache(maxsize=256)
def _small_linear_launch(
    m: int, n: int, k: int, norm: tuple[float, str] | None, features: frozenset[str]
) -> Launch:
    from quantkit.kernels.moe.router_kernels import small_linear

    # Rows of x for each program: more of them where there are many programs.
    rows = min(power_of_two(m), 1 if m * n <= 512 else 2 if m * n <= 2048 else 4)
    padded = power_of_two(k)
    sizes = {"K": k, "PADDED": padded, "ROWS": rows, **norm_options(norm)}
    warps = min(8, max(1, padded // 256))
    return Launch(small_linear, (n, -(-m // rows)), **sizes, **overlap(features), num_warps=warps)


@lru_cache(maxsize=256)
def _route_launch(
    programs: int,
    tokens: int,
    experts: int,
    how: Routing,
    has_bias: bool,
    segment: int | None,
    features: frozenset[str],
) -> Launch:
    """A launch whose programs have so many tokens; with the pairs of a `segment` it orders pairs as well."""
    from quantkit.kernels.moe.router_kernels import route

    padded = power_of_two(experts)
    ordered = {"ROWS": segment} if segment is not None else {"ROWS": 0, "order": None, "segments": None}
    return IndexLaunch(
        route,
        (programs,),
        EXPERTS=experts,
        PADDED=padded,
        SLOTS=how.slots,
        PADDED_SLOTS=power_of_two(how.slots),
        TOKENS=tokens,
        OF_CHOSEN=how.of_chosen,
        SIGMOID=has_bias,
        FACTOR=how.factor,
        GROUPS=how.groups,
        KEPT=how.kept,
        **ordered,
        **overlap(features),
        # A warp has the logits of a token, so that no other waits for it.
        num_warps=min(16, max(1, tokens * min(padded, 32) // 32)),
    )
