"""Operands of the fused kernels, and the constexprs that follow from a weight."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from quantkit.kernels.gemm.bound import Bound, Operand
from quantkit.kernels.gemm.gpu_limits import multiprocessors_of, shared_memory_of
from quantkit.kernels.jit.launcher import Launch
from quantkit.kernels.layouts.dequant_expressions import portable
from quantkit.kernels.layouts.dequant_ptx import Expression, expression, has_shared_table, shared_table
from quantkit.kernels.layouts.geometry import ROWS, Geometry, geometry
from quantkit.kernels.layouts.shared_memory import COPIES, shared_bytes
from quantkit.kernels.ops.norm import NORMS
from quantkit.kernels.ops.quantize_x import QuantizedX
from quantkit.kernels.problem import Gpu, Normed, Problem
from quantkit.packing.activations import ActivationScheme
from quantkit.packing.schemes import Scheme

#: Adjacent tiles of rows of x that run together, so that they share weights in the L2 cache.
GROUP_M = 8


@dataclass(frozen=True)
class Grouping:
    """Sizes of a grouped GEMM, in which each token is multiplied with the matrices of its experts.

    A routed token is a token paired with one of its experts. An expert block is up to `rows` routed tokens of
    one expert, which one program multiplies.

    count      number of routed tokens
    experts    number of experts
    rows       most routed tokens of an expert block
    matrices   matrices of an expert: 2 for gate and up, for example
    top_k      experts of a token
    chained    True if an earlier kernel read the same expert blocks: a kernel may then read them before it
               waits for the kernel before it (PDL)
    """

    count: int
    experts: int
    rows: int
    matrices: int
    top_k: int
    chained: bool = False

    @property
    def expert_blocks(self) -> int:
        """Return the largest possible number of expert blocks.

        An expert block is up to `rows` routed tokens of one expert. A routed token is a token paired with one
        of its experts.
        """
        return max_expert_blocks(self.count, self.experts, self.rows)

    @property
    def usual(self) -> int:
        """Return the expected number of expert blocks if tokens choose experts at random.

        An expert block is up to `rows` routed tokens of one expert. A routed token is a token paired with one
        of its experts.
        """
        missed: float = max(0.0, 1 - self.top_k / self.experts) ** (self.count / self.top_k)
        return min(self.expert_blocks, max(round(self.experts * (1 - missed)), -(-self.count // self.rows)))


def max_expert_blocks(routed: int, experts: int, rows: int) -> int:
    """Return the largest possible number of expert blocks for `routed` routed tokens.

    A routed token is a token paired with one of its experts. An expert block is up to `rows` of one expert.
    """
    return (routed + min(experts, routed) * (rows - 1)) // rows


class GemmSpec(NamedTuple):
    """Sizes and dtypes of y [m, n] = x [m, k] W^T for which a kernel is compiled.

    m        rows of x; with experts, most tokens of one expert that a program multiplies
    scheme   scheme of W [n, k]
    dtype    dtype of x and y
    bias     True if there is a bias [n]
    """

    m: int
    n: int
    k: int
    scheme: Scheme
    dtype: torch.dtype
    #: True if there is a bias [n].
    bias: bool = False

    @property
    def shape(self) -> Geometry:
        """Return the sizes of the fragment layout of W [n, k], padding included."""
        return geometry(self.n, self.k, self.scheme, self.dtype)


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens of a grouped GEMM, sorted by expert.

    A routed token is a token paired with one of its experts. An expert block is several of one expert.

    order            int32 [P]: indices of routed tokens; routed token p reads row p // top_k of x
    expert_blocks    int32 [blocks, 3]: expert, first index in `order`, and number of routed tokens
    grouping         sizes: number of experts, matrices of an expert, top_k

    Row p of y [P, matrices * n] belongs to routed token p.
    """

    order: torch.Tensor
    expert_blocks: torch.Tensor
    grouping: Grouping


