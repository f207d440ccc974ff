"""Rules of which problems the fused kernels support, and of where another kernel is at least as fast.

The rules were measured on an H200 and an H100. Other GPUs use the same rules, scaled by their
multiprocessors. A measured tile table takes precedence.
"""

import math
from collections.abc import Iterable

import torch

from quantkit.kernels.gemm.decode import decode_launch
from quantkit.kernels.gemm.gpu_limits import FEW_ROWS, has_few_rows, processors
from quantkit.kernels.gemm.operands import shape_of, table_bytes
from quantkit.kernels.gemm.portable import portable_gemm_launch, portable_gemv_launch
from quantkit.kernels.gemm.small_m import small_m_launch, small_m_tiles
from quantkit.kernels.gemm.wgmma.wgmma_tiles import FEW_OF_X
from quantkit.kernels.gemm.wgmma_8bit import wgmma_8bit_launch
from quantkit.kernels.layouts.dequant_expressions import portable
from quantkit.kernels.layouts.dequant_ptx import expression
from quantkit.kernels.library_gemm import BLOCK, MULTIPLE_OF_K
from quantkit.kernels.ops.quantize_x import DTYPES, why_not_quantized
from quantkit.kernels.problem import Problem, Verdict, always, one_plane

#: Most rows of x of `fused-portable-gemv`.
GEMV_ROWS = 32
#: Most scales of a weight, padding included, because offsets have 32 bits.
MOST_SCALES = 1 << 30
#: Most weights N * K with too few tiles for `fused-wgmma`.
SMALL_WEIGHT = 1 << 23
#: Limits of `fused-small-m`: largest K with more than 16 rows of x without `wgmma`; largest N with too few
#: row tiles; smallest N for which larger tiles are faster. Both N are for an H200, see `has_few_rows`.
MANY_COLUMNS, LEAST_ROWS, MOST_ROWS = 8192, 2048, 32768
#: Most weights N * K of int5 or int7 for which `fused-small-m` is faster than `fused-wgmma` with more than 16
#: rows of x; and of int7 with 9 to 16 (H100, 28672 x 4096, M = 16: 60.3 us against 45.8 us).
MOST_WIDE, MOST_INT7 = 1 << 24, 1 << 26
#: Bits of codes for which `fused-gemv` is as fast as `fused-small-m` with 5 to 8 rows of x (H100, 10 weights
#: of 2560 to 27648 rows: with 8 rows of x the rules take 1.02 times the best tile timed).
DECODE_BITS = (2, 5, 7)
#: Rows of x, and weights N * K, from which on `scaled-mm` is faster than `fused-wgmma-8bit` (H200, us of
#: both: 28672 x 4096, M = 1024: 273 and 290, 4096: 864 and 1127; 4096 x 14336, M = 1024: 174 and 168, 2048:
#: 315 and 323; 4096 x 4096, M = 2048: 90 and 94). Smaller weights were not timed.
UNPACKED_ROWS, UNPACKED_WEIGHTS = 2048, 1 << 24
#: Least `imbalance` at which `fused-gemv` counts as dividing a weight unevenly.
UNEVEN = 1.2
#: Most columns per warp of `fused-gemv`, over all its row tiles, for which it is as fast with 5 to 8 rows of
#: x: for an even division of the weight, and for an uneven one.
EVEN_COLUMNS, UNEVEN_COLUMNS = 768, 512
#: Least filled part of the last wave for which `fused-portable` is as fast as `fused-wgmma` (H100, 64 rows of
#: x, 27648 x 5120, 28672 x 3584 and 28672 x 4096: 0.86 to 1.00 of its time).
FULL = 0.8


def _first(reasons: Iterable[tuple[bool, str]]) -> str | None:
    """Return the text of the first pair (applies, text) that applies; None if none does."""
    return next((text for applies, text in reasons if applies), None)


