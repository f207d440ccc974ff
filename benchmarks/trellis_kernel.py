"""Probe kernel: one row of x times a weight of 2 bits, by how a weight is decoded.

    words     none: the words are only read
    int2      plain codes: a weight is its two bits less 2
    trellis   a weight is the sum of the two halves of a hash of 16 bits (QTIP's 3INST, arXiv 2406.11235)
    pairs     the two halves of such a hash are two weights: half of the hashes, values that are no sums

Words are int32 [row tiles, chunks, ROWS, 4]: a chunk is 64 columns, a lane has the 4 words of a row. Of a
trellis the window of 16 bits moves by 2 bits a weight, or by 4 a pair; that of the last word goes on in the
first one. So all bits of a window are in registers of a lane. Written in Gluon.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: The hash: multiply, add, then (hash & MASK) ^ HALVES are two float16.
MULTIPLY, ADD, MASK, HALVES = 89226354, 64248484, 0x8FFF8FFF, 0x3B603B60


def _windows(step: int) -> list[str]:
    """Return PTX that puts the windows at bits 0, `step`, ... of the words $1 and $2 in t0, t1, ..."""
    lines = []
    for shift in range(0, 8, step):
        # Bits from 0 and from 16 on, moved by `shift`: each has the windows of two bytes.
        lines += [f"shr.u32 a, $1, {shift};", f"shf.r.wrap.b32 b, $1, $2, {16 + shift};"]
        for byte, (base, selector) in enumerate((("a", "4410"), ("a", "4421"), ("b", "4410"), ("b", "4421"))):
            lines.append(f"prmt.b32 t{(8 * byte + shift) // step}, {base}, 0, 0x{selector};")
    return lines


def _hashes(count: int) -> list[str]:
    """Return PTX that makes two float16 of each window, and adds their products with x to the sums $0."""
    lines = []
    for i in range(count):
        lines += [
            f"mad.lo.u32 t{i}, t{i}, {MULTIPLY}, {ADD};",
            # (a & b) ^ c
            f"lop3.b32 t{i}, t{i}, {MASK}, {HALVES}, 0x6A;",
            f"fma.rn.f16x2 $0, t{i}, ${i + 4}, $0;",
        ]
    return lines


def _int2() -> list[str]:
    """Return PTX that adds the products of the 16 codes of $1 with x to the sums $0."""
    lines = ["shr.u32 a, $1, 10;"]
    for i in range(8):
        base, place = ("$1", i) if i < 5 else ("a", i - 5)
        # 1024 + 4^place * code, then the code less 2: (v - 1024) / 4^place - 2, which is exact.
        offset = _half(-(1024 / 4**place + 2))
        lines += [
            f"lop3.b32 t{i}, {base}, {0x00030003 << 2 * place}, 0x64006400, 0xEA;",
            f"mov.b32 c, {_half(4.0**-place)};",
            f"mov.b32 d, {offset};",
            f"fma.rn.f16x2 t{i}, t{i}, c, d;",
            f"fma.rn.f16x2 $0, t{i}, ${i + 4}, $0;",
        ]
    return lines


def _half(value: float) -> str:
    """Return the bits of a number in float16, twice."""
    import numpy as np

    bits = int(np.float16(value).view(np.uint16))
    return f"0x{bits << 16 | bits:08X}"


def _ptx(lines: list[str]) -> gl.constexpr:
    return gl.constexpr("\n".join(["{", ".reg .b32 a, b, c, d, t<16>;", "mov.b32 $0, $3;", *lines, "}"]))


#: Registers of x for a word of 16 weights, two float16 each: pairs of columns, or one column twice.
X_REGISTERS = {"words": 0, "int2": 8, "trellis": 16, "pairs": 8}
_PTX = {
    "int2": _ptx(_int2()),
    "trellis": _ptx([*_windows(2), *_hashes(16)]),
    "pairs": _ptx([*_windows(4), *_hashes(8)]),
}
_INT2, _TRELLIS, _PAIRS = (_PTX[name] for name in ("int2", "trellis", "pairs"))
_CONSTRAINTS8 = gl.constexpr("=&r,r,r,r" + ",r" * 8)
_CONSTRAINTS16 = gl.constexpr("=&r,r,r,r" + ",r" * 16)


@gluon.jit(do_not_specialize=["STEPS", "N"])
def gemv(words, x, y, N, STEPS, CODE: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr, D: gl.constexpr):
    """Compute float32 sums y [slices of K, N] of x times a weight. Grid: (row tiles, slices of K).

    x int32 [chunks, X, 4]    two float16 each: X registers for each word
    STEPS                     steps of a program; W warps have a chunk each in a step
    D                         steps whose words are loaded ahead; STEPS is a multiple of it
    """
    P: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [W, 1, 1], [2, 1, 0])
    OF_WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, P))
    OF_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, P))
    OF_WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, P))
    warp = gl.arange(0, W, OF_WARP)
    row = gl.arange(0, ROWS, OF_ROW)
    word = gl.arange(0, 4, OF_WORD)
    of_warp = gl.expand_dims(gl.expand_dims(warp, 1), 2)
    of_row = gl.expand_dims(gl.expand_dims(row, 0), 2)
    of_word = gl.expand_dims(gl.expand_dims(word, 0), 1)
    chunks = gl.num_programs(1) * STEPS * W
    chunk = gl.program_id(1) * STEPS * W + of_warp
    words += ((gl.program_id(0) * chunks + chunk) * ROWS + of_row) * 4 + of_word
    XS: gl.constexpr = 16 if CODE == "trellis" else 8
    x += chunk * (XS * 4) + of_word
    ring = ()
    for d in gl.static_range(D):
        ring = ring + (gl.load(words + d * (W * ROWS * 4)),)  # noqa: RUF005
    total = gl.zeros((W, ROWS, 4), gl.float32, P)
    for outer in range(0, STEPS // D):
        sums = gl.zeros((W, ROWS, 4), gl.int32, P)
        following = ()
        for d in gl.static_range(D):
            now = ring[d]
            step = outer * D + d
            ahead = gl.minimum(step + D, STEPS - 1)
            following = following + (gl.load(words + ahead * (W * ROWS * 4)),)  # noqa: RUF005
            if CODE == "words":
                sums ^= now
            else:
                sums = _multiply(now, x + step * (W * XS * 4), sums, CODE, W, ROWS)
        ring = following
        if CODE == "words":
            total += sums.to(gl.float32)
        else:
            low = sums.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
            high = (sums >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
            total += low + high
    out = gl.sum(gl.sum(total, 2), 0)
    at = gl.program_id(1) * N + gl.program_id(0) * ROWS + gl.arange(0, ROWS, OF_ROW)
    gl.store(y + at, gl.convert_layout(out, OF_ROW))


@gluon.jit
def _multiply(now, x, sums, CODE: gl.constexpr, W: gl.constexpr, ROWS: gl.constexpr):
    """Return `sums` and the products of a chunk, each two float16: [W, ROWS, 4], as the words `now`."""
    x0 = gl.load(x)
    x1 = gl.load(x + 4)
    x2 = gl.load(x + 8)
    x3 = gl.load(x + 12)
    x4 = gl.load(x + 16)
    x5 = gl.load(x + 20)
    x6 = gl.load(x + 24)
    x7 = gl.load(x + 28)
    if CODE == "int2":
        return gl.inline_asm_elementwise(
            _INT2, _CONSTRAINTS8, [now, now, sums, x0, x1, x2, x3, x4, x5, x6, x7], gl.int32, True, 1
        )
    # The words after these, of the same lane.
    even, odd = gl.split(gl.reshape(now, (W, ROWS, 2, 2)))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    after = gl.reshape(gl.join(gl.join(w1, w3), gl.join(w2, w0)), (W, ROWS, 4))
    after = gl.convert_layout(after, now.type.layout, assert_trivial=True)
    if CODE == "pairs":
        return gl.inline_asm_elementwise(
            _PAIRS, _CONSTRAINTS8, [now, after, sums, x0, x1, x2, x3, x4, x5, x6, x7], gl.int32, True, 1
        )
    x8 = gl.load(x + 32)
    x9 = gl.load(x + 36)
    x10 = gl.load(x + 40)
    x11 = gl.load(x + 44)
    x12 = gl.load(x + 48)
    x13 = gl.load(x + 52)
    x14 = gl.load(x + 56)
    x15 = gl.load(x + 60)
    return gl.inline_asm_elementwise(
        _TRELLIS,
        _CONSTRAINTS16,
        [now, after, sums, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15],
        gl.int32,
        True,
        1,
    )
