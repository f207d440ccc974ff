"""Stage x in shared memory as operand B of `mma`, for kernels whose warps each have their own columns of K.

A vec4 is the 16 bytes of a lane that hold operand B of two products. Lane 4 n + t has column n of eight: a
row of x, or one digit of it. Two products with the same columns are an mma pair:

    floats     32 columns of x. As they lie in memory, [column n | word of a vec4 | lane t]: `ldmatrix` makes
               vec4s of them. Or, if registers are of two planes, as vec4s [column n | lane t | word], where a
               word has two columns that are 16 apart.
    integers   64 columns, one byte each, in either order. x is three digits of 8 bits,

                   x = unit * (65536 d2 + 256 d1 + d0)     unit a power of two, |x| <= unit * 2**22

               rounded to 2**-23 of the largest of its row among the columns of a warp. Column n is
               (digit, row of x), so one product has all digits of up to two rows.

Letters with a number are digits of a column in its run, as in `layouts.fragment_layout`:
p0, e1 and e0.

`S` is the `DecodeConfig` of `gemm.decode.decode_config`. Written in Gluon.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from quantkit.kernels.gluon.compat import async_load, reinterpret
from quantkit.kernels.gluon.smem_layouts import copy_layout, x_smem_layout
from quantkit.kernels.gluon.x_rows import (
    largest_of_warps,
    pack2,
    per_lane,
    round_rows,
    row_layout,
    unpack2,
    vec4_layout,
)

#: 1.5 * 2**23, added to a float32 so that its last place counts 1; and the bits of that, less 0x808080.
ROUNDING = gl.constexpr(12582912.0)
ROUNDED = gl.constexpr(0x4B400000 - 0x808080)
#: PTX from four 24-bit numbers, plus 0x808080 each, to three words: their highest, middle and lowest digits.
#: The bytes of such a number are its digits plus 0x80.
_SPLIT = gl.constexpr("""{
.reg .b32 t<4>;
prmt.b32 t0, $3, $4, 0x5140;
prmt.b32 t1, $5, $6, 0x5140;
prmt.b32 t2, $3, $4, 0x0062;
prmt.b32 t3, $5, $6, 0x0062;
prmt.b32 $0, t2, t3, 0x5410;
prmt.b32 $1, t0, t1, 0x7632;
prmt.b32 $2, t0, t1, 0x5410;
xor.b32 $0, $0, 0x80808080;
xor.b32 $1, $1, 0x80808080;
xor.b32 $2, $2, 0x80808080;}""")

#: PTX that transposes the words of warp lanes 4 n + t: word i of lane t becomes word t of lane i.
_EXCHANGE = gl.constexpr("""{
.reg .b32 lane, bit<2>, give<2>, own<4>;
.reg .pred p<2>;
mov.u32 lane, %laneid;
and.b32 bit0, lane, 1; setp.ne.u32 p0, bit0, 0;
and.b32 bit1, lane, 2; setp.ne.u32 p1, bit1, 0;
selp.b32 give0, $4, $5, p0; shfl.sync.bfly.b32 give0, give0, 1, 31, 0xFFFFFFFF;
selp.b32 give1, $6, $7, p0; shfl.sync.bfly.b32 give1, give1, 1, 31, 0xFFFFFFFF;
selp.b32 own0, give0, $4, p0; selp.b32 own1, $5, give0, p0;
selp.b32 own2, give1, $6, p0; selp.b32 own3, $7, give1, p0;
selp.b32 give0, own0, own2, p1; shfl.sync.bfly.b32 give0, give0, 2, 31, 0xFFFFFFFF;
selp.b32 give1, own1, own3, p1; shfl.sync.bfly.b32 give1, give1, 2, 31, 0xFFFFFFFF;
selp.b32 $0, give0, own0, p1; selp.b32 $1, give1, own1, p1;
selp.b32 $2, own2, give0, p1; selp.b32 $3, own3, give1, p1;}""")


@gluon.jit
def norm_weights(norm, S: gl.constexpr):
    """Load the weights `norm` [K] of an RMSNorm at the columns of each warp; () if x is not normed.

    Returns a tuple of words int32 [W, 32, 4] in the order of `_load_x`, the argument `weights` of `stage_x`.
    """
    weights = ()
    if S.norms_x:
        weights = _load_x(norm, 1, None, S)
    return weights


@gluon.jit
def stage_x(x, other, weights, total, M, order, S: gl.constexpr):
    """Copy x [M, K] to shared memory as operand B; return that memory, and the unit of each row of x.

    The memory is int32 [number of a vec4, words of all warps], for `load_b_fragment`. Each mma pair has
    `S.column_groups` vec4s, adjacent; columns beyond K are zeros. Units are float32 [W warps, rows]: 1 for
    floats, () if sums have no weights.

    With `S.norms_x`, x, or x + `other` (written to `total` [M, K]), is normed with `weights`, the result of
    `norm_weights`. With `S.rounding`, it is then rounded. `order` names the routed tokens, or is None.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_smem = gl.allocate_shared_memory(gl.int32, [S.smem_rows, S.smem_row_words], FLAT)
    if S.int8_mma or S.shared_table or S.norms_x or S.rounding is not None:
        words = _load_x(x, M, order, S)
        if S.norms_x:
            words = _rms_norm(words, other, weights, total, M, S)
        if S.rounding is not None:
            words = round_rows(words, S)
        if S.int8_mma:
            x_scale = _stage_digits(words, x_smem, S)
        else:
            x_scale = _stage_floats(words, x_smem, S)
    else:
        _copy(x, M, order, x_smem, S)
        x_scale = _unit_scales(S)
    return x_smem, x_scale


