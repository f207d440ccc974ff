"""What kernels multiply, and what they know of a weight when they are compiled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from quantkit.kernels.gemm.bound import Bound, Operand
from quantkit.kernels.gemm.gpu_limits import multiprocessors_of, shared_memory_of
from quantkit.kernels.jit.launcher import Launch
from quantkit.kernels.layouts.dequant_expressions import portable
from quantkit.kernels.layouts.dequant_ptx import Expression, expression, has_shared_table, shared_table
from quantkit.kernels.layouts.fragment_layout import ROWS, Geometry, geometry
from quantkit.kernels.layouts.shared_memory import COPIES, shared_bytes
from quantkit.kernels.ops.norm import NORMS
from quantkit.kernels.problem import Gpu, Normed, Problem
from quantkit.packing.schemes import Scheme

#: Tiles of rows of x that share the weights in the cache run next to each other, so many of them.
GROUP_M = 8


@dataclass(frozen=True)
class Grouping:
    """Sizes of products of `count` pairs, each of a token and one of `experts` with so many matrices.

    A segment has up to `rows` pairs, and a token `top_k` of them. If the product is `chained`, kernels before
    it multiplied with the same segments, which were there before the last of these began.
    """

    count: int
    experts: int
    rows: int
    matrices: int
    top_k: int
    chained: bool = False

    @property
    def expert_blocks(self) -> int:
        """No more segments than this have pairs."""
        return max_expert_blocks(self.count, self.experts, self.rows)

    @property
    def usual(self) -> int:
        """How many have some where tokens choose by chance: as many as experts are chosen, or more."""
        missed: float = max(0.0, 1 - self.top_k / self.experts) ** (self.count / self.top_k)
        return min(self.expert_blocks, max(round(self.experts * (1 - missed)), -(-self.count // self.rows)))


def max_expert_blocks(routed: int, experts: int, rows: int) -> int:
    """How many segments of up to so many rows so many pairs can have."""
    return (routed + min(experts, routed) * (rows - 1)) // rows


@dataclass(frozen=True)
class RoutedTokens:
    """Routed tokens, sorted by expert, for stacked weights: the matrices of an expert are adjacent.

    `order` int32 [P] and `expert_blocks` int32 [P, 3] are from `quantkit.kernels.moe.permute_kernels`. Row p
    of y [P, matrices * n] is that of routed token p, which has row p // top_k of x.
    """

    order: torch.Tensor
    expert_blocks: torch.Tensor
    grouping: Grouping


@dataclass(frozen=True)
class Operands:
    """x [m, k] and a weight [n, k] in the fragment layout: codes, scale, zero, factor, values.

    Kernels take besides what the device can do, of `GPU_FEATURES`. With `routed`, the parts of the layout
    have a first dimension more, that of matrices of experts. With `normed`, they do a part of a norm; with
    the kind of a `gate`, y are the gated columns.
    """

    x: torch.Tensor
    layout: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None
    scheme: Scheme
    n: int
    routed: RoutedTokens | None = None
    normed: Normed | None = None
    gate: str = ""
    #: The GPU that kernels are compiled for, where x is on none.
    gpu: Gpu | None = None

    @property
    def multiprocessors(self) -> int:
        """Those of the GPU that kernels are for."""
        return multiprocessors_of(self.x.device) if self.gpu is None else self.gpu.multiprocessors

    @property
    def shared_memory(self) -> int:
        """Bytes that a program may have on it."""
        return shared_memory_of(self.x.device) if self.gpu is None else self.gpu.shared_memory

    @property
    def norm_offset(self) -> float | None:
        """What a norm that is begun adds to its weights; None where none is."""
        return NORMS[self.normed.kind][1] if self.normed and self.normed.part == "begin" else None

    @property
    def norm_eps(self) -> float | None:
        """The eps of a norm that is ended; None where none is."""
        return self.normed.eps if self.normed and self.normed.part == "end" else None

    def norm_operands(self, instead: Operand) -> tuple[Any, ...]:
        """What a norm adds, its weights, the sum, and the squares of that; `instead` of what there is not."""
        if (normed := self.normed) is None:
            return (instead,) * 4
        found = normed.other, normed.weight, normed.total, normed.squares
        return tuple(instead if one is None else one for one in found)

    @property
    def grouping(self) -> Grouping | None:
        return None if self.routed is None else self.routed.grouping

    @property
    def grouped(self) -> tuple[torch.Tensor, ...]:
        """What kernels take of pairs, after their other arguments."""
        return () if self.routed is None else (self.routed.order, self.routed.expert_blocks)

    @property
    def shape(self) -> Geometry:
        return geometry(self.n, self.x.shape[1], self.scheme, self.x.dtype)


@lru_cache(maxsize=4096)
def constants(n: int, k: int, scheme: Scheme, dtype: torch.dtype, inline: bool) -> dict[str, Any]:
    """What all fused kernels know of a weight at compile time. `inline` allows PTX."""
    import triton.language as tl

    shape = geometry(n, k, scheme, dtype)
    name = str(dtype).removeprefix("torch.")
    carried = shape.carried != 1.0
    found = expression(scheme.format, name, bare=carried) if inline else None
    return {
        "K": shape.k,
        "SPANS": shape.spans,
        "TILES": shape.tiles,
        "DOT": shape.dot,
        "GROUP": shape.group,
        "GROUPS": shape.groups,
        "PER_BLOCK": shape.per_block,
        "BLOCKS": shape.blocks,
        "V": shape.in_block,
        "ON_WEIGHTS": shape.on_weights,
        "SCALE": shape.scale_kind,
        "HAS_ZERO": scheme.has_zero_point,
        "HAS_FACTOR": scheme.global_scale or carried,
        **_decoding(found),
        "FIELDS": () if found else portable(scheme.format, bare=carried),
        "PLANES": shape.planes,
        "DTYPE": getattr(tl, name),
    }


def _decoding(found: Expression | None) -> dict[str, str | None]:
    """What kernels know of an expression; without one they decode without PTX."""
    if found is None:
        return dict.fromkeys(("ASM", "CONSTRAINTS", "TABLE"))
    return {"ASM": found.asm, "CONSTRAINTS": found.constraints, "TABLE": found.table}


def with_shared_table(
    known: dict[str, Any], scheme: Scheme, dtype: torch.dtype, warps: int, copies: int = COPIES
) -> dict[str, Any]:
    """`constants` for a kernel of which so many warps fill a table in shared memory, if values have one."""
    found = shared_table(scheme.format, str(dtype).removeprefix("torch."), warps, copies) if copies else None
    if found is None:
        return known | {"FILL": None}
    return known | _decoding(found) | {"FILL": found.fill}


def table_bytes(scheme: Scheme, dtype: torch.dtype, copies: int = COPIES) -> int:
    """Bytes of shared memory that the table of `with_shared_table` takes, which Triton does not count."""
    found = has_shared_table(scheme.format, str(dtype).removeprefix("torch."))
    return shared_bytes(copies) if found else 0


def known_of(grouping: Grouping | None) -> dict[str, Any]:
    """What kernels know of pairs at compile time."""
    if grouping is None:
        return {"order": None, "expert_blocks": None, "MATRICES": 1, "TOP_K": 1}
    return {"MATRICES": grouping.matrices, "TOP_K": grouping.top_k}


def shape_of(problem: Problem) -> Geometry:
    """The fragment layout of the weight of a problem."""
    return geometry(problem.n, problem.k, problem.scheme, problem.dtype)


def unknown_value(tile: Any, values: Mapping[str, tuple[int, ...]]) -> str | None:
    """Which field of a tile is none of the `values` that kernels were tried with."""
    for field, known in values.items():
        value = getattr(tile, field)
        if value not in known:
            return f"{field} is one of {', '.join(map(str, known))}, not {value}"
    return None


def empty(op: Operands, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Room for so many numbers, of the dtype of x unless another is named, on its device."""
    return torch.empty(size, dtype=dtype or op.x.dtype, device=op.x.device)


