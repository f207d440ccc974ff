"""MoE router in few launches: small dense GEMMs, and top-k of the logits.

Each function has references: the torch code of models in transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from quantkit.kernels.jit.launcher import IndexLaunch, Launch, launch_features, launching_on, overlap
from quantkit.kernels.layouts.shared_memory import next_power_of_2
from quantkit.kernels.moe.grouped_gemm import expert_block_rows
from quantkit.kernels.ops.norm import norm_options

#: Limits within which `small_linear` is faster than torch: N, M * N, and M * N * K. The fourth is M * N * K
#: for a float32 y, for which torch converts the weight first. The last is the largest K that fits in
#: registers.
SMALL_ROWS, SMALL, SMALL_PRODUCTS, WIDE_PRODUCTS, MOST_COLUMNS = 1024, 4096, 8 << 20, 32 << 20, 16384
#: Largest M of `norm_linear`: each program computes the norm of its rows again.
NORMED_ROWS = 2
#: Largest E and top_k of `route`.
MOST_EXPERTS, MAX_TOP_K = 4096, 64
#: Most bytes of a token's logits that one warp loads: with more, several warps would share a token.
LOADED = 512
#: Most routed tokens of `route_and_sort`: with more, two launches are as fast.
ORDERED = 32


def small_linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T by torch: `x` [M, K], `weight` W [N, K] -> [M, N], all of one dtype."""
    return F.linear(x, weight)


