"""x in shared memory as `mma` wants operand B, for kernels in which each warp has columns of its own.

A quad is 16 bytes of a lane: operand B of two products. Lane 4 n + t has column n of eight, which is a row of
x or one of its digits. A piece is as many columns as lanes 4 n to 4 n + 3 have in a quad:

    floats     32 columns of x as they lie in memory, [column n | word of a quad | lane t], of which
               `ldmatrix` makes quads; or, where registers are of two planes, quads [column n | lane t | word]
               with a word for each two columns that these multiply, which lie 16 apart
    integers   64 columns, a byte for each, as either: x is three digits of 8 bits,

                   x = unit * (65536 d2 + 256 d1 + d0)     unit a power of two, |x| <= unit * 2**22

               rounded to 2**-23 of the largest in its row among the columns of a warp. Columns n are
               (digit, row of x), so that one product of up to two rows has all their digits.

`S` is the `DecodeConfig` of `quantkit.kernels.gemm.decode.decode_config`. Written in Gluon.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from quantkit.kernels.gluon.compat import async_load, reinterpret
from quantkit.kernels.gluon.smem_layouts import side_by_side, stored

#: 1.5 * 2**23: what a float32 is added to for its last place to be 1, and its bits, less 0x808080.
ROUNDING = gl.constexpr(12582912.0)
ROUNDED = gl.constexpr(0x4B400000 - 0x808080)
#: PTX that makes a digit of each of four numbers, highest digits first, of their 24 bits: numbers plus
#: 0x808080 have digits plus 0x80 in their bytes.
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

#: PTX by which lanes 4 n + t exchange words: word i of lane t becomes word t of lane i.
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


@gluon.constexpr_function
def quads_of(W: int, WORDS: int = 4) -> gl.DistributedLinearLayout:
    """[W warps, 32 lanes, WORDS]: a thread has its words in registers."""
    words = [[0, 0, 1 << bit] for bit in range(WORDS.bit_length() - 1)]
    lanes = [[0, 1 << bit, 0] for bit in range(5)]
    warps = [[1 << bit, 0, 0] for bit in range(W.bit_length() - 1)]
    return gl.DistributedLinearLayout(words, lanes, warps, [], [W, 32, WORDS])


@gluon.jit
def norm_weights(norm, S: gl.constexpr):
    """What the norm of x is multiplied with, for the columns of each warp; nothing where x is no norm."""
    weights = ()
    if S.is_normed:
        weights = _own(norm, 1, None, S)
    return weights


@gluon.jit
def stage_x(x, other, weights, total, M, order, S: gl.constexpr):
    """The quads of all pieces in shared memory, [number, words of all warps], and the unit of each row of x,
    [W, rows]; 1 of floats, and none where sums are not weighed.

    A piece has a quad for each of `S.column_groups`, whose numbers follow each other. Beyond K are zeros.
    With `S.is_normed` they are those of the norm of x, or of x + other, which becomes `total`.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    held = gl.allocate_shared_memory(gl.int32, [S.held_rows, S.row_words], FLAT)
    if S.integers or S.shared_table or S.is_normed:
        words = _own(x, M, order, S)
        if S.is_normed:
            words = _normed(words, other, weights, total, M, S)
        if S.integers:
            unit = _stage_digits(words, held, S)
        else:
            unit = _stage_floats(words, held, S)
    else:
        _copy(x, M, order, held, S)
        unit = _ones(S)
    return held, unit


@gluon.jit
def load_b_fragment(held, number, S: gl.constexpr):
    """Quads [W, 32, 4] by their number; lanes have the same ones where there are fewer than eight columns."""
    PARTS: gl.constexpr = 8 // S.bm
    WORDS: gl.constexpr = 1 if S.as_quads else 4
    LANES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, WORDS, 4 // WORDS],
        [1, PARTS, S.bm, 4 // WORDS, WORDS],
        [S.warps, 1, 1, 1, 1],
        [4, 3, 2, 1, 0],
    )
    words = reinterpret(held.index(number), gl.int32, S.quad_sizes, stored(S.quad_sizes, S))
    quads, _ = gl.broadcast(words.load(LANES), gl.full([S.warps, PARTS, S.bm, 4, 4], 0, gl.int32, LANES))
    if not S.as_quads:
        quads = gl.permute(quads, (0, 1, 2, 4, 3))
    quads = gl.reshape(quads, (S.warps, 32, 4))
    return gl.convert_layout(quads, quads_of(S.warps), assert_trivial=True)


@gluon.jit
def pair_of(words, DTYPE: gl.constexpr):
    """The two numbers of 16 bits of each word, as float32."""
    if DTYPE == gl.bfloat16:
        low = (words << 16).to(gl.float32, bitcast=True)
        high = (words & -65536).to(gl.float32, bitcast=True)
    else:
        low = words.to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
        high = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    return low, high


