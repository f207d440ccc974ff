"""The fused kernels as rows of the kernel table: what they take, when they pay, and how they launch.

Where they pay was measured on one H200 (docs/kernels-measured.md); other GPUs use the same rules.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import torch

from quantkit.kernels.building import wait_for
from quantkit.kernels.fused.expressions import portable
from quantkit.kernels.fused.launch import dense, hopper, narrow, skinny, stream, tiled
from quantkit.kernels.fused.launch.gpu import FEW_ROWS, has_few_rows, processors
from quantkit.kernels.fused.launch.operands import Grouping, Operands, Pairs, shape_of, table_bytes
from quantkit.kernels.fused.launch.pairs import SKINNY_SEGMENT, segment_rows
from quantkit.kernels.fused.layout import build, join, restore
from quantkit.kernels.fused.ptx import expression
from quantkit.kernels.problem import (
    KernelRow,
    Layout,
    Outline,
    Problem,
    TileError,
    Verdict,
    always,
    device_features,
    one_plane,
)
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor

#: The most rows of x that `fused-skinny` takes.
SKINNY_ROWS = 32
#: The most scales of a weight, with their padding: they alone are addressed in 32 bits.
MOST_SCALES = 1 << 30
#: Weights of so many numbers or fewer have no use for the tiles of `fused-hopper`, as `quantkit tune` found.
SMALL_WEIGHT = 1 << 23
#: And those of so many, or fewer, mostly have none from so many rows of x on.
MIDDLE_WEIGHT, LONG_PROMPT = 1 << 25, 2048
#: More columns than this are many for `fused-narrow`. Of the least rows of a weight, or fewer, it has too few
#: row tiles, and for more than the most tiles are faster, on an H200; few rows are those of `has_few_rows`.
MANY_COLUMNS, LEAST_ROWS, MOST_ROWS = 8192, 2048, 32768
#: With up to 8 rows of x `fused-stream` is as fast as `fused-narrow` for so many bits, or where warps have at
#: most so many columns of all their row tiles: the former number if its idleness is more than that, the
#: latter if not (115 in docs/kernels-log.md).
STREAMED_BITS, UNEVEN, STREAMED_COLUMNS = (2, 5, 7), 1.2, (512, 768)
#: The part of its last round of programs from which on `fused-tiled` is as fast as `fused-hopper` (115).
FULL = 0.8


def _build(weight: PackedTensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    if weight.device.type != "cuda":
        return build(weight, dtype)
    with torch.cuda.device(weight.device):
        layout = build(weight, dtype)
    wait_for(weight.device)
    return layout


FRAGMENTS = Layout("fragments", _build, join, restore)


def _unpackable(problem: Problem) -> str | None:
    """Why the fragment layout cannot hold a weight."""
    if "triton" not in problem.features:
        return "Triton is not installed"
    if problem.scheme.planes > 1:
        return one_plane(problem)
    size = problem.scheme.group_columns(problem.k)
    if size not in (16, problem.k) and size % 32:
        return f"it takes groups of 16 or of multiples of 32 columns, not of {size}"
    scales = problem.n * -(-problem.k // size)
    if scales > MOST_SCALES:
        return f"it takes up to 2^30 scales of a weight, not {scales}"
    return None


def _unmultipliable(problem: Problem) -> str | None:
    if problem.dtype == torch.float32:
        return "it multiplies bfloat16 or float16 activations; cast x to one of them"
    return _unpackable(problem)


def _skinny_supports(problem: Problem) -> str | None:
    if problem.m > SKINNY_ROWS:
        return f"it takes up to {SKINNY_ROWS} rows of x, not {problem.m}"
    return _unmultipliable(problem)


def _looked_up(problem: Problem) -> bool:
    """Whether the values of a format are looked up in memory rather than computed."""
    if "ptx" in problem.features:
        return expression(problem.scheme.format, str(problem.dtype).removeprefix("torch.")) is None
    return portable(problem.scheme.format)[0].looked_up


def _shares_x(most: int, why_no_tile: Verdict) -> Verdict:
    """What a row says whose programs have up to so many rows of x in shared memory."""

    def supports(problem: Problem) -> str | None:
        if problem.m > most:
            return f"it takes up to {most} rows of x, not {problem.m}"
        if (reason := _unmultipliable(problem)) is not None:
            return reason
        if not {"ptx", "gluon"} <= problem.features:
            return "it is for NVIDIA GPUs from compute capability 8.0 on, and the Gluon of Triton 3.6"
        if problem.k % 8:
            return f"it loads 16 bytes of x at a time, of whose {problem.k} columns some begin between them"
        if _looked_up(problem):
            return f"it would look up every value of {problem.scheme.format.name} in memory"
        return why_no_tile(problem)

    return supports


def _streams(problem: Problem) -> str | None:
    """Why `fused-stream` is as soon as `fused-narrow` with up to 8 rows of x; None where it is not, as where
    it has no room for x and sums.
    """
    if _stream_supports(problem) is not None:
        return None
    tile, bits = stream.TILING.rule(problem), shape_of(problem).bits
    uneven = stream.idleness(problem, tile) > UNEVEN
    most = STREAMED_COLUMNS[0 if uneven else 1]
    reasons = (
        (problem.m <= 2, "up to M=2 `fused-stream` is faster"),
        (
            problem.m <= 4 and not (uneven and problem.k > MANY_COLUMNS),
            "up to M=4 it pays for many columns that `fused-stream` divides unevenly",
        ),
        (
            problem.m > 4 and bits in STREAMED_BITS,
            f"up to M=8 `fused-stream` is as fast for {bits} bits",
        ),
        (
            problem.m > 4 and stream.columns_of_warp(problem, tile) <= most,
            f"up to M=8 `fused-stream` is as fast where warps have up to {most} columns",
        ),
    )
    return next((reason for loses, reason in reasons if loses), None)


def _shared_by_warps(problem: Problem) -> bool:
    """Whether `fused-narrow` can run, and pays by its rules."""
    return _narrow_supports(problem) is None and _narrow_pays(problem) is None


def _stream_pays(problem: Problem) -> str | None:
    small = has_few_rows(problem.n, processors(problem), LEAST_ROWS) and problem.k <= skinny.LONG_ROWS
    if problem.m > 8 and not small:
        return "from M=9 on each program copies so much x that it is faster only on small weights"
    if _shared_by_warps(problem):
        return "warps of `fused-narrow` share x, where those of a program copy all of it"
    return None


_stream_supports = _shares_x(stream.MOST_ROWS, stream.why_no_tile)
_narrow_supports = _shares_x(narrow.MOST_ROWS, narrow.why_no_tile)


def _narrow_pays(problem: Problem) -> str | None:
    least, few, most = (
        has_few_rows(problem.n, processors(problem), rows) for rows in (LEAST_ROWS, FEW_ROWS, MOST_ROWS)
    )
    reasons = (
        (least, f"it has too few row tiles of {problem.n} rows"),
        (
            problem.m > 8 and not most,
            "each multiprocessor would read all of x for many rows, as tiles do not",
        ),
        (
            problem.m > 16 and not (few and problem.k <= MANY_COLUMNS),
            "from M=17 on each warp would read much of x from shared memory",
        ),
    )
    reason = next((reason for loses, reason in reasons if loses), None)
    return _streams(problem) if reason is None and problem.m <= 8 else reason


def _skinny_pays(problem: Problem) -> str | None:
    if "ptx" not in problem.features and _looked_up(problem):
        return f"without PTX it would look up every value of {problem.scheme.format.name} in memory"
    limit = 16 if has_few_rows(problem.n, processors(problem)) and problem.k <= skinny.LONG_ROWS else 8
    if problem.m > limit:
        return f"tensor cores are busier in tiles from M={limit + 1} on"
    if _shared_by_warps(problem):
        return "warps of `fused-narrow` share x, where these each load it"
    return None


def _hopper_supports(problem: Problem) -> str | None:
    if (reason := _unmultipliable(problem)) is not None:
        return reason
    if not {"wgmma", "gluon"} <= problem.features:
        return "it is for compute capability 9, and the Gluon of Triton 3.6"
    if expression(problem.scheme.format, str(problem.dtype).removeprefix("torch.")) is None:
        return f"it would look up every value of {problem.scheme.format.name} in memory"
    return None


def _fills_rounds(problem: Problem) -> bool:
    """Whether `fused-tiled`, of which a multiprocessor runs two programs, is hardly ever idle at its end, and
    decodes as fast as `fused-hopper` does.
    """
    shape = shape_of(problem)
    slow = shape.span > 128 or shape.group < 64 or table_bytes(problem.scheme, problem.dtype) > 0
    if slow or has_few_rows(problem.n, processors(problem)):
        return False
    tile = tiled.TILING.rule(problem)
    rounds = tiled.programs(tile, shape, problem.m) / (2 * processors(problem))
    return tile.split == 1 and rounds > FULL * math.ceil(rounds)


def _hopper_pays(problem: Problem) -> str | None:
    shape = shape_of(problem)
    if problem.m <= 32:
        return "smaller tiles are faster up to M=32"
    if problem.m <= 64 and _fills_rounds(problem):
        return "up to M=64 tiles of `fused-tiled` are as fast where they leave no multiprocessor idle"
    if problem.n * problem.k <= SMALL_WEIGHT:
        return f"it has too few tiles of a weight of {problem.n} x {problem.k}"
    if problem.m >= LONG_PROMPT and problem.n * problem.k <= MIDDLE_WEIGHT:
        return (
            f"dequantizing and the library's product are mostly faster from M={LONG_PROMPT} on at such a size"
        )
    if problem.m > 1024 and shape.group == 16:
        return "dequantizing and the library's product are faster from M=1025 on for groups of 16"
    return None


def _tiled_pays(problem: Problem) -> str | None:
    shape = shape_of(problem)
    if _looked_up(problem):
        return f"it would look up every value of {problem.scheme.format.name} once for each tile of x"
    if shape.span > 128:
        limit = 128
    elif "wgmma" in problem.features:
        limit = 256 if shape.on_weights else 1024
    else:
        limit = 256 if has_few_rows(problem.n, processors(problem)) else 512
    if problem.m <= limit:
        return None
    return f"dequantizing and the library's product are faster from M={limit + 1} on"


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
    "fused-stream": stream.run,
    "fused-skinny": skinny.run,
    "fused-narrow": narrow.run,
    "fused-tiled": tiled.run,
    "fused-hopper": hopper.run,
    "dequantize": dense.run,
}


def ungroupable(problem: Problem) -> str | None:
    """Why no grouped kernels multiply with experts that have such weights; see `grouped`."""
    if problem.device != "cuda":
        return f"they run on cuda, the tensors are on {problem.device}"
    if problem.scheme.column_scale:
        return "each expert scales the columns of x by factors of its own"
    if (reason := _unmultipliable(problem)) is not None:
        return reason
    if _looked_up(problem):
        return f"they would look up every value of {problem.scheme.format.name} in memory"
    return None


def stacked(weights: Iterable[PackedTensor], count: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The fragment layouts of `count` weights of one scheme and shape, one after the other in each part."""
    stacks: tuple[torch.Tensor, ...] = ()
    for index, weight in enumerate(weights):
        layout = FRAGMENTS.build(weight, dtype)
        stacks = stacks or tuple(part.new_empty(count, *part.shape) for part in layout)
        for stack, part in zip(stacks, layout, strict=True):
            stack[index] = part
    wait_for(stacks[0].device)
    return stacks


