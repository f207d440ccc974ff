"""Compile-time configuration of `fused-gemv`. Free of torch, as processes that only compile import it.

Units of K in the kernel, from small to large, and x in shared memory:

    MMA        16 columns of floats, 32 of int8 (`mma_k`)
    MMA pair   2 MMAs: their B operands are one 16-byte load per lane, a vec4
    k_step     128 columns, or a span where that is longer: what a warp dequantizes at a time
    x          vec4s [padded MMA pairs * column groups, W warps, lanes]
"""

from dataclasses import dataclass
from typing import Any

from quantkit.kernels.layouts.shared_memory import (
    low_planes,
    planes_apart,
    power_of_two,
    shared_bytes,
    undeclared_bytes,
)

#: Columns of operand B of an MMA (n8): rows of x that one MMA multiplies with, at most.
COLUMNS = 8


@dataclass(frozen=True)
class Norm:
    """Fused RMSNorm: its part ("whole", "begin" or "end"), and whether a residual is added (`adds`).

    With `rounded`, x / rms(x) is rounded to x's dtype before it is multiplied with weight + `offset`.
    """

    part: str
    adds: bool
    eps: float
    rounded: bool
    offset: float


@dataclass(frozen=True)
class DecodeConfig:
    """What `decode_gemm` knows at compile time: weight layout, dequantization PTX, and division of work.

    Fields without a comment are those of `Geometry` (`quantkit.kernels.layouts.fragment_layout`), or of the
    `Expression` that dequantizes (`quantkit.kernels.layouts.dequant_ptx`).
    """

    k: int
    spans: int
    tiles: int
    planes: int
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
    #: Activation of the gate, of `quantkit.kernels.ops.activation.gate`; "" for none.
    gate: str
    #: Matrices of an expert, and experts of a token.
    matrices: int
    top_k: int
    chained: bool
    dtype_name: str
    int8_mma: bool
    #: Value of a weight per unit of its int8 byte.
    byte_scale: float
    asm: str
    constraints: str
    table: str | None
    fill: str | None
    warps: int
    #: Rows of x, a power of two.
    rows: int
    #: Row tiles of the partial sums in shared memory, a power of two.
    padded_row_tiles: int
    k_steps_per_warp: int
    tiles_per_iter: int
    #: True if all row tiles of a program are one iteration.
    single_iter: bool
    prefetch: int
    overlap: bool

    def __hash__(self) -> int:
        # Triton looks compiled kernels up by it.
        return hash((self.k, self.asm, self.rows, self.padded_row_tiles))

    @property
    def norms_x(self) -> bool:
        """Return True if x is replaced by its RMSNorm."""
        return self._does("whole")

    @property
    def begins_norm(self) -> bool:
        """Return True if the epilogue begins an RMSNorm: residual add, sums of squares."""
        return self._does("begin")

    @property
    def ends_norm(self) -> bool:
        """Return True if x is a begun RMSNorm, whose sums are divided by the RMS."""
        return self._does("end")

    @property
    def as_vec4(self) -> bool:
        """Return True if x is stored as vec4s per lane, as a word multiplies columns 16 apart.

        Otherwise rows of x lie as in memory, and `ldmatrix` makes the vec4s.
        """
        return self.shared_table or (self.int8_mma and self.plane_distance == 1)

    @property
    def shared_table(self) -> bool:
        """Return True if dequantization looks values up in a table in shared memory."""
        return self.fill is not None

    def _does(self, part: str) -> bool:
        return self.norm is not None and self.norm.part == part

    @property
    def dtype(self) -> Any:
        """Return Triton's dtype of x."""
        import triton.language as tl

        return {"bfloat16": tl.bfloat16, "float16": tl.float16}[self.dtype_name]

    @property
    def row_tiles_per_output(self) -> int:
        """Row tiles of W per 16 columns of y: 2 with a gate (gate and up), else 1."""
        return 2 if self.gate else 1

    @property
    def k_step(self) -> int:
        """Columns of a k_step."""
        return max(128, 16 * self.planes)

    @property
    def vec4s_per_step(self) -> int:
        """16-byte loads of a lane for the codes of a k_step."""
        return self.k_step // (16 * self.planes) * self.tiles

    @property
    def total_k_steps(self) -> int:
        """k_steps of all columns of W."""
        return self.spans * 16 * self.planes // self.k_step

    @property
    def scales_sums(self) -> bool:
        """Return True if scales multiply the sums of each dot, rather than weights or whole rows."""
        return self.groups > 1 and not self.on_weights

    @property
    def int32_sums(self) -> bool:
        """Return True if accumulators stay int32 to the last column."""
        return self.int8_mma and not self.scales_sums

    @property
    def mma_k(self) -> int:
        """Columns of one MMA."""
        return 32 if self.int8_mma else 16

    @property
    def mma_pairs_per_step(self) -> int:
        """MMA pairs of a k_step."""
        return self.k_step // (2 * self.mma_k)

    @property
    def mma_pairs(self) -> int:
        """MMA pairs of a warp."""
        return self.k_steps_per_warp * self.mma_pairs_per_step

    @property
    def mma_pairs_per_pass(self) -> int:
        """MMA pairs whose x a warp stages in one pass: 4 lanes per pair and row of x."""
        return max(1, COLUMNS // self.rows)

    @property
    def padded_mma_pairs(self) -> int:
        """MMA pairs of a warp in shared memory: whole passes for digits, else a power of two."""
        whole_passes = -(-self.mma_pairs // self.mma_pairs_per_pass) * self.mma_pairs_per_pass
        return whole_passes if self.int8_mma else power_of_two(whole_passes)

    @property
    def columns_per_digit(self) -> int:
        """Columns of operand B for one digit of x, or for the rows of x of a group; at least 2."""
        return max(2, self.rows_per_group)

    @property
    def rows_per_group(self) -> int:
        """Rows of x in a group of 8 columns of operand B."""
        return min(COLUMNS, self.rows)

    @property
    def has_column_weights(self) -> bool:
        """Return True if columns of operand B differ in weight: digits, or copies that count once."""
        return self.int8_mma or self.rows <= COLUMNS

    @property
    def column_groups(self) -> int:
        """Groups of 8 columns of operand B: for digits, or for rows of x."""
        return self.columns_per_digit // 2 if self.int8_mma else max(1, self.rows // COLUMNS)

    @property
    def stored_vec4s(self) -> int:
        """vec4s in shared memory of a lane t, for one MMA pair and column group."""
        return (8 // self.columns_per_digit if self.int8_mma else 1) * self.rows_per_group

    @property
    def vec4_shape(self) -> tuple[int, ...]:
        """Shape of the vec4s of one MMA pair and column group: words and lanes t last, in either order."""
        return self.warps, self.stored_vec4s // self.rows_per_group, self.rows_per_group, 4, 4

    @property
    def x_shape(self) -> tuple[int, ...]:
        """Shape of all of x in shared memory, as 16-bit floats."""
        return self.padded_mma_pairs * self.column_groups, *self.vec4_shape

    @property
    def float_shape(self) -> tuple[int, ...]:
        """Shape of the x of one pass, as 16-bit floats."""
        return self.mma_pairs_per_pass, self.warps, 1, self.rows, 4, 4

    @property
    def digit_shape(self) -> tuple[int, ...]:
        """Shape of the x of one pass, as digits: column groups, and the digits of a group."""
        groups = self.column_groups
        return self.mma_pairs_per_pass, groups, self.warps, 2 // groups, 2, self.rows, 4, 4

    @property
    def smem_rows(self) -> int:
        """Rows of `smem_row_words` words that hold x."""
        return self.padded_mma_pairs * self.column_groups

    @property
    def smem_row_words(self) -> int:
        """32-bit words of a row of shared memory: one vec4 per lane of all warps."""
        return self.warps * self.stored_vec4s * 16

    @property
    def padding_rows(self) -> int:
        """Rows that Triton allocates in place of the lookup table, which only inline PTX knows of."""
        return -(
            -undeclared_bytes(self._needed, self.shared_table * shared_bytes()) // (4 * self.smem_row_words)
        )

    @property
    def _needed(self) -> int:
        """Bytes of shared memory for x, the partial sums of each row tile, and the RMS of rows of x."""
        x = 4 * self.smem_rows * self.smem_row_words
        return (
            x + self.warps * self.padded_row_tiles * self.rows * 64 + (4 * self.rows if self.ends_norm else 0)
        )

    @property
    def declared_bytes(self) -> int:
        """Bytes of shared memory that Triton counts, with `padding_rows`."""
        return self._needed + 4 * self.padding_rows * self.smem_row_words

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory, with the lookup table."""
        return self.declared_bytes + self.shared_table * shared_bytes()

    @property
    def plane_distance(self) -> int:
        """Distance of the two planes whose codes become bytes of one register."""
        return planes_apart(self.planes, self.dot)

    @property
    def dequant_registers(self) -> int:
        """Registers that the PTX makes of one register of each part of a span."""
        return self.planes // 2 if self.int8_mma else self.planes

    @property
    def dequant_types(self) -> tuple[Any, ...]:
        """Triton dtypes of these registers."""
        import triton.language as tl

        return (tl.int32,) * self.dequant_registers

    @property
    def mmas(self) -> tuple["Mma", ...]:
        """The MMAs of a k_step, in order."""
        return tuple(map(self._mma_of, range(self.k_step // self.mma_k)))

    def _mma_of(self, number: int) -> "Mma":
        # Two MMAs of floats are a run of 32 columns; two of int8 are two runs.
        runs = self.planes // 2
        if not self.int8_mma or self.plane_distance == 1:
            run = number if self.int8_mma else number // 2
            plane = 2 * (run % runs) + (0 if self.int8_mma else number % 2)
        else:
            # Planes of runs `distance` apart share registers.
            distance, mma_pair = self.plane_distance // 2, number // 2
            run = mma_pair // distance * self.plane_distance + mma_pair % distance
            plane = 2 * (run % runs) + number % 2
        register = low_planes(self.planes, self.plane_distance).index(plane) if self.int8_mma else plane
        column = number * self.mma_k
        value = column % 128 // min(128, self.per_block // self.in_block)
        return Mma(run // runs, register, column // 128, value)


@dataclass(frozen=True)
class Mma:
    """Operand A of an MMA of a k_step: its `span`, and the `register` made of the codes of that.

    `subtile` counts its 128 columns, and `value` is its scale in their block.
    """

    span: int
    register: int
    subtile: int
    value: int
