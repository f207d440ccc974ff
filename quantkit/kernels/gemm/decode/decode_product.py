"""Products of `fused-gemv`: dequantize a k_step of codes and multiply it by x, one `mma` after another.

A k_step is 128 columns of W, or a few more: what a warp dequantizes at a time. Operand A of an `mma` is 16
rows of W (a row tile). Operand B is a column group, 8 columns: rows of x, or int8 digits that rows are split
into. Operands and sums are int32 or float32 [warps, 32 lanes, 4 registers].

`S` is the `DecodeConfig` of `gemm.decode.decode_config`: all that is known at compile time.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gluon.scales_registers import (
    row_scales,
    scales_for_a_fragment,
    scales_for_accumulator,
)
from quantkit.kernels.gluon.stage_x_per_warp import load_b_fragment
from quantkit.kernels.gluon.x_rows import pack2, vec4_layout

#: PTX of an mma: operand A is a vec4, operand B half of one.
_MMA_INT8 = gl.constexpr("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 ")
_MMA_BF16 = gl.constexpr("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 ")
_MMA_FP16 = gl.constexpr("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 ")
_OPERANDS = gl.constexpr(
    (
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$12, $13, $14, $15};",
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$10, $11}, {$12, $13, $14, $15};",
    )
)
#: Two 16-bit floats of -0: adding it keeps the sign of a zero, XOR flips signs.
_MINUS_ZEROS = gl.constexpr(-0x7FFF8000)


@gluon.jit
def zero_sums(DTYPE: gl.constexpr, S: gl.constexpr):
    """Return the initial sums of `mma`, zeros: a tuple of DTYPE [warps, 32 lanes, 4], one per column group.

    A column group is the 8 columns of operand B.
    `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    GROUPS: gl.constexpr = S.column_groups
    sums = ()
    for _ in gl.static_range(GROUPS):
        sums = sums + (gl.full([S.warps, 32, 4], 0, DTYPE, vec4_layout(S.warps)),)
    return sums


@gluon.jit
def multiply(totals, loaded, table, x_smem, k_step: gl.constexpr, scale, zero, S: gl.constexpr):
    """Return `totals` plus W x^T over one k_step of each warp: 128 columns or more of W and x.

        totals         per row tile (16 rows of W), a tuple of sums [warps, 32 lanes, 4] per column group:
                       8 columns of operand B, which are rows of x or int8 digits they are split into
        loaded         codes, scales and zero-points of the k_step, from `_load_iteration`
        table          lane's value, or address, in the lookup table of codes; read if `S.table` is not None
        x_smem         x in shared memory, from `stage_x`
        k_step         index of the k_step among those of a warp
        scale, zero    pointers, of which only the dtype is used

    Scales of groups multiply the weights if `S.on_weights`, else the sums of their columns. `S` is a
    `DecodeConfig`: all compile-time constants.
    """
    TILES_PER_ITER: gl.constexpr = S.tiles_per_iter
    MMAS: gl.constexpr = S.k_step // S.mma_k
    GROUPS: gl.constexpr = S.column_groups
    sums = totals
    dequant_registers = ()
    for number in gl.static_range(MMAS):
        if number % (MMAS * S.registers // S.vec4s_per_step) == 0:
            dequant_registers = _dequant_span(loaded, S.mmas[number].span, table, S)
        x = ()
        for group in gl.static_range(GROUPS):
            x = x + (
                load_b_fragment(
                    x_smem, (k_step * S.mma_pairs_per_step + number // 2) * S.column_groups + group, S
                ),
            )
        next_sums = ()
        scaled = ()
        for one in gl.static_range(TILES_PER_ITER):
            _, s, z = loaded[one]
            acc = sums[one]
            if S.scales_sums and number * S.mma_k % S.dot == 0:
                acc = zero_sums(gl.int32 if S.int8_mma else gl.float32, S)
            a = dequant_registers[one][S.mmas[number].register]
            if not S.int8_mma:
                a = _scaled(
                    a,
                    s[S.mmas[number].subtile],
                    z[S.mmas[number].subtile],
                    S.mmas[number].value,
                    scale,
                    zero,
                    S,
                )
            acc = _mma_groups(a, x, acc, number % 2, S)
            next_sums = next_sums + (acc,)
            if S.scales_sums and (number + 1) * S.mma_k % S.dot == 0:
                low, high = row_scales(
                    s[S.mmas[number].subtile], S.mmas[number].value, scale.dtype.element_ty, S
                )
                scaled = scaled + (
                    _with_scales(totals[one], acc, scales_for_accumulator(low, high, S.warps), S),
                )
        sums = next_sums
        if S.scales_sums and (number + 1) * S.mma_k % S.dot == 0:
            totals = scaled
    return totals if S.scales_sums else sums


@gluon.jit
def _dequant_span(loaded, span: gl.constexpr, table, S: gl.constexpr):
    """Return span `span` of a k_step, dequantized: per row tile, a tuple of int32 [warps, 32 lanes, 4].

    Each tensor is operand A of an `mma`. A k_step is the columns that a warp dequantizes at a time; a span is
    those whose codes are stored in the same registers. A row tile is 16 rows of W.

        loaded   codes of the k_step, from `_load_iteration`
        span     index of the span in the k_step
        table    lane's value, or address, in the lookup table of codes; read only if `S.table` is not None

    `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    TILES_PER_ITER: gl.constexpr = S.tiles_per_iter
    REGISTERS: gl.constexpr = S.registers
    dequant_registers = ()
    for one in gl.static_range(TILES_PER_ITER):
        words = ()
        for register in gl.static_range(REGISTERS):
            words = words + (loaded[one][0][span * REGISTERS + register],)
        if S.table is not None:
            words = words + (table,)
        dequant_registers = dequant_registers + (_dequant_registers(words, S),)
    return dequant_registers


