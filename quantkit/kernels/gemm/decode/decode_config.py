"""Compile-time configuration of `fused-gemv`. Imports no torch, because compile-only processes import it.

Units of K in the kernel, from small to large, and x in shared memory:

    mma        16 columns of floats, 32 of int8 (`mma_k`)
    mma pair   two consecutive mmas: a lane loads both operands B with one 16-byte load, a vec4
    pass       the mma pairs whose columns of x a warp loads from global memory at once
    span       the columns whose codes are stored in the same registers, 16 for each of its fragments
    k_step     what a warp dequantizes at a time: 128 columns, or a span where that is longer
    x          vec4s [padded mma pairs * column groups, warps, lanes]

Operand B of an mma has 8 columns, a column group. For float products its columns are rows of x. For int8
products each value of x is split into three int8 digits (`gluon.x_digits`), and a column is one digit of a
row of x.
"""

from dataclasses import dataclass
from typing import Any

from quantkit.kernels.layouts.shared_memory import (
    fragment_distance,
    low_fragments,
    next_power_of_2,
    shared_bytes,
    undeclared_bytes,
)

#: Columns of operand B of an mma, so most rows of x of one mma.
COLUMNS = 8


@dataclass(frozen=True)
class Norm:
    """Part of an RMSNorm, x / sqrt(mean(x^2) + eps) * (weight + offset), that `decode_gemm` computes.

    part      "whole": of x; "begin": of y, without the division; "end": the division (`problem.Normed`)
    adds      True if a residual is added before the norm
    rounded   True if x / sqrt(...) is rounded to x's dtype before the product with the weights
    """

    part: str
    adds: bool
    eps: float
    rounded: bool
    offset: float


@dataclass(frozen=True)
class Rounding:
    """Rounding of rows of x to 8 bits and back: scale * round(x / scale), scale = largest magnitude / absmax.

    A row with NaN or infinity becomes NaN.

    absmax     largest code of the 8-bit format: int8 or e4m3
    mantissa   mantissa bits of codes; 0 for integers
    smallest   smallest normal number of the 8-bit format
    most       largest finite value of x's dtype, to which results are clamped
    fma        True if a * b + c is rounded once (not in Triton's interpreter). x / scale is then x times
               1 / scale with a correction, else a division.
    """

    absmax: float
    mantissa: int
    smallest: float
    most: float
    fma: bool