def wide_linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T in float32 by torch: `x` [M, K], `weight` W [N, K] -> [M, N]."""
    return F.linear(x.type(torch.float32), weight.type(torch.float32))


def small_linear(x: torch.Tensor, weight: torch.Tensor, wide: bool = False) -> torch.Tensor:
    """Return x W^T [M, N] for few rows x [M, K] and a dense `weight` W [N, K], summed in float32.

    Rows of `weight` are contiguous, and K is at most `MOST_COLUMNS`. The result has the dtype of `x`, or
    float32 if `wide`. The kernel reads `weight` before it waits for the kernel before it (PDL). So no kernel
    that may still run may write `weight`.
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
    """Return t = x + other, n = RMSNorm(t), and n W^T, in one launch: [..., K], [..., K] and [M, N].

        x, other    [..., K], contiguous: M rows in all
        norm        [K], contiguous: weight of the norm; `eps` and `kind` are those of `rms_norm`
        weight      W [N, K], dense
        wide        True for n W^T in float32, False for the dtype of `x`

    The kernel reads `norm` and `weight` before it waits for the kernel before it (PDL). So no kernel that may
    still run may write them.
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


def route_mixtral_reference(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the top-k of E experts for T tokens as Mixtral does: `logits` [T, E] -> weights, experts.

    Weights are the softmax over the chosen logits, float32; both results are [T, top_k].
    """
    weights, index = torch.topk(F.softmax(logits.float(), dim=-1), top_k, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights, index


def route_qwen_reference(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the top-k of E experts for T tokens as Qwen3-MoE does: `logits` [T, E] -> weights, experts.

    Weights are the softmax over the chosen logits, rounded to the dtype of `logits`; results are [T, top_k].
    """
    weights, index = torch.topk(F.softmax(logits, dtype=torch.float, dim=-1), top_k, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), index


def route_olmo_reference(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the top-k of E experts for T tokens as OLMoE, Qwen2-MoE do: `logits` [T, E] -> weights, experts.

    Weights are the softmax over all logits, rounded to the dtype of `logits`; both results are [T, top_k].
    """
    weights, index = torch.topk(F.softmax(logits, dtype=torch.float, dim=-1), top_k, dim=-1)
    return weights.to(logits.dtype), index


def route_granite_reference(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the top-k of E experts for T tokens as Granite does: `logits` [T, E] -> weights, experts.

    Weights are the softmax over the chosen logits, rounded to the dtype of `logits`; results are [T, top_k].
    """
    largest, index = logits.float().topk(top_k, dim=-1)
    return F.softmax(largest, dim=-1).type_as(logits), index


def route_deepseek_reference(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, factor: float, groups: int, kept: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the top-k of E experts for T tokens by sigmoids, as DeepSeek-V3, GLM-4.5 and dots.llm1 do.

    `logits` [T, E] float32, `bias` [E] -> weights float32 and experts int64, [T, top_k] each. The score of an
    expert is sigmoid(logit) + bias. Only experts of the best `kept` of `groups` groups can be chosen: those
    with the largest sums of their two best scores. Weights are `factor` * sigmoid(logit) over the sum of the
    chosen sigmoids.
    """
    experts = logits.shape[1]
    scores = logits.sigmoid()
    choice = scores + bias
    of_groups = choice.view(-1, groups, experts // groups).topk(2, dim=-1)[0].sum(dim=-1)
    of_kept = torch.topk(of_groups, k=kept, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(of_groups)
    mask.scatter_(1, of_kept, 1)
    mask = mask.unsqueeze(-1).expand(-1, groups, experts // groups).reshape(-1, experts)
    choice = choice.masked_fill(~mask.bool(), float("-inf"))
    index = torch.topk(choice, k=top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, index)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * factor, index


#: References without a bias, longest chains first, and the options with which `route` computes the same.
ROUTERS: tuple[tuple[Callable[..., Any], Mapping[str, bool]], ...] = (
    (route_qwen_reference, {"of_chosen": True, "rounded": True}),
    (route_mixtral_reference, {"of_chosen": True, "rounded": False}),
    (route_granite_reference, {"of_chosen": True, "rounded": True}),
    (route_olmo_reference, {"of_chosen": False, "rounded": True}),
)


@dataclass(frozen=True)
class Routing:
    """Options of `route`: how the `top_k` experts of a token and their weights are computed.

    Without a bias, experts are chosen by their logits. Weights are the softmax over all logits, or over the
    chosen ones if `of_chosen`.

    With a bias, the score of an expert is sigmoid(logit) + bias. Experts are chosen from the best `kept` of
    `groups` groups: those with the largest sums of their two best scores (arXiv 2412.19437). Weights are
    `factor` * sigmoid(logit) over the sum of the chosen sigmoids.

    Weights are float32, or have the dtype of the logits if `rounded`.
    """

    top_k: int
    of_chosen: bool = True
    rounded: bool = False
    factor: float = 1.0
    groups: int = 1
    kept: int = 1


def route(
    logits: torch.Tensor, bias: torch.Tensor | None = None, **routing: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the top-k of E experts for T tokens: `logits` [T, E] -> weights, experts int64, [T, top_k].

    `routing` has the fields of a `Routing`, and `bias` is [E] or None. Experts are sorted by falling logit,
    or score if there is a bias; of equal experts the one with the smaller index comes first. NaN is larger
    than every number, and makes all weights of its token NaN.
    """
    how = Routing(**routing)
    tokens, experts = logits.shape
    part = min(next_power_of_2(tokens), 4) if _has_short_rows(logits) else 1
    features = launch_features(logits.device)
    launch = _route_launch(-(-tokens // part), part, experts, how, bias is not None, None, features)
    operands, weights, index = _operands(logits, bias, how)
    with launching_on(logits.device):
        launch(*operands)
    return weights, index


def can_route_and_sort(logits: torch.Tensor, top_k: int) -> bool:
    """Return True if `route_and_sort` supports `logits` [T tokens, E experts] with this `top_k`."""
    few = next_power_of_2(len(logits)) * next_power_of_2(top_k) <= ORDERED
    return few and (len(logits) == 1 or _has_short_rows(logits))


def _has_short_rows(logits: torch.Tensor) -> bool:
    """Return True if a row of `logits` [T, E], padded, has at most `LOADED` bytes.

    E is padded to a power of two. Each warp of kernel `route` then takes a whole token.
    """
    return next_power_of_2(logits.shape[1]) * logits.itemsize <= LOADED


def route_and_sort(
    logits: torch.Tensor, bias: torch.Tensor | None = None, *, single_row_ratio: int, **routing: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose the top-k experts of each token, and sort the tokens by expert, in one launch.

        logits              [T tokens, E experts]; `bias` [E] and `routing` are those of `route`
        single_row_ratio    if E / (T * top_k) >= this, an expert block has one token; 0 for never

    Returns four tensors: weights and experts [T, top_k], as `route` does; then `order` [T * top_k] int32 and
    `expert_blocks` [T * top_k, 3] int32, the fields of `SortedTokens`. `can_route_and_sort` must be true.
    """
    how = Routing(**routing)
    tokens, experts = logits.shape
    routed = tokens * how.top_k
    order = torch.empty(routed, dtype=torch.int32, device=logits.device)
    expert_blocks = torch.empty((routed, 3), dtype=torch.int32, device=logits.device)
    size = expert_block_rows(routed, experts, single_row_ratio)
    features = launch_features(logits.device)
    launch = _route_launch(1, next_power_of_2(tokens), experts, how, bias is not None, size, features)
    operands, weights, index = _operands(logits, bias, how)
    with launching_on(logits.device):
        launch(*operands, order, expert_blocks)
    return weights, index, order, expert_blocks


def _operands(
    logits: torch.Tensor, bias: torch.Tensor | None, how: Routing
) -> tuple[tuple[Any, ...], torch.Tensor, torch.Tensor]:
    """Return (arguments, weights, experts) of kernel `route`, except the arguments for sorted tokens.

    `arguments` is for `logits` [T tokens, E experts] and `bias` [E] or None, routed as `how` says. It
    includes the outputs weights and experts, [T, top_k] each.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    size = len(logits), how.top_k
    weights = torch.empty(size, dtype=logits.dtype if how.rounded else torch.float32, device=logits.device)
    index = torch.empty(size, dtype=torch.int64, device=logits.device)
    # Without a bias the kernel gets `logits` in its place, and does not read it.
    bias = logits if bias is None else bias.contiguous()
    return (logits, bias, weights, index, len(logits), logits.stride(0)), weights, index


@lru_cache(maxsize=256)
def _small_linear_launch(
    m: int, n: int, k: int, norm: tuple[float, str] | None, features: frozenset[str]
) -> Launch:
    """Build the launch of `small_linear` for x [m, k] and weight [n, k]; `norm` is (eps, kind) or None.

    `features` are those of the device (`device_features`).
    """
    from quantkit.kernels.moe.router_kernels import small_linear

    # Rows of x per program: more of them where there are many programs.
    rows = min(next_power_of_2(m), 1 if m * n <= 512 else 2 if m * n <= 2048 else 4)
    padded = next_power_of_2(k)
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
    expert_block: int | None,
    features: frozenset[str],
) -> Launch:
    """Build the launch of `route` for `programs` programs of `tokens` tokens each.

    how             options of routing
    has_bias        True if experts are chosen by sigmoid(logit) + bias
    expert_block    the kernel also sorts tokens by expert, into blocks of up to this number of tokens;
                    None to not sort

    `features` are those of the device (`device_features`).
    """
    from quantkit.kernels.moe.router_kernels import route

    padded = next_power_of_2(experts)
    ordered = (
        {"ROWS": expert_block}
        if expert_block is not None
        else {"ROWS": 0, "order": None, "expert_blocks": None}
    )
    return IndexLaunch(
        route,
        (programs,),
        EXPERTS=experts,
        PADDED=padded,
        TOP_K=how.top_k,
        PADDED_TOP_K=next_power_of_2(how.top_k),
        TOKENS=tokens,
        OF_CHOSEN=how.of_chosen,
        SIGMOID=has_bias,
        FACTOR=how.factor,
        GROUPS=how.groups,
        KEPT=how.kept,
        **ordered,
        **overlap(features),
        # One warp has the logits of a token, so that no warp waits for another.
        num_warps=min(16, max(1, tokens * min(padded, 32) // 32)),
    )