@gluon.jit
def _dequant_registers(words, S: gl.constexpr):
    """Return the codes of a span, dequantized by the PTX `S.asm`: a tuple of int32 [warps, 32 lanes, 4].

    The tuple has `S.dequant_registers` tensors, each an operand A of `mma`. `words` is a tuple of int32
    [warps, 32 lanes, 4]: the registers of codes. If `S.table` is not None, its last tensor is the lane's
    entry of the lookup table of codes: a value, or an address in shared memory. `S` holds the kernel's
    compile-time constants (`DecodeConfig`).
    """
    if S.dequant_registers == 1:
        dequant_registers = (gl.inline_asm_elementwise(S.asm, S.constraints, words, gl.int32, True, 1),)
    else:
        dequant_registers = gl.inline_asm_elementwise(S.asm, S.constraints, words, S.dequant_types, True, 1)
    return dequant_registers


@gluon.jit
def _scaled(a, scales, zeros, v: gl.constexpr, scale, zero, S: gl.constexpr):
    """Return (`a` - zero-point) * scale for operand A of an `mma`: int32 [warps, 32 lanes, 4].

    Each int32 has two 16-bit weights. A zero-point is subtracted only if `S.has_zero`; the scale multiplies
    only if `S.on_weights`.

        scales, zeros   int32 words [warps, 32] or larger from `load_scale_words`, of several groups
        v               index of the group in these words
        scale, zero     pointers, of which only the dtype is used

    `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    FMA: gl.constexpr = (
        "fma.rn.bf16x2 $0, $1, $2, $3;" if S.dtype == gl.bfloat16 else "fma.rn.f16x2 $0, $1, $2, $3;"
    )
    if S.has_zero:
        less = scales_for_a_fragment(zeros, v, zero.dtype.element_ty, S) ^ _MINUS_ZEROS
        one = gl.full([S.warps, 32, 4], 1.0, gl.float32, vec4_layout(S.warps))
        one = pack2(one, one, S.dtype)
        a = gl.inline_asm_elementwise(FMA, "=r,r,r,r", [a, one, less], gl.int32, True, 1)
    if S.on_weights:
        multiplier = scales_for_a_fragment(scales, v, scale.dtype.element_ty, S)
        nothing = gl.full([S.warps, 32, 4], _MINUS_ZEROS, gl.int32, vec4_layout(S.warps))
        a = gl.inline_asm_elementwise(FMA, "=r,r,r,r", [a, multiplier, nothing], gl.int32, True, 1)
    return a


@gluon.jit
def _mma_groups(a, x, sums, HALF: gl.constexpr, S: gl.constexpr):
    """Return `sums` + `a` @ `x` by one `mma` per column group, 8 columns of operand B: a tuple like `sums`.

    All tensors are [warps, 32 lanes, 4]. `a` is operand A, int32; `x` and `sums` are tuples of a tensor per
    column group. A tensor of `x` holds operand B of two `mma`, of which HALF (0 or 1) is used. `S` is a
    `DecodeConfig`: all compile-time constants.
    """
    GROUPS: gl.constexpr = S.column_groups
    next_sums = ()
    for group in gl.static_range(GROUPS):
        next_sums = next_sums + (_mma(a, x[group], sums[group], HALF, S),)
    return next_sums


@gluon.jit
def _mma(a, b, sums, HALF: gl.constexpr, S: gl.constexpr):
    """Return `sums` + `a` @ `b` by one `mma` per warp; all are [warps, 32 lanes, 4 registers].

    `a` is operand A, int32. `b` holds operand B of two `mma`, of which HALF (0 or 1) is used. `sums` are
    float32, or int32 for 8-bit integers. `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    if S.int8_mma:
        dequant_registers = gl.inline_asm_elementwise(
            _MMA_INT8 + _OPERANDS[HALF], "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r", [a, b, sums], gl.int32,
            True, 4,
        )  # fmt: skip
    else:
        dequant_registers = gl.inline_asm_elementwise(
            (_MMA_BF16 if S.dtype == gl.bfloat16 else _MMA_FP16) + _OPERANDS[HALF],
            "=f,=f,=f,=f,r,r,r,r,r,r,r,r,f,f,f,f", [a, b, sums], gl.float32, True, 4,
        )  # fmt: skip
    return dequant_registers


@gluon.jit
def _with_scales(total, sums, scales, S: gl.constexpr):
    """Return `total` + `sums` * `scales` for each column group: a tuple of float32 [warps, 32 lanes, 4].

    A column group is the 8 columns of operand B. `total` and `sums` are tuples like the result; `sums` are
    the products over the columns of K that share one scale. `scales` is float32 [warps, 32 lanes, 4], from
    `scales_for_accumulator`. `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    GROUPS: gl.constexpr = S.column_groups
    next_sums = ()
    for group in gl.static_range(GROUPS):
        next_sums = next_sums + (total[group] + sums[group].to(gl.float32) * scales,)
    return next_sums
