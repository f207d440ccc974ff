"""Dequantize a weight: from the fragment layout to a row-major matrix, for the library's GEMM after it."""
# mypy: ignore-errors

import triton
import triton.language as tl

from quantkit.kernels.layouts.dequant_blocks import (
    dequant_codes,
    load_scales,
    scales_by_lane,
    values_per_weight,
)


@triton.jit
def dequantize(
    codes, scale, zero, factor, lut, out, first, N,
    K: tl.constexpr, SPANS: tl.constexpr, REGISTERS: tl.constexpr, DOT: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCKS: tl.constexpr, V: tl.constexpr,
    ON_WEIGHTS: tl.constexpr, SCALE: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_FACTOR: tl.constexpr,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, TABLE: tl.constexpr, FIELDS: tl.constexpr,
    FRAGMENTS: tl.constexpr, DTYPE: tl.constexpr, C: tl.constexpr, W: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Dequantize rows of a packed weight [N, K] from row 16 * `first` on: write `out` [rows, K].

    A dequantized value is (code - zero-point) * scale / factor. A span is the columns whose codes are stored
    in the same registers. A row tile is 16 rows. Grid: (row tiles / W, SPANS / C).

        codes, scale, zero       the weight in the fragment layout (`layouts.fragment_layout`)
        lut float32 [2**bits]    value of each code
        factor float32 [1]       read only if HAS_FACTOR
        N                        end of the rows

        SPANS                    spans of a row
        FRAGMENTS                fragments of a span, 16 columns each
        REGISTERS                registers in which the codes of a span are stored
        BLOCKS                   scale blocks of a row: 128 columns each, or one longer group
        PER_BLOCK                columns of a scale block
        V                        groups of a scale block
        SCALE                    encoding of 8-bit scales (`scale_kind`); "" for wider ones
        HAS_ZERO                 True if there are zero-points
        ASM, CONSTRAINTS         PTX that dequantizes a span, with its constraints; None for no PTX
        TABLE                    PTX that loads the values of codes from `lut`; None for no lookup
        FIELDS                   instructions for each fragment, used if ASM is None (`dequant_codes`)
        DTYPE                    dtype of codes converted to values, before scales
        W                        row tiles of a program, one per warp
        C                        spans of a program
        SCALED                   False to write the values of codes alone: no zero-points, scales or factor

    DOT, GROUP, GROUPS and ON_WEIGHTS are not read.
    """
    SPAN: tl.constexpr = 16 * FRAGMENTS
    COLUMNS: tl.constexpr = C * SPAN
    B: tl.constexpr = COLUMNS // 128
    row_tile = first + tl.program_id(0) * W + tl.arange(0, W)
    last_tile = (N + 15) // 16 - 1
    rows_in = tl.minimum(row_tile, last_tile)
    span = tl.program_id(1) * C + tl.arange(0, C)
    at = (rows_in.to(tl.int64)[:, None] * SPANS + span[None, :]) * (REGISTERS * 256)
    registers = ()
    for t in tl.static_range(REGISTERS):
        registers = registers + (tl.load(codes + at[:, :, None] + t * 256 + tl.arange(0, 256)),)
    q = dequant_codes(registers, lut, ASM, CONSTRAINTS, TABLE, FIELDS, FRAGMENTS, DTYPE).to(tl.float32)
    # W, span, r, t, e1, row // 8, e0, run, p0
    q = tl.reshape(q, (W, C, 8, 4, 2, 2, 2, SPAN // 32, 2))
    q = tl.reshape(tl.permute(q, (0, 5, 2, 1, 7, 8, 4, 3, 6)), (W * 16, COLUMNS))
    step = tl.program_id(1)
    if SCALED and HAS_ZERO:
        z = load_scales(zero, rows_in, step, BLOCKS, V, B, PER_BLOCK, COLUMNS, False)
        q -= values_per_weight(z.to(tl.float32), W, COLUMNS)
    if SCALED:
        s = load_scales(scale, rows_in, step, BLOCKS, V, B, PER_BLOCK, COLUMNS, False)
        q *= values_per_weight(scales_by_lane(s, SCALE, tl.float32), W, COLUMNS)
    if SCALED and HAS_FACTOR:
        q /= tl.load(factor)
    row = tl.reshape(row_tile[:, None] * 16 + tl.arange(0, 16)[None, :], (W * 16,))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < N)[:, None] & (column < K)[None, :]
    tl.store(
        out + (row - first * 16).to(tl.int64)[:, None] * K + column[None, :],
        q.to(out.dtype.element_ty),
        mask=mask,
    )