def why_no_gate_up_tiles(problem: Problem) -> str | None:
    """Why rows of a weight cannot be pairs of row tiles, one of each half."""
    if problem.n % (2 * ROWS):
        return f"halves of {problem.n} rows are no multiples of {ROWS}"
    return None


def aligned(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied unless it begins at a multiple of 16 bytes, which is how many kernels copy at a time."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def whole_columns(k: int) -> int:
    """Columns of rows of k numbers of 16 bits that take multiples of 16 bytes."""
    return -(-k // 8) * 8


def whole_rows(x: torch.Tensor, least: int = 0) -> torch.Tensor:
    """`x` [m, k], `aligned`, with zeros up to `whole_columns`, or up to `least` columns."""
    more = max(whole_columns(x.shape[1]), least) - x.shape[1]
    return F.pad(x, (0, more)) if more else aligned(x)


def output_size(op: Operands) -> tuple[int, int]:
    """Rows and columns of y."""
    if op.grouping is None:
        return op.x.shape[0], op.n // 2 if op.gate else op.n
    n = op.grouping.matrices * op.n
    return op.grouping.count, n // 2 if op.gate else n


def bound(
    op: Operands,
    *launches: tuple[Launch, tuple[Any, ...]],
    prepare: Callable[[torch.Tensor], torch.Tensor] = aligned,
    sums: tuple[int, ...] = (),
) -> Bound:
    """The product by `launches`, for operands like these."""
    return Bound(launches, output_size(op), op.x.dtype, op.x.device, prepare, sums)


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    """`x`, for kernels that copy it from anywhere."""
    return x
