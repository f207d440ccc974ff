"""Stage x in shared memory as operand B of `mma`, for kernels in which each warp has its own columns of K.

Operand B of an m16n8 `mma` has 8 columns n: rows of x, or the int8 digits that rows are split into. Lane 4 n
+ t (t 0 to 3) of a warp holds column n. Two consecutive mmas are an mma pair. Their two operands B are 16
bytes per lane, four 32-bit words: a vec4.

    floats     An mma pair takes 32 columns of K. x is stored as in memory, [n][word][t], and `ldmatrix` makes
               vec4s of it. If `S.shared_table`, a register of weights has two fragments (16 columns each).
               x is then stored as vec4s, [n][t][word], and a word has two columns 16 apart.
    integers   An mma pair takes 64 columns, one byte each, stored in either order. x is split into three
               int8 digits,

                   x = unit * (65536 d2 + 256 d1 + d0)     unit a power of two, |x| <= unit * 2**22

               rounded to 2**-23 of the largest of its row among the columns of a warp. Column n is
               (digit, row of x), so one product has all digits of up to two rows.

A run is 32 consecutive columns of K: column = 16 p0 + 8 e1 + 2 t + e0, with p0, e1 and e0 of 0 or 1.

`S` is the `DecodeConfig` of `gemm.decode.decode_config`: all that is known at compile time. Written in Gluon.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from quantkit.kernels.gluon.compat import async_load, reinterpret
from quantkit.kernels.gluon.smem_layouts import copy_layout, x_smem_layout
from quantkit.kernels.gluon.x_digits import stage_digits
from quantkit.kernels.gluon.x_rows import (
    pack2,
    per_lane,
    round_rows,
    row_layout,
    split_words,
    transpose_words,
    unpack2,
    vec4_layout,
)


@gluon.jit
def norm_weights(norm, S: gl.constexpr):
    """Load the weights `norm` [K] of an RMSNorm of x: a tuple of int32 [warps, 32 lanes, 4 words].

    A word has two 16-bit weights. Each lane gets the weights of the columns of x that `_load_x` gives it. If
    not `S.norms_x`, the result is (). `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    weights = ()
    if S.norms_x:
        weights = _load_x(norm, 1, None, S)
    return weights


@gluon.jit
def stage_x(x, other, weights, total, M, order, S: gl.constexpr):
    """Copy x [M, K] to shared memory as operand B of `mma`: return (that memory, factors of the sums).

        x          [M, K], 16-bit floats; columns beyond K become zeros
        order      int32 [M]: the routed tokens whose rows of x are copied; None without experts
        other      [M, K]: if `S.norms_x` and `S.norm.adds`, x is replaced by x + `other`
        total      [M, K]: x + `other` is also written here
        weights    result of `norm_weights`: if `S.norms_x`, x (or x + `other`) is replaced by its RMSNorm
        memory     int32 [mma pairs * column groups, words of all warps], for `load_b_fragment`
        factors    float32 [warps, rows]: sums of products with a row of x are to be multiplied by them; () if
                   there are none (`S.has_column_weights`)

    If `S.rounding` is not None, x is rounded to 8 bits after the norm. If `S.int8_mma`, x is split into int8
    digits: x = unit * (65536 d2 + 256 d1 + d0), and the factor of a row is its unit. Otherwise factors are 1.

    An mma pair is two consecutive mmas; a column group is 8 rows of x or 8 int8 digits. `S` holds the
    kernel's compile-time constants (`DecodeConfig`).
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
            x_scale = stage_digits(words, x_smem, S)
        else:
            x_scale = _stage_floats(words, x_smem, S)
    else:
        _copy(x, M, order, x_smem, S)
        x_scale = _unit_scales(S)
    return x_smem, x_scale


@gluon.jit
def load_b_fragment(x_smem, number, S: gl.constexpr):
    """Load operand B of two consecutive mmas from shared memory: int32 [warps, 32 lanes, 4 words].

        x_smem    the shared memory that `stage_x` returns
        number    index of its row: index of the mma pair * column groups + index of the column group

    An mma pair is two consecutive mmas; a column group is 8 rows of x or 8 int8 digits. If x has fewer than
    eight such columns, several lanes read the same words. `S` holds the kernel's compile-time constants
    (`DecodeConfig`).
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
    """Copy x [M, K], 16-bit floats, to shared memory `x_smem` by `cp.async` of 16 bytes, and wait for it.

    The memory is int32 [mma pairs * column groups, warps, 1, row, 4 words, 4 lanes]; a word has two values of
    x. `order` int32 [M] has the routed tokens whose rows of x are copied; it is None without experts. `S`
    holds the kernel's compile-time constants (`DecodeConfig`).
    """
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
    """Return the 1-D layout of axis AXIS of LAYOUT, the register layout of a tensor of shape SIZES."""
    for other, _ in list(enumerate(SIZES))[::-1]:
        if other != AXIS:
            LAYOUT = gl.SliceLayout(other, LAYOUT)
    return LAYOUT


@gluon.jit
def _axis_index(AXIS: gl.constexpr, SIZES: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the indices 0 to SIZES[AXIS] - 1, int32, along AXIS of a tensor of shape SIZES in layout LAYOUT.

    The result has the rank of that tensor and size 1 along the other axes, so it broadcasts: [1, .., n, ..,
    1].
    """
    RANK: gl.constexpr = len(SIZES)
    numbers = gl.arange(0, SIZES[AXIS], _axis_layout(LAYOUT, AXIS, SIZES))
    for other in gl.static_range(RANK):
        if other != AXIS:
            numbers = gl.expand_dims(numbers, other)
    return numbers


@gluon.jit
def _row_of_x(m, M, order, S: gl.constexpr):
    """Return the index of the row of x that is row `m` [...] of the program: int64 [...].

    The program has M rows; indices `m` from M on count as M - 1. If `order` is None, the result is `m`. With
    experts the rows are routed tokens `order` int32 [M], and routed token p reads row p // `S.top_k` of x.
    `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    m = gl.minimum(m, M - 1)
    if order is not None:
        m = gl.load(order + m) // S.top_k
    return m.to(gl.int64)


