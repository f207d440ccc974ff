"""`fused-gemv`: rules for its tile (launch configuration), checks of what it can compute, and its launch."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from quantkit.kernels.gemm.bound import BIAS, Bound, X, Y
from quantkit.kernels.gemm.decode.decode_config import COLUMNS, Norm, Rounding
from quantkit.kernels.gemm.decode.decode_tiles import (
    DecodeTile,
    RowTileSchedule,
    decode_config,
    k_steps_per_warp,
    prefetch,
    schedule_row_tiles,
    tiles_per_iter,
)
from quantkit.kernels.gemm.gpu_limits import processors, program_memory
from quantkit.kernels.gemm.operands import (
    GemmSpec,
    Grouping,
    Operands,
    bound,
    shape_of,
    table_bytes,
    unknown_value,
    why_no_gate_up_tiles,
)
from quantkit.kernels.jit.launcher import Launch, overlap
from quantkit.kernels.layouts.geometry import RUN, value_sizes
from quantkit.kernels.layouts.int8_codes import as_bytes
from quantkit.kernels.layouts.shared_memory import next_power_of_2
from quantkit.kernels.ops.norm import NORMS
from quantkit.kernels.ops.quantize_x import rounding_options, why_not_quantized
from quantkit.kernels.problem import Problem, TileSpace
from quantkit.packing.activations import ActivationScheme

#: Most rows of x, whose sums fit in registers, and most rows of x with integer products.
MOST_ROWS, MOST_DIGITS = 16, 4
#: Warps per multiprocessor by the rules, and at most; their threads share its registers.
RESIDENT_WARPS, MOST_WARPS = 16, 32
#: Registers of a multiprocessor, and most registers of a thread.
ALL_REGISTERS, MOST_REGISTERS = 1 << 16, 128
#: From more columns than this on, K is divided among more warps.
LONG_ROWS = 8192
#: Most rows of x with a gated epilogue. A layer of Llama-3 8B on an H200, int4: 45.9 us instead of 46.8 with
#: one row, 53.4 instead of 54.0 with two, 65.4 instead of 65.0 with four.
MOST_GATED = 2
#: Most rows of x for which it ends a norm. With four a layer of Llama-3 8B takes 60.0 to 60.6 us on an H200
#: instead of 59.2 to 60.0.
MOST_ENDED = 2
#: End of a norm, to compute sizes of shared memory.
_ENDED = Norm("end", adds=False, eps=0.0, rounded=True, offset=0.0)
#: k_steps of an expert up to which four programs of four warps are faster than two of eight.
SHORT_STEPS = 16
#: Registers of a thread for sums and addresses; with fewer, the kernel spills.
OTHER_REGISTERS = 40
#: Most rows of x for which more warps with fewer registers are faster. H200, 28672 x 4096: nvfp4 20.6 us
#: instead of 22.0 with one row, within 5 % of each other with four, slower with eight.
MOST_WITH_WARPS = 4
#: Conditions for two programs per multiprocessor with more rows of x than the first number. x, which both
#: copy, has at most `COPIED_TWICE` values. Their `imbalance` is at most `AS_EVEN` times that of one program
#: (H100, 10 weights with 4 rows: the rules take 1.03 times the best tile timed).
FEW_OF_X, COPIED_TWICE, AS_EVEN = 2, (1 << 15) - 1, 1.12
#: Tested values of each tile field. To add a candidate, add a number.
VALUES: Mapping[str, tuple[int, ...]] = {
    "warps": (4, 8, 16),
    "occupancy": (1, 2, 3, 4),
    "tiles_per_iter": (1, 2),
    "prefetch": (1, 2, 3, 4, 7, 8),
    "int8_mma": (False, True),
}


def k_step_registers(problem: Problem) -> int:
    """Return the 32-bit registers of a thread that hold the codes, scales and zero-points of a k_step.

    A k_step is what a warp dequantizes at a time: 128 columns or more.
    """
    shape = shape_of(problem)
    codes = shape.k_step // shape.span * shape.registers * 4
    words = sum(-(-2 * shape.in_block * size // 4) for size in value_sizes(shape, problem.scheme))
    return codes + shape.k_step // 128 * words


def thread_registers(tile: DecodeTile) -> int:
    """Return how many 32-bit registers a thread may use with this tile, a multiple of 8."""
    return min(MOST_REGISTERS, ALL_REGISTERS // (32 * tile.warps * tile.occupancy) // 8 * 8)


def prefetch_in_registers(problem: Problem, tile: DecodeTile) -> int:
    """Return the number of k_steps (128 columns or more) of codes that a thread can hold in registers.

    The registers of the dequantized weights of a span, and `OTHER_REGISTERS` more, are not available for
    codes. A span is the columns whose codes are stored in the same registers.
    """
    fragments = shape_of(problem).fragments
    dequant_registers = 4 * (fragments // 2 if tile.int8_mma else fragments)
    return (thread_registers(tile) - OTHER_REGISTERS - dequant_registers) // k_step_registers(problem)


def shared_memory(
    tile: DecodeTile,
    problem: Problem,
    gate: str = "",
    norm: Norm | None = None,
    grouping: Grouping | None = None,
) -> int:
    """Return the bytes of shared memory of a program of `decode_gemm` for `problem` and `tile`.

    gate       activation f of a gated epilogue; "" for none
    norm       part of an RMSNorm that the kernel computes, or None
    grouping   sizes of a grouped GEMM over experts, or None
    """
    spec = GemmSpec(problem.m, problem.n, problem.k, problem.scheme, problem.dtype)
    return decode_config(spec, tile, False, processors(problem), norm, gate, grouping).shared_memory


def why_no_int8(problem: Problem) -> str | None:
    """Return why `problem` cannot be computed by int8 `mma` of codes and int8 digits of x; None if it can."""
    if as_bytes(problem.scheme.format) is None:
        return f"codes of {problem.scheme.format.name} are no bytes in proportion to their values"
    if problem.scheme.has_zero_point:
        return "zero-points are taken from 16-bit floats"
    if shape_of(problem).on_weights:
        return f"scales of {problem.scheme.group_columns(problem.k)} columns multiply weights, not sums"
    if problem.m > MOST_DIGITS:
        return f"there are digits of up to {MOST_DIGITS} rows of x, not of {problem.m}"
    return None


def _why_no_table(problem: Problem) -> str | None:
    """Return why code values cannot be looked up in shared memory for `problem`; None if they can.

    None is also returned for a format that needs no lookup table.
    """
    if table_bytes(problem.scheme, problem.dtype) == 0:
        return None
    name = problem.scheme.format.name
    if problem.m > COLUMNS:
        return f"values of {name} in shared memory are for up to {COLUMNS} rows of x"
    if shape_of(problem).group < RUN:
        # A register of values has columns that are 16 apart.
        return f"values of {name} in shared memory have one scale per {RUN} columns"
    return None


def _rule(problem: Problem) -> DecodeTile:
    """Return the tile (launch configuration) that rules choose for a `problem` without a measured one."""
    few, long = problem.m <= FEW_OF_X, problem.k > LONG_ROWS
    short = shape_of(problem).k_steps < RESIDENT_WARPS
    int8_mma = problem.m <= (1 if long else FEW_OF_X) and why_no_int8(problem) is None
    # Codes that fit in bytes leave registers for more k_steps, with or without integer products.
    wide = int8_mma or (not few and as_bytes(problem.scheme.format) is not None)
    one, two = DecodeTile(RESIDENT_WARPS, 1, prefetch=2), DecodeTile(prefetch=4 if wide else 2)
    many = DecodeTile(RESIDENT_WARPS, MOST_WARPS // RESIDENT_WARPS, prefetch=1)
    if long or not (few or _copies_twice(problem, one, two)):
        tile = one
    elif _is_straight(problem) and problem.m <= MOST_WITH_WARPS and not (short or int8_mma):
        tile = many
    else:
        tile = two
    # Two row tiles per iteration take up to 1.3 times as long for integers in spans of 256 columns.
    pairs = tile is one or (tile is two and not (int8_mma and shape_of(problem).span > 128))
    if pairs and _max_row_tiles(problem, tile) == 2:
        tile = replace(tile, tiles_per_iter=2, prefetch=1 if long else 2)
    tile = replace(tile, int8_mma=int8_mma)
    most = max(1, prefetch_in_registers(problem, tile) // tile.tiles_per_iter)
    tile = replace(
        tile, prefetch=max(number for number in VALUES["prefetch"] if number <= min(most, tile.prefetch))
    )
    # With less shared memory: float products, then one program per multiprocessor, then half of the warps.
    floats = replace(tile, int8_mma=False)
    smaller = floats, replace(one, prefetch=1), replace(floats, occupancy=1)
    return next((one for one in (tile, *smaller) if _why_invalid(problem, one) is None), smaller[-1])


def single_row_ratio(problem: Problem) -> int:
    """Return the ratio experts / routed tokens from which it is fastest to multiply each routed token alone.

    A routed token is a token paired with one of its experts. Below that ratio, a program multiplies an expert
    block: up to 128 routed tokens of one expert. `problem` is the product of one expert. The result is the
    argument `single_row_ratio` of `permute.usual_block_rows`.
    """
    return 1 if why_no_int8(replace(problem, m=1)) is None else 4


def experts_tile(problem: Problem, grouping: Grouping) -> DecodeTile | None:
    """Return the tile (launch configuration) for a grouped GEMM over experts; None if none fits the GPU.

    An expert block is up to 128 routed tokens (token paired with one of its experts) of one expert. `problem`
    is the product of one block: m is the rows of the block. Blocks of one routed token have other rules.
    H100: 0.895 of the time of `fused-small-m`, geometric mean of 70 products.
    """
    int8_mma, steps = why_no_int8(problem) is None, shape_of(problem).k_steps
    if problem.m > 1:
        tile = _rule(problem)
    elif problem.k > LONG_ROWS:
        tile = DecodeTile(16, 1, tiles_per_iter=2, prefetch=1, int8_mma=int8_mma)
    elif steps <= (SHORT_STEPS if int8_mma else SHORT_STEPS // 2):
        tile = DecodeTile(4, 4, tiles_per_iter=2, prefetch=1, int8_mma=int8_mma)
    else:
        tile = DecodeTile(8, 2, tiles_per_iter=2, prefetch=1, int8_mma=int8_mma)
    # Reserve memory for a gate, which is chosen later.
    gate = "silu" if grouping.matrices == 2 else ""
    for changes in ({}, {"int8_mma": False}, {"int8_mma": False, "occupancy": 1}):
        other = replace(tile, **changes)
        other = replace(
            other, tiles_per_iter=min(other.tiles_per_iter, max(1, prefetch_in_registers(problem, other)))
        )
        needed = shared_memory(other, problem, gate, grouping=grouping)
        if needed <= program_memory(problem) // other.occupancy:
            return other
    return None


def _copies_twice(problem: Problem, one: DecodeTile, two: DecodeTile) -> bool:
    """Return True if two programs per multiprocessor, each with a copy of x, are faster than one.

    That is so if x is small, and warps have about as even work as with one program. `one` and `two` are the
    tiles with one and two programs.
    """
    even = imbalance(problem, two) <= AS_EVEN * imbalance(problem, one)
    return problem.m * problem.k <= COPIED_TWICE and even


def _max_row_tiles(problem: Problem, tile: DecodeTile) -> int:
    """Return the number of row tiles (16 rows of W) of the busiest program, for `problem` with `tile`."""
    return schedule_row_tiles(tile, shape_of(problem), processors(problem)).row_tiles


def columns_per_warp(problem: Problem, tile: DecodeTile) -> int:
    """Return the columns of W that the busiest warp multiplies, summed over its row tiles (16 rows of W)."""
    shape = shape_of(problem)
    return _max_row_tiles(problem, tile) * k_steps_per_warp(tile, shape) * shape.k_step


def imbalance(problem: Problem, tile: DecodeTile) -> float:
    """Return the columns of the busiest warp divided by the mean of all warps; 1 if no warp is ever idle."""
    shape = shape_of(problem)
    warps = processors(problem) * tile.occupancy * tile.warps
    return columns_per_warp(problem, tile) * warps / (shape.row_tiles * shape.k_steps * shape.k_step)


def _is_straight(problem: Problem) -> bool:
    """Return True if dequantizing takes few registers, so that more warps per multiprocessor fit.

    That is so without lookup table and zero-points, if spans have at most 128 columns, and scales do not
    multiply sums of groups. A span is the columns whose codes are stored in the same registers.
    """
    shape, scheme = shape_of(problem), problem.scheme
    straight = (shape.groups == 1 or shape.on_weights) and table_bytes(scheme, problem.dtype) == 0
    return straight and not scheme.has_zero_point and shape.span <= 128


def why_no_norm(problem: Problem, tile: DecodeTile, part: str) -> str | None:
    """Return why `decode_gemm` cannot compute `part` of an RMSNorm (`problem.Normed`); None if it can.

    If `part` is "whole", each program computes the norm of all of x, in registers.
    """
    if part == "begin":
        return None
    if part == "end":
        return _why_no_end(problem, tile)
    if problem.m > COLUMNS:
        return f"norms are computed for up to {COLUMNS} rows of x, not for {problem.m}"
    # A thread also holds the same number of addends and of weights.
    return _why_no_registers(problem, tile, thread_registers(tile) // 4)


def why_no_rounding(problem: Problem, tile: DecodeTile) -> str | None:
    """Return why `decode_gemm` cannot round x to 8 bits as `problem.activations` says; None if it can.

    Each program rounds all of x itself, in registers.
    """
    scheme = problem.activations
    if scheme is None:
        return "inputs are taken as they are"
    if (reason := why_not_quantized(scheme, problem.k)) is not None:
        return reason
    if scheme.static or scheme.group_size is not None:
        return f"it finds one scale for each row of x, not as {scheme}"
    if problem.m > COLUMNS:
        return f"up to {COLUMNS} rows of x are rounded, not {problem.m}"
    return _why_no_registers(problem, tile, thread_registers(tile) // 2)


def _why_no_registers(problem: Problem, tile: DecodeTile, most: int) -> str | None:
    """Return why a program's threads cannot hold all of x in registers; None if they can.

    A thread has registers for `most` values of x.
    """
    numbers = next_power_of_2(problem.m) * problem.k // (32 * tile.warps)
    if numbers > most:
        return f"each thread would have {numbers} numbers of x, and has registers for {most}"
    return None


def _why_no_end(problem: Problem, tile: DecodeTile) -> str | None:
    """Return why `decode_gemm` cannot divide y by the RMS of x, the end of an RMSNorm; None if it can."""
    if problem.m > MOST_ENDED:
        return f"a norm by itself is as fast from M={MOST_ENDED + 1} on"
    # y may be gated as well.
    gates = ("",) if why_no_gate_up_tiles(problem) else ("", "silu")
    needed = max(shared_memory(tile, problem, gate, _ENDED) for gate in gates)
    most = program_memory(problem) // tile.occupancy
    if needed > most:
        return f"x, sums and the RMS take {needed} bytes of shared memory, of {most} that there are"
    return None


def why_no_gate(problem: Problem, tile: DecodeTile) -> str | None:
    """Return why `decode_gemm` cannot compute activation(gate) * up in its epilogue; None if it can.

    Gate and up are the halves of W's rows. A program computes 16 rows of both.
    """
    if (reason := why_no_gate_up_tiles(problem)) is not None:
        return reason
    if problem.m > MOST_GATED:
        return f"a launch of its own is as fast from M={MOST_GATED + 1} on"
    needed, most = shared_memory(tile, problem, gate="silu"), program_memory(problem) // tile.occupancy
    if needed > most:
        return f"x and sums of gate and up take {needed} bytes of shared memory, of {most} that there are"
    return None


def why_no_tile(problem: Problem) -> str | None:
    """Return why the tile (launch configuration) that rules choose does not fit the GPU; None if it fits."""
    return _why_invalid(problem, _rule(problem))


def _why_invalid(problem: Problem, tile: DecodeTile) -> str | None:
    """Return why `fused-gemv` cannot run with this tile (launch configuration); None if it can."""
    if (reason := unknown_value(tile, VALUES)) is not None:
        return reason
    reason = why_no_int8(problem) if tile.int8_mma else _why_no_table(problem)
    if reason is not None:
        return reason
    if tile.warps * tile.occupancy > MOST_WARPS:
        return f"a multiprocessor has {MOST_WARPS} such warps at once"
    needed, most = shared_memory(tile, problem), program_memory(problem) // tile.occupancy
    if needed > most:
        return f"x and sums take {needed} bytes of shared memory, of {most} that there are"
    return None


def _why_pruned(problem: Problem, tile: DecodeTile) -> str | None:
    """Return why a tile, a launch configuration, is not worth measuring for a product; None if it is."""
    shape = shape_of(problem)
    schedule = schedule_row_tiles(tile, shape, processors(problem))
    found, both = prefetch(tile, shape, schedule), tiles_per_iter(tile, schedule)
    smaller = [number for number in VALUES["prefetch"] if found <= number < tile.prefetch]
    reasons = (
        (2 * tile.warps * tile.occupancy <= RESIDENT_WARPS, "more warps keep more bytes on their way"),
        (tile.tiles_per_iter > both, "a program has no more row tiles"),
        (
            # One k_step more than the estimate: int4 was fastest with it.
            found * both > max(2 * both, prefetch_in_registers(problem, tile) + 1),
            "codes take too many registers",
        ),
        (bool(smaller), "it is the same as with a smaller prefetch"),
        (tile.warps > shape.k_steps, "there are fewer k_steps than warps"),
    )
    return next((reason for applies, reason in reasons if applies), None)


TILE_SPACE = TileSpace(DecodeTile, VALUES, _rule, _why_invalid, _why_pruned)


@lru_cache(maxsize=4096)
def _launch(
    spec: GemmSpec,
    tile: DecodeTile,
    features: frozenset[str],
    multiprocessors: int,
    norm: Norm | None = None,
    gate: str = "",
    grouping: Grouping | None = None,
    rounding: Rounding | None = None,
) -> tuple[Launch, RowTileSchedule]:
    """Build the launch of `decode_gemm`; return (launch, division of row tiles among programs).

    A row tile is 16 rows of W.

    spec                               sizes and dtypes of the product
    features                           what the GPU and Triton can do, such as "overlap" for PDL
    multiprocessors                    number of multiprocessors of the GPU
    norm, gate, grouping, rounding     as in `decode_config`
    """
    from quantkit.kernels.gemm.decode.decode_kernel import decode_gemm as kernel

    options = overlap(features)
    overlaps = options.pop("PDL")
    config = decode_config(spec, tile, overlaps, multiprocessors, norm, gate, grouping, rounding)
    schedule = schedule_row_tiles(tile, spec.shape, multiprocessors, bool(gate), grouping)
    expert_blocks = () if grouping is None else (grouping.expert_blocks,)
    pairs = {"order": None, "expert_blocks": None} if grouping is None else {}
    return Launch(
        kernel,
        (*expert_blocks, schedule.programs),
        S=config,
        **pairs,
        num_warps=tile.warps,
        maxnreg=thread_registers(tile),
        **options,
    ), schedule


def bind(op: Operands, tile: DecodeTile, features: frozenset[str] = frozenset()) -> Bound:
    """Prepare the launch of `fused-gemv` for the operands `op`; the result is called with x and bias.

    It computes y [m, n] = x [m, k] W^T for m up to `MOST_ROWS`. `features` are what the GPU and Triton can
    do, such as "overlap" for PDL. The GPU must be an NVIDIA one of compute capability 8.0 or higher.
    """
    spec, norm = op.spec, None
    if (normed := op.normed) is not None:
        norm = Norm(normed.part, normed.other is not None, normed.eps, *NORMS[normed.kind])
    rounding = None if op.activations is None else _rounding(op.activations, spec.dtype, features)
    how = op.multiprocessors, norm, op.gate, op.grouping, rounding
    launch, schedule = _launch(spec, tile, features, *how)
    sizes = spec.m, spec.n, schedule.per_program, schedule.remainder
    # Placeholders of missing operands are neither read nor written.
    return bound(op, (launch, (X, *op.norm_operands(X), *op.layout, BIAS, Y, *sizes, *op.grouped)))


def _rounding(scheme: ActivationScheme, dtype: torch.dtype, features: frozenset[str]) -> Rounding:
    """Return the constants with which `decode_gemm` rounds x, of `dtype`, to 8 bits as `scheme` says.

    `features` are what the GPU and Triton can do.
    """
    known = rounding_options(scheme, features)
    most = torch.finfo(dtype).max
    return Rounding(known["ABSMAX"], known["MANTISSA"], known["SMALLEST"], most, known["FMA"])


def run(op: Operands, tile: DecodeTile, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """Return y [m, n] = x [m, k] W^T of the operands `op`, computed by `fused-gemv`, for m up to `MOST_ROWS`.

    `features` are what the GPU and Triton can do, such as "overlap" for PDL.
    """
    return bind(op, tile, features)(op.x, op.bias)