def pairs_of_segment(pairs: int, experts: int, forced: str = "") -> int:
    """`segment_rows`, with as many as the kernels of a forced row take."""
    usual = segment_rows(pairs, experts)
    return {"fused-skinny": SKINNY_SEGMENT, "fused-tiled": max(usual, 2 * SKINNY_SEGMENT)}.get(forced, usual)


@lru_cache(maxsize=4096)
def group(
    problem: Problem, experts: int, matrices: int, slots: int, forced: str = ""
) -> tuple[str, Grouping, Any]:
    """The row that multiplies m pairs with their experts, how it groups them, and the tile of the rules.

    `problem` is that of one matrix. Tile tables have no part in it: they were measured with one weight.
    """
    size = pairs_of_segment(problem.m, experts, forced)
    grouping = Grouping(problem.m, experts, size, matrices, slots)
    # All segments keep processors busy together.
    asked = replace(problem, m=size, n=problem.n * matrices * grouping.segments)
    if size == SKINNY_SEGMENT:
        return "fused-skinny", grouping, skinny.TILING.rule(asked)
    return "fused-tiled", grouping, replace(tiled.TILING.rule(asked), split=1)


def grouped(
    row: str,
    x: torch.Tensor,
    layout: tuple[torch.Tensor, ...],
    scheme: Scheme,
    n: int,
    pairs: Pairs,
    tile: Any,
) -> torch.Tensor:
    """y [P, matrices * n] of pairs, by the kernel of `row`; those without an expert are not written.

    `layout` is from `stacked`. Nothing waits for the device.
    """
    return _started(_RUNS[row], Operands(x, layout, None, scheme, n, pairs), tile)