@gluon.jit
def load_b_fragment(x_smem, number, S: gl.constexpr):
    """Return vec4s `number` of x from shared memory, int32 [W, 32, 4]: the operand B of an mma.

    With fewer than eight columns, lanes share them.
    """
    COLUMN_DIGITS: gl.constexpr = 8 // S.columns_per_digit
    WORDS: gl.constexpr = 1 if S.as_vec4 else 4
    LANES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, WORDS, 4 // WORDS],
        [1, COLUMN_DIGITS, S.columns_per_digit, 4 // WORDS, WORDS],
        [S.warps, 1, 1, 1, 1],
        [4, 3, 2, 1, 0],
    )
    words = reinterpret(x_smem.index(number), gl.int32, S.vec4_shape, x_smem_layout(S.vec4_shape, S))
    vec4s, _ = gl.broadcast(
        words.load(LANES), gl.full([S.warps, COLUMN_DIGITS, S.columns_per_digit, 4, 4], 0, gl.int32, LANES)
    )
    if not S.as_vec4:
        vec4s = gl.permute(vec4s, (0, 1, 2, 4, 3))
    vec4s = gl.reshape(vec4s, (S.warps, 32, 4))
    return gl.convert_layout(vec4s, vec4_layout(S.warps), assert_trivial=True)


