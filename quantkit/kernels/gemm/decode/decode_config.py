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

    Products are those of `product` columns; two of them have a quad of x, a `piece` of columns.
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
    integers: bool
    #: What a byte counts, of integers.
    worth: float
    asm: str
    constraints: str
    table: str | None
    fill: str | None
    warps: int
    #: Rows of x, a power of two.
    rows: int
    #: Row tiles that there is shared memory for, a power of two.
    row_tile_room: int
    units: int
    together: int
    #: Whether there is but one turn.
    once: bool
    ahead: int
    overlap: bool

    def __hash__(self) -> int:
        # Part of what Triton looks a kernel up by.
        return hash((self.k, self.asm, self.rows, self.row_tile_room))

    @property
    def is_normed(self) -> bool:
        """Whether x becomes a norm."""
        return self._does("whole")

    @property
    def begins(self) -> bool:
        """Whether a norm of y is begun."""
        return self._does("begin")

    @property
    def ends(self) -> bool:
        """Whether the norm that x was begun to become is ended."""
        return self._does("end")

    @property
    def as_quads(self) -> bool:
        """Whether x is in shared memory as quads, as words have columns that lie 16 apart."""
        return self.shared_table or (self.integers and self.apart == 1)

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
    def step(self) -> int:
        """Row tiles that a program has one or none of."""
        return 2 if self.gate else 1

    @property
    def unit(self) -> int:
        """Columns of a unit."""
        return max(128, 16 * self.planes)

    @property
    def unit_quads(self) -> int:
        """Quads that a lane has of the codes of a unit."""
        return self.unit // (16 * self.planes) * self.tiles

    @property
    def all_units(self) -> int:
        """Units of all warps together."""
        return self.spans * 16 * self.planes // self.unit

    @property
    def on_sums(self) -> bool:
        """Whether each dot has a scale that multiplies its sums."""
        return self.groups > 1 and not self.on_weights

    @property
    def whole(self) -> bool:
        """Whether sums are integers to the end."""
        return self.integers and not self.on_sums

    @property
    def product(self) -> int:
        """Columns of a product."""
        return 32 if self.integers else 16

    @property
    def unit_pieces(self) -> int:
        """Pieces of a unit."""
        return self.unit // (2 * self.product)

    @property
    def pieces(self) -> int:
        """Pieces of each warp."""
        return self.units * self.unit_pieces

    @property
    def at_once(self) -> int:
        """Pieces that the lanes of a warp have at a time, each four of every row of x."""
        return max(1, COLUMNS // self.rows)

    @property
    def room(self) -> int:
        """Pieces of each warp that there is shared memory for: whole turns of a warp, or a power of two."""
        turns = -(-self.pieces // self.at_once) * self.at_once
        return turns if self.integers else power_of_two(turns)

    @property
    def bm(self) -> int:
        """Columns of operand B for one digit, or for the rows of x that a group of them has."""
        return max(2, self.group_rows)

    @property
    def group_rows(self) -> int:
        """Rows of x that a group of columns of operand B has."""
        return min(COLUMNS, self.rows)

    @property
    def weighed(self) -> bool:
        """Whether columns of operand B may count differently: as digits, or once where there are copies."""
        return self.integers or self.rows <= COLUMNS

    @property
    def column_groups(self) -> int:
        """Groups of `COLUMNS` columns of operand B: of digits, or of rows of x."""
        return self.bm // 2 if self.integers else max(1, self.rows // COLUMNS)

    @property
    def stored_quads(self) -> int:
        """Quads of a lane t in shared memory, for a group of columns of a piece."""
        return (8 // self.bm if self.integers else 1) * self.group_rows

    @property
    def quad_sizes(self) -> tuple[int, ...]:
        """Words in shared memory that are a quad of each lane: columns n, words and t in either order."""
        return self.warps, self.stored_quads // self.group_rows, self.group_rows, 4, 4

    @property
    def copied_sizes(self) -> tuple[int, ...]:
        """All of them, of floats."""
        return self.room * self.column_groups, *self.quad_sizes

    @property
    def float_sizes(self) -> tuple[int, ...]:
        """Those of a turn of floats."""
        return self.at_once, self.warps, 1, self.rows, 4, 4

    @property
    def digit_sizes(self) -> tuple[int, ...]:
        """Those of a turn of digits: groups of columns, and the digits of a group."""
        groups = self.column_groups
        return self.at_once, groups, self.warps, 2 // groups, 2, self.rows, 4, 4

    @property
    def held_rows(self) -> int:
        """Rows of `row_words` that hold the quads of x."""
        return self.room * self.column_groups

    @property
    def row_words(self) -> int:
        """Words of a row of shared memory: a quad of each lane of all warps."""
        return self.warps * self.stored_quads * 16

    @property
    def spare_rows(self) -> int:
        """Dummy rows, so that Triton requests the shared memory of the table that inline PTX puts there."""
        return -(-undeclared_bytes(self._needed, self.shared_table * shared_bytes()) // (4 * self.row_words))

    @property
    def _needed(self) -> int:
        """Bytes of shared memory for x, what warps have of each row tile, and roots of rows of x."""
        x = 4 * self.held_rows * self.row_words
        return x + self.warps * self.row_tile_room * self.rows * 64 + (4 * self.rows if self.ends else 0)

    @property
    def counted_memory(self) -> int:
        """Bytes of shared memory that Triton counts, with those of `spare_rows`."""
        return self._needed + 4 * self.spare_rows * self.row_words

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory, the table among them."""
        return self.counted_memory + self.shared_table * shared_bytes()

    @property
    def apart(self) -> int:
        """How far apart planes are whose codes become bytes of one register."""
        return planes_apart(self.planes, self.dot)

    @property
    def made(self) -> int:
        """Registers that are made of one of each part."""
        return self.planes // 2 if self.integers else self.planes

    @property
    def made_types(self) -> tuple[Any, ...]:
        """Their types."""
        import triton.language as tl

        return (tl.int32,) * self.made

    @property
    def products(self) -> tuple["Product", ...]:
        """The products of a unit."""
        return tuple(map(self._product, range(self.unit // self.product)))

    def _product(self, number: int) -> "Product":
        # Of floats two products are a run of 32 columns, of integers a piece of two runs.
        runs = self.planes // 2
        if not self.integers or self.apart == 1:
            run = number if self.integers else number // 2
            plane = 2 * (run % runs) + (0 if self.integers else number % 2)
        else:
            # Runs so far apart have planes that share registers.
            distance, piece = self.apart // 2, number // 2
            run = piece // distance * self.apart + piece % distance
            plane = 2 * (run % runs) + number % 2
        register = low_planes(self.planes, self.apart).index(plane) if self.integers else plane
        column = number * self.product
        value = column % 128 // min(128, self.per_block // self.in_block)
        return Product(run // runs, register, column // 128, value)


@dataclass(frozen=True)
class Product:
    """Where a product of a unit has its operand A, and the scale of that: the span, which of the registers
    made of its codes, which 128 columns, and which value of their block.
    """

    span: int
    register: int
    part: int
    value: int
