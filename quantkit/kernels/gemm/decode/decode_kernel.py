"""Decode GEMM for M <= 16: y [M, N] = x [M, K] W^T, with K sliced over the warps of a program.

A row tile is 16 rows of W. A k_step, 128 columns of K or a few more, is what a warp dequantizes at a time.
All warps of a program work on its row tiles, each on its own columns:

                  warp 0            warp 1           ...   last warp
    columns       k_steps_per_warp  k_steps_per_warp ...   k_steps_per_warp k_steps
    x             own columns, staged in shared memory once
    codes         global memory -> registers, `S.prefetch` k_steps early -> dequantize -> mma
    row tile 0    partial sums      partial sums     ...   partial sums       float32, shared memory
    row tile 1    ...                                                         the epilogue adds over warps

No warp waits for another between staging x and the last code. If `S.tiles_per_iter` is 2, two row tiles
are multiplied with each operand B that is loaded.

MMAs are m16n8k16 of x's dtype, or m16n8k32 of the int8 digits that x is split into (`gluon.x_digits`). Sums
of int8 are exact, and dequantizing takes a third of the instructions. Written in Gluon. Tensors say which
lane has what: a vec4 is int32 [warps, 32 lanes, 4 registers], a word int32 [warps, 32].

`S` is the `DecodeConfig` of `gemm.decode.decode_config`: all that is known at compile time.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gemm.decode.decode_product import multiply, zero_sums
from quantkit.kernels.gluon.dequant_fragment import (
    fill_table,
    load_squares,
    pdl_launch_dependents,
    pdl_wait,
    row_tile_of,
    stage_rstd,
)
from quantkit.kernels.gluon.epilogue import load_outputs, store_epilogue
from quantkit.kernels.gluon.scales_registers import load_scale_words
from quantkit.kernels.gluon.stage_x_per_warp import norm_weights, stage_x
from quantkit.kernels.gluon.x_rows import vec4_layout
from quantkit.kernels.layouts.dequant_blocks import load_expert_block, select_matrix


@gluon.jit(do_not_specialize=["M", "ROW_TILES", "REMAINDER"])
def decode_gemm(
    x, other, norm, total, squares, codes, scale, zero, factor, lut, bias, y, M, N, ROW_TILES, REMAINDER,
    order, expert_blocks, S: gl.constexpr,
):  # fmt: skip
    """Compute y [M, N] = x [M, K] W^T for M up to 16, W packed: the kernel of `fused-gemv`.

    A row tile is 16 rows of W. A program computes ROW_TILES of them, the first REMAINDER programs one more;
    if `S.gate`, of gate and of up each. Grid: (programs,), or (expert blocks, programs).

        x [M, K], y                    bfloat16 or float16
        other                          residual of a norm: [M, K] if `S.norms_x`, [M, N] if `S.begins_norm`
        norm                           weight of an RMSNorm: [K] if `S.norms_x`, [N] if `S.begins_norm`
        total                          output: x + other if `S.norms_x`, y + other if `S.begins_norm`
        squares float32                sums of squares over 16 columns each: of x, read, if `S.ends_norm`; of
                                       `total`, written, if `S.begins_norm`
        codes, scale, zero             W [N, K] in the fragment layout (`layouts.fragment_layout`)
        lut float32 [2**bits]          value of each code
        factor float32 [matrices]      one per matrix; y is divided by it if `S.has_factor`
        bias [N]                       dtype of x; read only if `S.has_bias`
        order int32                    with experts, the routed tokens (token-expert pairs), else None
        expert_blocks int32 [.., 3]    expert, first routed token and number of them of each block, or None
        S                              `DecodeConfig`: all that is known at compile time

    If `S.gate` is an activation f, the first half of W's rows is G, the second U: y [M, N / 2] = f(x G^T) *
    (x U^T).

    If `expert_blocks` is given, a program has the M routed tokens of one block as rows of x and y. W is then
    the `S.matrices` matrices of the block's expert, one above the other.
    """
    PREFETCH: gl.constexpr = S.prefetch
    FILL: gl.constexpr = S.fill
    if S.overlap and expert_blocks is None:
        pdl_launch_dependents()
    program = gl.program_id(0)
    if expert_blocks is not None:
        if S.overlap and not S.chained:
            # The kernel before this one may have written the expert blocks.
            pdl_wait()
        expert, its_first, M = load_expert_block(expert_blocks, program, S.chained)
        if S.overlap and S.chained:
            # If no block has routed tokens, one program must still wait before all programs end.
            if (M == 0) & (program == 0):
                pdl_wait()
        if M == 0:
            return
        codes, scale, zero, factor, lut = select_matrix(
            codes, scale, zero, factor, lut, expert * S.matrices, N // S.matrices,
            S.spans, S.registers, S.fragments, S.blocks, S.in_block,
        )  # fmt: skip
        order += its_first
        program = gl.program_id(1)
    first = row_tile_of(
        (program * ROW_TILES + gl.minimum(program, REMAINDER)) * S.row_tiles_per_output, N, S.gate != ""
    )
    count = (ROW_TILES + (program < REMAINDER).to(gl.int32)) * S.row_tiles_per_output
    pointers = _pointers(codes, scale, zero, first, count, N, S)
    ring = ()
    for number in gl.static_range(PREFETCH):
        ring = ring + (_load_iteration(pointers, first * 0, number, S),)
    table = lut
    if S.table is not None:
        # Each lane holds another value, although Triton sees a scalar.
        table = gl.inline_asm_elementwise(S.table, "=r,l", [fill_table(lut, FILL)], gl.int32, True, 1)
    of_norm = norm_weights(norm, S)
    multiplier = ()
    if S.begins_norm:
        multiplier = (load_outputs(norm, first, count, 1, N, S),)
    if S.overlap and (expert_blocks is None or S.chained):
        # Kernels before this one write only x and operands of norms.
        pdl_wait()
    if S.overlap and expert_blocks is not None:
        # A chained kernel reads the expert blocks at once, because this one has waited.
        pdl_launch_dependents()
    squares_x = ()
    if S.ends_norm:
        squares_x = (load_squares(squares, M, S.k, S.rows, S.warps),)
    added = ()
    if S.begins_norm:
        added = (load_outputs(other, first, count, M, N, S),)
    if S.padding_rows:
        spare = gl.allocate_shared_memory(
            gl.int32, [S.padding_rows, S.smem_row_words], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
    x_smem, x_scale = stage_x(x, other, of_norm, total, M, order, S)
    rstd = ()
    if S.ends_norm:
        rstd = (stage_rstd(squares_x[0], S.k, S.norm.eps),)
    weights = ()
    if S.has_column_weights:
        weights = _column_weights(x_scale, S)
    partials = gl.allocate_shared_memory(
        gl.float32, [S.padded_row_tiles, S.warps * S.rows * 16], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    if S.single_iter:
        _iteration(pointers, ring, first * 0, table, x_smem, weights, partials, scale, zero, S)
    else:
        for iteration in range((count + S.tiles_per_iter - 1) // S.tiles_per_iter):
            ring = _iteration(
                pointers, ring, iteration * S.tiles_per_iter, table, x_smem, weights, partials, scale, zero, S
            )
    store_epilogue(
        partials, first, count, scale, factor, bias, y, rstd, added, multiplier, total, squares, M, N,
        order, S,
    )  # fmt: skip
    if S.padding_rows:
        # Otherwise Triton frees this unused memory before the end.
        spare._keep_alive()


@gluon.jit
def _iteration(pointers, ring, row_tile, table, x_smem, weights, partials, scale, zero, S: gl.constexpr):
    """Multiply `S.tiles_per_iter` row tiles (16 rows of W) with x over each warp's columns; store the sums.

        pointers                result of `_pointers`
        ring                    tuple of `S.prefetch` results of `_load_iteration`, loaded early
        row_tile                index of the first of these row tiles among those of the program
        table                   lane's value, or address, in the lookup table of codes
        x_smem                  x in shared memory, from `stage_x`
        weights                 factors of sums, from `_column_weights`
        partials                output: shared memory, float32 [row tiles, warps * rows of x * 16]
        scale, zero             pointers, of which only the dtype is used

    Return the ring for the row tiles that follow.
    `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    TILES_PER_ITER: gl.constexpr = S.tiles_per_iter
    K_STEPS: gl.constexpr = S.k_steps_per_warp
    totals = ()
    for _ in gl.static_range(TILES_PER_ITER):
        totals = totals + (zero_sums(gl.int32 if S.int32_sums else gl.float32, S),)
    for k_step in gl.static_range(K_STEPS):
        loaded = ring[0]
        ring = _tail(ring)
        if k_step + S.prefetch < S.k_steps_per_warp or not S.single_iter:
            ring = ring + (_load_iteration(pointers, row_tile, k_step + S.prefetch, S),)
        totals = multiply(totals, loaded, table, x_smem, k_step, scale, zero, S)
    for number in gl.static_range(TILES_PER_ITER):
        # Sums of padding row tiles overwrite the last slot, which is not read then.
        partials.index(gl.minimum(row_tile + number, S.padded_row_tiles - 1)).store(
            _reduce_columns(totals[number], weights, S)
        )
    return ring


@gluon.jit
def _tail(ring):
    """Return the tuple `ring` without its first element.

    Each element is a result of `_load_iteration`: codes int32 [warps, 32 lanes, 4] and scales of a k_step,
    128 columns or more.
    """
    tail = ()
    for number in gl.static_range(1, len(ring)):
        tail = tail + (ring[number],)
    return tail


@gluon.jit
def _pointers(codes, scale, zero, first, count, N, S: gl.constexpr):
    """Return where each lane of a program finds its codes and scales of W [N, K]: a tuple for `_load_k_step`.

        codes         pointers [warps, 32 lanes, 4 words] to the first row tile and each warp's first k_step
        scale, zero   the arguments
        words_at      int32 [warps, 32]: where the lane's first scales are in `scale`, in units of 2 V values
        k_step        int32 [warps, 1]: index of the first k_step of each warp
        count, N      the arguments

    The program has `count` row tiles (16 rows of W each) from row tile `first` on. A k_step is 128 columns or
    more; V is the number of scales of a row in 128 columns. `S` holds the kernel's compile-time
    constants.
    """
    VEC4: gl.constexpr = vec4_layout(S.warps)
    LANES: gl.constexpr = gl.SliceLayout(2, VEC4)
    warp = gl.expand_dims(gl.arange(0, S.warps, gl.SliceLayout(1, LANES)), 1)
    lane = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, LANES)), 0)
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, VEC4)))
    codes_at = codes.to(gl.pointer_type(gl.int32), bitcast=True)
    codes_at += first.to(gl.int64) * (S.spans * S.registers * 128)
    codes_at += gl.expand_dims(warp * (S.k_steps_per_warp * S.vec4s_per_step * 128) + lane * 4, 2)
    codes_at += gl.expand_dims(gl.expand_dims(word, 0), 1)
    return codes_at, scale, zero, first * (S.blocks * 8) + lane // 4, warp * S.k_steps_per_warp, count, N


@gluon.jit
def _load_iteration(pointers, row_tile, number: gl.constexpr, S: gl.constexpr):
    """Load k_step `number` of each warp for `S.tiles_per_iter` row tiles: a tuple of `_load_k_step` results.

    A k_step is 128 columns or more, a row tile 16 rows of W; codes are int32 [warps, 32 lanes, 4].

        pointers   result of `_pointers`
        row_tile   index of the first row tile among those of the program
        number     index of the k_step; from `S.k_steps_per_warp` on, those of the row tiles that follow

    `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    TILES_PER_ITER: gl.constexpr = S.tiles_per_iter
    first = row_tile + number // S.k_steps_per_warp * S.tiles_per_iter
    loaded = ()
    for one in gl.static_range(TILES_PER_ITER):
        loaded = loaded + (_load_k_step(pointers, first + one, number % S.k_steps_per_warp, S),)
    return loaded


