"""What the fused kernels are made of: tiles of codes to values, scales and zero-points to where they apply.

All of them work on tensors whose axes are those of the fragment layout
(`quantkit.kernels.layouts.fragment_layout`), so that reshaping and transposing only renames registers. Axes
called W are divided among the warps.
"""

import triton
import triton.language as tl


@triton.jit
def load_expert_block(expert_blocks, number, EARLY: tl.constexpr = False):
    """Expert, first pair and number of pairs of a segment (`quantkit.kernels.moe.permute_kernels`).

    EARLY, before the wait for the kernel before this one, they do not come from a multiprocessor's cache.
    """
    at = expert_blocks + number * 3
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    first = tl.load(at + 1, cache_modifier=CACHE)
    return tl.load(at, cache_modifier=CACHE), first, tl.load(at + 2, cache_modifier=CACHE)


@triton.jit
def output_rows(order, m, M):
    """The rows of y that are computed as numbers `m` of M: those, or those of the pairs of a segment, which
    begins at `order`.
    """
    if order is not None:
        m = tl.load(order + m, mask=m < M, other=0)
    return m.to(tl.int64)


@triton.jit
def select_matrix(
    codes, scale, zero, factor, lut, matrix, N, SPANS: tl.constexpr, TILES: tl.constexpr,
    PLANES: tl.constexpr, BLOCKS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The operands of matrix `matrix` of those that lie one after the other, all with N rows."""
    BITS: tl.constexpr = 16 * TILES // PLANES
    row_tile = matrix.to(tl.int64) * ((N + 15) // 16)
    lanes = row_tile * (16 * BLOCKS * V)
    codes += row_tile * (SPANS * TILES * 256)
    return codes, scale + lanes, zero + lanes, factor + matrix, lut + matrix * (1 << BITS)


@triton.jit
def load_code_words(codes, row_tile, span, SPANS: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr):
    """The tiles (int16 [W, L, 256]) of each part: of row tiles `row_tile` [L] and spans `span` [W, L]."""
    lane = tl.arange(0, 256)
    at = codes + ((row_tile.to(tl.int64)[None, :] * SPANS + span) * (TILES * 256))[:, :, None] + lane
    tiles = ()
    for t in tl.static_range(TILES):
        if EVEN:
            tiles = tiles + (tl.load(at + t * 256),)
        else:
            tiles = tiles + (tl.load(at + t * 256, mask=(span < SPANS)[:, :, None], other=0),)
    return tiles


@triton.jit
def dequant_codes(
    tiles, lut, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, TABLE: tl.constexpr, FIELDS: tl.constexpr,
    PLANES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The values of all planes, DTYPE [..., planes], in units of their scale.

    By the PTX of an expression, for which lanes may hold a `TABLE` of `lut` [2**bits], or without one by what
    `FIELDS` has of each plane: `expressions.Plane`. `lut` is where that says values are looked up.
    """
    if ASM is None:
        lanes = ()
        for tile in tl.static_range(len(tiles)):
            lanes = lanes + (tiles[tile].to(tl.uint32),)
        values = ()
        for plane in tl.static_range(PLANES):
            values = values + (_value(lanes, lut, FIELDS, plane, DTYPE),)
        return _planes_last(values, PLANES)
    else:
        operands = tiles
        if TABLE is not None:
            # No tensor in truth: each lane of a warp has a value of its own.
            operands = operands + (tl.inline_asm_elementwise(TABLE, "=r,l", [lut], tl.int32, True, 1),)
        return _planes_last(_expression(operands, ASM, CONSTRAINTS, PLANES), PLANES).to(DTYPE, bitcast=True)


@triton.jit
def _value(lanes, lut, FIELDS: tl.constexpr, PLANE: tl.constexpr, DTYPE: tl.constexpr):
    bits = _moved(lanes, FIELDS, PLANE, 0)
    for move in tl.static_range(1, len(FIELDS[PLANE].moves)):
        bits |= _moved(lanes, FIELDS, PLANE, move)
    if FIELDS[PLANE].looked_up:
        return tl.load(lut + bits).to(DTYPE)
    else:
        value = (bits | FIELDS[PLANE].base).to(tl.float32, bitcast=True) * FIELDS[PLANE].factor
        # Triton takes -0 for 0, whose sum with -0 is 0.
        if FIELDS[PLANE].addend != 0.0:
            value += FIELDS[PLANE].addend
        if DTYPE.is_bf16():
            # It is a bfloat16, whose bits are the upper half; not every GPU has an instruction that rounds.
            return (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
        else:
            return value.to(DTYPE)


@triton.jit
def _moved(lanes, FIELDS: tl.constexpr, PLANE: tl.constexpr, MOVE: tl.constexpr):
    move: tl.constexpr = FIELDS[PLANE].moves[MOVE]
    lane = lanes[move.register]
    if move.right > 0:
        lane = lane >> move.right
    elif move.right < 0:
        lane = lane << -move.right
    return lane & move.mask


@triton.jit
def _expression(operands, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, PLANES: tl.constexpr):
    if PLANES == 2:
        return tl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, (tl.int16, tl.int16), True, 2)
    elif PLANES == 4:
        return tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, operands, (tl.int16, tl.int16, tl.int16, tl.int16), True, 2
        )
    elif PLANES == 8:
        return tl.inline_asm_elementwise(
            ASM,
            CONSTRAINTS,
            operands,
            (tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            True,
            2,
        )
    else:
        return tl.inline_asm_elementwise(
            ASM,
            CONSTRAINTS,
            operands,
            (
                tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16,
                tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16,
            ),
            True,
            2,
        )  # fmt: skip


@triton.jit
def _planes_last(q, PLANES: tl.constexpr):
    """Tensors [...] as one [..., 2, 2, ...], the highest bit of a plane's number first."""
    if PLANES == 2:
        return tl.join(q[0], q[1])
    elif PLANES == 4:
        return _join4(q[0], q[1], q[2], q[3])
    elif PLANES == 8:
        return _join8(q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7])
    else:
        return tl.join(
            _join8(q[0], q[2], q[4], q[6], q[8], q[10], q[12], q[14]),
            _join8(q[1], q[3], q[5], q[7], q[9], q[11], q[13], q[15]),
        )


