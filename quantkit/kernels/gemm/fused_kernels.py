"""Table of the GPU kernels that read packed weights, and selection of one for experts (grouped GEMM)."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from quantkit.errors import KernelError
from quantkit.kernels.gemm import support
from quantkit.kernels.gemm.bound import Bound
from quantkit.kernels.gemm.decode import decode_launch
from quantkit.kernels.gemm.dequantize import dequantize_launch
from quantkit.kernels.gemm.operands import Grouping, Operands, RoutedTokens
from quantkit.kernels.gemm.portable import portable_gemm_launch, portable_gemv_launch
from quantkit.kernels.gemm.scaled_mm import scaled_mm_launch
from quantkit.kernels.gemm.small_m import small_m_launch
from quantkit.kernels.gemm.wgmma import wgmma_launch
from quantkit.kernels.gemm.wgmma_8bit import wgmma_8bit_launch
from quantkit.kernels.jit.building import wait_for
from quantkit.kernels.layouts.fragment_layout import build, join, restore
from quantkit.kernels.layouts.geometry import ROWS
from quantkit.kernels.layouts.shared_memory import next_power_of_2
from quantkit.kernels.moe.permute import MAX_BLOCK_ROWS, SMALL_BLOCK_ROWS, usual_block_rows
from quantkit.kernels.ops.quantize_x import NATURAL_ORDER
from quantkit.kernels.problem import (
    GroupedGemm,
    Kernel,
    Layout,
    Outline,
    Problem,
    TileError,
    always,
    on_device,
)
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor


def build_fragments(weight: PackedTensor, dtype: torch.dtype, count: int = 1) -> tuple[torch.Tensor, ...]:
    """Build the fragment layout of `weight` [count * N, K], `count` weights, for activations of `dtype`."""
    if weight.device.type != "cuda":
        return build(weight, dtype, count)
    with torch.cuda.device(weight.device):
        layout = build(weight, dtype, count)
    wait_for(weight.device)
    return layout


FRAGMENTS = Layout("fragments", build_fragments, join, restore)

_BEFORE_LOADING = "Set QUANTKIT_KERNEL, if at all, before the model is loaded."
#: `Kernel.run`: operands, tile (None without tiles) and features of the device -> y.
_RunFunction = Callable[[Operands, Any, frozenset[str]], torch.Tensor]


def _launch(run: _RunFunction) -> Callable[..., torch.Tensor]:
    """Return a function (x, weight, layout, bias, tile) -> y for `Kernel.launch`, which calls `run`."""

    def launched(
        x: torch.Tensor,
        weight: PackedTensor | Outline,
        layout: tuple[torch.Tensor, ...],
        bias: torch.Tensor | None,
        tile: Any = None,
        **prepared: Any,
    ) -> torch.Tensor:
        """Return y [m, n] = x [m, k] W^T + bias with W in `layout`; `prepared` are more `Operands` fields."""
        if bias is not None:
            bias = bias.contiguous()
        operands = Operands(x, layout, bias, weight.scheme, weight.shape[0], **prepared)
        return _started(run, operands, tile)

    return launched


def _bind(bind: Callable[[Operands, Any, frozenset[str]], Bound]) -> Callable[..., Bound]:
    """Return a function for `Kernel.bind`, which calls `bind` of a kernel's module."""

    def bound(
        x: torch.Tensor,
        weight: Outline,
        layout: tuple[torch.Tensor, ...],
        bias: torch.Tensor | None,
        tile: Any,
        **prepared: Any,
    ) -> Bound:
        """Return the launches of y [m, n] = x [m, k] W^T + bias [n], prepared for one weight.

        Later x and bias need the same shapes, dtypes and device. `layout` is the weight in the fragment
        layout; `prepared` are more fields of `Operands`.
        """
        operands = Operands(x, layout, bias, weight.scheme, weight.shape[0], **prepared)
        return on_device(x.device, lambda features: bind(operands, tile, features))

    return bound


def _started(run: _RunFunction, operands: Operands, tile: Any) -> torch.Tensor:
    """Return y [m, n], computed by `run`; raise `TileError` if the tile is too large for the GPU."""
    device = operands.x.device
    try:
        return on_device(device, lambda features: run(operands, tile, features))
    except Exception as error:
        # Compare Triton's error class by name, so that Triton is imported only when needed.
        if type(error).__name__ != "OutOfResources":
            raise
        raise TileError(
            f"the tile {tile} is too large for this GPU: {error}. If it is from a tile table (`quantkit "
            "doctor` shows which is used), delete that, or run `quantkit tune`."
        ) from error


