"""Epilogue of `fused-gemv`: add the partial sums of all warps, apply scale, bias, gate and norm, write y.

The warps of a program divide the columns K among them, so each output has one partial sum per warp. A row
tile is 16 rows of W [N, K], thus 16 outputs. Tensors of outputs are [row tiles, rows of x * 16]: element m *
16 + r is output r of the tile for row m of x.

`S` is the `DecodeConfig` of `gemm.decode.decode_config`: all that is known at compile time. Written in Gluon.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gluon.compat import reinterpret
from quantkit.kernels.gluon.dequant_fragment import row_tile_of
from quantkit.kernels.layouts.dequant_blocks import apply_scale_and_bias, begin_rms_norm, output_rows
from quantkit.kernels.ops.activation_kernel import gated


@gluon.constexpr_function
def _partials_layout(S):  # type: ignore[no-untyped-def]
    """Return the register layout of partial sums [row tiles, warps, rows of x * 16], to add over warps.

    A row tile is 16 rows of W. A thread holds the partial sums of all warps for an output, so that no
    exchange is needed. If `S.gate`, it holds those of gate and up. `S` holds the kernel's compile-time
    constants.
    """
    bits = [[0, 0, 1 << bit] for bit in range((S.rows * 16).bit_length() - 1)]
    tiles = [[1 << bit, 0, 0] for bit in range(S.padded_row_tiles.bit_length() - 1)]
    bits += tiles[S.row_tiles_per_output - 1 :]
    warps = [[0, 1 << bit, 0] for bit in range(S.warps.bit_length() - 1)]
    threads = 5 + len(warps)
    among = bits[:threads] + [[0, 0, 0]] * (threads - len(bits))
    sizes = [S.padded_row_tiles, S.warps, S.rows * 16]
    registers = warps + tiles[: S.row_tiles_per_output - 1] + bits[threads:]
    return gl.DistributedLinearLayout(registers, among[:5], among[5:], [], sizes)


@gluon.jit
def _outputs(first, count, N, S: gl.constexpr):
    """Return where the outputs of a program are in y [M, N]: (feature n, row of x), two int32 tensors.

    Both broadcast to [row tiles, rows of x * 16]. Column m * 16 + r of row tile t is row m of x and feature
    16 * t + r. The program has `count` row tiles from row tile `first` on. Further row tiles get feature N,
    which the mask `feature < N` excludes. `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    OUT: gl.constexpr = gl.SliceLayout(1, _partials_layout(S))
    tile = gl.expand_dims(gl.arange(0, S.padded_row_tiles, gl.SliceLayout(1, OUT)), 1)
    place = gl.expand_dims(gl.arange(0, S.rows * 16, gl.SliceLayout(0, OUT)), 0)
    # N marks row tiles that this program does not have.
    rows = gl.where(tile < count, (first + row_tile_of(tile, N, S.gate != "")) * 16 + place % 16, N)
    return rows, place // 16


@gluon.jit
def load_outputs(values, first, count, M, N, S: gl.constexpr):
    """Load the elements of `values` [M, N] at the outputs of this program: [row tiles, rows of x * 16].

    `values` points to an operand of the epilogue, such as a residual. The program has `count` row tiles (16
    of the N outputs), from row tile `first` on. Further row tiles are 0; rows of x from M on repeat row M -
    1. `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    rows, m = _outputs(first, count, N, S)
    m = gl.minimum(m, M - 1)
    return gl.load(values + m.to(gl.int64) * N + rows, mask=rows < N, other=0.0)


