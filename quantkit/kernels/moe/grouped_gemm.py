"""Grouped GEMM: products of all tokens with the weights of their experts in one launch, as torch operators.

A routed token is a token paired with one of its experts. Routed token p is token p // top_k with expert p %
top_k among the token's top_k. `sort_tokens_by_expert` runs on the device, so a forward pass does not wait,
and CUDA graphs can capture it. torch.compile sees three operators. They have no gradients.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from quantkit.errors import KernelError
from quantkit.kernels.eager import KernelLayout
from quantkit.kernels.gemm import fused_kernels
from quantkit.kernels.gemm.decode import decode_launch
from quantkit.kernels.gemm.operands import Grouping, RoutedTokens
from quantkit.kernels.jit.building import building
from quantkit.kernels.moe import permute, stacked_weights
from quantkit.kernels.moe.permute import SMALL_BLOCK_ROWS
from quantkit.kernels.problem import ACTIVATION_DTYPES, Problem, on_device
from quantkit.kernels.registry import FORCE_VARIABLE, forced_kernel, kernel_named, log_grouped, warn_looped
from quantkit.packing.schemes import parse_token
from quantkit.packing.tensor import PackedTensor


@dataclass(frozen=True, eq=False)
class ExpertsLayout:
    """Weights of a layer's experts, stacked for a grouped GEMM, for one activation dtype and device.

    scheme             `Scheme.token` of the weights
    experts            number of experts
    matrices           number of matrices [n, K] per expert, such as 2 for gate and up
    tensors            tensors of the fragment layout, with a first dimension of experts * matrices
    single_row_ratio   if experts / routed tokens (token-expert pairs) >= this, each program multiplies one
                       routed token; 0 for never (`permute.usual_block_rows`)
    """

    dtype: torch.dtype
    scheme: str
    experts: int
    matrices: int
    n: int
    tensors: tuple[torch.Tensor, ...]
    single_row_ratio: int = 0

    def of(self, matrix: int) -> KernelLayout:
        """Return the layout of one matrix as a weight of its own: a view of the stacked tensors.

        Matrix i of expert e has the index `matrix` = e * `matrices` + i.
        """
        return KernelLayout(
            fused_kernels.FRAGMENTS.name, self.dtype, tuple([part[matrix] for part in self.tensors])
        )


class SortedTokens(NamedTuple):
    """P routed tokens sorted by expert, for grouped GEMMs.

    A routed token is a token paired with one of its experts.

    order             [P] int32: indices of routed tokens, sorted by expert; those without an expert last
    expert_blocks     [P, 3] int32, a row per block of tokens of one expert: (expert, first index in
                      `order`, count); count is 0 in unused rows
    single_row_ratio  if experts / routed tokens >= this, a block has one token; 0 for never
    """

    order: torch.Tensor
    expert_blocks: torch.Tensor
    single_row_ratio: int


def why_not_grouped(problem: Problem, matrices: int = 1) -> str | None:
    """Return why experts must run one after the other; None if a grouped GEMM can run all in one launch.

    `problem` is the product with one matrix; an expert has `matrices` matrices.
    """
    forced = forced_kernel()
    if forced and kernel_named(forced).grouped is None:
        return f"{FORCE_VARIABLE}={forced} multiplies with one weight at a time"
    reason = fused_kernels.why_not_groupable(problem)
    if reason is None and forced and _may_share_x(forced):
        return fused_kernels.why_not_experts(kernel_named(forced), problem, matrices, SMALL_BLOCK_ROWS)
    return reason


def _may_share_x(forced: str) -> bool:
    """Return True if a kernel may be selected whose warps share x in shared memory.

    `forced` is the kernel that `QUANTKIT_KERNEL` names, or "". The result is False if the warps of that
    kernel do not share x.
    """
    grouped = kernel_named(forced).grouped if forced else None
    return not forced or (grouped is not None and grouped.shares_x)


def build_experts_layout(
    weights: Iterable[PackedTensor], experts: int, matrices: int, dtype: torch.dtype
) -> ExpertsLayout | None:
    """Build the layout of a layer's experts for a grouped GEMM; None if no grouped GEMM supports them.

    `weights` are matrices [N, K] of one scheme, sorted by expert: `matrices` for each of `experts` experts.
    Activations have `dtype`. On a GPU, the reason for None is logged once as a warning.
    """
    weights = list(weights)
    if not weights:
        return None
    first = weights[0]
    problem = Problem.on(first.device, 1, *first.shape, first.scheme, dtype)
    reason = why_not_grouped(problem, matrices)
    if reason is not None:
        warn_looped(problem, experts, reason)
        return None
    # Tensors of inference mode could not be saved for the backward pass of experts that run one by one.
    with torch.no_grad(), torch.inference_mode(False), building():
        tensors = stacked_weights.stacked(weights, dtype)
    shares_x = _may_share_x(forced_kernel()) and fused_kernels.why_not_shared(problem, matrices) is None
    single_row_ratio = decode_launch.single_row_ratio(problem) if shares_x else 0
    return ExpertsLayout(
        dtype, first.scheme.token, experts, matrices, first.shape[0], tensors, single_row_ratio
    )


def sort_tokens_by_expert(index: torch.Tensor, *layouts: ExpertsLayout) -> SortedTokens:
    """Sort T tokens by expert for grouped GEMMs with `layouts`; `index` [T, top_k] has each token's experts.

    An index outside 0 to experts - 1 stands for no expert.
    """
    ratios = [layout.single_row_ratio for layout in layouts]
    single_row_ratio = max(ratios) if all(ratios) else 0
    order, expert_blocks = torch.ops.quantkit.sort_tokens_by_expert(
        index, layouts[0].experts, single_row_ratio
    )
    return SortedTokens(order, expert_blocks, single_row_ratio)


def experts_linear(
    x: torch.Tensor, sorted_tokens: SortedTokens, layout: ExpertsLayout, chained: bool = False
) -> torch.Tensor:
    """Return x W^T for each routed token, W of its expert: [P, matrices * n], by a grouped GEMM.

    A routed token is a token paired with one of its experts. W is the expert's matrices [n, K], stacked along
    n.

        x          [T, K], a row per token, or [P, K], a row per routed token; the result has its dtype
        chained    True if x was computed from a product of the same `sorted_tokens`. The kernel then reads
                   the expert blocks before it waits for the kernel before it (PDL).

    Rows of routed tokens without an expert are undefined. Raises `KernelError` where dtypes do not fit.
    """
    if x.dtype != layout.dtype:
        raise KernelError(f"x is {x.dtype} and the layout for {layout.dtype}; build one for x's dtype.")
    y: torch.Tensor = torch.ops.quantkit.experts_linear(
        x,
        sorted_tokens.order,
        sorted_tokens.expert_blocks,
        list(layout.tensors),
        layout.scheme,
        layout.experts,
        layout.matrices,
        layout.n,
        sorted_tokens.single_row_ratio,
        chained,
    )
    return y


def combine_experts(
    y: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the outputs of each token's experts: [T, H] = sum over k of weights[t, k] y[t * top_k + k].

        y          [T * top_k, H] for T tokens and H features
        index      [T, top_k]: the expert of each row of y; outside 0 to `experts` - 1 the row adds nothing
        weights    [T, top_k]
        bias       [experts, H] or None: the row of its expert is first added to each row of y

    Sums are float32, in the order of top-k.
    """
    out: torch.Tensor = torch.ops.quantkit.combine_experts(y, index, weights, experts, bias)
    return out


