"""Products with the experts that tokens chose, all in one launch, and the torch operators behind them.

A pair is a token and one of its experts, pair p being slot p % k of token p // k. `order_pairs` sorts them by
expert on the device, so that a forward pass waits for nothing, and CUDA graphs can capture it; torch.compile
sees three operators. They have no gradients.
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
from quantkit.kernels.gemm.operands import Grouping, Pairs
from quantkit.kernels.gemm.support import why_not_narrow_experts, why_not_shared
from quantkit.kernels.jit.building import building
from quantkit.kernels.moe import permute as launch_pairs
from quantkit.kernels.moe import stacked_weights
from quantkit.kernels.moe.permute import FEW_PAIRS
from quantkit.kernels.problem import ACTIVATION_DTYPES, Problem
from quantkit.kernels.registry import FORCE_VARIABLE, forced_row, log_grouped, row_named, warn_looped
from quantkit.packing.schemes import parse_token
from quantkit.packing.tensor import PackedTensor

#: Rows of the kernel table whose kernels multiply with several experts at once.
GROUPED_ROWS = ("fused-stream", "fused-narrow", "fused-skinny", "fused-tiled")


@dataclass(frozen=True, eq=False)
class ExpertsLayout:
    """What grouped kernels read: `matrices` packed matrices [n, k] of each expert, one after the other.

    For one activation dtype and one device. `spread` is that of `launch.pairs.segment_rows`.
    """

    dtype: torch.dtype
    scheme: str
    experts: int
    matrices: int
    n: int
    tensors: tuple[torch.Tensor, ...]
    spread: int = 0

    def of(self, matrix: int) -> KernelLayout:
        """The layout of one matrix, in the same memory."""
        return KernelLayout(
            fused_kernels.FRAGMENTS.name, self.dtype, tuple([part[matrix] for part in self.tensors])
        )


class OrderedPairs(NamedTuple):
    """Pairs [P] in the order of their experts, and segments [P, 3], int32 (`kernels/moe/permute_kernels.py`).

    `spread` is what they are cut by, as in `launch.pairs.segment_rows`.
    """

    order: torch.Tensor
    segments: torch.Tensor
    spread: int


def why_not_grouped(problem: Problem, matrices: int = 1) -> str | None:
    """Why experts with such weights are multiplied with one after the other; None where they are grouped.

    `problem` is that of one matrix, of which experts have so many.
    """
    forced = forced_row()
    if forced and row_named(forced).name not in GROUPED_ROWS:
        return f"{FORCE_VARIABLE}={forced} multiplies with one weight at a time"
    reason = fused_kernels.ungroupable(problem)
    if reason is None and forced in ("fused-stream", "fused-narrow"):
        return why_not_shared(forced, problem, matrices, FEW_PAIRS)
    return reason


def build_experts_layout(
    weights: Iterable[PackedTensor], experts: int, matrices: int, dtype: torch.dtype
) -> ExpertsLayout | None:
    """The layout of the weights of experts, which come expert by expert and have one scheme and shape.

    None where they are not grouped, which a GPU says once, with the reason.
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
    # Tensors of inference mode could not be kept for the backward pass of experts one after the other.
    with torch.no_grad(), torch.inference_mode(False), building():
        tensors = stacked_weights.stacked(weights, dtype)
    shares = forced_row() in ("", "fused-stream", "fused-narrow")
    shares = shares and why_not_narrow_experts(problem, matrices) is None
    spread = decode_launch.experts_spread(problem) if shares else 0
    return ExpertsLayout(dtype, first.scheme.token, experts, matrices, first.shape[0], tensors, spread)


def order_pairs(index: torch.Tensor, *layouts: ExpertsLayout) -> OrderedPairs:
    """The pairs of `index` [T, k] in the order of their experts, for products with these layouts.

    An index that is not one of the experts stands for none.
    """
    spreads = [layout.spread for layout in layouts]
    spread = max(spreads) if all(spreads) else 0
    order, segments = torch.ops.quantkit.order_pairs(index, layouts[0].experts, spread)
    return OrderedPairs(order, segments, spread)