@gluon.jit
def _x_pointers(x, M, order, number: gl.constexpr, S: gl.constexpr):
    """Return (pointers, mask) of a load of x [M, K]: [warps, 32 lanes, 4 words], two columns of x per word.

        number    index of the load. An mma pair is two adjacent fragments, 32 columns of x, of which `mma`
                  takes one at a time; for int8 products 64 columns. A load fetches 32 columns of
                  `S.mma_pairs_per_pass` pairs. So int8 products load each of these pairs twice, a half of its
                  columns at a time.
        order     int32 [M]: the routed tokens whose rows of x are loaded; None without experts
        mask      False for columns from K on

    Lane (pair * rows + row) * 4 + t loads 8 adjacent columns of a row of x for a pair. `S` holds the kernel's
    compile-time constants (`DecodeConfig`).
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
        run = _run_of(mma_pair, number % HALVES, S.fragment_distance)
    column = warp * (S.mma_pairs * S.mma_k) + run * 16 + lane % 4 * 4 + word
    at = x.to(gl.pointer_type(gl.int32), bitcast=True) + row * (S.k // 2) + column
    return at, (column < S.k // 2) & (mma_pair < S.mma_pairs)


@gluon.jit
def _load_x(x, M, order, S: gl.constexpr):
    """Load all of x [M, K] to registers: a tuple of int32 [warps, 32 lanes, 4], two 16-bit floats each.

    Tensor i is loaded from `_x_pointers` for `number` = i; columns beyond K are zeros. `order` int32 [M] has
    the routed tokens whose rows of x are loaded; it is None without experts. `S` holds the kernel's
    compile-time constants (`DecodeConfig`).
    """
    NUMBERS: gl.constexpr = S.padded_mma_pairs // S.mma_pairs_per_pass * (S.mma_k // 16)
    words = ()
    for number in gl.static_range(NUMBERS):
        at, inside = _x_pointers(x, M, order, number, S)
        words = words + (gl.load(at, mask=inside, other=0),)
    return words


@gluon.jit
def _rms_norm(words, other, weights, total, M, S: gl.constexpr):
    """Return RMSNorm of each row of x [M, K], which is in registers: a tuple of int32 [warps, 32 lanes, 4].

        RMSNorm(x) = x / sqrt(mean(x^2) + eps) * (weight + offset)

        words           x as a tuple like the result; a word is two 16-bit floats
        other, total    [M, K]: if `S.norm.adds`, x is first replaced by x + `other`; program 0 writes that to
                        `total`
        weights         result of `norm_weights`

    If `S.norm.rounded`, x / sqrt(...) is rounded to 16 bits before the product. `S` holds the kernel's
    compile-time constants (`DecodeConfig`).
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
    rstd = gl.expand_dims(gl.rsqrt(of_rows / S.k + S.norm.eps), 0)
    rstd = per_lane(rstd, S)
    scaled = ()
    for number in gl.static_range(NUMBERS):
        low, high = unpack2(words[number], S.dtype)
        low, high = low * rstd, high * rstd
        if S.norm.rounded:
            low, high = low.to(S.dtype).to(gl.float32), high.to(S.dtype).to(gl.float32)
        weight_low, weight_high = unpack2(weights[number], S.dtype)
        low, high = low * (weight_low + S.norm.offset), high * (weight_high + S.norm.offset)
        scaled = scaled + (pack2(low, high, S.dtype),)
    return scaled