torch.library.define(
    "quantkit::sort_tokens_by_expert", "(Tensor index, int experts, int single_row_ratio) -> (Tensor, Tensor)"
)
torch.library.define(
    "quantkit::experts_linear",
    "(Tensor x, Tensor order, Tensor expert_blocks, Tensor[] layout, str scheme, int experts, int matrices, "
    "int out_features, int single_row_ratio, bool chained) -> Tensor",
)
torch.library.define(
    "quantkit::combine_experts",
    "(Tensor y, Tensor index, Tensor weights, int experts, Tensor? bias=None) -> Tensor",
)


def _forced() -> str:
    """Return the kernel that `QUANTKIT_KERNEL` forces, "" for none.

    Raises `KernelError` for a kernel without a grouped GEMM.
    """
    forced = forced_kernel()
    if forced and kernel_named(forced).grouped is None:
        raise KernelError(
            f"{FORCE_VARIABLE}={forced} multiplies with one weight at a time, and these experts are laid out "
            "to be multiplied with together. Set it before the model is loaded."
        )
    return forced


def expert_block_rows(routed: int, experts: int, single_row_ratio: int) -> int:
    """Return the maximum number of routed tokens of an expert block, which have the same expert.

    `routed` is the number of routed tokens (token-expert pairs). The result is 1 if experts / routed >=
    `single_row_ratio` > 0. Otherwise it depends on the kernel, which `QUANTKIT_KERNEL` may force.
    """
    return fused_kernels.expert_block_rows(routed, experts, single_row_ratio, _forced())