def _run_function(name: str) -> _RunFunction:
    """Return `Kernel.run` of the fused kernel called `name`: a function (operands, tile, features) -> y."""
    run = fused_kernel(name).run
    assert run is not None
    return run


def why_not_groupable(problem: Problem) -> str | None:
    """Return why no grouped GEMM supports experts with weights as in `problem`; None if one does."""
    if problem.device != "cuda":
        return f"they run on cuda, the tensors are on {problem.device}"
    if problem.scheme.column_scale:
        return "each expert scales the columns of x by factors of its own"
    if (reason := support.why_no_fused_kernel(problem)) is not None:
        return reason
    if support.looked_up(problem):
        return f"they would look up every value of {problem.scheme.format.name} in memory"
    return None


@lru_cache(maxsize=64)
def fused_kernel(name: str) -> Kernel:
    """Return the `Kernel` record of the fused kernel called `name`."""
    return next(kernel for kernel in FUSED_KERNELS if kernel.name == name)


def grouped_kernels(shares_x: bool) -> tuple[Kernel, ...]:
    """Return grouped GEMM kernels for few tokens per expert, best first; if `shares_x`, warps share one x."""
    return tuple(
        kernel
        for kernel in FUSED_KERNELS
        if kernel.grouped is not None
        and kernel.grouped.shares_x == shares_x
        and kernel.grouped.block_rows[0] <= SMALL_BLOCK_ROWS
    )


def expert_block_rows(routed: int, experts: int, single_row_ratio: int, forced: str = "") -> int:
    """Return the maximum number of routed tokens of one expert that a program multiplies.

    A routed token is a token paired with one of its experts; there are `routed`. The result is that of
    `permute.usual_block_rows`, clamped to what the kernel `forced` supports, if that is not "".
    """
    usual = usual_block_rows(routed, experts, single_row_ratio)
    grouped = fused_kernel(forced).grouped if forced else None
    if grouped is None:
        return usual
    least, most = grouped.forced_rows
    return min(max(usual, least), most)


def why_not_experts(kernel: Kernel, problem: Problem, matrices: int, rows: int) -> str | None:
    """Return why a kernel cannot run a grouped GEMM of blocks of `rows` tokens of one expert; None if it can.

    An expert has `matrices` matrices, and `problem` is the product with one matrix.
    """
    grouped = kernel.grouped
    if grouped is None:
        return "it multiplies with one weight at a time"
    if (reason := grouped.why_unsupported(replace(problem, m=rows, n=problem.n * matrices))) is not None:
        return reason
    if grouped.shares_x and matrices > 1 and problem.n % ROWS:
        return (
            f"matrices of an expert lie next to each other for multiples of {ROWS} rows, not for {problem.n}"
        )
    if grouped.shares_x and problem.scheme.is_fitted:
        return "each matrix has values of its own, of which a program has one table"
    return None


def why_not_shared(problem: Problem, matrices: int) -> str | None:
    """Return why no kernel whose warps share x supports experts with few tokens; None if one does.

    An expert has `matrices` matrices; `problem` is the product with one matrix.
    """
    kernel = grouped_kernels(shares_x=True)[-1]
    return why_not_experts(kernel, problem, matrices, SMALL_BLOCK_ROWS)


def _candidates(rows: int, single_row_ratio: int, forced: str) -> list[Kernel]:
    """Return kernels for a grouped GEMM of blocks of `rows` tokens of one expert, the preferred one first.

    `forced`, if not "", is the only one. For few rows, warps share one x if `single_row_ratio` > 0, else not.
    """
    if forced:
        return [fused_kernel(forced)]
    return [
        kernel
        for kernel in FUSED_KERNELS
        if kernel.grouped is not None
        and kernel.grouped.block_rows[0] <= rows <= kernel.grouped.block_rows[1]
        and (rows > SMALL_BLOCK_ROWS or kernel.grouped.shares_x == (single_row_ratio > 0))
    ]


@lru_cache(maxsize=4096)
def group(
    problem: Problem,
    experts: int,
    matrices: int,
    top_k: int,
    single_row_ratio: int,
    forced: str = "",
    chained: bool = False,
) -> tuple[str, Grouping, Any]:
    """Select the grouped GEMM for `problem.m` routed tokens: return (name of the kernel, sizes, tile).

    A routed token is a token paired with one of its `top_k` experts. `problem` is the product with one of an
    expert's `matrices` matrices. If experts / `problem.m` >= `single_row_ratio` > 0, a program multiplies one
    routed token, else up to 128. `forced` is the name of the kernel to use, or "". `chained` is as in
    `Grouping`. Rules choose the tile. Raises `KernelError` if no kernel supports it.
    """
    rows = expert_block_rows(problem.m, experts, single_row_ratio, forced)
    grouping = Grouping(problem.m, experts, rows, matrices, top_k, chained)
    expert = replace(problem, m=rows, n=problem.n * matrices)
    name, reason = "", None
    for kernel in _candidates(rows, single_row_ratio, forced):
        assert kernel.grouped is not None
        name, reason = kernel.name, why_not_experts(kernel, problem, matrices, rows)
        if reason is None:
            if (tile := kernel.grouped.tile(expert, grouping)) is not None:
                return name, grouping, tile
            reason = f"x and sums of {rows} routed tokens take more shared memory than there is"
    raise KernelError(f"{name} cannot run experts of {problem}: {reason}. {_BEFORE_LOADING}")


