"""Split-K reduction: add the partial sums of several programs and apply the epilogue."""
# mypy: ignore-errors

import triton
import triton.language as tl

from quantkit.kernels.layouts.dequant_blocks import (
    apply_scale_and_bias,
    begin_rms_norm,
    load_expert_block,
    output_rows,
)
from quantkit.kernels.ops.activation_kernel import gated


@triton.jit(do_not_specialize=["M"])
def split_k_reduce(
    sums, scale, factor, bias, y, other, norm, total, squares, M, N, order, expert_blocks,
    GROUPS: tl.constexpr, SCALE: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, SPLIT_K: tl.constexpr, MR: tl.constexpr, NORM_OFFSET: tl.constexpr, GATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of split-K and write y [M, N] = sums * scale / factor + bias.

    The GEMM before divided the columns K into SPLIT_K splits. Each of its programs stored float32 sums of one
    split for a row tile (16 rows of W [N, K]) and BM rows of x. A program of this kernel has a row tile and
    MR of the rows. The grid is (row tiles of y, M / MR, expert blocks or 1).

        sums             float32 [expert blocks or 1, SPLIT_K, row tiles, BM, 16]
        scale            [N / 16, 8, 2], one per output, encoded as SCALE; applied only if GROUPS is 1
        GROUPS           scales per row of W; if more than 1, `sums` already include them
        factor           float32 [1]: sums are divided by it if HAS_FACTOR
        bias             [N], added if HAS_BIAS
        GATE             activation f: y [M, N / 2] = f(first half of outputs) * second half; "" for no gate
        order            int32 [routed tokens]: row of y of each; None without experts
        expert_blocks    int32 [blocks, 3]: expert, first index in `order`, number of routed tokens; or None
        PDL              True if launched with programmatic dependent launch: waits for the kernel before it

    If NORM_OFFSET is a number, the kernel begins an RMSNorm (`problem.Normed`). It takes the residual `other`
    [M, N] and the weights `norm` [N], and writes three outputs:

        total            [M, N] = sums * scale / factor + bias + other
        y                [M, N] = total * (norm + NORM_OFFSET)
        squares          float32 [M, N / 16]: total^2 summed over each 16 outputs

    Splits are added in order, so results are the same every run.
    """
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    outputs = N
    if GATE != "":
        tiles *= 2
        outputs = N // 2
    if expert_blocks is not None:
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        _, its_first, M = load_expert_block(expert_blocks, tl.program_id(2))
        if M == 0:
            return
        order += its_first
        sums += tl.program_id(2).to(tl.int64) * (SPLIT_K * BM * 16) * tiles
    rows = tile * 16 + tl.arange(0, 16)
    m = tl.program_id(1) * MR + tl.arange(0, MR)
    inside = (rows < outputs)[:, None] & (m < M)[None, :]
    at = output_rows(order, m, M)[None, :] * outputs + rows[:, None]
    if NORM_OFFSET is not None:
        weights = tl.load(norm + rows, mask=rows < N, other=0.0)
    if PDL and expert_blocks is None:
        # Kernels before this one write `sums` and `other`.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if NORM_OFFSET is not None:
        more = tl.load(other + at, mask=inside, other=0.0)
    after = (scale, factor, bias, N)
    out = _sum_splits(sums, tile, tiles, m, after, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS, BM, SPLIT_K)
    out = out.to(y.dtype.element_ty)
    if GATE != "":
        second = tile + tiles // 2
        up = _sum_splits(sums, second, tiles, m, after, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS, BM, SPLIT_K)
        out = gated(out, up.to(out.dtype), GATE)
    if NORM_OFFSET is not None:
        whole, out = begin_rms_norm(out, more, weights[:, None], NORM_OFFSET)
        tl.store(total + at, whole, mask=inside)
        wide = tl.where(inside, whole.to(tl.float32), 0.0)
        tl.store(squares + m * tiles + tile, tl.sum(wide * wide, 0), mask=m < M)
    tl.store(y + at, out, mask=inside)


@triton.jit
def _sum_splits(
    sums, tile, tiles, m, after, GROUPS: tl.constexpr, SCALE: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of all splits of a row tile, apply scale and bias: float32 [16, rows of x].

    sums           float32 [SPLIT_K, tiles, BM, 16]: 16 rows of W, BM rows of x
    tile, tiles    index of the row tile (16 rows of W), and the number of all row tiles
    m              int32 [rows of x]: indices among the BM rows of x
    after          (scale, factor, bias, N), applied by `apply_scale_and_bias`
    GROUPS         scales per row of W; if 1, the sums are multiplied by the scale, encoded as SCALE
    HAS_FACTOR     True to divide by the factor in `after`
    HAS_BIAS       True to add the bias in `after`
    """
    first = sums + tile.to(tl.int64) * (BM * 16) + m[None, :] * 16 + tl.arange(0, 16)[:, None]
    out = tl.load(first)
    for split in tl.static_range(1, SPLIT_K):
        out += tl.load(first + tiles.to(tl.int64) * (split * BM * 16))
    rows = (tile * 16 + tl.arange(0, 16))[:, None]
    scale, factor, bias, N = after
    return apply_scale_and_bias(out, rows, scale, factor, bias, N, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS)