@dataclass(frozen=True)
class Operands:
    """Operands of y = x W^T: x [m, k], a weight W [n, k] in the fragment layout, and bias [n] or None.

    layout        (codes, scale, zero, factor, values) of `fragment_layout.build`; if `routed` is given, each
                  has a first dimension of experts * matrices
    scheme        scheme of W: number format, groups, zero-points and dtype of scales
    n             output features of W; if `routed` is given, of one of the matrices of an expert
    routed        tokens of each expert, for a grouped GEMM over experts; None for one W
    normed        part of an RMSNorm that the kernel computes: all, or the first or second half if two
                  products share it (`problem.Normed`); None for none
    gate          activation f, if y = f(first half of columns) * second half; "" for none
    activations   how the kernel rounds x to 8 bits; None if it does not
    codes         x as 8-bit codes and scales, from an earlier kernel: of `x` only shape and dtype are then
                  used; None if x has values
    gpu           GPU to compile for, if x is on the meta device; else None
    """

    x: torch.Tensor
    layout: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None
    scheme: Scheme
    n: int
    routed: RoutedTokens | None = None
    normed: Normed | None = None
    gate: str = ""
    activations: ActivationScheme | None = None
    codes: QuantizedX | None = None
    #: GPU to compile for, if x is on the meta device.
    gpu: Gpu | None = None

    @property
    def multiprocessors(self) -> int:
        """Return the number of multiprocessors of the GPU of x, or of `gpu` if given."""
        return multiprocessors_of(self.x.device) if self.gpu is None else self.gpu.multiprocessors

    @property
    def shared_memory(self) -> int:
        """Return the bytes of shared memory that a program may use on the GPU of x, or on `gpu` if given."""
        return shared_memory_of(self.x.device) if self.gpu is None else self.gpu.shared_memory

    @property
    def norm_offset(self) -> float | None:
        """Return the offset in y * (weight + offset), if the epilogue begins an RMSNorm; else None."""
        return NORMS[self.normed.kind][1] if self.normed and self.normed.part == "begin" else None

    @property
    def norm_eps(self) -> float | None:
        """Return eps, if the kernel ends an RMSNorm by dividing y by sqrt(mean(x^2) + eps); else None."""
        return self.normed.eps if self.normed and self.normed.part == "end" else None

    def norm_operands(self, instead: Operand) -> tuple[Any, ...]:
        """Return the tensors of `normed`: (residual, norm weight, sum with residual, sums of squares).

        `instead`, a placeholder, replaces each tensor that is missing.
        """
        if (normed := self.normed) is None:
            return (instead,) * 4
        found = normed.other, normed.weight, normed.total, normed.squares
        return tuple(instead if one is None else one for one in found)

    @property
    def grouping(self) -> Grouping | None:
        """Return the sizes of the grouped GEMM; None without experts."""
        return None if self.routed is None else self.routed.grouping

    @property
    def spec(self) -> GemmSpec:
        """Return sizes and dtypes that kernels are compiled for; for experts n counts all matrices."""
        matrices = 1 if self.grouping is None else self.grouping.matrices
        return self.matrix_spec._replace(n=self.n * matrices)

    @property
    def matrix_spec(self) -> GemmSpec:
        """Return sizes and dtypes that kernels are compiled for; for experts n is that of one matrix."""
        m = self.x.shape[0] if self.grouping is None else self.grouping.rows
        return GemmSpec(m, self.n, self.x.shape[1], self.scheme, self.x.dtype, self.bias is not None)

    @property
    def grouped(self) -> tuple[torch.Tensor, ...]:
        """Return (`order`, `expert_blocks`) of `routed`, which kernels take last; () without experts."""
        return () if self.routed is None else (self.routed.order, self.routed.expert_blocks)

    @property
    def shape(self) -> Geometry:
        """Return the sizes of the fragment layout of W [n, k], padding included."""
        return geometry(self.n, self.x.shape[1], self.scheme, self.x.dtype)


@lru_cache(maxsize=4096)
def constants(n: int, k: int, scheme: Scheme, dtype: torch.dtype, inline: bool) -> dict[str, Any]:
    """Return the constexprs that follow from a weight W [n, k] and x's `dtype`, for all fused kernels.

    A span is the columns whose codes are stored in the same registers. A scale block is the groups of 128
    columns, or one longer group. `inline` is True to dequantize codes by inline PTX.

    K                         columns of W
    SPANS                     spans of a row, padding included
    FRAGMENTS                 fragments of a span, 16 columns each
    REGISTERS                 registers in which the codes of a span are stored
    DOT                       columns whose products are summed before a scale applies
    GROUP, GROUPS             columns of a group, and groups of a row
    BLOCKS, PER_BLOCK         scale blocks of a row, and columns of a scale block
    V                         groups of a scale block
    ON_WEIGHTS                True if scales multiply weights, not sums of products
    SCALE                     encoding of 8-bit scales (`scale_kind`); "" for wider ones
    HAS_ZERO                  True if there are zero-points
    HAS_FACTOR                True if y is divided by a float32, such as the global scale
    ASM, CONSTRAINTS, TABLE   PTX of `dequant_ptx.Expression`; None if not `inline`
    FIELDS                    a `CodeToFloat` for each fragment, used where ASM is None
    DTYPE                     Triton's dtype of x
    """
    import triton.language as tl

    shape = geometry(n, k, scheme, dtype)
    name = str(dtype).removeprefix("torch.")
    is_folded = shape.folded_factor != 1.0
    found = expression(scheme.format, name, is_folded=is_folded) if inline else None
    return {
        "K": shape.k,
        "SPANS": shape.spans,
        "REGISTERS": shape.registers,
        "DOT": shape.dot,
        "GROUP": shape.group,
        "GROUPS": shape.groups,
        "PER_BLOCK": shape.per_block,
        "BLOCKS": shape.blocks,
        "V": shape.in_block,
        "ON_WEIGHTS": shape.on_weights,
        "SCALE": shape.scale_kind,
        "HAS_ZERO": scheme.has_zero_point,
        "HAS_FACTOR": scheme.global_scale or is_folded,
        **_dequant_constexprs(found),
        "FIELDS": () if found else portable(scheme.format, is_folded=is_folded),
        "FRAGMENTS": shape.fragments,
        "DTYPE": getattr(tl, name),
    }