def _all_blocks(problem: Problem, grouping: Grouping) -> Problem:
    """Return `problem`, the product of one expert block, with n times the number of expert blocks."""
    return replace(problem, n=problem.n * grouping.expert_blocks)


def why_no_gated_experts(name: str, matrices: int) -> str | None:
    """Return why kernel `name` cannot compute f(gate) * up for experts of `matrices` matrices; else None."""
    grouped = fused_kernel(name).grouped
    if grouped is None or not grouped.gates:
        return "it gives y as it is"
    if matrices != 2:
        return f"experts have one matrix that gates and one that is gated, not {matrices}"
    return None


def grouped(
    name: str,
    x: torch.Tensor,
    layout: tuple[torch.Tensor, ...],
    scheme: Scheme,
    n: int,
    routed: RoutedTokens,
    tile: Any,
    gate: str = "",
) -> torch.Tensor:
    """Return y [P, matrices * n] of P routed tokens (token-expert pairs), computed by a grouped GEMM.

    name      name of the kernel
    x         [P, K], or [tokens, K] if several routed tokens have the same row
    layout    weights of all experts, from `stacked_weights.stacked`
    n         output features of one matrix of an expert
    gate      activation f, if y [P, n] = f(gate) * up; `why_no_gated_experts` must return None

    Rows of y without an expert are undefined. Does not wait for the device.
    """
    return _started(_run_function(name), Operands(x, layout, None, scheme, n, routed, gate=gate), tile)


def compile_kernels(name: str, problem: Problem, layout: tuple[torch.Tensor, ...], tile: Any) -> None:
    """Compile the kernel called `name` for `problem` into Triton's cache, without a GPU.

    `layout` gives dtypes and shapes of the tensors of the weight [N, K]. The target is Triton's active
    driver.
    """
    x = torch.empty(problem.m, problem.k, dtype=problem.dtype, device="meta")
    on_meta = tuple(tensor.to("meta") for tensor in layout)
    operands = Operands(x, on_meta, None, problem.scheme, problem.n, gpu=problem.gpu)
    _run_function(name)(operands, tile, problem.features)


def _by_rows(*most: int) -> Callable[[Problem], Problem]:
    """Return a function for `Kernel.representative`: from a problem to the smallest with the same code.

    The compiled code is the same for all M after one limit of `most` and up to the next, except M = 1. It
    differs if N (outputs) is a multiple of 16.
    """

    def representative(problem: Problem) -> Problem:
        m = next((one for one in (1, *most) if problem.m <= one), most[-1])
        return replace(problem, m=m, n=16 if problem.n % 16 == 0 else 17)

    return representative


def _by_power_of_two(problem: Problem) -> Problem:
    """Return the smallest problem with the same compiled code: that with M rounded up to a power of two."""
    return replace(problem, m=next_power_of_2(problem.m))


def _fused(
    run: _RunFunction, bind: Callable[[Operands, Any, frozenset[str]], Bound] | None = None, **fields: Any
) -> Kernel:
    """Return the `Kernel` of a GPU kernel from `run` and `bind` of its module, and its other `fields`."""
    return Kernel(
        devices=("cuda",),
        layout=FRAGMENTS,
        run=run,
        launch=_launch(run),
        bind=None if bind is None else _bind(bind),
        **fields,
    )


