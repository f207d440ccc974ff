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

    part      "whole": x is replaced by its norm. "begin": sums of squares of y are written, then y is
              multiplied by weight + offset. "end": y is divided by sqrt(...), from sums that an earlier
              kernel wrote.
    adds      True if a residual is added before the norm: to x if "whole", to y if "begin"
    rounded   True if x / sqrt(...) is rounded to x's dtype before it is multiplied by weight + offset
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

    absmax     largest value of the 8-bit format, int8 or e4m3
    mantissa   mantissa bits of the format; 0 for int8
    smallest   smallest normal number of the format
    most       largest finite value of x's dtype, to which results are clamped
    fma        True on GPUs, where a * b + c is rounded once: x / scale is then computed as x * (1 / scale)
               and corrected. False in Triton's interpreter: x / scale is then a division.
    """

    absmax: float
    mantissa: int
    smallest: float
    most: float
    fma: bool


@dataclass(frozen=True)
class DecodeConfig:
    """Compile-time constants of the kernel `decode_gemm`, for a weight W [n, k] in the fragment layout.

    A span is the columns whose codes are stored in the same registers. A k_step is 128 columns, or one span
    if that is longer. A row tile is 16 rows of W.

    spans                          spans of a row of W, padding included
    registers                      registers in which the codes of a span are stored
    fragments                      fragments of a span, 16 columns each
    dot                            columns whose products are summed before a scale applies: 32, 64 or 128
    groups                         groups of a row, which share a scale; 1 if a row has one scale
    blocks, per_block              scale blocks of a row, and columns of one: 128, or one longer group
    in_block                       groups of a scale block
    on_weights                     True if scales multiply weights, not sums of products
    scale_kind                     encoding of scales: a result of `fragment_scales.scale_kind`
    has_zero                       True if W has zero-points
    has_factor                     True if y is divided by a float32 that belongs to W
    has_bias                       True if a bias is added to y
    norm                           part of an RMSNorm to compute, or None
    rounding                       how x is rounded to 8 bits, after a norm; or None
    gate                           f, if y = f(x G^T) * (x U^T) and W is G [n / 2, k] above U; "" for no gate
    matrices, top_k                matrices of an expert, and experts of a token; 1 and 1 without experts
    chained                        True if expert blocks may be read before `pdl_wait`
    int8_mma                       True to multiply int8 codes with the int8 digits that x is split into
    byte_scale                     value of the code byte 1, if `int8_mma`
    asm, constraints, table, fill  PTX that dequantizes a span: the fields of `dequant_ptx.Expression`
    warps                          warps of a program, which divide K: `k_steps_per_warp` each
    rows                           rows of x, rounded up to a power of two
    padded_row_tiles               row tiles of a program, rounded up to a power of two
    tiles_per_iter                 row tiles that are multiplied with each operand B that is loaded
    single_iter                    True if these are all row tiles of a program
    prefetch                       k_steps by which loads of codes run ahead of their products
    overlap                        True if launched with programmatic dependent launch (PDL)
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
    rounding: Rounding | None
    gate: str
    matrices: int
    top_k: int
    chained: bool
    dtype_name: str
    int8_mma: bool
    byte_scale: float
    asm: str
    constraints: str
    table: str | None
    fill: str | None
    warps: int
    rows: int
    padded_row_tiles: int
    k_steps_per_warp: int
    tiles_per_iter: int
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
        """Return True if the 16 bytes of a lane, operand B of two mmas, are adjacent in shared memory.

        If False, x is stored in the order of its columns, and the four words of a lane are 16 bytes apart.
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
        """Return the number of row tiles (16 rows) of W for a row tile of y: 2 for gate and up, else 1."""
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
        """Return the number of k_steps (128 columns or more) of a row of the weight, padding included."""
        return self.spans * 16 * self.fragments // self.k_step

    @property
    def scales_sums(self) -> bool:
        """Return True if the scale of a group multiplies the float32 sum of its products, not its weights."""
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
        """Return the number of mma pairs with which a warp multiplies one row tile (16 rows of W).

        An mma pair is two consecutive mmas; a lane loads both operands B with one 16-byte load.
        """
        return self.k_steps_per_warp * self.mma_pairs_per_step

    @property
    def mma_pairs_per_pass(self) -> int:
        """Return the number of mma pairs for which a warp loads columns of x from global memory at once.

        A lane loads 16 bytes, so 32 lanes load 8 rows of one mma pair, or fewer rows of several. An mma pair
        is two consecutive mmas.
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
        """Return the number of columns of operand B that hold one digit of each row of x: at least 2.

        For int8 products each value of x is split into three int8 digits. For floats, x itself counts as one
        digit. If x has one row, the second column is a copy of the first.
        """
        return max(2, self.rows_per_group)

    @property
    def rows_per_group(self) -> int:
        """Return the number of rows of x in a column group, the 8 columns of operand B: min(8, rows)."""
        return min(COLUMNS, self.rows)

    @property
    def has_column_weights(self) -> bool:
        """Return True if each column of operand B has a factor for its sums.

        Sums of columns that belong to the same row of x are multiplied by their factors and added. A factor
        is the place value of an int8 digit of x, or 0 for a column that is a copy of another.
        """
        return self.int8_mma or self.rows <= COLUMNS

    @property
    def column_groups(self) -> int:
        """Return the number of column groups of operand B: 8 columns each, one mma.

        Columns are rows of x or, for int8 products, the int8 digits into which each row is split.
        """
        return self.columns_per_digit // 2 if self.int8_mma else max(1, self.rows // COLUMNS)

    @property
    def stored_vec4s(self) -> int:
        """Return how many of the 8 columns of operand B are stored in shared memory; copies are not.

        A stored column takes 16 bytes (a vec4) in each of the four lanes that hold it.
        """
        return (8 // self.columns_per_digit if self.int8_mma else 1) * self.rows_per_group

    @property
    def vec4_shape(self) -> tuple[int, ...]:
        """Return the shape of x in shared memory, in 32-bit words, for one mma pair and one column group.

        It is [warps, digits, rows of x, 4 words, 4 lanes], or [..., 4 lanes, 4 words] if `as_vec4`. Four
        lanes hold a row. For int8 products x is split into int8 digits; floats have one digit. An mma pair is
        two consecutive mmas, a column group 8 columns of operand B.
        """
        return self.warps, self.stored_vec4s // self.rows_per_group, self.rows_per_group, 4, 4

    @property
    def x_shape(self) -> tuple[int, ...]:
        """Return the shape of all of x as 16-bit floats in shared memory, in 32-bit words.

        It is [mma pairs * column groups, warps, 1, rows of a group, 4 words, 4 lanes]; the last two are
        swapped if `as_vec4`. An mma pair is two consecutive mmas, a column group up to 8 rows of x.
        """
        return self.padded_mma_pairs * self.column_groups, *self.vec4_shape

    @property
    def float_shape(self) -> tuple[int, ...]:
        """Return the shape of x as 16-bit floats in shared memory, for the columns that a warp loads at once.

        It is [mma pairs, warps, 1, rows of x, 4 lanes, 4 words], in 32-bit words. Four lanes hold a row. An
        mma pair is two consecutive mmas.
        """
        return self.mma_pairs_per_pass, self.warps, 1, self.rows, 4, 4

    @property
    def digit_shape(self) -> tuple[int, ...]:
        """Return the shape of x as int8 digits in shared memory, for the columns that a warp loads at once.

        It is [mma pairs, column groups, warps, 2 / column groups, 2, rows of x, 4 lanes, 4 words]. Words have
        32 bits. A value of x becomes three int8 digits and a zero: axes 1, 3 and 4. An mma pair is two
        consecutive mmas, a column group 8 columns of operand B.
        """
        groups = self.column_groups
        return self.mma_pairs_per_pass, groups, self.warps, 2 // groups, 2, self.rows, 4, 4

    @property
    def smem_rows(self) -> int:
        """Return the number of rows of the shared memory of x: padded mma pairs * column groups.

        A row has operand B of two consecutive mmas for all warps, `smem_row_words` words. A column group is 8
        columns of operand B.
        """
        return self.padded_mma_pairs * self.column_groups

    @property
    def smem_row_words(self) -> int:
        """Return the number of 32-bit words in a row of the shared memory of x.

        A row has operand B of two consecutive mmas for all warps. Each warp has 16 words for each column of
        operand B, except columns that are copies of others.
        """
        return self.warps * self.stored_vec4s * 16

    @property
    def padding_rows(self) -> int:
        """Return the number of rows, `smem_row_words` words each, that enlarge the shared memory of x.

        Triton does not count the lookup table of code values, which inline PTX allocates. The unused rows
        raise Triton's count above 48 KiB, so that it asks the driver for more shared memory.
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
        """Return the bytes of shared memory that Triton counts: all but the table of inline PTX."""
        return self._needed + 4 * self.padding_rows * self.smem_row_words

    @property
    def shared_memory(self) -> int:
        """Return the bytes of shared memory of a program, lookup table included."""
        return self.declared_bytes + self.shared_table * shared_bytes()

    @property
    def fragment_distance(self) -> int:
        """Return the distance, in fragments (16 columns), of codes that become adjacent bytes of a register.

        This is for int8 products.
        """
        return fragment_distance(self.fragments, self.dot)

    @property
    def dequant_registers(self) -> int:
        """Return the number of operands A of `mma` that the PTX makes of a span.

        Each is int32 [warps, 32 lanes, 4]: four registers of a thread. A span is the columns whose codes are
        stored in the same registers. An int32 has two 16-bit floats or, for int8 products, four bytes.
        """
        return self.fragments // 2 if self.int8_mma else self.fragments

    @property
    def dequant_types(self) -> tuple[Any, ...]:
        """Return Triton's types of the `dequant_registers` outputs of the dequantizing PTX: int32 each."""
        import triton.language as tl

        return (tl.int32,) * self.dequant_registers

    @property
    def mmas(self) -> tuple["Mma", ...]:
        """Return, for each mma of a k_step (128 columns or more), the location of its operand A and scale."""
        return tuple(map(self._mma_of, range(self.k_step // self.mma_k)))

    def _mma_of(self, number: int) -> "Mma":
        # Floats: two mmas are a run of 32 columns. Integers: two mmas are two runs.
        """Return the location of operand A and scale for mma `number` of a k_step (128 columns or more)."""
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
    """Location of operand A and of its scale, for one mma of a k_step (128 columns of W or more).

    span       index of the span in the k_step: the columns whose codes are stored in the same registers
    register   index of operand A among the outputs of the PTX that dequantizes the span
    subtile    index of the 128 columns in the k_step
    value      index of the scale among the scales of these 128 columns
    """

    span: int
    register: int
    subtile: int
    value: int