@gluon.jit
def _unit_scales(S: gl.constexpr):
    """Return ones, float32 [warps, rows of x], or () if `S.has_column_weights` is False.

    They are the factors of sums of products with x in 16-bit floats. For int8 digits the factors are the
    units that `stage_digits` returns. `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    x_scale = ()
    if S.has_column_weights:
        x_scale = gl.full(
            [S.warps, S.rows], 1.0, gl.float32, gl.SliceLayout(1, gl.SliceLayout(3, row_layout(S)))
        )
    return x_scale


@gluon.jit
def _stage_floats(words, x_smem, S: gl.constexpr):
    """Store x in shared memory `x_smem` and return the factors of its sums, the result of `_unit_scales`.

    `words` is x: a tuple of int32 [warps, 32 lanes, 4 words], two 16-bit floats in a word. Words are stored
    in the order of columns, as by `_copy`. But if `S.shared_table`, a lane's four words are adjacent, and
    each has two columns that are 16 apart. `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    PASSES: gl.constexpr = S.padded_mma_pairs // S.mma_pairs_per_pass
    SIZES: gl.constexpr = S.float_shape
    x_passes = reinterpret(
        x_smem, gl.int32, [PASSES, S.mma_pairs_per_pass * S.warps * S.rows * 16], x_smem.type.layout
    )
    for number in gl.static_range(PASSES):
        if S.shared_table:
            first, second = split_words(transpose_words(words[number]), S.warps)
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
def _run_of(mma_pair, HALF: gl.constexpr, DISTANCE: gl.constexpr):
    """Return the index of the run (32 columns of K) that is half HALF of each int8 mma pair: int32 [...].

    An int8 mma pair, two consecutive mmas, multiplies 64 columns: the run of HALF 0, then that of HALF 1.
    `mma_pair` [...] are indices of pairs. The two runs are adjacent if DISTANCE is 1, else DISTANCE / 2 runs
    apart. DISTANCE is `S.fragment_distance`: the distance, in fragments, of two codes that become bytes of
    one register.
    """
    if DISTANCE == 1:
        run = 2 * mma_pair + HALF
    else:
        run = mma_pair // (DISTANCE // 2) * DISTANCE + mma_pair % (DISTANCE // 2) + HALF * (DISTANCE // 2)
    return run
