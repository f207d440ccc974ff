"""The fused kernels as rows of the kernel table, and how they launch."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import torch

from quantkit.errors import KernelError
from quantkit.kernels.gemm import support
from quantkit.kernels.gemm.bound import Bound
from quantkit.kernels.gemm.decode import decode_launch
from quantkit.kernels.gemm.dequantize import dequantize_launch
from quantkit.kernels.gemm.operands import Grouping, Operands, RoutedTokens
from quantkit.kernels.gemm.portable import portable_gemm_launch, portable_gemv_launch
from quantkit.kernels.gemm.small_m import small_m_launch
from quantkit.kernels.gemm.wgmma import wgmma_launch
from quantkit.kernels.jit.building import wait_for
from quantkit.kernels.layouts.fragment_layout import build, join, restore
from quantkit.kernels.moe.permute import SMALL_BLOCK_ROWS, usual_block_rows
from quantkit.kernels.problem import (
    Kernel,
    Layout,
    Outline,
    Problem,
    TileError,
    always,
    device_features,
)
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor


def build_fragments(weight: PackedTensor, dtype: torch.dtype, count: int = 1) -> tuple[torch.Tensor, ...]:
    """`layout.build` on the device that has the weight."""
    if weight.device.type != "cuda":
        return build(weight, dtype, count)
    with torch.cuda.device(weight.device):
        layout = build(weight, dtype, count)
    wait_for(weight.device)
    return layout


FRAGMENTS = Layout("fragments", build_fragments, join, restore)


_BEFORE_LOADING = "Set QUANTKIT_KERNEL, if at all, before the model is loaded."
#: Computes y of operands on a device with some features, in a tile where its row has tiles.
_Run = Callable[[Operands, Any, frozenset[str]], torch.Tensor]


def _launch(run: _Run) -> Callable[..., torch.Tensor]:
    """`run` as rows launch: with x's device the current one; `prepared` are those fields of `Operands`."""

    def launched(
        x: torch.Tensor,
        weight: PackedTensor | Outline,
        layout: tuple[torch.Tensor, ...],
        bias: torch.Tensor | None,
        tile: Any = None,
        **prepared: Any,
    ) -> torch.Tensor:
        if bias is not None:
            bias = bias.contiguous()
        operands = Operands(x, layout, bias, weight.scheme, weight.shape[0], **prepared)
        return _started(run, operands, tile)

    return launched


def _bind(bind: Callable[[Operands, Any, frozenset[str]], Bound]) -> Callable[..., Bound]:
    """`bind` as rows do it; see `Kernel.bind`."""

    def bound(
        x: torch.Tensor,
        weight: Outline,
        layout: tuple[torch.Tensor, ...],
        bias: torch.Tensor | None,
        tile: Any,
    ) -> Bound:
        operands = Operands(x, layout, bias, weight.scheme, weight.shape[0])
        return on_device(x.device, lambda features: bind(operands, tile, features))

    return bound


def _started(run: _Run, operands: Operands, tile: Any) -> torch.Tensor:
    device = operands.x.device
    try:
        return on_device(device, lambda features: run(operands, tile, features))
    except Exception as error:
        # Triton's, which is not imported before it is needed.
        if type(error).__name__ != "OutOfResources":
            raise
        raise TileError(
            f"the tile {tile} is too large for this GPU: {error}. If it is from a tile table (`quantkit "
            "doctor` shows which is used), delete that, or run `quantkit tune`."
        ) from error


_Result = TypeVar("_Result")


def on_device(device: torch.device, run: Callable[[frozenset[str]], _Result]) -> _Result:
    """`run` with what `device` can do, while it is the current one."""
    features = device_features(device)
    if device.index == torch.cuda.current_device():
        return run(features)
    with torch.cuda.device(device):
        return run(features)


_RUNS: dict[str, _Run] = {
    "fused-gemv": decode_launch.run,
    "fused-portable-gemv": portable_gemv_launch.run,
    "fused-small-m": small_m_launch.run,
    "fused-portable": portable_gemm_launch.run,
    "fused-wgmma": wgmma_launch.run,
    "dequantize": dequantize_launch.run,
}


def why_not_groupable(problem: Problem) -> str | None:
    """Why no grouped kernels multiply with experts that have such weights; see `grouped`."""
    if problem.device != "cuda":
        return f"they run on cuda, the tensors are on {problem.device}"
    if problem.scheme.column_scale:
        return "each expert scales the columns of x by factors of its own"
    if (reason := support.why_no_fused_kernel(problem)) is not None:
        return reason
    if support.looked_up(problem):
        return f"they would look up every value of {problem.scheme.format.name} in memory"
    return None