FUSED_KERNELS: tuple[Kernel, ...] = (
    _fused(
        name="fused-gemv",
        summary="Gluon: codes stream through registers past an x in shared memory, for up to 16 rows of x; "
        "integers of up to 8 bits are multiplied as such, with digits of x",
        why_unsupported=support.why_unsupported_decode,
        why_slower=support.why_slower_decode,
        run=decode_launch.run,
        bind=decode_launch.bind,
        tile_space=decode_launch.TILE_SPACE,
        grouped=GroupedGemm(
            block_rows=(1, 1),
            forced_rows=(1, SMALL_BLOCK_ROWS),
            tile=decode_launch.experts_tile,
            why_unsupported=support.why_unsupported_decode_experts,
            shares_x=True,
            gates=True,
        ),
        why_no_norm=decode_launch.why_no_norm,
        why_no_gate=decode_launch.why_no_gate,
        why_no_rounding=decode_launch.why_no_rounding,
        representative=_by_power_of_two,
    ),
    _fused(
        name="fused-portable-gemv",
        summary="Triton: reads every packed byte once and multiplies in registers, for a few rows of x",
        why_unsupported=support.why_unsupported_portable_gemv,
        why_slower=support.why_slower_portable_gemv,
        run=portable_gemv_launch.run,
        bind=portable_gemv_launch.bind,
        tile_space=portable_gemv_launch.TILE_SPACE,
        grouped=GroupedGemm(
            block_rows=(1, SMALL_BLOCK_ROWS),
            forced_rows=(SMALL_BLOCK_ROWS, SMALL_BLOCK_ROWS),
            tile=lambda expert, grouping: portable_gemv_launch.TILE_SPACE.rule(_all_blocks(expert, grouping)),
        ),
        representative=_by_rows(8, 16, 32),
    ),
    _fused(
        name="fused-small-m",
        summary="Gluon: warps dequantize rows of their own and multiply with one x in shared memory, for up "
        "to 32 rows of x",
        why_unsupported=support.why_unsupported_small_m,
        why_slower=support.why_slower_small_m,
        run=small_m_launch.run,
        bind=small_m_launch.bind,
        tile_space=small_m_launch.TILE_SPACE,
        grouped=GroupedGemm(
            block_rows=(1, SMALL_BLOCK_ROWS),
            forced_rows=(SMALL_BLOCK_ROWS, SMALL_BLOCK_ROWS),
            tile=lambda expert, grouping: small_m_launch.experts_tile(expert, grouping.usual),
            why_unsupported=support.why_unsupported_small_m,
            shares_x=True,
            gates=True,
        ),
        why_no_gate=small_m_launch.why_no_gate,
        why_no_norm=small_m_launch.why_no_norm,
        representative=_by_rows(8, 16, 32),
    ),
    _fused(
        name="fused-wgmma",
        summary="Gluon, for Hopper: dequantizes weights in registers while other warps copy and multiply",
        why_unsupported=support.why_unsupported_wgmma,
        why_slower=support.why_slower_wgmma,
        run=wgmma_launch.run,
        tile_space=wgmma_launch.TILE_SPACE,
    ),
    _fused(
        name="scaled-mm",
        summary="Triton: unpacks a weight with scales of blocks to rows of e4m3, for the library to multiply "
        "with inputs that a scheme rounds, which it quantizes first",
        why_unsupported=support.why_unsupported_scaled_mm,
        why_slower=support.why_slower_scaled_mm,
        run=scaled_mm_launch.run,
        rounds_x=True,
        code_order=lambda _: NATURAL_ORDER,
    ),
    _fused(
        name="fused-wgmma-8bit",
        summary="Gluon, for Hopper: int8 or fp8 products of bytes of the weights and inputs that a scheme "
        "rounds, which it quantizes first",
        why_unsupported=support.why_unsupported_wgmma_8bit,
        why_slower=support.why_slower_wgmma_8bit,
        run=wgmma_8bit_launch.run,
        rounds_x=True,
        code_order=wgmma_8bit_launch.order_of,
    ),
    _fused(
        name="fused-portable",
        summary="Triton: dequantizes weights in registers and multiplies tiles on tensor cores; weights take "
        "their scales in the dtype of x",
        why_unsupported=support.why_no_fused_kernel,
        why_slower=support.why_slower_portable_gemm,
        run=portable_gemm_launch.run,
        bind=portable_gemm_launch.bind,
        tile_space=portable_gemm_launch.TILE_SPACE,
        grouped=GroupedGemm(
            block_rows=(SMALL_BLOCK_ROWS + 1, MAX_BLOCK_ROWS),
            forced_rows=(2 * SMALL_BLOCK_ROWS, MAX_BLOCK_ROWS),
            tile=lambda expert, grouping: replace(
                portable_gemm_launch.TILE_SPACE.rule(_all_blocks(expert, grouping)), split_k=1
            ),
        ),
        representative=_by_rows(8, 16),
    ),
    _fused(
        name="dequantize",
        summary="Triton: writes the weight in the dtype of x, 2^27 at a time, for the library to multiply",
        why_unsupported=support.why_no_layout,
        why_slower=always,
        run=dequantize_launch.run,
        grad_x=dequantize_launch.launch_grad_x,
        bind_weight=dequantize_launch.prepare_weight,
        representative=_by_rows(8, 16),
    ),
)