def why_no_layout(problem: Problem) -> str | None:
    """Return why a weight cannot be in the fragment layout; None if it can.

    That layout has codes in the order of `mma` operands.
    """
    if "triton" not in problem.features:
        return "Triton is not installed"
    if problem.scheme.planes > 1:
        return one_plane(problem)
    if (reason := problem.scheme.zero_point_type.why_not_fused) is not None:
        return reason
    size = problem.scheme.group_columns(problem.k)
    if size not in (16, problem.k) and size % 32:
        return f"it takes groups of 16 or of multiples of 32 columns, not of {size}"
    scales = problem.n * -(-problem.k // size)
    if scales > MOST_SCALES:
        return f"it takes up to 2^30 scales of a weight, not {scales}"
    return None


def why_no_fused_kernel(problem: Problem) -> str | None:
    """Return why no kernel that reads the fragment layout can compute a problem; None if one can."""
    if problem.dtype == torch.float32:
        return "it multiplies bfloat16 or float16 activations; cast x to one of them"
    return why_no_layout(problem)


def why_unsupported_portable_gemv(problem: Problem) -> str | None:
    """Return why `fused-portable-gemv` cannot compute a problem; None if it can."""
    if problem.m > GEMV_ROWS:
        return f"it takes up to {GEMV_ROWS} rows of x, not {problem.m}"
    return why_no_fused_kernel(problem)


def looked_up(problem: Problem) -> bool:
    """Return True if the value of each code must be loaded from memory, because it is not computed.

    This is for kernels without a lookup table in shared memory.
    """
    if "ptx" in problem.features:
        return expression(problem.scheme.format, str(problem.dtype).removeprefix("torch.")) is None
    return portable(problem.scheme.format)[0].looked_up


def _stages_x(most: int, why_no_tile: Verdict) -> Verdict:
    """Return a function that says why a kernel with x in shared memory cannot compute a problem, or None.

    The kernel takes up to `most` rows of x. `why_no_tile` says why no tile (launch configuration) fits a
    problem.
    """

    def why_unsupported(problem: Problem) -> str | None:
        if problem.m > most:
            return f"it takes up to {most} rows of x, not {problem.m}"
        if (reason := why_no_fused_kernel(problem)) is not None:
            return reason
        if not {"ptx", "gluon"} <= problem.features:
            return "it is for NVIDIA GPUs from compute capability 8.0 on, and a Triton whose Gluon compiles"
        if problem.k % 8:
            return f"it loads 16 bytes of x at a time, and {problem.k} columns are no multiple of 8"

        if looked_up(problem):
            return f"it would look up every value of {problem.scheme.format.name} in memory"
        return why_no_tile(problem)

    return why_unsupported


def _why_decode_is_as_fast(problem: Problem) -> str | None:
    """Return why `fused-gemv` is as fast as `fused-small-m` for a problem of up to 8 rows of x, or None.

    None is returned if `fused-gemv` is slower or cannot run. It is also returned if the shared memory of a
    multiprocessor has no room for 16 warps of `fused-gemv`.
    """
    if problem.m <= 2:
        return "up to M=2 it was not seen to be faster"
    if why_unsupported_decode(problem) is not None:
        return None
    tile, bits = decode_launch.TILE_SPACE.rule(problem), problem.scheme.format.bits
    has_wide_codes = small_m_tiles.has_wide_codes(shape_of(problem))
    if tile.warps * tile.occupancy < decode_launch.RESIDENT_WARPS and not has_wide_codes:
        return None
    uneven = decode_launch.imbalance(problem, tile) > UNEVEN
    most = UNEVEN_COLUMNS if uneven else EVEN_COLUMNS
    reasons = (
        (
            problem.m <= 4 and not (uneven and problem.k > MANY_COLUMNS),
            "up to M=4 it pays for many columns that `fused-gemv` divides unevenly",
        ),
        (
            problem.m > 4 and bits in DECODE_BITS,
            f"up to M=8 `fused-gemv` is as fast for {bits} bits",
        ),
        (
            problem.m > 4 and decode_launch.columns_per_warp(problem, tile) <= most,
            f"up to M=8 `fused-gemv` is as fast where warps have up to {most} columns",
        ),
    )
    return _first(reasons)


def _small_m_is_faster(problem: Problem) -> bool:
    """Return True if `fused-small-m` supports a problem and no other kernel is as fast by its rules."""
    return why_unsupported_small_m(problem) is None and why_slower_small_m(problem) is None


def why_slower_decode(problem: Problem) -> str | None:
    """Return why another kernel is at least as fast as `fused-gemv` for a problem; None if none is."""
    small = (
        has_few_rows(problem.n, processors(problem), LEAST_ROWS)
        and problem.k <= portable_gemv_launch.LONG_ROWS
    )
    if problem.m > 8 and not small:
        return "from M=9 on each program copies so much x that it is faster only on small weights"
    if _small_m_is_faster(problem):
        return "warps of `fused-small-m` share x, where those of a program copy all of it"
    return None


why_unsupported_decode = _stages_x(decode_launch.MOST_ROWS, decode_launch.why_no_tile)
why_unsupported_small_m = _stages_x(small_m_tiles.MOST_ROWS, small_m_launch.why_no_tile)
#: `fused-gemv` for expert blocks. `decode_launch.experts_tile` checks if x fits.
why_unsupported_decode_experts = _stages_x(decode_launch.MOST_ROWS, always)


def _spills_codes(problem: Problem) -> bool:
    """Return True if `fused-small-m` lacks registers for int5 or int7 codes where `fused-wgmma` does not."""
    if problem.m <= 8 or "wgmma" not in problem.features:
        return False
    most = MOST_WIDE if problem.m > 16 else MOST_INT7 if problem.scheme.format.bits > 6 else math.inf
    return problem.n * problem.k > most and small_m_tiles.has_wide_codes(shape_of(problem))


def why_slower_small_m(problem: Problem) -> str | None:
    """Return why another kernel is at least as fast as `fused-small-m` for a problem; None if none is."""
    least, few, most = (
        has_few_rows(problem.n, processors(problem), rows) for rows in (LEAST_ROWS, FEW_ROWS, MOST_ROWS)
    )
    has_wgmma = "wgmma" in problem.features
    # Other kernels have too few tiles for so few rows too, except `fused-gemv`, if x fits in shared memory.
    fewest, left = (5, 32) if has_wgmma else (9, 16)
    is_left = fewest <= problem.m <= left and why_unsupported_decode(problem) is not None
    reasons = (
        (least and not is_left, f"it has too few row tiles of {problem.n} rows"),
        (
            problem.m > 8 and not most and not (has_wgmma and _dequantizes_slowly(problem)),
            "each multiprocessor would read all of x for many rows, as tiles do not",
        ),
        (
            problem.m > 16 and has_wgmma and not few,
            "from M=17 on tiles of more rows of the weight are faster where there are many",
        ),
        (
            problem.m > 16 and not has_wgmma and not (few and problem.k <= MANY_COLUMNS),
            "from M=17 on each warp would read much of x from shared memory",
        ),
        (_spills_codes(problem), f"it lacks registers for codes of {problem.scheme.format.bits} bits"),
    )
    reason = _first(reasons)
    return _why_decode_is_as_fast(problem) if reason is None and problem.m <= 8 else reason


def why_slower_portable_gemv(problem: Problem) -> str | None:
    """Return why another kernel is at least as fast as `fused-portable-gemv`; None if none is."""
    if "ptx" not in problem.features and looked_up(problem):
        return f"without PTX it would look up every value of {problem.scheme.format.name} in memory"
    limit = (
        16
        if has_few_rows(problem.n, processors(problem)) and problem.k <= portable_gemv_launch.LONG_ROWS
        else 8
    )
    if problem.m > limit:
        return f"tensor cores are busier in tiles from M={limit + 1} on"
    if _small_m_is_faster(problem):
        return "warps of `fused-small-m` share x, where these each load it"
    return None


def why_unsupported_wgmma(problem: Problem) -> str | None:
    """Return why `fused-wgmma` cannot run a problem; None if it can."""
    if (reason := why_no_fused_kernel(problem)) is not None:
        return reason
    if not {"wgmma", "gluon"} <= problem.features:
        return "it is for compute capability 9, and a Triton whose Gluon compiles"
    if expression(problem.scheme.format, str(problem.dtype).removeprefix("torch.")) is None:
        return f"it would look up every value of {problem.scheme.format.name} in memory"
    return None


def _why_no_codes(problem: Problem) -> str | None:
    """Return why no kernel can multiply 8-bit codes of x with W as it is laid out; None if one may."""
    if (reason := why_no_fused_kernel(problem)) is not None:
        return reason
    if problem.activations is None:
        return "it is for weights whose inputs are rounded to 8 bits"
    return why_not_quantized(problem.activations, problem.k)


def why_unsupported_wgmma_8bit(problem: Problem) -> str | None:
    """Return why `fused-wgmma-8bit` cannot run a problem; None if it can."""
    if (reason := _why_no_codes(problem)) is not None:
        return reason
    activations, weight = problem.activations, problem.scheme
    assert activations is not None
    shape, grouped = shape_of(problem), activations.group_size is not None
    reasons = (
        (
            not {"wgmma", "gluon"} <= problem.features,
            "it is for compute capability 9, and a Triton whose Gluon compiles",
        ),
        (
            weight.has_zero_point or weight.global_scale or weight.column_scale,
            "it takes one scale of each group alone: no zero-points, and no scales of tensors or columns",
        ),
        (
            wgmma_8bit_launch.byte_operand(weight, activations) is None,
            f"bytes of {weight.format.name} are no operand beside {activations.format}",
        ),
        (
            shape.groups > 1
            and (shape.group % 128 > 0 or shape.scale_kind != "" or weight.scale_dtype.itemsize != 2),
            "it takes groups of multiples of 128 columns, with scales of 16 bits",
        ),
        (
            grouped and wgmma_8bit_launch.needs_sums(weight, activations),
            "it multiplies groups of inputs with 8-bit weights only",
        ),
    )
    return _first(reasons)


def why_unsupported_scaled_mm(problem: Problem) -> str | None:
    """Return why `scaled-mm` cannot run a problem; None if it can."""
    if (reason := _why_no_codes(problem)) is not None:
        return reason
    inputs, weight = problem.activations, problem.scheme
    assert inputs is not None
    of_blocks = (weight.group_rows, weight.group_size, inputs.group_size) == (BLOCK, BLOCK, BLOCK)
    is_e4m3 = weight.format == inputs.number_format and DTYPES[inputs.number_format] == torch.float8_e4m3fn
    reasons = (
        (
            "scaled_mm" not in problem.features,
            "it is for compute capability 9, and a torch with FP8 products of blocks",
        ),
        (problem.dtype != torch.bfloat16, "it multiplies bfloat16 activations"),
        (
            not of_blocks or not is_e4m3,
            "it multiplies fp8 in blocks of 128x128 with inputs in groups of 128",
        ),
        (
            weight.global_scale or weight.scale_dtype.itemsize != 2,
            "it takes scales of 16 bits, and no global scale",
        ),
        (
            problem.n % BLOCK > 0 or problem.k % MULTIPLE_OF_K > 0,
            f"it takes multiples of {BLOCK} rows and of {MULTIPLE_OF_K} columns",
        ),
    )
    return _first(reasons)


def why_slower_scaled_mm(problem: Problem) -> str | None:
    """Return why another kernel is at least as fast as `scaled-mm`; None if none is."""
    if problem.m < UNPACKED_ROWS:
        return f"below M={UNPACKED_ROWS} unpacking the weight takes longer than it saves"
    if problem.n * problem.k < UNPACKED_WEIGHTS:
        return "it was timed with larger weights only"
    return None


def why_slower_wgmma_8bit(problem: Problem) -> str | None:
    """Return why another kernel is at least as fast as `fused-wgmma-8bit`; None if none is."""
    if problem.m <= FEW_OF_X:
        return f"up to M={FEW_OF_X} kernels that read x as it is rounded, in 16 bits, are faster"
    return None


def _dequantizes_slowly(problem: Problem) -> bool:
    """Return True if `fused-portable` dequantizes the codes slowly: long spans, short groups, or lookups.

    A span is the columns whose codes are stored in the same registers.
    """
    shape = shape_of(problem)
    return shape.span > 128 or shape.group < 64 or table_bytes(problem.scheme, problem.dtype) > 0


def _fills_waves(problem: Problem) -> bool:
    """Return True if the programs of `fused-portable` occupy on average more than `FULL` of the GPU.

    A wave is the programs that run at once; the last one may leave multiprocessors idle.
    """
    if has_few_rows(problem.n, processors(problem)):
        return False
    shape = shape_of(problem)
    tile = portable_gemm_launch.TILE_SPACE.rule(problem)
    waves = portable_gemm_launch.programs(tile, shape, problem.m) / (2 * processors(problem))
    return tile.split_k == 1 and waves > FULL * math.ceil(waves)


def why_slower_wgmma(problem: Problem) -> str | None:
    """Return why another kernel is at least as fast as `fused-wgmma`; None if none is."""
    is_small = problem.n * problem.k <= SMALL_WEIGHT
    reasons = (
        (
            problem.m <= 16 and not _spills_codes(problem),
            "up to M=16 warps that share x, or smaller tiles, are faster",
        ),
        (
            32 < problem.m <= 64 and not _dequantizes_slowly(problem) and _fills_waves(problem),
            "up to M=64 tiles of `fused-portable` are as fast where they leave no multiprocessor idle",
        ),
        (
            problem.m > 1024 and is_small,
            "dequantizing and the library's product are faster from M=1025 on at such a size",
        ),
    )
    return _first(reasons)


def why_slower_portable_gemm(problem: Problem) -> str | None:
    """Return why another kernel is at least as fast as `fused-portable`; None if none is."""
    shape = shape_of(problem)
    if looked_up(problem):
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
