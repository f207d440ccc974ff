"""`fused-wgmma-8bit`: its tile (launch configuration), the rule for it, and its launch."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from quantkit.errors import KernelError
from quantkit.kernels.gemm.gpu_limits import HOPPER_SHARED
from quantkit.kernels.gemm.operands import GROUP_M, GemmSpec, Operands, constants, empty, shape_of
from quantkit.kernels.gemm.wgmma.wgmma_launch import MAX_STORE_VECTOR, TMA_ROWS, WARPS, launch_token
from quantkit.kernels.gemm.wgmma.wgmma_tiles import COLUMNS, SCRATCH, STAGES, stream_k_schedule
from quantkit.kernels.jit.launcher import Launch, overlap
from quantkit.kernels.layouts.geometry import Geometry
from quantkit.kernels.ops.quantize_x import CodeOrder, quantize_x
from quantkit.kernels.problem import Problem
from quantkit.packing.activations import ActivationScheme
from quantkit.packing.formats import FloatFormat, IntFormat
from quantkit.packing.schemes import Scheme

#: Rows of W of a tile.
BLOCK_N = 128
#: A subnormal e4m3 with the bits of c is c times this.
SUBNORMAL = 2.0**-9
#: Rows of x of one product: Triton has no int8 product with more.
MOST_INT8 = 128
#: Most rows of x for which tiles of 128 are as fast as those of 256, whose threads lack the registers to
#: promote sums (H200, fp8, 28672 x 4096, M = 512: 94 against 98 us; M = 1024: 196 against 172 us).
MANY_ROWS = 512
#: Part of the time that tiles must keep multiprocessors busy, else stream-K is faster (H200: int4, 4096 x
#: 14336, M = 256: 64 tiles take 69 us, with stream-K 43 us; fp8, 6144 x 4096, M = 512: 192 tiles, 33.3 and
#: 28.9 us).
BUSY = 0.75
#: Steps that a fix-up of stream-K takes.
FIXUP_STEPS = 1.0


@dataclass(frozen=True)
class Wgmma8BitTile:
    """Tile of `fused-wgmma-8bit`: the configuration of its launch.

    block_m   rows of x of an output tile
    blocks    blocks of 128 columns between two barriers
    stream_k  True to divide the output tiles of the last wave among all programs, along K
    promote   True to add e4m3 products of every 128 columns to sums in float32; else tensor cores, whose sums
              are less precise, add all
    """

    block_m: int = 128
    blocks: int = 2
    stream_k: bool = False
    promote: bool = True


@dataclass(frozen=True)
class ByteOperand:
    """Conversion of codes to bytes, int8 or e4m3, for an 8-bit MMA.

    A weight is scale * (unit * value of the byte + offset).

    flipped   mask XORed with int32 words of four 8-bit codes; not used for narrower codes
    unit      factor of the value of a byte
    offset    what is added to it: 0 for 8-bit codes
    """

    flipped: int = 0
    unit: float = 1.0
    offset: float = 0.0


def byte_operand(scheme: Scheme, activations: ActivationScheme) -> ByteOperand | None:
    """Return how codes of `scheme` become bytes that tensor cores multiply with x; None if they cannot.

    `activations` says how x is rounded: to int8 or e4m3. The bytes need the same type.
    """
    number_format, inputs = scheme.format, activations.number_format
    integer = isinstance(inputs, IntFormat)
    if isinstance(number_format, FloatFormat):
        return ByteOperand() if number_format == inputs else None
    if not isinstance(number_format, IntFormat) or number_format.bits not in (2, 4, 8):
        return None
    if number_format.bits == 8:
        # Offset binary less 128 is two's complement.
        return ByteOperand(flipped=-0x7F7F7F80) if integer else None
    return ByteOperand(unit=1.0 if integer else 1.0 / SUBNORMAL, offset=number_format.values[0])


def needs_sums(scheme: Scheme, activations: ActivationScheme) -> bool:
    """Return True if `wgmma_8bit_gemm` needs the sums of the codes of x over each 128 columns.

    It needs them if bytes of weights have an offset (`ByteOperand`). `activations` says how x is rounded.
    """
    found = byte_operand(scheme, activations)
    return found is not None and found.offset != 0.0


def code_order(shape: Geometry, scheme: Scheme, activations: ActivationScheme) -> CodeOrder:
    """Return the order of columns in which `wgmma_8bit_gemm` reads x, for the kernel that quantizes x.

    `shape` and `scheme` are those of the weight; `activations` says how x is rounded.
    """
    return CodeOrder(shape.span, needs_sums(scheme, activations))


def order_of(problem: Problem) -> CodeOrder:
    """Return the `code_order` of a problem, which must have an activation scheme."""
    assert problem.activations is not None, problem
    return code_order(shape_of(problem), problem.scheme, problem.activations)


def wgmma_8bit_tile(shape: Geometry, m: int, promotes: bool, multiprocessors: int) -> Wgmma8BitTile:
    """Return the tile (launch configuration) of `fused-wgmma-8bit` that rules choose for m rows of x.

    `promotes` is True if sums of 128 columns must be added in float32, because they have a scale or an
    offset. `shape` is that of the weight.
    """
    rows = 64 if m <= 64 else 128 if promotes or m <= MANY_ROWS else 256
    tiles = -(-shape.n // BLOCK_N) * -(-m // rows)
    if rows == 256 and tiles < BUSY * multiprocessors:
        rows, tiles = 128, -(-shape.n // BLOCK_N) * -(-m // 128)
    waves = -(-tiles // multiprocessors)
    return Wgmma8BitTile(rows, 1 if rows == 256 else 2, tiles < BUSY * waves * multiprocessors, rows < 256)


@dataclass(frozen=True)
class _Launches:
    """Launch of `wgmma_8bit_gemm` for one `GemmSpec` and tile, with the arguments that follow from both.

    kernel              the launch
    x_layout            shared memory layout of codes of x, for their TMA descriptor
    plain_layouts       shared memory layouts of the other TMA descriptors, with two and with three dimensions
    stream_k_schedule   WHOLE_TILES, STEPS_PER_PROGRAM and TILE_STRIDE (`wgmma_tiles.stream_k_schedule`)
    steps               steps of a row of the weight: 128 or 256 columns each
    sums                size in float32 of the memory for partial sums and flags; 0 if no tile is shared
    """

    kernel: Launch
    x_layout: Any
    plain_layouts: tuple[Any, Any]
    stream_k_schedule: tuple[int, int, int]
    steps: int
    sums: int


@lru_cache(maxsize=4096)
def _launches(
    spec: GemmSpec,
    activations: ActivationScheme,
    tile: Wgmma8BitTile,
    features: frozenset[str],
    multiprocessors: int,
) -> _Launches:
    """Build the launch of `wgmma_8bit_gemm` for sizes and dtypes `spec` and a tile (launch configuration).

    `activations` says how x is rounded. `features` are what the GPU and Triton can do, such as "overlap" for
    PDL.
    """
    import triton.language as tl
    from triton.experimental.gluon.language import NVMMASharedLayout

    from quantkit.kernels.gemm.wgmma_8bit.wgmma_8bit_kernel import wgmma_8bit_gemm as kernel

    shape, (m, n, k, scheme, dtype, bias) = spec.shape, spec
    constexprs, operand = constants(n, k, scheme, dtype, True), byte_operand(scheme, activations)
    assert operand is not None
    grouped, integer = activations.group_size is not None, isinstance(activations.number_format, IntFormat)
    most = min(tile.block_m, MOST_INT8) if integer else tile.block_m
    steps = -(-shape.spans * shape.span // (COLUMNS * tile.blocks))
    tiles = -(-n // BLOCK_N) * -(-m // tile.block_m)
    schedule = (tiles, 0, steps)
    if tile.stream_k:
        schedule = stream_k_schedule(tiles, steps, multiprocessors, FIXUP_STEPS)
    programs = multiprocessors if schedule[1] else min(multiprocessors, tiles)
    main = Launch(
        kernel,
        (programs,),
        SCALE=constexprs["SCALE"],
        FRAGMENTS=constexprs["FRAGMENTS"],
        FLIPPED=operand.flipped,
        UNIT=operand.unit,
        OFFSET=operand.offset,
        GROUPS=1 if shape.groups == 1 else 2,
        PER_BLOCK=shape.per_block if shape.groups > 1 else COLUMNS,
        HAS_BIAS=bias,
        X_GROUPS=grouped,
        PROMOTE=promotes(shape, scheme, activations) or (tile.promote and not integer),
        DTYPE=tl.int8 if integer else tl.float8e4nv,
        BM=tile.block_m,
        MMA_M=most,
        BLOCKS=tile.blocks,
        STAGES=stages(shape, tile),
        GROUP_M=GROUP_M,
        STORE_VECTOR=math.gcd(n, MAX_STORE_VECTOR),
        num_warps=WARPS,
        **overlap(features),
    )
    parts = tile.block_m // most
    # Partial sums, and a 64-bit flag for each part of a warp group.
    sums = programs * (BLOCK_N * tile.block_m + 2 * (BLOCK_N // 64) * parts) if schedule[1] else 0
    plain = NVMMASharedLayout(0, 32, 2), NVMMASharedLayout(0, 32, 3)
    return _Launches(main, NVMMASharedLayout(128, 8, 2), plain, schedule, steps, sums)


def stages(shape: Geometry, tile: Wgmma8BitTile) -> int:
    """Return the number of buffers in shared memory for steps of x and W: all that fit, up to `STAGES`.

    A step is `tile.blocks` times 128 columns.
    """
    # Codes and scales of W, and x with a scale or sum of codes of each of its rows.
    each = BLOCK_N * COLUMNS * shape.bits // 8 + 2 * BLOCK_N + tile.block_m * (COLUMNS + 4)
    return min(STAGES, (HOPPER_SHARED - SCRATCH) // (each * tile.blocks))


def promotes(shape: Geometry, scheme: Scheme, activations: ActivationScheme) -> bool:
    """Return True if sums of 128 columns must be added in float32, because they have a scale or an offset.

    `shape` and `scheme` are those of the weight; `activations` says how x is rounded.
    """
    return shape.groups > 1 or activations.group_size is not None or needs_sums(scheme, activations)


def run(
    op: Operands, tile: Wgmma8BitTile | None = None, features: frozenset[str] = frozenset()
) -> torch.Tensor:
    """Return y [m, n] = x [m, k] W^T of the operands `op`, computed by `fused-wgmma-8bit`.

    x is quantized first, unless `op.codes` holds its codes. If `tile` is None, rules choose it. The GPU must
    have compute capability 9. Raises `KernelError` if `op.activations` is None.

    `features` are those of the device (`device_features`).
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    m, scheme, activations, shape = op.x.shape[0], op.scheme, op.activations, op.shape
    if activations is None:
        raise KernelError("fused-wgmma-8bit multiplies inputs that a scheme rounds; this has none.")
    if tile is None:
        tile = wgmma_8bit_tile(shape, m, promotes(shape, scheme, activations), op.multiprocessors)
    x = op.codes or quantize_x(op.x, activations, code_order(shape, scheme, activations))
    launches = _launches(op.spec, activations.unbound, tile, features, op.multiprocessors)

    def described(tensor: torch.Tensor, box: list[int], layout: Any) -> Any:
        """Return the descriptor of `tensor` [...] for TMA copies of blocks of shape `box`."""
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)

    y = empty(op, m, op.n)
    codes, scale, *_ = op.layout
    x_descriptor = described(x.codes, [min(tile.block_m, TMA_ROWS), COLUMNS], launches.x_layout)
    matrix, cube = launches.plain_layouts
    words = codes.view(torch.int32).view(shape.row_tiles, -1, COLUMNS)
    scales_descriptor = block_values_descriptor = x_descriptor
    if shape.groups > 1:
        scales_descriptor = described(
            scale.view(torch.int32).view(shape.row_tiles, -1), [BLOCK_N // 16, 8], matrix
        )
    if x.block_values.numel():
        block_values_descriptor = described(x.block_values, [1, tile.block_m], matrix)
    launches.kernel(
        x_descriptor,
        described(words, [BLOCK_N // 16, shape.bits // 2, COLUMNS], cube),
        scales_descriptor,
        block_values_descriptor,
        x.scales,
        scale,
        y if op.bias is None else op.bias,
        y,
        empty(op, launches.sums, dtype=torch.float32) if launches.sums else y,
        m,
        op.n,
        *launches.stream_k_schedule,
        launches.steps,
        launch_token(),
    )
    return y