@gluon.jit
def _copy(x, M, order, x_smem, S: gl.constexpr):
    """Copy x [M, K] by 16 bytes (cp.async) to shared memory int32 [vec4 number, W, 1, row, word, t]."""
    SIZES: gl.constexpr = S.x_shape
    LAYOUT: gl.constexpr = copy_layout(SIZES, S.warps)
    number, warp = _axis_index(0, SIZES, LAYOUT), _axis_index(1, SIZES, LAYOUT)
    mma_pair, group = number // S.column_groups, number % S.column_groups
    # A word has two columns.
    column = (
        (warp * S.mma_pairs + mma_pair) * 16
        + _axis_index(4, SIZES, LAYOUT) * 4
        + _axis_index(5, SIZES, LAYOUT)
    )
    row = _row_of_x(group * S.rows_per_group + _axis_index(3, SIZES, LAYOUT), M, order, S)
    at = x.to(gl.pointer_type(gl.int32), bitcast=True) + row * (S.k // 2) + column
    async_load(
        reinterpret(x_smem, gl.int32, SIZES, x_smem_layout(SIZES, S)),
        at,
        mask=(mma_pair < S.mma_pairs) & (column < S.k // 2),
    )
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.constexpr_function
def _axis_layout(LAYOUT, AXIS, SIZES):  # type: ignore[no-untyped-def]
    """Return the layout of indices along AXIS: LAYOUT, of a tensor of shape SIZES, without its other axes."""
    for other, _ in list(enumerate(SIZES))[::-1]:
        if other != AXIS:
            LAYOUT = gl.SliceLayout(other, LAYOUT)
    return LAYOUT


@gluon.jit
def _axis_index(AXIS: gl.constexpr, SIZES: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the indices along AXIS of a tensor of shape SIZES in LAYOUT, int32; other axes have size 1."""
    RANK: gl.constexpr = len(SIZES)
    numbers = gl.arange(0, SIZES[AXIS], _axis_layout(LAYOUT, AXIS, SIZES))
    for other in gl.static_range(RANK):
        if other != AXIS:
            numbers = gl.expand_dims(numbers, other)
    return numbers


@gluon.jit
def _row_of_x(m, M, order, S: gl.constexpr):
    """Return the row of x, int64 [...], for row numbers `m` [...] of a program with M rows.

    Numbers from M on repeat the last row. With experts, the row is the token of routed token `order[m]`.
    """
    m = gl.minimum(m, M - 1)
    if order is not None:
        m = gl.load(order + m) // S.top_k
    return m.to(gl.int64)


@gluon.jit
def _x_pointers(x, M, order, number: gl.constexpr, S: gl.constexpr):
    """Return pointers from which lanes load words [W, 32, 4] of x [M, K], and a mask of those to load.

    A word is two columns. The 32 lanes are (mma pair of a pass, row of x, t), and lane t loads 16 bytes. A
    pass is the mma pairs that all lanes of a warp load at once. `number` counts passes, for int8 products the
    halves of their mma pairs.
    """
    HALVES: gl.constexpr = S.mma_k // 16
    VEC4: gl.constexpr = vec4_layout(S.warps)
    warp = gl.arange(0, S.warps, gl.SliceLayout(1, gl.SliceLayout(2, VEC4)))
    warp = gl.expand_dims(gl.expand_dims(warp, 1), 2)
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, VEC4)))
    lane = gl.expand_dims(gl.expand_dims(lane, 0), 2)
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, VEC4)))
    word = gl.expand_dims(gl.expand_dims(word, 0), 1)
    row = _row_of_x(lane // 4 % S.rows, M, order, S)
    mma_pair = lane // (4 * S.rows) + number // HALVES * S.mma_pairs_per_pass
    run = mma_pair
    if S.int8_mma:
        run = _run_of(mma_pair, number % HALVES, S.plane_distance)
    column = warp * (S.mma_pairs * S.mma_k) + run * 16 + lane % 4 * 4 + word
    at = x.to(gl.pointer_type(gl.int32), bitcast=True) + row * (S.k // 2) + column
    return at, (column < S.k // 2) & (mma_pair < S.mma_pairs)


@gluon.jit
def _load_x(x, M, order, S: gl.constexpr):
    """Load x [M, K]: a tuple with words int32 [W, 32, 4] for each number of `_x_pointers`; zeros beyond K."""
    NUMBERS: gl.constexpr = S.padded_mma_pairs // S.mma_pairs_per_pass * (S.mma_k // 16)
    words = ()
    for number in gl.static_range(NUMBERS):
        at, inside = _x_pointers(x, M, order, number, S)
        words = words + (gl.load(at, mask=inside, other=0),)
    return words


@gluon.jit
def _rms_norm(words, other, weights, total, M, S: gl.constexpr):
    """Return RMSNorm of x [M, K] as words int32 [W, 32, 4].

    With `S.norm.adds`, x is replaced by x + `other`, which is written to `total`. Numbers are rounded
    where `ops.norm_kernel.rms_norm` rounds them.
    """
    VEC4: gl.constexpr = vec4_layout(S.warps)
    ROW_LAYOUT: gl.constexpr = row_layout(S)
    NUMBERS: gl.constexpr = len(words)
    if S.norm.adds:
        others = _load_x(other, M, None, S)
        sums = ()
        for number in gl.static_range(NUMBERS):
            low, high = unpack2(words[number], S.dtype)
            more_low, more_high = unpack2(others[number], S.dtype)
            sums = sums + (pack2(low + more_low, high + more_high, S.dtype),)
            at, inside = _x_pointers(total, M, None, number, S)
            # Every program computes all of `total`; the first one writes it.
            gl.store(at, sums[number], mask=inside & (gl.program_id(0) == 0))
        words = sums
    squares = gl.full([S.warps, 32, 4], 0.0, gl.float32, VEC4)
    for number in gl.static_range(NUMBERS):
        low, high = unpack2(words[number], S.dtype)
        squares += low * low + high * high
    of_rows = gl.reshape(gl.sum(squares, axis=2), (S.warps, S.mma_pairs_per_pass, S.rows, 4))
    of_rows = gl.convert_layout(of_rows, ROW_LAYOUT, assert_trivial=True)
    of_rows = gl.sum(gl.sum(gl.sum(of_rows, axis=3), axis=1), axis=0)
    times = gl.expand_dims(gl.rsqrt(of_rows / S.k + S.norm.eps), 0)
    times = per_lane(times, S)
    scaled = ()
    for number in gl.static_range(NUMBERS):
        low, high = unpack2(words[number], S.dtype)
        low, high = low * times, high * times
        if S.norm.rounded:
            low, high = low.to(S.dtype).to(gl.float32), high.to(S.dtype).to(gl.float32)
        weight_low, weight_high = unpack2(weights[number], S.dtype)
        low, high = low * (weight_low + S.norm.offset), high * (weight_high + S.norm.offset)
        scaled = scaled + (pack2(low, high, S.dtype),)
    return scaled


@gluon.jit
def _unit_scales(S: gl.constexpr):
    """Return units of 1, float32 [W warps, rows of x], if `S.has_column_weights`; else ()."""
    x_scale = ()
    if S.has_column_weights:
        x_scale = gl.full(
            [S.warps, S.rows], 1.0, gl.float32, gl.SliceLayout(1, gl.SliceLayout(3, row_layout(S)))
        )
    return x_scale


@gluon.jit
def _transpose_words(words):
    """Transpose words int32 [W, 32, 4] of x among the four lanes t that hold a row.

    Word i of lane t becomes word t of lane i. Columns that were adjacent in memory then lie as in vec4s, in
    the order (p0, e1).
    """
    return gl.inline_asm_elementwise(_EXCHANGE, "=r,=r,=r,=r,r,r,r,r", [words], gl.int32, True, 4)


@gluon.jit
def _stage_floats(words, x_smem, S: gl.constexpr):
    """Store x, a tuple of words int32 [W, 32, 4], in `x_smem` as floats; return `_unit_scales`.

    Words lie as `_copy` stores them. With `S.shared_table` they are vec4s whose words hold columns 16 apart.
    """
    PASSES: gl.constexpr = S.padded_mma_pairs // S.mma_pairs_per_pass
    SIZES: gl.constexpr = S.float_shape
    x_passes = reinterpret(
        x_smem, gl.int32, [PASSES, S.mma_pairs_per_pass * S.warps * S.rows * 16], x_smem.type.layout
    )
    for number in gl.static_range(PASSES):
        if S.shared_table:
            first, second = _split_words(_transpose_words(words[number]), S.warps)
            low = gl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [first, second], gl.int32, True, 1
            )
            high = gl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [first, second], gl.int32, True, 1
            )
            words_of_pass = gl.permute(gl.join(low, high), (0, 1, 3, 2))
        else:
            words_of_pass = words[number]
        words_of_pass = gl.reshape(words_of_pass, (S.warps, S.mma_pairs_per_pass, 1, S.rows, 4, 4))
        reinterpret(x_passes.index(number), gl.int32, SIZES, x_smem_layout(SIZES, S)).store(
            gl.permute(words_of_pass, (1, 0, 2, 3, 4, 5))
        )
    return _unit_scales(S)


@gluon.jit
def _stage_digits(words, x_smem, S: gl.constexpr):
    """Store x, a tuple of words int32 [W, 32, 4], in `x_smem` as three digits of 8 bits per number.

    Returns the unit of each row of x, float32 [W warps, rows], by which sums of digits must be multiplied.
    """
    GROUPS: gl.constexpr = S.column_groups
    PASSES: gl.constexpr = S.padded_mma_pairs // S.mma_pairs_per_pass
    SIZES: gl.constexpr = S.digit_shape
    x_scale, inverse_scale = _x_scales(words, S)
    for number in gl.static_range(PASSES):
        first, second = words[2 * number], words[2 * number + 1]
        if S.plane_distance == 1:
            first, second = _transpose_words(first), _transpose_words(second)
        digits = _digits(first, second, inverse_scale, S)
        high = gl.join(digits[0], digits[2])
        low = gl.join(digits[1], gl.zeros_like(digits[1]))
        # Axis 4 (digits) becomes column groups and columns n of a group.
        value = gl.reshape(
            gl.join(high, low), (S.warps, S.mma_pairs_per_pass, S.rows, 4, 4, GROUPS, 2 // GROUPS, 2)
        )
        value = gl.permute(value, (1, 5, 0, 6, 7, 2, 3, 4))
        x_passes = reinterpret(
            x_smem, gl.int32, [PASSES, S.mma_pairs_per_pass * S.warps * S.rows * 64], x_smem.type.layout
        )
        reinterpret(x_passes.index(number), gl.int32, SIZES, x_smem_layout(SIZES, S)).store(value)
    return x_scale


@gluon.jit
def _run_of(mma_pair, HALF: gl.constexpr, APART: gl.constexpr):
    """Return which run of 32 columns is half HALF (0 or 1) of each `mma_pair`, int32 [...].

    The halves are adjacent runs if APART is 1. Else they are APART / 2 runs apart: their planes, APART apart,
    share registers.
    """
    if APART == 1:
        run = 2 * mma_pair + HALF
    else:
        run = mma_pair // (APART // 2) * APART + mma_pair % (APART // 2) + HALF * (APART // 2)
    return run


@gluon.jit
def _x_scales(words, S: gl.constexpr):
    """Return the unit of each row of x, float32 [W, rows], and 1 / unit for each lane, float32 [W, 32, 1].

    Units are powers of two from the largest number of a row among the columns of a warp; NaN unless that is
    finite. `words` is x, a tuple of int32 [W, 32, 4].
    """
    most = largest_of_warps(words, S)
    # Keep unit and 1 / unit normal floats.
    exponent = gl.minimum(gl.maximum(most >> 23, 30), 254)
    x_scale = ((exponent - 21) << 23).to(gl.float32, bitcast=True)
    x_scale = gl.where(most < 0x7F800000, x_scale, float("nan"))
    inverse_scale = ((275 - exponent) << 23).to(gl.float32, bitcast=True)
    return x_scale, per_lane(inverse_scale, S)


@gluon.jit
def _digits(first, second, inverse_scale, S: gl.constexpr):
    """Return the highest, middle and lowest digits of x: three int32 [W, 32, 4], four digits in a word.

    `first` and `second` are two runs of x, int32 [W, 32, 4] each. Bytes of a word are (e0, run) if planes of
    different runs share registers; else (e0, p0) of vec4s (run, e1).
    """
    first_low, first_high = _fixed_point(first, inverse_scale, S.dtype)
    second_low, second_high = _fixed_point(second, inverse_scale, S.dtype)
    if S.plane_distance == 1:
        a, b = _split_words(first_low, S.warps)
        c, d = _split_words(first_high, S.warps)
        of_first = _split_digits(a, b, c, d)
        a, b = _split_words(second_low, S.warps)
        c, d = _split_words(second_high, S.warps)
        of_second = _split_digits(a, b, c, d)
        digits = ()
        for digit in gl.static_range(3):
            vec4 = gl.permute(gl.join(of_first[digit], of_second[digit]), (0, 1, 3, 2))
            vec4 = gl.reshape(vec4, (S.warps, 32, 4))
            digits = digits + (gl.convert_layout(vec4, vec4_layout(S.warps), assert_trivial=True),)
    else:
        digits = _split_digits(first_low, second_low, first_high, second_high)
    return digits


@gluon.jit
def _fixed_point(words, inverse_scale, DTYPE: gl.constexpr):
    """Return both 16-bit floats of each word int32 [W, 32, 4] as two int32: number / unit plus 0x808080.

    `inverse_scale` is 1 / unit, float32 [W, 32, 1]; quotients are rounded to integers.
    """
    low, high = unpack2(words, DTYPE)
    low = (low * inverse_scale + ROUNDING).to(gl.int32, bitcast=True) - ROUNDED
    high = (high * inverse_scale + ROUNDING).to(gl.int32, bitcast=True) - ROUNDED
    return low, high


@gluon.jit
def _split_words(vec4s, W: gl.constexpr):
    """Split vec4s int32 [W, 32, 4], in the order (p0, e1), into two [W, 32, 2]: one for each p0."""
    return gl.split(gl.permute(gl.reshape(vec4s, (W, 32, 2, 2)), (0, 1, 3, 2)))


@gluon.jit
def _split_digits(a, b, c, d):
    """Split four int32 [...], results of `_fixed_point`, into digits: highest, middle and lowest of all four.

    Returns three int32 [...], with a byte for each of `a`, `b`, `c` and `d`.
    """
    return gl.inline_asm_elementwise(
        _SPLIT, "=&r,=&r,=&r,r,r,r,r", [a, b, c, d], (gl.int32, gl.int32, gl.int32), True, 1
    )