@gluon.jit
def pair(low, high, DTYPE: gl.constexpr):
    """Two float32 as the 16-bit numbers of a word."""
    low = low.to(DTYPE).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return low | high.to(DTYPE).to(gl.int16, bitcast=True).to(gl.int32) << 16


@gluon.jit
def _copy(x, M, order, held, S: gl.constexpr):
    """Have x copied, 16 bytes at a time, to [number of a quad, warp, 1, row, word, t]."""
    SIZES: gl.constexpr = S.copied_sizes
    LAYOUT: gl.constexpr = side_by_side(SIZES, S.warps)
    number, warp = _along(0, SIZES, LAYOUT), _along(1, SIZES, LAYOUT)
    piece, group = number // S.column_groups, number % S.column_groups
    # Two columns to a word.
    column = (warp * S.pieces + piece) * 16 + _along(4, SIZES, LAYOUT) * 4 + _along(5, SIZES, LAYOUT)
    row = _row_of_x(group * S.group_rows + _along(3, SIZES, LAYOUT), M, order, S)
    at = x.to(gl.pointer_type(gl.int32), bitcast=True) + row * (S.k // 2) + column
    async_load(
        reinterpret(held, gl.int32, SIZES, stored(SIZES, S)),
        at,
        mask=(piece < S.pieces) & (column < S.k // 2),
    )
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.constexpr_function
def _axis_of(LAYOUT, AXIS, SIZES):  # type: ignore[no-untyped-def]
    for other, _ in list(enumerate(SIZES))[::-1]:
        if other != AXIS:
            LAYOUT = gl.SliceLayout(other, LAYOUT)
    return LAYOUT


@gluon.jit
def _along(AXIS: gl.constexpr, SIZES: gl.constexpr, LAYOUT: gl.constexpr):
    """Numbers along an axis of a tensor of `SIZES`."""
    RANK: gl.constexpr = len(SIZES)
    numbers = gl.arange(0, SIZES[AXIS], _axis_of(LAYOUT, AXIS, SIZES))
    for other in gl.static_range(RANK):
        if other != AXIS:
            numbers = gl.expand_dims(numbers, other)
    return numbers


@gluon.constexpr_function
def _tasks_of(S):  # type: ignore[no-untyped-def]
    """Lanes [W, pieces at a time, rows of x, t]."""
    return gl.BlockedLayout([1, 1, 1, 1], [1, S.at_once, S.rows, 4], [S.warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def _row_of_x(m, M, order, S: gl.constexpr):
    """Which row of x is number `m` of M, or the last: that, or that of a pair of a segment."""
    m = gl.minimum(m, M - 1)
    if order is not None:
        m = gl.load(order + m) // S.top_k
    return m.to(gl.int64)


@gluon.jit
def _place(x, M, order, number: gl.constexpr, S: gl.constexpr):
    """Where the words [W, 32 = (piece of a turn, row, number of 16 bytes), 4] of each warp are in rows of x,
    and which there are.

    A turn of integers has two numbers, one for each half of its pieces.
    """
    HALVES: gl.constexpr = S.product // 16
    QUADS: gl.constexpr = quads_of(S.warps)
    warp = gl.arange(0, S.warps, gl.SliceLayout(1, gl.SliceLayout(2, QUADS)))
    warp = gl.expand_dims(gl.expand_dims(warp, 1), 2)
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, QUADS)))
    lane = gl.expand_dims(gl.expand_dims(lane, 0), 2)
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, QUADS)))
    word = gl.expand_dims(gl.expand_dims(word, 0), 1)
    row = _row_of_x(lane // 4 % S.rows, M, order, S)
    piece = lane // (4 * S.rows) + number // HALVES * S.at_once
    run = piece
    if S.integers:
        run = _run(piece, number % HALVES, S.apart)
    column = warp * (S.pieces * S.product) + run * 16 + lane % 4 * 4 + word
    at = x.to(gl.pointer_type(gl.int32), bitcast=True) + row * (S.k // 2) + column
    return at, (column < S.k // 2) & (piece < S.pieces)


@gluon.jit
def _own(x, M, order, S: gl.constexpr):
    """All words that `_place` names, by their number; zeros beyond K."""
    NUMBERS: gl.constexpr = S.room // S.at_once * (S.product // 16)
    words = ()
    for number in gl.static_range(NUMBERS):
        at, inside = _place(x, M, order, number, S)
        words = words + (gl.load(at, mask=inside, other=0),)
    return words


@gluon.jit
def _normed(words, other, weights, total, M, S: gl.constexpr):
    """Return the RMSNorm of x, of which this warp has `words`; with `other`, of x + other, kept in `total`.

    Numbers are rounded where `quantkit.kernels.ops.norm_kernel.rms_norm` rounds them.
    """
    QUADS: gl.constexpr = quads_of(S.warps)
    TASKS: gl.constexpr = _tasks_of(S)
    NUMBERS: gl.constexpr = len(words)
    if S.norm.adds:
        others = _own(other, M, None, S)
        sums = ()
        for number in gl.static_range(NUMBERS):
            low, high = pair_of(words[number], S.dtype)
            more_low, more_high = pair_of(others[number], S.dtype)
            sums = sums + (pair(low + more_low, high + more_high, S.dtype),)
            at, inside = _place(total, M, None, number, S)
            # All programs have all of it.
            gl.store(at, sums[number], mask=inside & (gl.program_id(0) == 0))
        words = sums
    squares = gl.full([S.warps, 32, 4], 0.0, gl.float32, QUADS)
    for number in gl.static_range(NUMBERS):
        low, high = pair_of(words[number], S.dtype)
        squares += low * low + high * high
    of_rows = gl.reshape(gl.sum(squares, axis=2), (S.warps, S.at_once, S.rows, 4))
    of_rows = gl.convert_layout(of_rows, TASKS, assert_trivial=True)
    of_rows = gl.sum(gl.sum(gl.sum(of_rows, axis=3), axis=1), axis=0)
    times = gl.expand_dims(gl.rsqrt(of_rows / S.k + S.norm.eps), 0)
    times = _of_lanes(times, S)
    made = ()
    for number in gl.static_range(NUMBERS):
        low, high = pair_of(words[number], S.dtype)
        low, high = low * times, high * times
        if S.norm.rounded:
            low, high = low.to(S.dtype).to(gl.float32), high.to(S.dtype).to(gl.float32)
        weight_low, weight_high = pair_of(weights[number], S.dtype)
        low, high = low * (weight_low + S.norm.offset), high * (weight_high + S.norm.offset)
        made = made + (pair(low, high, S.dtype),)
    return made


@gluon.jit
def _of_lanes(of_rows, S: gl.constexpr):
    """What rows of x [W or 1, rows] have, where lanes have words of them: [W, 32, 1]."""
    TASKS: gl.constexpr = _tasks_of(S)
    of_rows = gl.expand_dims(gl.expand_dims(of_rows, 1), 3)
    of_rows, _ = gl.broadcast(of_rows, gl.full([S.warps, S.at_once, S.rows, 4], 0, gl.float32, TASKS))
    of_rows = gl.convert_layout(
        gl.reshape(of_rows, (S.warps, 32)), gl.SliceLayout(2, quads_of(S.warps)), assert_trivial=True
    )
    return gl.expand_dims(of_rows, 2)


@gluon.jit
def _ones(S: gl.constexpr):
    """The unit of floats, if sums are weighed."""
    unit = ()
    if S.weighed:
        unit = gl.full([S.warps, S.rows], 1.0, gl.float32, gl.SliceLayout(1, gl.SliceLayout(3, _tasks_of(S))))
    return unit


@gluon.jit
def _quads(words):
    """Quads (p0, e1) of what lanes have as 16 bytes of x."""
    return gl.inline_asm_elementwise(_EXCHANGE, "=r,=r,=r,=r,r,r,r,r", [words], gl.int32, True, 4)


@gluon.jit
def _stage_floats(words, held, S: gl.constexpr):
    """Words of `_own` to shared memory, where `_copy` has them; the unit of x.

    For `S.shared_table` they are (e0, e1) of numbers p0 instead of (p0, e1) of e0.
    """
    TURNS: gl.constexpr = S.room // S.at_once
    SIZES: gl.constexpr = S.float_sizes
    turns = reinterpret(held, gl.int32, [TURNS, S.at_once * S.warps * S.rows * 16], held.type.layout)
    for turn in gl.static_range(TURNS):
        if S.shared_table:
            first, second = _split_words(_quads(words[turn]), S.warps)
            low = gl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [first, second], gl.int32, True, 1
            )
            high = gl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [first, second], gl.int32, True, 1
            )
            own = gl.permute(gl.join(low, high), (0, 1, 3, 2))
        else:
            own = words[turn]
        own = gl.reshape(own, (S.warps, S.at_once, 1, S.rows, 4, 4))
        reinterpret(turns.index(turn), gl.int32, SIZES, stored(SIZES, S)).store(
            gl.permute(own, (1, 0, 2, 3, 4, 5))
        )
    return _ones(S)


@gluon.jit
def _stage_digits(words, held, S: gl.constexpr):
    """Digits of x to shared memory; the units of x."""
    GROUPS: gl.constexpr = S.column_groups
    TURNS: gl.constexpr = S.room // S.at_once
    SIZES: gl.constexpr = S.digit_sizes
    unit, inverse = _units(words, S)
    for turn in gl.static_range(TURNS):
        first, second = words[2 * turn], words[2 * turn + 1]
        if S.apart == 1:
            first, second = _quads(first), _quads(second)
        digits = _digits(first, second, inverse, S)
        high = gl.join(digits[0], digits[2])
        low = gl.join(digits[1], gl.zeros_like(digits[1]))
        # Digits as columns n have them: groups, and those of a group.
        value = gl.reshape(gl.join(high, low), (S.warps, S.at_once, S.rows, 4, 4, GROUPS, 2 // GROUPS, 2))
        value = gl.permute(value, (1, 5, 0, 6, 7, 2, 3, 4))
        turns = reinterpret(held, gl.int32, [TURNS, S.at_once * S.warps * S.rows * 64], held.type.layout)
        reinterpret(turns.index(turn), gl.int32, SIZES, stored(SIZES, S)).store(value)
    return unit


@gluon.jit
def _run(piece, HALF: gl.constexpr, APART: gl.constexpr):
    """The run of 32 columns that is a half of a piece: that of every other byte, or of a product."""
    if APART == 1:
        run = 2 * piece + HALF
    else:
        run = piece // (APART // 2) * APART + piece % (APART // 2) + HALF * (APART // 2)
    return run


@gluon.jit
def _units(words, S: gl.constexpr):
    """The unit of each row of x [W, rows], NaN where not all of it is finite, and 1 / unit [W, 32, 1]."""
    TASKS: gl.constexpr = _tasks_of(S)
    largest = gl.full([S.warps, 32, 4], 0, gl.int32, quads_of(S.warps))
    for number in gl.static_range(len(words)):
        low, high = pair_of(words[number], S.dtype)
        low, high = low.to(gl.int32, bitcast=True), high.to(gl.int32, bitcast=True)
        # Magnitudes in the order of their bits.
        largest = gl.maximum(largest, gl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF))
    most = gl.reshape(gl.max(largest, axis=2), (S.warps, S.at_once, S.rows, 4))
    most = gl.convert_layout(most, TASKS, assert_trivial=True)
    most = gl.max(gl.max(most, axis=3), axis=1)
    # Smaller or larger ones would be no floats any more.
    exponent = gl.minimum(gl.maximum(most >> 23, 30), 254)
    unit = ((exponent - 21) << 23).to(gl.float32, bitcast=True)
    unit = gl.where(most < 0x7F800000, unit, float("nan"))
    inverse = ((275 - exponent) << 23).to(gl.float32, bitcast=True)
    return unit, _of_lanes(inverse, S)


@gluon.jit
def _digits(first, second, inverse, S: gl.constexpr):
    """The three digits of two runs, of numbers e0 of words, as words of four digits.

    Bytes are (e0, run) where planes of different runs share registers. Where those of a run do they are
    (e0, p0): quads (run, e1) of quads (p0, e1).
    """
    first_low, first_high = _fixed(first, inverse, S.dtype)
    second_low, second_high = _fixed(second, inverse, S.dtype)
    if S.apart == 1:
        a, b = _split_words(first_low, S.warps)
        c, d = _split_words(first_high, S.warps)
        of_first = _split_digits(a, b, c, d)
        a, b = _split_words(second_low, S.warps)
        c, d = _split_words(second_high, S.warps)
        of_second = _split_digits(a, b, c, d)
        digits = ()
        for digit in gl.static_range(3):
            quad = gl.permute(gl.join(of_first[digit], of_second[digit]), (0, 1, 3, 2))
            quad = gl.reshape(quad, (S.warps, 32, 4))
            digits = digits + (gl.convert_layout(quad, quads_of(S.warps), assert_trivial=True),)
    else:
        digits = _split_digits(first_low, second_low, first_high, second_high)
    return digits


@gluon.jit
def _fixed(words, inverse, DTYPE: gl.constexpr):
    """The two numbers of each word in units, plus 0x808080."""
    low, high = pair_of(words, DTYPE)
    low = (low * inverse + ROUNDING).to(gl.int32, bitcast=True) - ROUNDED
    high = (high * inverse + ROUNDING).to(gl.int32, bitcast=True) - ROUNDED
    return low, high


@gluon.jit
def _split_words(quads, W: gl.constexpr):
    """Quads (p0, e1) as the two [W, 32, e1] of p0."""
    return gl.split(gl.permute(gl.reshape(quads, (W, 32, 2, 2)), (0, 1, 3, 2)))


@gluon.jit
def _split_digits(a, b, c, d):
    """The highest, middle and lowest digits of four numbers, four of a digit to a word."""
    return gl.inline_asm_elementwise(
        _SPLIT, "=&r,=&r,=&r,r,r,r,r", [a, b, c, d], (gl.int32, gl.int32, gl.int32), True, 1
    )