@dataclass(frozen=True)
class DecodeConfig:
    """Compile-time constants of `decode_gemm`: shape of the weight, dequantization, and division of work.

    k .. scale_kind             sizes of the weight, as in `layouts.geometry.Geometry`
    matrices, top_k, chained    as in `operands.Grouping`; 1, 1 and False without experts
    asm .. fill                 PTX that dequantizes, as in `dequant_ptx.Expression`
    warps .. prefetch           as in `DecodeTile`, limited to the weight
    has_factor                  True if all of y is divided by one float32
    overlap                     True if launched with programmatic dependent launch (PDL)

    An mma pair, a pass, a k_step (128 columns or more) and a column group are defined in the module
    docstring.
    """

    k: int
    spans: int
    registers: int
    fragments: int
    dot: int
    groups: int
    per_block: int
    in_block: int
    blocks: int
    on_weights: bool
    scale_kind: str
    has_zero: bool
    has_factor: bool
    has_bias: bool
    norm: Norm | None
    #: Of x, after a norm; None to take x as it is.
    rounding: Rounding | None
    #: Kind of gate (`ops.activation.gate`): the first half of rows gates the second; "" for
    #: none.
    gate: str
    #: Matrices per expert, and experts per token (top-k).
    matrices: int
    top_k: int
    chained: bool
    dtype_name: str
    int8_mma: bool
    #: Value of a signed byte of 1, for integer products.
    byte_scale: float
    asm: str
    constraints: str
    table: str | None
    fill: str | None
    warps: int
    #: Rows of x, a power of two.
    rows: int
    #: Row tiles in shared memory, a power of two.
    padded_row_tiles: int
    k_steps_per_warp: int
    tiles_per_iter: int
    #: True if all row tiles of a program are one iteration.
    single_iter: bool
    prefetch: int
    overlap: bool

    def __hash__(self) -> int:
        # A fast hash: Triton hashes it at every launch.
        return hash((self.k, self.asm, self.rows, self.padded_row_tiles))

    @property
    def norms_x(self) -> bool:
        """Return True if the kernel replaces x by RMSNorm(x) before the product."""
        return self._computes_norm("whole")

    @property
    def begins_norm(self) -> bool:
        """Return True if the epilogue adds a residual to y and writes sums of squares for a norm."""
        return self._computes_norm("begin")

    @property
    def ends_norm(self) -> bool:
        """Return True if y is divided by the RMS of x, from sums of squares that an earlier kernel wrote."""
        return self._computes_norm("end")

    @property
    def as_vec4(self) -> bool:
        """Return True if the four words of a lane, operand B of two mmas, are adjacent in shared memory.

        That needs words with two columns of x that are 16 apart. Otherwise x is stored in the order of
        memory.
        """
        return self.shared_table or (self.int8_mma and self.fragment_distance == 1)

    @property
    def shared_table(self) -> bool:
        """Return True if values of codes are looked up in shared memory (`dequant_ptx.shared_table`)."""
        return self.fill is not None

    def _computes_norm(self, part: str) -> bool:
        """Return True if the kernel computes `part` of an RMSNorm: "whole", "begin" or "end"."""
        return self.norm is not None and self.norm.part == part

    @property
    def dtype(self) -> Any:
        """Return Triton's dtype of x."""
        import triton.language as tl

        return {"bfloat16": tl.bfloat16, "float16": tl.float16}[self.dtype_name]

    @property
    def row_tiles_per_output(self) -> int:
        """Return the number of row tiles (16 rows) of W per row tile of y: 2 with gate and up, else 1."""
        return 2 if self.gate else 1

    @property
    def k_step(self) -> int:
        """Return the number of columns that a warp dequantizes at a time: 128, or a longer span.

        A span is the columns whose codes are stored in the same registers.
        """
        return max(128, 16 * self.fragments)

    @property
    def vec4s_per_step(self) -> int:
        """Return the number of 16-byte loads of codes per lane and k_step (128 columns or more)."""
        return self.k_step // (16 * self.fragments) * self.registers

    @property
    def total_k_steps(self) -> int:
        """Return the number of k_steps (128 columns or more) of a row of the weight."""
        return self.spans * 16 * self.fragments // self.k_step

    @property
    def scales_sums(self) -> bool:
        """Return True if scales of groups multiply the float32 sums of their group, not the weights."""
        return self.groups > 1 and not self.on_weights

    @property
    def int32_sums(self) -> bool:
        """Return True if sums are int32 until the epilogue: int8 products with one scale per row."""
        return self.int8_mma and not self.scales_sums

    @property
    def mma_k(self) -> int:
        """Return the number of columns of W that one mma multiplies: 16 for floats, 32 for int8."""
        return 32 if self.int8_mma else 16

    @property
    def mma_pairs_per_step(self) -> int:
        """Return the number of mma pairs of a k_step (128 columns or more).

        An mma pair is two consecutive mmas; a lane loads both operands B with one 16-byte load.
        """
        return self.k_step // (2 * self.mma_k)

    @property
    def mma_pairs(self) -> int:
        """Return the number of mma pairs of a warp for one row tile (16 rows of W).

        An mma pair is two consecutive mmas; a lane loads both operands B with one 16-byte load.
        """
        return self.k_steps_per_warp * self.mma_pairs_per_step

    @property
    def mma_pairs_per_pass(self) -> int:
        """Return the number of mma pairs whose columns of x a warp loads from global memory at once.

        Four of the 32 lanes load a row of x. An mma pair is two consecutive mmas; a lane loads both operands
        B with one 16-byte load.
        """
        return max(1, COLUMNS // self.rows)

    @property
    def padded_mma_pairs(self) -> int:
        """Return `mma_pairs` of a warp, rounded up to what is allocated in shared memory.

        That is a multiple of `mma_pairs_per_pass` and, unless products are int8, a power of two. An mma pair
        is two consecutive mmas; a lane loads both operands B with one 16-byte load.
        """
        turns = -(-self.mma_pairs // self.mma_pairs_per_pass) * self.mma_pairs_per_pass
        return turns if self.int8_mma else next_power_of_2(turns)

    @property
    def columns_per_digit(self) -> int:
        """Return the number of columns of operand B for one int8 digit of each row of x: at least 2.

        For int8 products each value of x is split into three int8 digits. For floats, a column is a row of x,
        as if x had one digit.
        """
        return max(2, self.rows_per_group)

    @property
    def rows_per_group(self) -> int:
        """Return the number of rows of x in a column group, the 8 columns of operand B: min(8, rows)."""
        return min(COLUMNS, self.rows)

    @property
    def has_column_weights(self) -> bool:
        """Return True if each column of sums is multiplied by a factor before columns are added.

        The factor is the place value of an int8 digit of x, or 0 for a second copy of a row of x.
        """
        return self.int8_mma or self.rows <= COLUMNS

    @property
    def column_groups(self) -> int:
        """Return the number of 8-column groups of operand B (n8 of an mma).

        Its columns are the rows of x or, with int8 products, the int8 digits each row is split into.
        """
        return self.columns_per_digit // 2 if self.int8_mma else max(1, self.rows // COLUMNS)

    @property
    def stored_vec4s(self) -> int:
        """Return how many of the 8 columns of operand B are stored in shared memory; copies are not.

        A stored column has 16 bytes (a vec4) for each of its four lanes.
        """
        return (8 // self.columns_per_digit if self.int8_mma else 1) * self.rows_per_group

    @property
    def vec4_shape(self) -> tuple[int, ...]:
        """Return the shape of x in shared memory, in 32-bit words, for one mma pair and one column group.

        An mma pair is two consecutive mmas, a column group 8 columns of operand B. The axes are warps,
        digits, rows of x, four words of a lane, four lanes of a row. The digits are the int8 digits that x is
        split into; there is one for floats. With `as_vec4`, the last two axes are swapped.
        """
        return self.warps, self.stored_vec4s // self.rows_per_group, self.rows_per_group, 4, 4

    @property
    def x_shape(self) -> tuple[int, ...]:
        """Return the shape of all of x in shared memory, in 32-bit words, for float products.

        The axes are mma pairs (two consecutive mmas) times column groups (8 rows of x), then those of
        `vec4_shape`.
        """
        return self.padded_mma_pairs * self.column_groups, *self.vec4_shape

    @property
    def float_shape(self) -> tuple[int, ...]:
        """Return the shape of x as 16-bit floats in shared memory, for the columns that a warp loads at once.

        The shape is [mma pairs, warps, 1, rows of x, 4, 4] in words of 32 bits; an mma pair is two
        consecutive mmas. `digit_shape` is for x split into int8 digits.
        """
        return self.mma_pairs_per_pass, self.warps, 1, self.rows, 4, 4

    @property
    def digit_shape(self) -> tuple[int, ...]:
        """Return the shape of x as int8 digits in shared memory, for the columns that a warp loads at once.

        Each value of x is split into three int8 digits (`gluon.x_digits`). The shape, in words of 32 bits, is
        [mma pairs, column groups, warps, two axes of digits, rows of x, 4, 4]. An mma pair is two consecutive
        mmas, a column group 8 columns of operand B.
        """
        groups = self.column_groups
        return self.mma_pairs_per_pass, groups, self.warps, 2 // groups, 2, self.rows, 4, 4

    @property
    def smem_rows(self) -> int:
        """Return the number of rows of the shared memory of x: padded mma pairs * column groups.

        A row of `smem_row_words` words is operand B of two consecutive mmas, of all warps: 8 rows of x, or 8
        int8 digits that rows of x are split into.
        """
        return self.padded_mma_pairs * self.column_groups

    @property
    def smem_row_words(self) -> int:
        """Return the number of 32-bit words of a row of x in shared memory: 16 bytes per lane and warp.

        A row is operand B of two consecutive mmas: 8 rows of x, or 8 int8 digits that rows of x are split
        into. Copies of columns are not stored.
        """
        return self.warps * self.stored_vec4s * 16

    @property
    def padding_rows(self) -> int:
        """Return the number of unused rows, `smem_row_words` words each, of the shared memory of x.

        Triton does not count the lookup table of code values, which inline PTX allocates. Unused rows raise
        its count above 48 KiB, so that Triton asks the driver for more shared memory.
        """
        return -(
            -undeclared_bytes(self._needed, self.shared_table * shared_bytes()) // (4 * self.smem_row_words)
        )

    @property
    def _needed(self) -> int:
        """Return the bytes of shared memory for x, the sums of all warps, and the RMS of rows of x."""
        x = 4 * self.smem_rows * self.smem_row_words
        return (
            x + self.warps * self.padded_row_tiles * self.rows * 64 + (4 * self.rows if self.ends_norm else 0)
        )

    @property
    def declared_bytes(self) -> int:
        """Return the bytes of shared memory that Triton counts, `padding_rows` included."""
        return self._needed + 4 * self.padding_rows * self.smem_row_words

    @property
    def shared_memory(self) -> int:
        """Return the bytes of shared memory of a program, lookup table included."""
        return self.declared_bytes + self.shared_table * shared_bytes()

    @property
    def fragment_distance(self) -> int:
        """Return the distance, in fragments of 16 columns, of two codes that become bytes of one register."""
        return fragment_distance(self.fragments, self.dot)

    @property
    def dequant_registers(self) -> int:
        """Return the number of registers of operand A, int32 [warps, 32, 4] each, of a dequantized span.

        A span is the columns whose codes are stored in the same registers, 16 for each of its fragments. A
        register has two floats, or four bytes for int8 products.
        """
        return self.fragments // 2 if self.int8_mma else self.fragments

    @property
    def dequant_types(self) -> tuple[Any, ...]:
        """Return Triton's types of the outputs of the PTX that dequantizes a span: int32 each."""
        import triton.language as tl

        return (tl.int32,) * self.dequant_registers

    @property
    def mmas(self) -> tuple["Mma", ...]:
        """Return, for each mma of a k_step (128 columns or more), where operand A and its scale are."""
        return tuple(map(self._mma_of, range(self.k_step // self.mma_k)))

    def _mma_of(self, number: int) -> "Mma":
        # Floats: two mmas are a run of 32 columns. Integers: two mmas are two runs.
        """Return where operand A and the scale of mma `number` of a k_step (128 columns or more) are."""
        runs = self.fragments // 2
        if not self.int8_mma or self.fragment_distance == 1:
            run = number if self.int8_mma else number // 2
            fragment = 2 * (run % runs) + (0 if self.int8_mma else number % 2)
        else:
            # Fragments of runs at this distance share registers.
            distance, mma_pair = self.fragment_distance // 2, number // 2
            run = mma_pair // distance * self.fragment_distance + mma_pair % distance
            fragment = 2 * (run % runs) + number % 2
        register = (
            low_fragments(self.fragments, self.fragment_distance).index(fragment)
            if self.int8_mma
            else fragment
        )
        column = number * self.mma_k
        value = column % 128 // min(128, self.per_block // self.in_block)
        return Mma(run // runs, register, column // 128, value)


@dataclass(frozen=True)
class Mma:
    """Location of operand A, and of its scale, for one mma of a k_step: what a warp dequantizes at a time.

    span       index of the span in the k_step: the columns whose codes are stored in the same registers
    register   index of the output register of the PTX that dequantizes the span
    subtile    index of the 128 columns in the k_step
    value      index of the scale among the scales of these 128 columns
    """

    span: int
    register: int
    subtile: int
    value: int