@torch.library.impl("quantkit::sort_tokens_by_expert", "default")
def _sort_tokens_by_expert(
    index: torch.Tensor, experts: int, single_row_ratio: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the operator `sort_tokens_by_expert` for `index` [T tokens, top_k]: (order, expert_blocks).

    The results, int32 [P] and [P, 3] with P = T * top_k, and `single_row_ratio` are fields of `SortedTokens`.
    """
    flat = index.reshape(-1).contiguous()
    if flat.shape[0] == 0:
        return _sort_tokens_by_expert_fake(index)
    size = expert_block_rows(flat.shape[0], experts, single_row_ratio)
    return on_device(
        flat.device, lambda features: permute.launch_sort_by_expert(flat, experts, size, features)
    )


def _sort_tokens_by_expert_fake(index: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty int32 [P] and [P, 3] for tracing, P = T * top_k for `index` [T, top_k]."""
    routed = index.numel()
    return index.new_empty(routed, dtype=torch.int32), index.new_empty(routed, 3, dtype=torch.int32)


def run_experts(
    x: torch.Tensor,
    order: torch.Tensor,
    expert_blocks: torch.Tensor,
    layout: list[torch.Tensor],
    *of: Any,
    gate: str = "",
) -> torch.Tensor:
    """Compute the operator `quantkit::experts_linear`: x W^T, [P, matrices * n], for P routed tokens.

    x               [T, K], a row per token, or [P, K], a row per routed token, told apart by their number; a
                    routed token is a token paired with one of its experts
    order           int32 [P], a field of `SortedTokens`
    expert_blocks   int32 [P, 3], a field of `SortedTokens`
    layout          tensors of an `ExpertsLayout`
    of              (`Scheme.token` of the weights, number of experts, matrices of each, rows of a matrix,
                    `ExpertsLayout.single_row_ratio`, and `chained`, an argument of `experts_linear`)
    gate            activation f: the result is [P, n] = f(x W1^T) * (x W2^T) for the two matrices of an
                    expert; "" for no gate. `KernelError` if the kernel cannot do it (`gates_experts`).
    """
    _check(x, order)
    if order.shape[0] == 0:
        y = _experts_linear_fake(x, order, expert_blocks, layout, *of)
        return y.chunk(2, -1)[1] if gate else y
    problem, name, grouping, tile = _grouped(x.device, x, order, *of)
    if gate and (reason := fused_kernels.why_no_gated_experts(name, grouping.matrices)) is not None:
        raise KernelError(f"{name}, which runs experts of {problem}, does not gate y: {reason}.")
    log_grouped(problem, grouping.experts, name, tile, partial(_refusals, name, problem, grouping))
    routed = RoutedTokens(order, expert_blocks, grouping)
    return fused_kernels.grouped(
        name, x.contiguous(), tuple(layout), problem.scheme, problem.n, routed, tile, gate
    )


torch.library.impl("quantkit::experts_linear", "default", run_experts)


def gates_experts(device: torch.device, x: torch.Tensor, order: torch.Tensor, *of: Any) -> bool:
    """Return True if `run_experts` on `device` can compute f(x W1^T) * (x W2^T) in its epilogue.

    `x`, [T tokens, K] or [P, K] with a row per token and expert, `order` int32 [P], and `of` are arguments of
    `run_experts`.
    """
    if order.shape[0] == 0:
        return False
    _, name, grouping, _ = _grouped(device, x, order, *of)
    return fused_kernels.why_no_gated_experts(name, grouping.matrices) is None


def _grouped(
    device: torch.device,
    x: torch.Tensor,
    order: torch.Tensor,
    scheme: str,
    experts: int,
    matrices: int,
    out_features: int,
    single_row_ratio: int,
    chained: bool,
) -> tuple[Problem, str, Grouping, Any]:
    """Select the grouped GEMM: (problem of one matrix, name of the kernel, grouping, tile).

    x                  [T tokens, K] or [P, K] with a row per token and expert
    order              [P] int32, of which only the size is read
    scheme             `Scheme.token` of the weights: `experts` experts, each with `matrices` matrices
                       [out_features, K]
    single_row_ratio   if experts / P >= this, a program multiplies one row; 0 for never
    chained            True if x was computed from a product of the same sorted tokens
    """
    routed, columns = order.shape[0], x.shape[1]
    problem = Problem.on(device, routed, out_features, columns, parse_token(scheme), x.dtype)
    top_k = routed // x.shape[0]
    return problem, *fused_kernels.group(
        problem, experts, matrices, top_k, single_row_ratio, _forced(), chained
    )


def _refusals(name: str, problem: Problem, grouping: Grouping) -> str:
    """Return why a kernel whose warps share x does not run these experts, for the end of a log line.

    `name` is the kernel that runs them, `problem` the product with one matrix. The text is "; not <kernel>:
    <reason>". It is "" if kernel `name` shares x itself, or if there is no reason.
    """
    sharing = fused_kernels.grouped_kernels(shares_x=True)
    if name in {kernel.name for kernel in sharing}:
        return ""
    if grouping.rows > SMALL_BLOCK_ROWS:
        reason: str | None = f"tiles are faster for blocks of up to {grouping.rows} routed tokens"
    else:
        reason = fused_kernels.why_not_shared(problem, grouping.matrices)
        if reason is None and not forced_kernel():
            reason = "it cannot multiply with the other matrices of these experts"
    return "" if reason is None else f"; not {sharing[-1].name}: {reason}"


def _check(x: torch.Tensor, order: torch.Tensor) -> None:
    """Raise `KernelError` unless `x` [T or P, K] has a supported dtype and a fitting number of rows.

    `x` needs a row per token, or one per routed token (a token paired with one of its experts) in `order`
    [P].
    """
    if x.dim() != 2 or order.shape[0] % max(x.shape[0], 1):
        raise KernelError(
            f"x has shape {tuple(x.shape)} for {order.shape[0]} routed tokens; it must be [T, K], with a row "
            "per token or per routed token."
        )
    if x.dtype not in ACTIVATION_DTYPES:
        raise KernelError(f"x is {x.dtype}; cast it to bfloat16 or float16.")


def _experts_linear_fake(
    x: torch.Tensor,
    order: torch.Tensor,
    expert_blocks: torch.Tensor,
    layout: list[torch.Tensor],
    scheme: str,
    experts: int,
    matrices: int,
    out_features: int,
    *_: int,
) -> torch.Tensor:
    """Return an empty [P, matrices * n] for `order` [P], for tracing; n = `out_features`."""
    return x.new_empty(order.shape[0], matrices * out_features)


@torch.library.impl("quantkit::combine_experts", "default")
def _combine_experts(
    y: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the operator `combine_experts`: `y` [T * top_k, H features] -> [T tokens, H].

    Each row of `y` gets the `bias` [experts, H] of its expert in `index` [T, top_k]. The rows of a token are
    then multiplied by `weights` [T, top_k] and summed.
    """
    if index.numel() == 0:
        return y.new_zeros(index.shape[0], y.shape[1])
    operands = (y.contiguous(), index.contiguous(), weights.contiguous(), experts)
    bias = None if bias is None else bias.contiguous()
    return on_device(y.device, lambda features: permute.combine_experts(*operands, features, bias))


def _combine_experts_fake(y: torch.Tensor, index: torch.Tensor, *_: object) -> torch.Tensor:
    """Return an empty [T, H] for `index` [T, top_k] and `y` [T * top_k, H], for tracing."""
    return y.new_empty(index.shape[0], y.shape[1])


torch.library.register_fake("quantkit::sort_tokens_by_expert", _sort_tokens_by_expert_fake)
torch.library.register_fake("quantkit::experts_linear", _experts_linear_fake)
torch.library.register_fake("quantkit::combine_experts", _combine_experts_fake)
#: Operators as they occur in traced graphs.
SORT_OPERATOR = torch.ops.quantkit.sort_tokens_by_expert.default
EXPERTS_OPERATOR = torch.ops.quantkit.experts_linear.default