@gluon.jit
def _load_k_step(pointers, row_tile, number: gl.constexpr, S: gl.constexpr):
    """Load k_step `number` (128 columns or more) of a row tile for each warp: (codes, scales, zero-points).

        codes                  tuple of int32 [warps, 32 lanes, 4 words], one for every 16 bytes of a lane
        scales, zero-points    tuples with a result of `load_scale_words`, [warps, 32] or larger, per 128
                               columns. Instead of scales 0 if a row has one, instead of zero-points 0 if
                               there are none

    `row_tile` is the index of the row tile (16 rows of W) in the program, `pointers` the result of
    `_pointers`. Nothing past the program's row tiles or K is read. `S` holds the kernel's compile-time
    constants.
    """
    VEC4: gl.constexpr = S.vec4s_per_step
    SUBTILES: gl.constexpr = S.k_step // 128
    codes_at, scale, zero, words_at, k_step, count, N = pointers
    k_step += number
    mask = (k_step < S.total_k_steps) & (row_tile < count)
    row_tile = row_tile_of(row_tile, N, S.gate != "")
    codes_at += row_tile.to(gl.int64) * (S.spans * S.registers * 128) + number * (S.vec4s_per_step * 128)
    vec4s = ()
    for vec4 in gl.static_range(VEC4):
        vec4s = vec4s + (gl.load(codes_at + vec4 * 128, mask=gl.expand_dims(mask, 2)),)
    s = ()
    z = ()
    for subtile in gl.static_range(SUBTILES):
        block = gl.minimum((k_step * S.k_step + subtile * 128) // S.per_block, S.blocks - 1)
        at = words_at + (row_tile * S.blocks + block) * 8
        s = s + (load_scale_words(scale, at, mask, S) if S.groups > 1 else 0,)
        z = z + (load_scale_words(zero, at, mask, S) if S.has_zero else 0,)
    return vec4s, s, z


@gluon.jit
def _column_weights(x_scale, S: gl.constexpr):
    """Return the factor of each `mma` sum in y: a tuple of float32 [warps, 32 lanes, 4 sums].

    The tuple has a tensor per 8 columns of operand B of an `mma`. For floats, a column is a row of x: its
    factor is 1, or 0 if the column is a copy of another. For int8 products, a column is one of the digits of
    a row, x = unit * (65536 d2 + 256 d1 + d0). Its factor is `S.byte_scale` * unit times 65536, 256 or 1.

    `x_scale` float32 [warps, rows] are the units, 1 for floats. `S` holds the kernel's compile-time
    constants.
    """
    VEC4: gl.constexpr = vec4_layout(S.warps)
    GROUPS: gl.constexpr = S.column_groups
    # Axes of sums after the warp: r, column // bm, column % bm // 2, row // 8, column % 2.
    SUMS: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 2, 2],
        [1, 8, 8 // S.columns_per_digit, S.columns_per_digit // 2, 1, 1],
        [S.warps, 1, 1, 1, 1, 1],
        [5, 4, 3, 2, 1, 0],
    )
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, VEC4)))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, VEC4)))
    column = gl.expand_dims(gl.expand_dims(lane % 4 * 2, 0), 2)
    column += gl.expand_dims(gl.expand_dims(word % 2, 0), 1)
    x_scale = gl.reshape(
        x_scale, (S.warps, 1, 1, 1, 1, 1) if S.rows == 1 else (S.warps, 1, 1, S.columns_per_digit // 2, 1, 2)
    )
    x_scale = gl.convert_layout(x_scale, SUMS)
    x_scale, _ = gl.broadcast(
        x_scale,
        gl.full([S.warps, 8, 8 // S.columns_per_digit, S.columns_per_digit // 2, 2, 2], 0, gl.float32, SUMS),
    )
    x_scale = gl.convert_layout(gl.reshape(x_scale, (S.warps, 32, 4)), VEC4, assert_trivial=True)
    weights = ()
    for group in gl.static_range(GROUPS):
        digit = (group * 8 + column) // S.columns_per_digit
        if S.int8_mma:
            counts = gl.where(digit == 1, 256.0 * S.byte_scale, gl.where(digit == 2, 1.0 * S.byte_scale, 0.0))
            counts = gl.where(digit == 0, 65536.0 * S.byte_scale, counts)
        else:
            counts = gl.where(digit == 0, 1.0, 0.0)
        weights = weights + (x_scale * counts,)
    return weights


@gluon.jit
def _reduce_columns(total, weights, S: gl.constexpr):
    """Return `mma` sums added over the columns that belong to the same row of x: float32 [warps * rows * 16].

    A row of x may take several columns of operand B: copies, or one per int8 digit that it is split into. The
    result has the axes warp, row of x, and row of W in the row tile.

        total     tuple of sums [warps, 32 lanes, 4] as `mma` returns them, one per 8 columns of operand B
        weights   factors of the sums, from `_column_weights`; () if each column is another row of x

    `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    GROUPS: gl.constexpr = S.column_groups
    if not S.has_column_weights:
        # r, column // 2, row // 8, column % 2, and group.
        whole = gl.reshape(gl.join(total[0], total[1]), (S.warps, 8, 4, 2, 2, 2))
        whole = gl.permute(whole, (0, 5, 2, 4, 3, 1))
    else:
        whole = total[0].to(gl.float32) * weights[0]
        for group in gl.static_range(1, GROUPS):
            whole += total[group].to(gl.float32) * weights[group]
        # r, column // bm, column % bm // 2, row // 8, column % 2
        whole = gl.reshape(whole, (S.warps, 8, 8 // S.columns_per_digit, S.columns_per_digit // 2, 2, 2))
        if S.rows == 1:
            whole, _ = gl.split(whole)
            whole = gl.permute(gl.sum(whole, axis=2), (0, 2, 3, 1))
        else:
            whole = gl.permute(gl.sum(whole, axis=2), (0, 2, 4, 3, 1))
    return gl.reshape(whole, (S.warps * S.rows * 16,))