def compile_kernels(row: str, problem: Problem, layout: tuple[torch.Tensor, ...], tile: Any) -> None:
    """Compile what `row` launches for `problem`, into Triton's cache, without a GPU to run it.

    `layout` has the dtypes of the weight's, on any device. The target is that of Triton's active driver.
    """
    x = torch.empty(problem.m, problem.k, dtype=problem.dtype, device="meta")
    parts = tuple(part.to("meta") for part in layout)
    operands = Operands(x, parts, None, problem.scheme, problem.n, processors=processors(problem))
    _RUNS[row](operands, tile, problem.features)


FUSED_ROWS = (
    KernelRow(
        name="fused-stream",
        summary="Gluon: codes stream through registers past an x in shared memory, for up to 16 rows of x; "
        "integers of up to 8 bits are multiplied as such, with digits of x",
        devices=("cuda",),
        supports=_stream_supports,
        pays=_stream_pays,
        layout=FRAGMENTS,
        launch=_launch(stream.run),
        tiling=stream.TILING,
        no_norm=stream.why_no_norm,
        no_gate=stream.why_no_gate,
    ),
    KernelRow(
        name="fused-skinny",
        summary="Triton: reads every packed byte once and multiplies in registers, for a few rows of x",
        devices=("cuda",),
        supports=_skinny_supports,
        pays=_skinny_pays,
        layout=FRAGMENTS,
        launch=_launch(skinny.run),
        tiling=skinny.TILING,
    ),
    KernelRow(
        name="fused-narrow",
        summary="Gluon: warps decode rows of their own and multiply with one x in shared memory, for up to "
        "32 rows of x",
        devices=("cuda",),
        supports=_narrow_supports,
        pays=_narrow_pays,
        layout=FRAGMENTS,
        launch=_launch(narrow.run),
        tiling=narrow.TILING,
        no_gate=narrow.why_no_gate,
        no_norm=narrow.why_no_norm,
    ),
    KernelRow(
        name="fused-hopper",
        summary="Gluon, for Hopper: decodes weights in registers while other warps copy and multiply",
        devices=("cuda",),
        supports=_hopper_supports,
        pays=_hopper_pays,
        layout=FRAGMENTS,
        launch=_launch(hopper.run),
        tiling=hopper.TILING,
    ),
    KernelRow(
        name="fused-tiled",
        summary="Triton: decodes weights in registers and multiplies tiles on tensor cores; weights take "
        "their scales in the dtype of x",
        devices=("cuda",),
        supports=_unmultipliable,
        pays=_tiled_pays,
        layout=FRAGMENTS,
        launch=_launch(tiled.run),
        tiling=tiled.TILING,
    ),
    KernelRow(
        name="dequantize",
        summary="Triton: writes the weight in the dtype of x, 2^27 at a time, for the library to multiply",
        devices=("cuda",),
        supports=_unpackable,
        pays=always,
        layout=FRAGMENTS,
        launch=_launch(dense.run),
    ),
)
