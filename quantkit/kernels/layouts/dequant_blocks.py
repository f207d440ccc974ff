"""Device functions that fused kernels share: dequantize codes, load scales and zero-points, epilogue.

Tensors have the axes of the fragment layout (`layouts.fragment_layout`), so reshaping and transposing only
renames registers. A row tile is 16 rows of the weight W [N outputs, K inputs]. Lane 4 r + t of a warp has
rows r and r + 8 of the row tile. Axis W is divided among the warps; a warp loops over axis L.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def load_expert_block(expert_blocks, number, EARLY: tl.constexpr = False):
    """Load row `number` of `expert_blocks` int32 [P, 3]: three scalars that describe an expert block.

    A routed token is a token paired with one of its experts; an expert block is several of one expert. The
    scalars are the expert, the index of the first token among all routed tokens sorted by expert, and the
    number of tokens. If EARLY, the loads bypass L1, because they come before the wait for the kernel that may
    write the blocks (PDL).
    """
    at = expert_blocks + number * 3
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    first = tl.load(at + 1, cache_modifier=CACHE)
    return tl.load(at, cache_modifier=CACHE), first, tl.load(at + 2, cache_modifier=CACHE)


@triton.jit
def output_rows(order, m, M):
    """Return the rows of y [.., N] that rows `m` [...] of this program are written to: int64 [...].

    If `order` is None, the result is `m`. With experts it is `order[m]`, the row of y of a routed token (a
    token paired with one of its experts). `m` from M on, the number of rows of the program, then give 0.
    """
    if order is not None:
        m = tl.load(order + m, mask=m < M, other=0)
    return m.to(tl.int64)


@triton.jit
def select_matrix(
    codes, scale, zero, factor, lut, matrix, N, SPANS: tl.constexpr, REGISTERS: tl.constexpr,
    FRAGMENTS: tl.constexpr, BLOCKS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Return pointers to the matrix of index `matrix` of stacked weights [matrices, N outputs, K inputs].

    Use them in place of the arguments, which point to the first matrix:

        codes         int16 [row tiles, SPANS, REGISTERS, 256]   a row tile: 16 rows of the weight
        scale, zero   [row tiles, BLOCKS, 8, V, 2]               V groups of 128 columns, or one longer group
        factor        float32 [matrices]                         one per matrix; outputs are divided by it
        lut           float32 [matrices, 2**bits]                the value of each code

    A span is 16 * FRAGMENTS columns, whose codes are stored in the same REGISTERS registers.
    """
    BITS: tl.constexpr = 16 * REGISTERS // FRAGMENTS
    row_tile = matrix.to(tl.int64) * ((N + 15) // 16)
    values = row_tile * (16 * BLOCKS * V)
    codes += row_tile * (SPANS * REGISTERS * 256)
    return codes, scale + values, zero + values, factor + matrix, lut + matrix * (1 << BITS)


@triton.jit
def load_code_words(codes, row_tile, span, SPANS: tl.constexpr, REGISTERS: tl.constexpr, EVEN: tl.constexpr):
    """Load packed codes of L row tiles (16 weight rows), as W warps read them: a tuple of int16 [W, L, 256].

        codes       int16 [row tiles, SPANS, REGISTERS, 256]; 256 are the places of a 16 x 16 fragment
        row_tile    [L]: indices of row tiles; a warp loops over them
        span        [W, L]: indices of spans; a span is the columns stored in the same REGISTERS registers
        EVEN        True if all these spans exist; otherwise codes of spans from SPANS on are 0

    The tuple has one tensor per register and is an argument of `dequant_codes`.
    """
    place = tl.arange(0, 256)
    at = codes + ((row_tile.to(tl.int64)[None, :] * SPANS + span) * (REGISTERS * 256))[:, :, None] + place
    registers = ()
    for t in tl.static_range(REGISTERS):
        if EVEN:
            registers = registers + (tl.load(at + t * 256),)
        else:
            registers = registers + (tl.load(at + t * 256, mask=(span < SPANS)[:, :, None], other=0),)
    return registers


@triton.jit
def dequant_codes(
    registers, lut, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, TABLE: tl.constexpr, FIELDS: tl.constexpr,
    FRAGMENTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Dequantize packed codes, without scales: a tuple of int16 [...] to weights DTYPE [..., 2, 2, ...].

    `registers` has the int16 that hold the codes of FRAGMENTS fragments (16 columns each), a tensor for each.
    The int16 at one place of all tensors hold one code of each fragment. The new axes are the index of the
    fragment in binary, the highest bit first. For int4 one int16 holds four codes:

        bit         15..12       11..8        7..4         3..0
        code of     fragment 3   fragment 2   fragment 1   fragment 0

        ASM            PTX of an `Expression`; None to compute in float32 without PTX
        CONSTRAINTS    constraints of the operands of ASM
        TABLE          PTX that loads the values of codes from `lut` float32 [2**bits]; None: no lookup
        FIELDS         a `CodeToFloat` for each fragment, used if ASM is None
    """
    if ASM is None:
        halfwords = ()
        for register in tl.static_range(len(registers)):
            halfwords = halfwords + (registers[register].to(tl.uint32),)
        values = ()
        for fragment in tl.static_range(FRAGMENTS):
            values = values + (_value(halfwords, lut, FIELDS, fragment, DTYPE),)
        return _fragments_last(values, FRAGMENTS)
    else:
        operands = registers
        if TABLE is not None:
            # Each lane holds another value, although Triton sees a scalar.
            operands = operands + (tl.inline_asm_elementwise(TABLE, "=r,l", [lut], tl.int32, True, 1),)
        return _fragments_last(_expression(operands, ASM, CONSTRAINTS, FRAGMENTS), FRAGMENTS).to(
            DTYPE, bitcast=True
        )


@triton.jit
def _value(halfwords, lut, FIELDS: tl.constexpr, FRAGMENT: tl.constexpr, DTYPE: tl.constexpr):
    """Dequantize the code of the fragment (16 columns) of index FRAGMENT without PTX: DTYPE [...].

    halfwords    tuple of uint32 [...], one per register in which the codes are packed
    lut          float32 [2**bits]: values of codes, for formats that look them up
    FIELDS       a `CodeToFloat` for each fragment: the instructions
    """
    bits = _moved(halfwords, FIELDS, FRAGMENT, 0)
    for move in tl.static_range(1, len(FIELDS[FRAGMENT].moves)):
        bits |= _moved(halfwords, FIELDS, FRAGMENT, move)
    if FIELDS[FRAGMENT].looked_up:
        return tl.load(lut + bits).to(DTYPE)
    else:
        value = (bits | FIELDS[FRAGMENT].base).to(tl.float32, bitcast=True) * FIELDS[FRAGMENT].factor
        # Triton reads -0.0 as 0.0, and -0.0 + 0.0 would lose the sign.
        if FIELDS[FRAGMENT].addend != 0.0:
            value += FIELDS[FRAGMENT].addend
        if DTYPE.is_bf16():
            # Exact: the upper half is the bfloat16. Not every GPU has an instruction that rounds.
            return (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
        else:
            return value.to(DTYPE)


@triton.jit
def _moved(halfwords, FIELDS: tl.constexpr, FRAGMENT: tl.constexpr, MOVE: tl.constexpr):
    """Apply the bit move `FIELDS[FRAGMENT].moves[MOVE]`: shift a halfword and mask it, uint32 [...].

    `halfwords` is a tuple of uint32 [...], one per register; the move names the register.
    """
    move: tl.constexpr = FIELDS[FRAGMENT].moves[MOVE]
    halfword = halfwords[move.register]
    if move.right > 0:
        halfword = halfword >> move.right
    elif move.right < 0:
        halfword = halfword << -move.right
    return halfword & move.mask


@triton.jit
def _expression(operands, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, FRAGMENTS: tl.constexpr):
    """Run the PTX ASM on a tuple of int16 operands [...]: a tuple of FRAGMENTS results int16 [...].

    The PTX takes 32-bit registers, so two neighbouring elements are computed at once. CONSTRAINTS are the
    constraints of its operands.
    """
    if FRAGMENTS == 2:
        return tl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, (tl.int16, tl.int16), True, 2)
    elif FRAGMENTS == 4:
        return tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, operands, (tl.int16, tl.int16, tl.int16, tl.int16), True, 2
        )
    elif FRAGMENTS == 8:
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
def _fragments_last(q, FRAGMENTS: tl.constexpr):
    """Join a tuple `q` of FRAGMENTS tensors of shape S to one tensor [*S, 2, ..., 2].

    The log2(FRAGMENTS) new last axes are the bits of the index in the tuple, the highest bit first.
    """
    if FRAGMENTS == 2:
        return tl.join(q[0], q[1])
    elif FRAGMENTS == 4:
        return _join4(q[0], q[1], q[2], q[3])
    elif FRAGMENTS == 8:
        return _join8(q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7])
    else:
        return tl.join(
            _join8(q[0], q[2], q[4], q[6], q[8], q[10], q[12], q[14]),
            _join8(q[1], q[3], q[5], q[7], q[9], q[11], q[13], q[15]),
        )


@triton.jit
def _join4(q0, q1, q2, q3):
    """Join four tensors [...] to [..., 2, 2]; the new axes are the index of the tensor in binary.

    The highest bit comes first: q0 is at [0, 0], q1 at [0, 1].
    """
    return tl.join(tl.join(q0, q2), tl.join(q1, q3))


@triton.jit
def _join8(q0, q1, q2, q3, q4, q5, q6, q7):
    """Join eight tensors [...] to [..., 2, 2, 2]: the new axes are the index in binary, highest bit first."""
    return tl.join(_join4(q0, q2, q4, q6), _join4(q1, q3, q5, q7))


@triton.jit
def load_by_lane(
    values, row_tile, block, BLOCKS: tl.constexpr, V: tl.constexpr, INLINE: tl.constexpr = False
):
    """Load the V scales, or zero-points, of 128 columns for the rows of each lane: [4, 8, W, L, V, 2].

        axes        t and r of lane 4 r + t, warp, loop iteration, group, row r or r + 8 of the row tile
        values      pointer to all scales, or zero-points, of the weight: [row tiles, BLOCKS, 8, V, 2]
        row_tile    [L]: indices of row tiles, 16 rows each
        block       [W, L]: indices of scale blocks, which are 128 columns or one longer group; indices from
                    BLOCKS on load the last block
        INLINE      True if PTX may be used: 8-bit values of both rows then come as one int16, and the
                    last axis is 1

    The four lanes t load the same values. `scales_by_lane` converts scales to floats.
    """
    if INLINE and values.dtype.element_ty.primitive_bitwidth == 8:
        # 8-bit tensors would make Triton choose another layout for the operand computed from them.
        values = values.to(tl.pointer_type(tl.int16), bitcast=True)
        COUNT: tl.constexpr = 1
    else:
        COUNT: tl.constexpr = 2
    # A warp lane loads up to 16 bytes at once.
    MOST: tl.constexpr = 128 // values.dtype.element_ty.primitive_bitwidth
    LAST: tl.constexpr = COUNT * V if COUNT * V < MOST else MOST
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    r = tl.arange(0, 8)[:, None, None, None, None]
    at = row_tile[:, None, None] * BLOCKS + tl.minimum(block, BLOCKS - 1)[:, :, None, None] + t * 0
    part = tl.arange(0, COUNT * V // LAST)[:, None] * LAST
    v = tl.load(values + at * (8 * COUNT * V) + r * (COUNT * V) + part + tl.arange(0, LAST))
    return tl.reshape(v, (4, 8, block.shape[0], block.shape[1], V, COUNT))


@triton.jit
def load_scales(
    values, row_tiles, step, BLOCKS: tl.constexpr, V: tl.constexpr, B: tl.constexpr, PER_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, INLINE: tl.constexpr,
):  # fmt: skip
    """Load the scales, or zero-points, of COLUMNS columns of RT row tiles: [4, 8, RT, B, V, 2].

        axes         t and r of lane 4 r + t, row tile (16 rows), 128 columns, group, and row r or r + 8
        values       pointer to all scales, or zero-points, of the weight: [row tiles, BLOCKS, 8, V, 2]
        row_tiles    [RT]: indices of row tiles
        step         the columns from step * COLUMNS on are loaded; COLUMNS is 128 * B
        PER_BLOCK    columns of a scale block of V groups: 128, or one longer group
        INLINE       True if PTX may be used: 8-bit values of both rows then come as one int16, and the
                     last axis is 1

    `values_per_weight` broadcasts the result to weights.
    """
    block = (step * COLUMNS + tl.arange(0, B) * 128) // PER_BLOCK
    RT: tl.constexpr = row_tiles.shape[0]
    rows = tl.reshape(tl.broadcast_to(row_tiles[:, None], (RT, B)), (RT * B,))
    which = tl.reshape(tl.broadcast_to(block[None, :], (RT, B)), (1, RT * B))
    v = load_by_lane(values, rows, which, BLOCKS, V, INLINE)
    return tl.reshape(v, (4, 8, RT, B, V, v.shape[5]))


@triton.jit
def values_per_weight(v, RT: tl.constexpr, COLUMNS: tl.constexpr):
    """Broadcast scales or zero-points of groups to a value per weight: [16 * RT, COLUMNS].

    `v` [4, 8, RT, B, V, 2] is the result of `load_scales`, for RT row tiles of 16 rows and B blocks of 128
    columns. V is the number of groups in 128 columns.
    """
    G: tl.constexpr = v.shape[3] * v.shape[4]
    v = tl.permute(tl.reshape(v, (4, 8, RT, G, 2)), (2, 4, 1, 3, 0))
    # Warp lane t has columns 2 t and 2 t + 1 of eight.
    v = tl.reshape(v, (16 * RT, G, 1, 4, 1))
    v = tl.broadcast_to(v, (16 * RT, G, COLUMNS // (8 * G), 4, 2))
    return tl.reshape(v, (16 * RT, COLUMNS))


@triton.jit
def scales_by_lane(stored, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Convert scales as stored, [4, 8, W, L, V, 2 or 1], to values of DTYPE [4, 8, W, L, V, 2].

    `stored` is the result of `load_by_lane` or `load_scales`. The last axis is rows r and r + 8, or one int16
    with both as bytes. KIND is the encoding of 8-bit scales, "e4m3", "e5m3" or "e8m0"; "" for wider scales.
    """
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
            # Two int16 outputs: with bfloat16 outputs Triton would not multiply in pairs.
            low, high = tl.inline_asm_elementwise(ASM, "=r,=r,r", [stored], (tl.int16, tl.int16), True, 2)
            low = low.to(DTYPE, bitcast=True)
            high = high.to(DTYPE, bitcast=True)
        else:
            low = scale_value(stored, KIND).to(DTYPE)
            high = scale_value(stored >> 8, KIND).to(DTYPE)
        return tl.reshape(tl.join(low, high), (SHAPE[0], SHAPE[1], SHAPE[2], SHAPE[3], SHAPE[4], 2))


@triton.jit
def _bfloat16(byte, KIND: tl.constexpr):
    """Convert 8-bit scales `byte`, int16 [...], encoded as KIND ("e5m3" or "e8m0"), to bfloat16 [...]."""
    if KIND == "e5m3":
        bits = (byte << 4) + 0x7010
    else:
        bits = byte << 7
    return bits.to(tl.bfloat16, bitcast=True)


@triton.constexpr_function
def bfloat16_of_bytes(KIND, FIRST, SECOND, TWICE=False):
    """Return PTX that converts four 8-bit scales in register $2 to bfloat16: two each in registers $0 and $1.

        KIND             encoding of the scales, "e5m3" or "e8m0"
        FIRST, SECOND    selectors of `prmt` for $0 and $1, four hex digits: 0 to 3 is a byte of $2, 4 a zero
        TWICE            True to repeat the lower bfloat16 of a register in its upper half

    One multiplication shifts and repeats: by 2^20 + 2^4 for e5m3 and TWICE. It runs on other units of the GPU
    than shifts and selections.
    """
    times, more = {"e5m3": (16, "0x70107010"), "e8m0": (128, "0")}[KIND]
    times *= 0x10001 if TWICE else 1
    selections = f"prmt.b32 b0, $2, 0, 0x{FIRST};\nprmt.b32 b1, $2, 0, 0x{SECOND};"
    moved = f"mad.lo.u32 $0, b0, {times}, {more};\nmad.lo.u32 $1, b1, {times}, {more};"
    return f"{{.reg .b32 b<2>;\n{selections}\n{moved}}}"


@triton.jit
def scale_value(stored, KIND: tl.constexpr):
    """Convert scales [...] as stored to float32 [...].

    KIND is the encoding of 8-bit scales (`kernels/layouts/fragment_scales.py`), "" for wider scales. No scale
    is NaN, because `build` refuses NaN. The e8m0 scale 2^-127 (code 0) becomes 0.
    """
    if KIND == "e4m3":
        bits = stored.to(tl.int32)
        # Move sign, exponent and mantissa to their places in a float32, then multiply by 2^120 for the bias.
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
    """Return t = `out` + `other` and t * (`weight` + OFFSET), two [...]: an RMSNorm without its division.

    Arguments and results have the dtype of `out` [...]. A later kernel divides by the RMS of t.
    """
    total = (out.to(tl.float32) + other.to(tl.float32)).to(out.dtype)
    return total, (total.to(tl.float32) * (weight.to(tl.float32) + OFFSET)).to(out.dtype)


@triton.jit
def apply_scale_and_bias(
    sums, rows, scale, factor, bias, N, GROUPS: tl.constexpr, SCALE: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Return `sums` * scale / factor + bias, float32: the end of a product with a packed weight.

    sums          float32, products of codes with x
    rows          int32, index n of the output of each sum, in a shape that broadcasts to that of `sums`
    scale         [N / 16, 8, 2], one per output: that of output n is at [n // 16, n % 8, n // 8 % 2]. Applied
                  only if GROUPS is 1
    SCALE         name of the dtype that scales are stored in, such as "float16" or "e4m3"
    GROUPS        scales per row of W; if more than 1, `sums` already include them
    factor        float32 [1], or pointers to one per output: if HAS_FACTOR, sums are divided by it
    bias          [N], added if HAS_BIAS
    """
    if GROUPS == 1:
        by_lane = rows // 16 * 16 + rows % 8 * 2 + rows // 8 % 2
        sums *= scale_value(tl.load(scale + by_lane, mask=rows < N, other=0), SCALE)
    if HAS_FACTOR:
        # Divide once, then multiply.

        sums *= 1.0 / tl.load(factor)
    if HAS_BIAS:
        sums += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    return sums