def expert_block_rows(routed: int, experts: int, single_row_ratio: int, forced: str = "") -> int:
    """`usual_block_rows`, with as many as the kernels of a forced row take."""
    usual = usual_block_rows(routed, experts, single_row_ratio)
    if forced == "fused-gemv" and usual == 1:
        return usual
    return {"": usual, "fused-portable": max(usual, 2 * SMALL_BLOCK_ROWS)}.get(forced, SMALL_BLOCK_ROWS)


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
    """The row that multiplies m pairs with their experts, how it groups them, and the tile of the rules.

    `problem` is that of one matrix; `single_row_ratio` is that of `usual_block_rows`. Tile tables have no
    part in it: they were measured with one weight.
    """
    size = expert_block_rows(problem.m, experts, single_row_ratio, forced)
    grouping = Grouping(problem.m, experts, size, matrices, top_k, chained)
    expert = replace(problem, m=size, n=problem.n * matrices)
    # All segments keep processors busy together.
    every = replace(expert, n=expert.n * grouping.expert_blocks)
    if size > SMALL_BLOCK_ROWS:
        return "fused-portable", grouping, replace(portable_gemm_launch.TILING.rule(every), split_k=1)
    if forced == "fused-portable-gemv" or not (forced or single_row_ratio):
        return "fused-portable-gemv", grouping, portable_gemv_launch.TILING.rule(every)
    row = forced or "fused-small-m"
    tile: Any = None
    if forced == "fused-gemv" or (not forced and size == 1):
        tile = decode_launch.experts_tile(expert, grouping)
    if tile is not None and not forced:
        # What is spread is for kernels that have x in shared memory.
        return "fused-gemv", grouping, tile
    reason = support.why_not_experts(row, problem, matrices, size)
    if reason is None and forced == "fused-gemv" and tile is None:
        reason = f"x and sums of {size} pairs take more shared memory than there is"
    if reason is not None:
        raise KernelError(f"{row} cannot run experts of {problem}: {reason}. {_BEFORE_LOADING}")
    return row, grouping, tile or small_m_launch.experts_tile(expert, grouping.usual)


def why_no_gated_experts(row: str, matrices: int) -> str | None:
    """Why the kernel of a row does not gate y of experts with so many matrices."""
    if row not in ("fused-gemv", "fused-small-m"):
        return "it gives y as it is"
    if matrices != 2:
        return f"experts have one matrix that gates and one that is gated, not {matrices}"
    return None


def grouped(
    row: str,
    x: torch.Tensor,
    layout: tuple[torch.Tensor, ...],
    scheme: Scheme,
    n: int,
    routed: RoutedTokens,
    tile: Any,
    gate: str = "",
) -> torch.Tensor:
    """y [P, matrices * n] of pairs, by the kernel of `row`; those without an expert are not written.

    `layout` is from `stacks.stacked`. With the kind of a `gate`, y [P, n] are the gated columns, where
    `why_no_gated_experts` has no reason. Nothing waits for the device.
    """
    return _started(_RUNS[row], Operands(x, layout, None, scheme, n, routed, gate=gate), tile)


def compile_kernels(row: str, problem: Problem, layout: tuple[torch.Tensor, ...], tile: Any) -> None:
    """Compile what `row` launches for `problem`, into Triton's cache, without a GPU to run it.

    `layout` has the dtypes of the weight's, on any device. The target is that of Triton's active driver.
    """
    x = torch.empty(problem.m, problem.k, dtype=problem.dtype, device="meta")
    parts = tuple(part.to("meta") for part in layout)
    operands = Operands(x, parts, None, problem.scheme, problem.n, gpu=problem.gpu)
    _RUNS[row](operands, tile, problem.features)


FUSED_KERNELS = (
    Kernel(
        name="fused-gemv",
        summary="Gluon: codes stream through registers past an x in shared memory, for up to 16 rows of x; "
        "integers of up to 8 bits are multiplied as such, with digits of x",
        devices=("cuda",),
        supports=support.why_unsupported_decode,
        pays=support.why_slower_decode,
        layout=FRAGMENTS,
        launch=_launch(decode_launch.run),
        bind=_bind(decode_launch.bind),
        tiling=decode_launch.TILING,
        no_norm=decode_launch.why_no_norm,
        no_gate=decode_launch.why_no_gate,
    ),
    Kernel(
        name="fused-portable-gemv",
        summary="Triton: reads every packed byte once and multiplies in registers, for a few rows of x",
        devices=("cuda",),
        supports=support.why_unsupported_portable_gemv,
        pays=support.why_slower_portable_gemv,
        layout=FRAGMENTS,
        launch=_launch(portable_gemv_launch.run),
        bind=_bind(portable_gemv_launch.bind),
        tiling=portable_gemv_launch.TILING,
    ),
    Kernel(
        name="fused-small-m",
        summary="Gluon: warps decode rows of their own and multiply with one x in shared memory, for up to "
        "32 rows of x",
        devices=("cuda",),
        supports=support.why_unsupported_small_m,
        pays=support.why_slower_small_m,
        layout=FRAGMENTS,
        launch=_launch(small_m_launch.run),
        bind=_bind(small_m_launch.bind),
        tiling=small_m_launch.TILING,
        no_gate=small_m_launch.why_no_gate,
        no_norm=small_m_launch.why_no_norm,
    ),
    Kernel(
        name="fused-wgmma",
        summary="Gluon, for Hopper: decodes weights in registers while other warps copy and multiply",
        devices=("cuda",),
        supports=support.why_unsupported_wgmma,
        pays=support.why_slower_wgmma,
        layout=FRAGMENTS,
        launch=_launch(wgmma_launch.run),
        tiling=wgmma_launch.TILING,
    ),
    Kernel(
        name="fused-portable",
        summary="Triton: decodes weights in registers and multiplies tiles on tensor cores; weights take "
        "their scales in the dtype of x",
        devices=("cuda",),
        supports=support.why_no_fused_kernel,
        pays=support.why_slower_portable_gemm,
        layout=FRAGMENTS,
        launch=_launch(portable_gemm_launch.run),
        bind=_bind(portable_gemm_launch.bind),
        tiling=portable_gemm_launch.TILING,
    ),
    Kernel(
        name="dequantize",
        summary="Triton: writes the weight in the dtype of x, 2^27 at a time, for the library to multiply",
        devices=("cuda",),
        supports=support.why_no_layout,
        pays=always,
        layout=FRAGMENTS,
        launch=_launch(dequantize_launch.run),
    ),
)