@triton.jit
def _join4(q0, q1, q2, q3):
    return tl.join(tl.join(q0, q2), tl.join(q1, q3))


@triton.jit
def _join8(q0, q1, q2, q3, q4, q5, q6, q7):
    return tl.join(_join4(q0, q2, q4, q6), _join4(q1, q3, q5, q7))


@triton.jit
def load_by_lane(
    values, row_tile, block, BLOCKS: tl.constexpr, V: tl.constexpr, INLINE: tl.constexpr = False
):
    """V values per row and block, [4, 8, W, L, V, 2]: the axes are t, r, warps, the rest, values, row // 8.

    `row_tile` is [L], `block` [W, L]. The four lanes t of a row have the same values. `INLINE` allows PTX;
    with it, 8-bit ones of both rows are one int16, [4, 8, W, L, V, 1], for `scales_by_lane`.
    """
    if INLINE and values.dtype.element_ty.primitive_bitwidth == 8:
        # Numbers of 8 bits among what makes an operand of a product would change the layout of that.
        values = values.to(tl.pointer_type(tl.int16), bitcast=True)
        COUNT: tl.constexpr = 1
    else:
        COUNT: tl.constexpr = 2
    # A lane loads up to 16 bytes at once.
    MOST: tl.constexpr = 128 // values.dtype.element_ty.primitive_bitwidth
    LAST: tl.constexpr = COUNT * V if COUNT * V < MOST else MOST
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    r = tl.arange(0, 8)[:, None, None, None, None]
    at = row_tile[:, None, None] * BLOCKS + tl.minimum(block, BLOCKS - 1)[:, :, None, None] + t * 0
    part = tl.arange(0, COUNT * V // LAST)[:, None] * LAST
    v = tl.load(values + at * (8 * COUNT * V) + r * (COUNT * V) + part + tl.arange(0, LAST))
    return tl.reshape(v, (4, 8, block.shape[0], block.shape[1], V, COUNT))


@triton.jit
def scales_by_lane(stored, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Scales of `load_by_lane` as DTYPE, [4, 8, W, L, V, 2]."""
    SHAPE: tl.constexpr = stored.shape
    IN_BYTES: tl.constexpr = DTYPE.is_bf16() and (KIND == "e5m3" or KIND == "e8m0")
    if SHAPE[5] == 2:
        if IN_BYTES:
            return _bfloat16(stored.to(tl.int16) & 0xFF, KIND)
        else:
            return scale_value(stored, KIND).to(DTYPE)
    else:
        if IN_BYTES:
            ASM: tl.constexpr = bfloat16_of_bytes(KIND, "4240", "4341")
            # As bfloat16 they would not be multiplied in pairs.
            low, high = tl.inline_asm_elementwise(ASM, "=r,=r,r", [stored], (tl.int16, tl.int16), True, 2)
            low = low.to(DTYPE, bitcast=True)
            high = high.to(DTYPE, bitcast=True)
        else:
            low = scale_value(stored, KIND).to(DTYPE)
            high = scale_value(stored >> 8, KIND).to(DTYPE)
        return tl.reshape(tl.join(low, high), (SHAPE[0], SHAPE[1], SHAPE[2], SHAPE[3], SHAPE[4], 2))


@triton.jit
def _bfloat16(byte, KIND: tl.constexpr):
    """What a byte, in an int16, stands for in a KIND that carries a factor."""
    if KIND == "e5m3":
        bits = (byte << 4) + 0x7010
    else:
        bits = byte << 7
    return bits.to(tl.bfloat16, bitcast=True)


@triton.constexpr_function
def bfloat16_of_bytes(KIND, FIRST, SECOND, TWICE=False):
    """PTX that makes two registers of two bfloat16 each of one with scales of a KIND that carries a factor.

    FIRST and SECOND are what `prmt` selects for them: bytes 0 to 3, and 4, which is zero. TWICE makes two of
    the lower bfloat16: 2^20 + 2^4 is no shift, and does not wait for the units of shifts and selections.
    """
    times, more = {"e5m3": (16, "0x70107010"), "e8m0": (128, "0")}[KIND]
    times *= 0x10001 if TWICE else 1
    apart = f"prmt.b32 b0, $2, 0, 0x{FIRST};\nprmt.b32 b1, $2, 0, 0x{SECOND};"
    moved = f"mad.lo.u32 $0, b0, {times}, {more};\nmad.lo.u32 $1, b1, {times}, {more};"
    return f"{{.reg .b32 b<2>;\n{apart}\n{moved}}}"


@triton.jit
def scale_value(stored, KIND: tl.constexpr):
    """Scales as float32; `KIND` says how to read 8 bits in an int8 (`kernels/layouts/fragment_scales.py`).

    None of them is NaN, which the layout's builder made sure of; 2^-127 of e8m0 becomes 0.
    """
    if KIND == "e4m3":
        bits = stored.to(tl.int32)
        # Sign, exponent and mantissa to their places in a float32, whose exponents begin 120 lower.
        value = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
        return value * 1.329227995784916e36
    elif KIND == "e5m3":
        return (((stored.to(tl.int32) & 0xFF) << 20) + 0x70100000).to(tl.float32, bitcast=True)
    elif KIND == "e8m0":
        return ((stored.to(tl.int32) & 0xFF) << 23).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)


@triton.jit
def begin_rms_norm(out, other, weight, OFFSET: tl.constexpr):
    """`out` plus `other`, rounded; and times `weight` + OFFSET, which is their norm but for roots of rows."""
    total = (out.to(tl.float32) + other.to(tl.float32)).to(out.dtype)
    return total, (total.to(tl.float32) * (weight.to(tl.float32) + OFFSET)).to(out.dtype)


@triton.jit
def apply_scale_and_bias(
    sums, rows, scale, factor, bias, N, GROUPS: tl.constexpr, SCALE: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """What comes after the last column, for outputs `rows`: channels' scales, the tensor's factor, bias."""
    if GROUPS == 1:
        by_lane = rows // 16 * 16 + rows % 8 * 2 + rows // 8 % 2
        sums *= scale_value(tl.load(scale + by_lane, mask=rows < N, other=0), SCALE)
    if HAS_FACTOR:
        # One division, not one for each of them.
        sums *= 1.0 / tl.load(factor)
    if HAS_BIAS:
        sums += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    return sums
