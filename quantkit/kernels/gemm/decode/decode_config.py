"""What `fused-gemv` knows at compile time. Processes that only compile import it: it has no torch."""

from dataclasses import dataclass
from typing import Any

from quantkit.kernels.layouts.shared_memory import (
    low_planes,
    planes_apart,
    power_of_two,
    shared_bytes,
    undeclared_bytes,
)

#: Columns of operand B of a product, and the most rows of x that it multiplies with.
COLUMNS = 8


@dataclass(frozen=True)
class Norm:
    """The part of a norm that is done: of a sum if it `adds`; whether numbers are rounded before they are
    multiplied with weights, and what is added to these.
    """

    part: str
    adds: bool
    eps: float
    rounded: bool
    offset: float


@dataclass(frozen=True)
class DecodeConfig:
    """What the kernel knows at compile time: the weight, how codes become operands, and how work is shared.

    Products are those of `mma_k` columns; two of them have a quad of x, a `mma_pair` of columns.
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
    #: What gates the rows of the second half, of `quantkit.kernels.ops.activation.gate`; "" for nothing.
    gate: str
    #: Matrices of an expert, and pairs of each row of x.
    matrices: int
    top_k: int
    chained: bool
    dtype_name: str
    int8_mma: bool
    #: What a byte counts, of integers.
    byte_scale: float
    asm: str
    constraints: str
    table: str | None
    fill: str | None
    warps: int
    #: Rows of x, a power of two.
    rows: int
    #: Row tiles that there is shared memory for, a power of two.
    padded_row_tiles: int
    k_steps_per_warp: int
    tiles_per_iter: int
    #: Whether there is but one turn.
    single_iter: bool
    prefetch: int
    overlap: bool

    def __hash__(self) -> int:
        # Part of what Triton looks a kernel up by.
        return hash((self.k, self.asm, self.rows, self.padded_row_tiles))

    @property
    def norms_x(self) -> bool:
        """Whether x becomes a norm."""
        return self._does("whole")

    @property
    def begins_norm(self) -> bool:
        """Whether a norm of y is begun."""
        return self._does("begin")

    @property
    def ends_norm(self) -> bool:
        """Whether the norm that x was begun to become is ended."""
        return self._does("end")

    @property
    def as_vec4(self) -> bool:
        """Whether x is in shared memory as quads, as words have columns that lie 16 apart."""
        return self.shared_table or (self.int8_mma and self.plane_distance == 1)

    @property
    def shared_table(self) -> bool:
        """Whether the expression is that of `ptx.shared_table`."""
        return self.fill is not None

    def _does(self, part: str) -> bool:
        return self.norm is not None and self.norm.part == part

    @property
    def dtype(self) -> Any:
        """The dtype of x."""
        import triton.language as tl

        return {"bfloat16": tl.bfloat16, "float16": tl.float16}[self.dtype_name]

    @property
    def row_tiles_per_output(self) -> int:
        """Row tiles that a program has one or none of."""
        return 2 if self.gate else 1

    @property
    def k_step(self) -> int:
        """Columns of a unit."""
        return max(128, 16 * self.planes)

    @property
    def vec4s_per_step(self) -> int:
        """Quads that a lane has of the codes of a unit."""
        return self.k_step // (16 * self.planes) * self.tiles

    @property
    def total_k_steps(self) -> int:
        """Units of all warps together."""
        return self.spans * 16 * self.planes // self.k_step

    @property
    def scales_sums(self) -> bool:
        """Whether each dot has a scale that multiplies its sums."""
        return self.groups > 1 and not self.on_weights

    @property
    def int32_sums(self) -> bool:
        """Whether sums are integers to the end."""
        return self.int8_mma and not self.scales_sums

    @property
    def mma_k(self) -> int:
        """Columns of a product."""
        return 32 if self.int8_mma else 16

    @property
    def mma_pairs_per_step(self) -> int:
        """Pieces of a unit."""
        return self.k_step // (2 * self.mma_k)

    @property
    def mma_pairs(self) -> int:
        """Pieces of each warp."""
        return self.k_steps_per_warp * self.mma_pairs_per_step

    @property
    def mma_pairs_per_pass(self) -> int:
        """Pieces that the lanes of a warp have at a time, each four of every row of x."""
        return max(1, COLUMNS // self.rows)

    @property
    def padded_mma_pairs(self) -> int:
        """Pieces of each warp that there is shared memory for: whole turns of a warp, or a power of two."""
        turns = -(-self.mma_pairs // self.mma_pairs_per_pass) * self.mma_pairs_per_pass
        return turns if self.int8_mma else power_of_two(turns)

    @property
    def columns_per_digit(self) -> int:
        """Columns of operand B for one digit, or for the rows of x that a group of them has."""
        return max(2, self.rows_per_group)

    @property
    def rows_per_group(self) -> int:
        """Rows of x that a group of columns of operand B has."""
        return min(COLUMNS, self.rows)

    @property
    def has_column_weights(self) -> bool:
        """Whether columns of operand B may count differently: as digits, or once where there are copies."""
        return self.int8_mma or self.rows <= COLUMNS

    @property
    def column_groups(self) -> int:
        """Groups of `COLUMNS` columns of operand B: of digits, or of rows of x."""
        return self.columns_per_digit // 2 if self.int8_mma else max(1, self.rows // COLUMNS)

    @property
    def stored_vec4s(self) -> int:
        """Quads of a lane t in shared memory, for a group of columns of a piece."""
        return (8 // self.columns_per_digit if self.int8_mma else 1) * self.rows_per_group

    @property
    def vec4_shape(self) -> tuple[int, ...]:
        """Words in shared memory that are a quad of each lane: columns n, words and t in either order."""
        return self.warps, self.stored_vec4s // self.rows_per_group, self.rows_per_group, 4, 4

    @property
    def x_shape(self) -> tuple[int, ...]:
        """All of them, of floats."""
        return self.padded_mma_pairs * self.column_groups, *self.vec4_shape

    @property
    def float_shape(self) -> tuple[int, ...]:
        """Those of a turn of floats."""
        return self.mma_pairs_per_pass, self.warps, 1, self.rows, 4, 4

    @property
    def digit_shape(self) -> tuple[int, ...]:
        """Those of a turn of digits: groups of columns, and the digits of a group."""
        groups = self.column_groups
        return self.mma_pairs_per_pass, groups, self.warps, 2 // groups, 2, self.rows, 4, 4

    @property
    def smem_rows(self) -> int:
        """Rows of `smem_row_words` that hold the quads of x."""
        return self.padded_mma_pairs * self.column_groups

    @property
    def smem_row_words(self) -> int:
        """Words of a row of shared memory: a quad of each lane of all warps."""
        return self.warps * self.stored_vec4s * 16

    @property
    def padding_rows(self) -> int:
        """Dummy rows, so that Triton requests the shared memory of the table that inline PTX puts there."""
        return -(
            -undeclared_bytes(self._needed, self.shared_table * shared_bytes()) // (4 * self.smem_row_words)
        )

    @property
    def _needed(self) -> int:
        """Bytes of shared memory for x, what warps have of each row tile, and roots of rows of x."""
        x = 4 * self.smem_rows * self.smem_row_words
        return (
            x + self.warps * self.padded_row_tiles * self.rows * 64 + (4 * self.rows if self.ends_norm else 0)
        )

    @property
    def declared_bytes(self) -> int:
        """Bytes of shared memory that Triton counts, with those of `padding_rows`."""
        return self._needed + 4 * self.padding_rows * self.smem_row_words

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory, the table among them."""
        return self.declared_bytes + self.shared_table * shared_bytes()

    @property
    def plane_distance(self) -> int:
        """How far apart planes are whose codes become bytes of one register."""
        return planes_apart(self.planes, self.dot)

    @property
    def dequant_registers(self) -> int:
        """Registers that are made of one of each part."""
        return self.planes // 2 if self.int8_mma else self.planes

    @property
    def dequant_types(self) -> tuple[Any, ...]:
        """Their types."""
        import triton.language as tl

        return (tl.int32,) * self.dequant_registers

    @property
    def mmas(self) -> tuple["Mma", ...]:
        """The products of a unit."""
        return tuple(map(self._mma_of, range(self.k_step // self.mma_k)))

    def _mma_of(self, number: int) -> "Mma":
        # Of floats two products are a run of 32 columns, of integers a piece of two runs.
        runs = self.planes // 2
        if not self.int8_mma or self.plane_distance == 1:
            run = number if self.int8_mma else number // 2
            plane = 2 * (run % runs) + (0 if self.int8_mma else number % 2)
        else:
            # Runs so far apart have planes that share registers.
            distance, mma_pair = self.plane_distance // 2, number // 2
            run = mma_pair // distance * self.plane_distance + mma_pair % distance
            plane = 2 * (run % runs) + number % 2
        register = low_planes(self.planes, self.plane_distance).index(plane) if self.int8_mma else plane
        column = number * self.mma_k
        value = column % 128 // min(128, self.per_block // self.in_block)
        return Mma(run // runs, register, column // 128, value)


@dataclass(frozen=True)
class Mma:
    """Where a product of a unit has its operand A, and the scale of that: the span, which of the registers
    made of its codes, which 128 columns, and which value of their block.
    """

    span: int
    register: int
    subtile: int
    value: int
