"""y = x W^T for tens to hundreds of rows of x: y^T = W x^T in tiles, W decoded in registers as operand A.

Scales are applied to the weights, in the dtype of x: to the sums of a product they would have to be applied
before the next one starts.
"""

import triton
import triton.language as tl

from quantkit.kernels.fused.blocks import decode, finish, load_by_lane, scale_value


@triton.jit(do_not_specialize=["M"])
def tiled(
    x, codes, scale, zero, factor, lut, bias, y, M, N,
    K: tl.constexpr, SPANS: tl.constexpr, TILES: tl.constexpr, DOT: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCKS: tl.constexpr, V: tl.constexpr,
    ON_WEIGHTS: tl.constexpr, SCALE: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, FIELDS: tl.constexpr, PLANES: tl.constexpr,
    DTYPE: tl.constexpr,
    RT: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr, WAIT: tl.constexpr, STAGES: tl.constexpr, RASTER:
    tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """`x` is [M, SPANS * span] in the order of the fragments, by `order_columns`.

    With SPLIT equal parts of the columns, y is float32 [SPLIT, M, N]: sums for `combine` to add up and
    finish. Unless HALF is None, a step is summed in float16, with weights times HALF.
    """
    SPAN: tl.constexpr = 16 * PLANES
    COLUMNS: tl.constexpr = 128 if SPAN < 128 else SPAN
    C: tl.constexpr = COLUMNS // SPAN
    KP: tl.constexpr = SPANS * SPAN
    PER_CHANNEL: tl.constexpr = GROUPS == 1
    # Blocks of scales in a step.
    B: tl.constexpr = COLUMNS // 128
    # Programs with the same weights run next to each other, as many as share the rows of x in the cache.
    program = tl.program_id(0)
    column_tiles = tl.cdiv(M, BM)
    row_programs = tl.cdiv(N, 16 * RT)
    first = program // (RASTER * row_programs) * RASTER
    width = tl.minimum(column_tiles - first, RASTER)
    within = program % (RASTER * row_programs)
    pm = first + within % width
    pn = within // width
    last_tile = (N + 15) // 16 - 1
    row_tiles = tl.minimum(pn * RT + tl.arange(0, RT), last_tile)
    lane = tl.arange(0, 256)
    spans = tl.arange(0, C)
    at = (
        codes
        + ((row_tiles.to(tl.int64)[:, None] * SPANS + spans[None, :]) * (TILES * 256))[:, :, None]
        + lane
    )
    m = pm * BM + tl.arange(0, BM)
    xs = x + tl.minimum(m, M - 1).to(tl.int64)[None, :] * KP + tl.arange(0, COLUMNS)[:, None]
    STEPS: tl.constexpr = KP // COLUMNS // SPLIT
    part = tl.program_id(1)
    at += part * (STEPS * C * TILES * 256)
    xs += part * (STEPS * COLUMNS)
    acc = tl.zeros((16 * RT, BM), tl.float32)
    for i in tl.range(0, STEPS, num_stages=STAGES):
        step = part * STEPS + i
        tiles = ()
        for t in tl.static_range(TILES):
            tiles = tiles + (tl.load(at + t * 256),)
        q = decode(tiles, lut, ASM, CONSTRAINTS, FIELDS, PLANES, DTYPE)
        q = tl.reshape(q, (RT, C, 8, 4, 2, 2, 2, SPAN // 32, 2))
        q = tl.reshape(tl.permute(q, (0, 5, 2, 1, 7, 8, 4, 3, 6)), (16 * RT, COLUMNS))
        if HAS_ZERO:
            q -= _per_weight(_load(zero, row_tiles, step, BLOCKS, V, B, PER_BLOCK, COLUMNS), RT, COLUMNS).to(
                DTYPE
            )
        if not PER_CHANNEL:
            s = scale_value(_load(scale, row_tiles, step, BLOCKS, V, B, PER_BLOCK, COLUMNS), SCALE)
            q *= _per_weight(s, RT, COLUMNS).to(DTYPE)
        if HALF is None:
            acc = tl.dot(q, tl.load(xs), acc)
        else:
            acc += tl.dot(q * HALF, tl.load(xs), out_dtype=tl.float16).to(tl.float32) * (1 / HALF)
        if WAIT:
            # Left alone, Triton 3.6 keeps the product in flight while the next weights are decoded into the
            # registers that it still reads. Whoever looks at its result waits for it.
            acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], tl.float32, False, 1)
        at += C * TILES * 256
        xs += COLUMNS
    rows = pn * (16 * RT) + tl.arange(0, 16 * RT)
    mask = (rows < N)[:, None] & (m < M)[None, :]
    if SPLIT == 1:
        acc = finish(acc, rows[:, None], scale, factor, bias, N, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS)
    to = (part.to(tl.int64) * M + m)[None, :] * N + rows[:, None]
    tl.store(y + to, acc.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def combine(
    sums, scale, factor, bias, y, M, N,
    GROUPS: tl.constexpr, SCALE: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y [M, N] from float32 sums [SPLIT, M, N], added in the order of the parts."""
    m = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = sums + m * N + n
    total = tl.load(at, mask=n < N, other=0.0)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(at + M.to(tl.int64) * N * part, mask=n < N, other=0.0)
    total = finish(total, n, scale, factor, bias, N, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS)
    tl.store(y + m * N + n, total.to(y.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["M"])
def order_columns(x, out, M, K, KP, HALVES: tl.constexpr, BLOCK: tl.constexpr):
    """x [M, K] as [M, KP], zeros beyond K: in each run (t, p0, e1, e0) becomes (p0, e1, t, e0).

    With `HALVES`, for groups of 16, it is (p0, t, e1, e0) that does.
    """
    m = tl.program_id(1).to(tl.int64)
    to = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # to = 16 p0 + 8 e1 + 2 t + e0 of its run
    t = to // 2 % 4
    p0 = to // 16 % 2
    first = p0 * 16 + t * 4 if HALVES else t * 8 + p0 * 4
    source = to // 32 * 32 + first + to // 8 % 2 * 2 + to % 2
    v = tl.load(x + m * K + source, mask=(source < K) & (to < KP), other=0.0)
    tl.store(out + m * KP + to, v, mask=to < KP)


@triton.jit
def _load(
    values, row_tiles, step, BLOCKS: tl.constexpr, V: tl.constexpr, B: tl.constexpr, PER_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Values of a step, [4, 8, RT, B, V, 2]."""
    block = (step * COLUMNS + tl.arange(0, B) * 128) // PER_BLOCK
    RT: tl.constexpr = row_tiles.shape[0]
    rows = tl.reshape(tl.broadcast_to(row_tiles[:, None], (RT, B)), (RT * B,))
    which = tl.reshape(tl.broadcast_to(block[None, :], (RT, B)), (1, RT * B))
    return tl.reshape(load_by_lane(values, rows, which, BLOCKS, V), (4, 8, RT, B, V, 2))


@triton.jit
def _per_weight(v, RT: tl.constexpr, COLUMNS: tl.constexpr):
    """Values by lane for weights [16 * RT, COLUMNS]."""
    G: tl.constexpr = v.shape[3] * v.shape[4]
    v = tl.permute(tl.reshape(v, (4, 8, RT, G, 2)), (2, 4, 1, 3, 0))
    v = tl.reshape(v, (16 * RT, G, 1, 4, 1))
    v = tl.broadcast_to(v, (16 * RT, G, COLUMNS // (8 * G), 4, 2))
    return tl.reshape(v, (16 * RT, COLUMNS))
