"""What sends tokens to experts, in few launches: small dense products, and the choice of the largest logits.

Beside each function are its twins: what models of transformers compute in torch.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from quantkit.kernels.experts import pairs_of_segment
from quantkit.kernels.launcher import Launch, launch_features, launching_on, overlap, power_of_two

#: What `small_linear` is for, as torch takes longer: rows of a weight, numbers of y, and products
#: of numbers; and columns of x, which a program has in registers.
SMALL_ROWS, SMALL, SMALL_PRODUCTS, MOST_COLUMNS = 1024, 4096, 8 << 20, 16384
#: Logits of a token that a program of `route` has at most, and of several tokens.
MOST_EXPERTS, ROUTED = 4096, 512
#: Pairs that `route_pairs` orders, and experts of several tokens: with more, two launches are as fast.
ORDERED, ORDERED_EXPERTS = 32, 256


def slow_small_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The twin of `small_linear`."""
    return F.linear(x, weight)


def small_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K] times dense `weight` [N, K]: [M, N], summed in float32; for K up to `MOST_COLUMNS`.

    `weight` is read while the kernels before this one may still run.
    """
    x, weight = (part if part.stride(-1) == 1 else part.contiguous() for part in (x, weight))
    y = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    launch = _small_linear_launch(len(x), *weight.shape, launch_features(x.device))
    with launching_on(x.device):
        launch(x, weight, y, *y.shape, x.stride(0), weight.stride(0))
    return y


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


#: Twins, longest chains first, and how `route` is asked for the same.
ROUTERS: tuple[tuple[Callable[..., Any], Mapping[str, bool]], ...] = (
    (slow_route_qwen, {"of_chosen": True, "rounded": True}),
    (slow_route_mixtral, {"of_chosen": True, "rounded": False}),
    (slow_route_granite, {"of_chosen": True, "rounded": True}),
    (slow_route_olmo, {"of_chosen": False, "rounded": True}),
)


def route(
    logits: torch.Tensor, slots: int, of_chosen: bool, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts with the largest of `logits` [T, E] of each token, and their weights: [T, slots] each.

    Experts are int64, the largest logit first, of several that are equal the first expert. Weights are the
    softmax of all logits, or `of_chosen` those only, in float32, or `rounded` to the dtype of `logits`. What
    is no number is larger than all that are, and makes no number of all weights of its token.
    """
    tokens, experts = logits.shape
    logits, weights, index = _routed(logits, slots, rounded)
    part = min(power_of_two(tokens), 4, max(ROUTED // power_of_two(experts), 1))
    features = launch_features(logits.device)
    launch = _route_launch(-(-tokens // part), part, experts, slots, of_chosen, None, features)
    with launching_on(logits.device):
        launch(logits, weights, index, tokens, logits.stride(0))
    return weights, index


def orders_pairs(tokens: int, experts: int, slots: int) -> bool:
    """Whether `route_pairs` is for so many tokens and experts."""
    few = power_of_two(tokens) * power_of_two(slots) <= ORDERED
    return few and (tokens == 1 or experts <= ORDERED_EXPERTS)


def route_pairs(
    logits: torch.Tensor, slots: int, of_chosen: bool, rounded: bool, is_narrow: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `route` gives, with the order and the segments of its pairs (`experts.OrderedPairs`): one launch.

    For as many tokens as `orders_pairs` says.
    """
    tokens, experts = logits.shape
    logits, weights, index = _routed(logits, slots, rounded)
    pairs = tokens * slots
    order = torch.empty(pairs, dtype=torch.int32, device=logits.device)
    segments = torch.empty((pairs, 3), dtype=torch.int32, device=logits.device)
    size = pairs_of_segment(pairs, experts, is_narrow)
    features = launch_features(logits.device)
    launch = _route_launch(1, power_of_two(tokens), experts, slots, of_chosen, size, features)
    with launching_on(logits.device):
        launch(logits, weights, index, tokens, logits.stride(0), order, segments)
    return weights, index, order, segments


def _routed(
    logits: torch.Tensor, slots: int, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with rows that lie together, and memory for weights and experts."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    size = len(logits), slots
    weights = torch.empty(size, dtype=logits.dtype if rounded else torch.float32, device=logits.device)
    return logits, weights, torch.empty(size, dtype=torch.int64, device=logits.device)


@lru_cache(maxsize=256)
def _small_linear_launch(m: int, n: int, k: int, features: frozenset[str]) -> Launch:
    from quantkit.kernels.fused.router import small_linear

    # Rows of x for each program: more of them where there are many programs.
    rows = min(power_of_two(m), 1 if m * n <= 512 else 2 if m * n <= 2048 else 4)
    padded = power_of_two(k)
    sizes = {"K": k, "PADDED": padded, "ROWS": rows}
    warps = min(8, max(1, padded // 256))
    return Launch(small_linear, (n, -(-m // rows)), **sizes, **overlap(features), num_warps=warps)


@lru_cache(maxsize=256)
def _route_launch(
    programs: int,
    tokens: int,
    experts: int,
    slots: int,
    of_chosen: bool,
    segment: int | None,
    features: frozenset[str],
) -> Launch:
    """A launch whose programs have so many tokens; with the pairs of a `segment` it orders pairs as well."""
    from quantkit.kernels.fused.router import route

    padded = power_of_two(experts)
    ordered = {"ROWS": segment} if segment is not None else {"ROWS": 0, "order": None, "segments": None}
    return Launch(
        route,
        (programs,),
        EXPERTS=experts,
        PADDED=padded,
        SLOTS=slots,
        PADDED_SLOTS=power_of_two(slots),
        TOKENS=tokens,
        OF_CHOSEN=of_chosen,
        **ordered,
        **overlap(features),
        # A warp has the logits of a token, so that no other waits for it.
        num_warps=min(16, max(1, tokens * min(padded, 32) // 32)),
    )