@gluon.jit
def store_epilogue(
    partials, first, count, scale, factor, bias, y, rstd, added, norm_weight, total, squares, M, N, order,
    S: gl.constexpr,
):  # fmt: skip
    """Add the partial sums of all warps and write y [M, N] = sums * scale / factor + bias.

        partials       shared memory, float32 [row tiles of 16 outputs, warps, rows of x * 16]
        first          index of the program's first row tile
        count          number of its row tiles
        scale          pointer: one scale per output; read only if a row of W has one scale
        factor         pointer: float32 [matrices], divides all outputs of a matrix; read if `S.has_factor`
        bias           pointer to bias [N]; read if `S.has_bias`
        rstd           tuple: 1 / RMS of rows of x in shared memory, if `S.ends_norm`; else ()
        added          tuple: residual of an RMSNorm, if `S.begins_norm`; else ()
        norm_weight    tuple: weight of the norm, if `S.begins_norm`; else ()
        total          output if `S.begins_norm`: y + residual [M, N], before the norm's weight
        squares        output if `S.begins_norm`: sums of squares of `total`, float32 [M, N / 16]
        order          with experts, int32: the row of y of each routed token (token-expert pair), else None

    If `S.gate` is an activation f, row tiles alternate between gate and up, and y is [M, N / 2] = f(gate) *
    up. `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    LAYOUT: gl.constexpr = _partials_layout(S)
    PARTIALS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    partials = reinterpret(partials, gl.float32, [S.padded_row_tiles, S.warps, S.rows * 16], PARTIALS)
    sums = gl.sum(partials.load(LAYOUT), axis=1)
    rows, m = _outputs(first, count, N, S)
    if S.ends_norm:
        sums *= _rstd_of_outputs(rstd[0], S)
    SCALES: gl.constexpr = S.groups
    KIND: gl.constexpr = S.scale_kind
    HAS_FACTOR: gl.constexpr = S.has_factor
    HAS_BIAS: gl.constexpr = S.has_bias
    MATRICES: gl.constexpr = S.matrices
    if MATRICES > 1:
        factor += gl.minimum(rows, N - 1) // (N // MATRICES)
    out = apply_scale_and_bias(sums, rows, scale, factor, bias, N, SCALES, KIND, HAS_FACTOR, HAS_BIAS)
    out = out.to(y.dtype.element_ty)
    GATE: gl.constexpr = S.gate
    if GATE != "":
        out, up = _gate_up_rows(out, S)
        out = gated(out, up, GATE)
        m, _ = _gate_up_rows(m + rows * 0, S)
        rows, N = _gate_up_rows(rows, S)[0], N // 2
    at, inside = output_rows(order, m, M) * N + rows, (m < M) & (rows < N)
    if S.begins_norm:
        whole, out = begin_rms_norm(out, added[0], norm_weight[0], S.norm.offset)
        gl.store(total + at, whole, mask=inside)
        _store_squares(gl.where(rows < N, whole.to(gl.float32), 0.0), squares, first, count, M, N, S)
    gl.store(y + at, out, mask=inside)


@gluon.jit
def _store_squares(outputs, squares, first, count, M, N, S: gl.constexpr):
    """Write the sums of squares of outputs over each row tile (16 outputs): `squares` float32 [M, N / 16].

    `outputs` is float32 [row tiles, rows of x * 16]. The first `count` row tiles are valid; they are row
    tiles `first` and following of y. `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    sums = gl.sum(gl.reshape(outputs * outputs, (S.padded_row_tiles, S.rows, 16)), axis=2)
    LAYOUT: gl.constexpr = sums.type.layout
    tile = gl.expand_dims(gl.arange(0, S.padded_row_tiles, gl.SliceLayout(1, LAYOUT)), 1)
    row = gl.expand_dims(gl.arange(0, S.rows, gl.SliceLayout(0, LAYOUT)), 0)
    at = squares + row.to(gl.int64) * ((N + 15) // 16) + first + tile
    gl.store(at, sums, mask=(row < M) & (tile < count))


@gluon.jit
def _rstd_of_outputs(rstd_smem, S: gl.constexpr):
    """Load 1 / RMS of the row of x that each output belongs to: float32 [row tiles, rows of x * 16].

    `rstd_smem` is shared memory float32 [rows of x], from `stage_rstd`. A row tile is 16 outputs. `S` is a
    `DecodeConfig`: all compile-time constants.
    """
    OUT: gl.constexpr = gl.SliceLayout(1, _partials_layout(S))
    zeros = gl.reshape(
        gl.full([S.padded_row_tiles, S.rows * 16], 0.0, gl.float32, OUT), (S.padded_row_tiles, S.rows, 16)
    )
    BOTH: gl.constexpr = zeros.type.layout
    found = rstd_smem.load(gl.SliceLayout(0, gl.SliceLayout(2, BOTH)))
    found = gl.expand_dims(gl.expand_dims(found, 0), 2)
    found, _ = gl.broadcast(found, zeros)
    return gl.convert_layout(gl.reshape(found, (S.padded_row_tiles, S.rows * 16)), OUT, assert_trivial=True)


@gluon.jit
def _gate_up_rows(values, S: gl.constexpr):
    """Split `values` [row tiles, rows of x * 16] into (gate, up): [row tiles / 2, rows of x * 16] each.

    Row tiles (16 outputs) of gate and up alternate in `values`. `S` holds the kernel's compile-time
    constants.
    """
    values = gl.reshape(values, (S.padded_row_tiles // 2, 2, S.rows * 16))
    return gl.split(gl.permute(values, (0, 2, 1)))