def _dequant_constexprs(found: Expression | None) -> dict[str, str | None]:
    """Return the constexprs ASM, CONSTRAINTS and TABLE: the fields of `found`, PTX that dequantizes codes.

    All three are None if `found` is None: the kernel then dequantizes without PTX.
    """
    if found is None:
        return dict.fromkeys(("ASM", "CONSTRAINTS", "TABLE"))
    return {"ASM": found.asm, "CONSTRAINTS": found.constraints, "TABLE": found.table}


def with_shared_table(
    constexprs: dict[str, Any], scheme: Scheme, dtype: torch.dtype, warps: int, copies: int = COPIES
) -> dict[str, Any]:
    """Return `constexprs` with FILL, and with PTX that looks codes up in shared memory if needed.

    It is needed for formats whose values are looked up, not computed. For others, and if `copies` is 0, only
    FILL is added, as None.

    constexprs   result of `constants`
    dtype        dtype of x
    warps        warps that fill the lookup table
    copies       copies of each pair of values in the table
    """
    found = shared_table(scheme.format, str(dtype).removeprefix("torch."), warps, copies) if copies else None
    if found is None:
        return constexprs | {"FILL": None}
    return constexprs | _dequant_constexprs(found) | {"FILL": found.fill}


def table_bytes(scheme: Scheme, dtype: torch.dtype, copies: int = COPIES) -> int:
    """Return the bytes of a format's lookup table in shared memory; 0 for a format without one.

    The table has `copies` of each pair of values. PTX allocates it, so Triton does not count its bytes.
    """
    found = has_shared_table(scheme.format, str(dtype).removeprefix("torch."))
    return shared_bytes(copies) if found else 0


def grouping_constexprs(grouping: Grouping | None) -> dict[str, Any]:
    """Return the constexprs MATRICES (matrices of an expert) and TOP_K (experts of a token).

    If `grouping` is None, both are 1, and the kernel's arguments `order` and `expert_blocks` are set to None.
    """
    if grouping is None:
        return {"order": None, "expert_blocks": None, "MATRICES": 1, "TOP_K": 1}
    return {"MATRICES": grouping.matrices, "TOP_K": grouping.top_k}


def shape_of(problem: Problem) -> Geometry:
    """Return the sizes of the fragment layout of a problem's weight [n, k], padding included."""
    return geometry(problem.n, problem.k, problem.scheme, problem.dtype)


def unknown_value(tile: Any, values: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return why a tile (launch configuration) has a field with a value that is not in `values`; else None.

    `values` has the values of each field that were tested.
    """
    for field, allowed in values.items():
        value = getattr(tile, field)
        if value not in allowed:
            return f"{field} is one of {', '.join(map(str, allowed))}, not {value}"
    return None


def empty(op: Operands, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Allocate a tensor [*size] on the device of `op.x`, by default in the dtype of `op.x`."""
    return torch.empty(size, dtype=dtype or op.x.dtype, device=op.x.device)


def why_no_gate_up_tiles(problem: Problem) -> str | None:
    """Return why the halves of W's rows, gate and up, are no whole tiles of 16 rows; None if they are."""
    if problem.n % (2 * ROWS):
        return f"halves of {problem.n} rows are no multiples of {ROWS}"
    return None


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x [m, k], or a copy if its address is no multiple of 16 bytes, the size of vector loads."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def whole_columns(k: int) -> int:
    """Return k rounded up to a multiple of 8: rows of 16-bit values then take multiples of 16 bytes."""
    return -(-k // 8) * 8


def whole_rows(x: torch.Tensor, least: int = 0) -> torch.Tensor:
    """Return `x` [m, k], padded with zeros so that each row has a multiple of 16 bytes, as vector loads need.

    The result has at least `least` columns. Without padding, `x` is returned, copied if its address is no
    multiple of 16 bytes.
    """
    more = max(whole_columns(x.shape[1]), least) - x.shape[1]
    return F.pad(x, (0, more)) if more else aligned(x)


def output_size(op: Operands) -> tuple[int, int]:
    """Return the shape [rows, columns] of y for these operands.

    With experts, a row is a routed token, a token paired with one of its experts.
    """
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
    """Return a `Bound` of `launches`, which together compute y [m, n]; it is later called with x and bias.

    launches   pairs (launch, its arguments), in order; `Operand` stands for x, bias, y and partial sums
    prepare    converts x [m, k] to what kernels read
    sums       shape of the float32 partial sums; () for none
    """
    return Bound(launches, output_size(op), op.x.dtype, op.x.device, prepare, sums)


def unchanged(x: torch.Tensor) -> torch.Tensor:
    """Return x [m, k] unchanged, for kernels without a condition on its address."""
    return x