def experts_linear(
    x: torch.Tensor, pairs: OrderedPairs, layout: ExpertsLayout, chained: bool = False
) -> torch.Tensor:
    """For each pair, its row of x times the matrices of its expert: [P, matrices * n] in x's dtype.

    `x` is [T, K], a row per token, or [P, K], a row per pair. Rows of pairs without an expert are undefined.
    The product is `chained` if x is made of what this function gave for the same pairs, whose segments its
    kernel then reads while the one before it still runs. Raises `KernelError` where dtypes do not fit.
    """
    if x.dtype != layout.dtype:
        raise KernelError(f"x is {x.dtype} and the layout for {layout.dtype}; build one for x's dtype.")
    y: torch.Tensor = torch.ops.quantkit.experts_linear(
        x,
        pairs.order,
        pairs.segments,
        list(layout.tensors),
        layout.scheme,
        layout.experts,
        layout.matrices,
        layout.n,
        pairs.spread,
        chained,
    )
    return y


def weigh_pairs(y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """The sum over a token's pairs of y [T * k, H] times `weights` [T, k]: [T, H] in y's dtype.

    In float32, slot after slot. Pairs without an expert add nothing.
    """
    out: torch.Tensor = torch.ops.quantkit.weigh_pairs(y, index, weights, experts)
    return out


torch.library.define("quantkit::order_pairs", "(Tensor index, int experts, int spread) -> (Tensor, Tensor)")
torch.library.define(
    "quantkit::experts_linear",
    "(Tensor x, Tensor order, Tensor segments, Tensor[] layout, str scheme, int experts, int matrices, "
    "int out_features, int spread, bool chained) -> Tensor",
)
torch.library.define(
    "quantkit::weigh_pairs", "(Tensor y, Tensor index, Tensor weights, int experts) -> Tensor"
)


def _forced() -> str:
    forced = forced_row()
    if forced not in ("", *GROUPED_ROWS):
        raise KernelError(
            f"{FORCE_VARIABLE}={forced} multiplies with one weight at a time, and these experts are laid out "
            "to be multiplied with together. Set it before the model is loaded."
        )
    return forced


def pairs_of_segment(pairs: int, experts: int, spread: int) -> int:
    """How many pairs segments have at most, for the kernels that are to run."""
    return fused_kernels.pairs_of_segment(pairs, experts, spread, _forced())


@torch.library.impl("quantkit::order_pairs", "default")
def _order_pairs(index: torch.Tensor, experts: int, spread: int) -> tuple[torch.Tensor, torch.Tensor]:
    flat = index.reshape(-1).contiguous()
    if flat.shape[0] == 0:
        return _order_pairs_fake(index, experts, spread)
    size = pairs_of_segment(flat.shape[0], experts, spread)
    return fused_kernels.on_device(
        flat.device, lambda features: launch_pairs.order_pairs(flat, experts, size, features)
    )


def _order_pairs_fake(index: torch.Tensor, experts: int, spread: int) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = index.numel()
    return index.new_empty(pairs, dtype=torch.int32), index.new_empty(pairs, 3, dtype=torch.int32)


def run_experts(
    x: torch.Tensor,
    order: torch.Tensor,
    segments: torch.Tensor,
    layout: list[torch.Tensor],
    *of: Any,
    gate: str = "",
) -> torch.Tensor:
    """What the operator `quantkit::experts_linear` computes; with the kind of a `gate` the second of two
    matrices gated by the first (`glue.gate`), where `gates_experts` says so. `of` is what it takes besides.
    """
    _check(x, order)
    if order.shape[0] == 0:
        y = _experts_linear_fake(x, order, segments, layout, *of)
        return y.chunk(2, -1)[1] if gate else y
    problem, row, grouping, tile = _grouped(x.device, x, order, *of)
    if gate and (reason := fused_kernels.why_no_gated_experts(row, grouping.matrices)) is not None:
        raise KernelError(f"{row}, which runs experts of {problem}, does not gate y: {reason}.")
    log_grouped(problem, grouping.experts, row, tile, partial(_why_not_narrow, problem, grouping))
    pairs = Pairs(order, segments, grouping)
    return fused_kernels.grouped(
        row, x.contiguous(), tuple(layout), problem.scheme, problem.n, pairs, tile, gate
    )


torch.library.impl("quantkit::experts_linear", "default", run_experts)


def gates_experts(device: torch.device, x: torch.Tensor, order: torch.Tensor, *of: Any) -> bool:
    """Whether the kernel that the operator would run on a device can gate what it computes, as `run_experts`
    does.
    """
    if order.shape[0] == 0:
        return False
    _, row, grouping, _ = _grouped(device, x, order, *of)
    return fused_kernels.why_no_gated_experts(row, grouping.matrices) is None


def _grouped(
    device: torch.device,
    x: torch.Tensor,
    order: torch.Tensor,
    scheme: str,
    experts: int,
    matrices: int,
    out_features: int,
    spread: int,
    chained: bool,
) -> tuple[Problem, str, Grouping, Any]:
    """The problem of one matrix, the row that runs it, how pairs are grouped, and the tile."""
    pairs, columns = order.shape[0], x.shape[1]
    problem = Problem.on(device, pairs, out_features, columns, parse_token(scheme), x.dtype)
    slots = pairs // x.shape[0]
    return problem, *fused_kernels.group(problem, experts, matrices, slots, spread, _forced(), chained)


def _why_not_narrow(problem: Problem, grouping: Grouping) -> str | None:
    """Why `fused-narrow` does not multiply these segments, for who asked to see; None if that is forced."""
    if grouping.rows > FEW_PAIRS:
        return f"tiles are faster for segments of up to {grouping.rows} pairs"
    reason = why_not_narrow_experts(problem, grouping.matrices)
    return reason or (None if forced_row() else "it cannot multiply with the other matrices of these experts")


def _check(x: torch.Tensor, order: torch.Tensor) -> None:
    if x.dim() != 2 or order.shape[0] % max(x.shape[0], 1):
        raise KernelError(
            f"x has shape {tuple(x.shape)} for {order.shape[0]} pairs; it must be [T, K], with a row per "
            "token or per pair."
        )
    if x.dtype not in ACTIVATION_DTYPES:
        raise KernelError(f"x is {x.dtype}; cast it to bfloat16 or float16.")


def _experts_linear_fake(
    x: torch.Tensor,
    order: torch.Tensor,
    segments: torch.Tensor,
    layout: list[torch.Tensor],
    scheme: str,
    experts: int,
    matrices: int,
    out_features: int,
    *_: int,
) -> torch.Tensor:
    return x.new_empty(order.shape[0], matrices * out_features)


@torch.library.impl("quantkit::weigh_pairs", "default")
def _weigh_pairs(y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    if index.numel() == 0:
        return y.new_zeros(index.shape[0], y.shape[1])
    operands = (y.contiguous(), index.contiguous(), weights.contiguous(), experts)
    return fused_kernels.on_device(y.device, lambda features: launch_pairs.weigh_pairs(*operands, features))


def _weigh_pairs_fake(
    y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, experts: int
) -> torch.Tensor:
    return y.new_empty(index.shape[0], y.shape[1])


torch.library.register_fake("quantkit::order_pairs", _order_pairs_fake)
torch.library.register_fake("quantkit::experts_linear", _experts_linear_fake)
torch.library.register_fake("quantkit::weigh_pairs", _weigh_pairs_fake)
#: The operators, as they are in traced graphs.
ORDER_OPERATOR = torch.ops.quantkit.order_pairs.default
EXPERTS_OPERATOR = torch.ops.quantkit.experts_linear.default
