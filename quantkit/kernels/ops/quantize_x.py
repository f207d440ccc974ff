"""Quantize inputs x of linears to 8 bits, or round them to 8 bits and back, in one launch.

Kernels that multiply in 8 bits call `quantize_x`. Others get x from `round_x` (`linear.py`, `eager.py`).
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from quantkit.kernels.jit.launcher import Launch, launch_features, launching_on, overlap
from quantkit.kernels.layouts.shared_memory import next_power_of_2
from quantkit.kernels.problem import device_features
from quantkit.packing.activations import ActivationScheme
from quantkit.packing.formats import FORMATS, FloatFormat
from quantkit.packing.schemes import parse_token

#: Columns of a block of x, and rows to which scales and sums are padded: those of the largest tile.
BLOCK, ROWS = 128, 256
#: Largest K: a program keeps a row in registers.
MOST_COLUMNS = 32768
#: Rows for which a GPU has a multiprocessor each.
FEW_ROWS = 128
#: Dtypes of codes, by number format.
DTYPES = {FORMATS["int8"]: torch.int8, FORMATS["fp8-e4m3"]: torch.float8_e4m3fn}


@dataclass(frozen=True)
class CodeOrder:
    """Order in which a GEMM reads codes of x: c and c + span / 2 of each `span` columns are neighbours.

        span 64    codes    0     1    2     3    4    ...
                   columns  0    32    1    33    2    ...

    `span` is a power of two, at most 128. `sums` says that the GEMM also reads the sum of each 128 codes.
    """

    span: int
    sums: bool


@dataclass(frozen=True)
class QuantizedX:
    """Inputs x [M, K] of a linear quantized to 8 bits: x = scale * code.

    codes    int8 or e4m3 [M, B * 128], columns in a `CodeOrder`, zeros beyond K
    scales   float32 [S], one per row, or [B, S], one per row and 128 columns
    sums     float32 [B, S], the sums of each 128 codes of a row; empty if not needed
    order    that of the columns of `codes`

    B is the number of blocks of 128 columns, rounded up to an even number. S is M rounded up to `ROWS`;
    scales and sums of rows beyond M are undefined.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor
    order: CodeOrder

    @property
    def block_values(self) -> torch.Tensor:
        """Return `scales` if they are [B, S], one per row and 128 columns; else `sums`, maybe empty."""
        return self.scales if self.scales.dim() == 2 else self.sums

    @property
    def stride(self) -> int:
        """Return S, the length of a row of scales and of sums: M rounded up to `ROWS`."""
        return self.scales.shape[-1]

    @property
    def sums_or_scales(self) -> torch.Tensor:
        """Return `sums`, or `scales` if empty: kernels take a pointer to sums even if they write none."""
        return self.sums if self.sums.numel() else self.scales


def why_not_quantized(x: ActivationScheme, columns: int) -> str | None:
    """Return why no kernel quantizes rows of `columns` inputs to 8 bits as `x` says; None if one can."""
    if x.number_format not in DTYPES or x.group_size not in (None, BLOCK):
        return (
            f"inputs are rounded to {x}, and it multiplies int8 or fp8, with a scale per token or 128 inputs"
        )
    if columns > MOST_COLUMNS:
        return f"it rounds rows of up to {MOST_COLUMNS} inputs, not of {columns}"
    return None


def quantize_x(x: torch.Tensor, scheme: ActivationScheme, order: CodeOrder) -> QuantizedX:
    """Quantize contiguous `x` [M, K] to 8 bits as `scheme` says, with its codes in `order`, in one launch.

    `why_not_quantized` must return None. K must be a multiple of the group size of `scheme`, if it has one.
    """
    m, k = x.shape
    found = empty_codes(m, k, scheme, order, x.device)
    with launching_on(x.device):
        _launch(m, k, scheme.unbound, order, None, launch_features(x.device))(
            x, found.codes, found.scales, found.sums_or_scales, found.stride, scale_bits(scheme)
        )
    return found


def empty_codes(
    m: int, k: int, scheme: ActivationScheme, order: CodeOrder, device: torch.device
) -> QuantizedX:
    """Allocate an uninitialized `QuantizedX` for x [m, k], quantized by `scheme`, with codes in `order`."""
    blocks, stride = blocks_of(k), -(-m // ROWS) * ROWS
    shape = (stride,) if scheme.group_size is None else (blocks, stride)
    return QuantizedX(
        torch.empty(m, blocks * BLOCK, dtype=DTYPES[scheme.number_format], device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(blocks if order.sums else 0, stride, dtype=torch.float32, device=device),
        order,
    )


def blocks_of(k: int) -> int:
    """Return the number of blocks of 128 columns that hold k columns of x, rounded up to an even number."""
    return -(-k // (2 * BLOCK)) * 2


def is_on_gpu(x: torch.Tensor) -> bool:
    """Return True if `x` [...] is on a GPU and Triton is installed.

    A function of its own, so that tests can run kernels in Triton's interpreter on a CPU.
    """
    return x.is_cuda and "triton" in device_features(x.device)


#: Columns in their order: pairs of neighbours stay as they are.
NATURAL_ORDER = CodeOrder(2, False)


def round_x(x: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    """Return contiguous `x` [M, K] rounded to 8 bits and back: `scheme.round(x)`, by a kernel if one can."""
    m, k = x.shape
    if not is_on_gpu(x) or why_not_quantized(scheme, k) is not None or x.dtype == torch.float32:
        return scheme.round(x)
    y = torch.empty_like(x)
    with launching_on(x.device):
        launch = _launch(m, k, scheme.unbound, NATURAL_ORDER, x.dtype, launch_features(x.device))
        launch(x, y, y, y, 0, scale_bits(scheme))
    return y


def round_inputs(x: torch.Tensor, token: str) -> torch.Tensor:
    """Return `x` [..., K] rounded to 8 bits and back, in its dtype, as a scheme rounds inputs of linears.

    `token` is the `Scheme.token` of the scheme, which must have an activation scheme.
    """
    return round_x(x.reshape(-1, x.shape[-1]).contiguous(), rounding_of(token)).view(x.shape)


def rounding_of(token: str) -> ActivationScheme:
    """Return the activation scheme of the scheme with this `Scheme.token`; it must have one."""
    found = parse_token(token).activations
    assert found is not None, token
    return found


def scale_bits(scheme: ActivationScheme | None) -> int:
    """Return the bits of the float32 scale that a static `scheme` stores, as an integer; 0 if there is none.

    A kernel takes it as an argument: a float constexpr would compile a kernel per scale.
    """
    if scheme is None or scheme.stored is None:
        return 0
    bits: int = struct.unpack("<i", struct.pack("<f", scheme.stored))[0]
    return bits


def rounding_options(scheme: ActivationScheme | None, features: frozenset[str]) -> dict[str, Any]:
    """Return constexprs of `quantize_x_kernel.quantized`: ABSMAX, MANTISSA, SMALLEST, GROUPED, STATIC, FMA.

    They are for inputs rounded as `scheme` says, on a device with `features` (`device_features`). If `scheme`
    is None, for no rounding, ABSMAX is 0. `why_not_quantized` must return None for `scheme`.
    """
    floats = None if scheme is None else scheme.number_format
    mantissa, smallest = 0, 0.0
    if isinstance(floats, FloatFormat):
        mantissa, smallest = floats.mantissa_bits, 2.0 ** (1 - floats.bias)
    return {
        "ABSMAX": 0.0 if floats is None else float(floats.absmax),
        "MANTISSA": mantissa,
        "SMALLEST": smallest,
        "GROUPED": scheme is not None and scheme.group_size is not None,
        "STATIC": scheme is not None and scheme.static,
        # Triton's interpreter rounds twice.
        "FMA": "ptx" in features,
    }


def rounding_warps(rows: int, columns: int) -> int:
    """Return the number of warps of a program that rounds one of `rows` rows of `columns` values.

    A thread has 8 values up to `FEW_ROWS` rows, beyond that 16.
    """
    return min(32, max(1, columns // 256)) if rows <= FEW_ROWS else min(16, max(1, columns // 512))


def code_options(
    scheme: ActivationScheme, k: int, order: CodeOrder, features: frozenset[str]
) -> dict[str, Any]:
    """Return the constexprs of `quantize_x_kernel.store_codes`, for rows of `k` inputs.

    Inputs are quantized as `scheme` says, with codes in `order`. `features` are of the device
    (`device_features`).
    """
    blocks = blocks_of(k)
    sizes = {"STRIDE": blocks * BLOCK, "BLOCKS": blocks, "SPAN": order.span, "SUMS": order.sums}
    return sizes | rounding_options(scheme, features)


@lru_cache(maxsize=4096)
def _launch(
    m: int,
    k: int,
    scheme: ActivationScheme,
    order: CodeOrder,
    rounded: torch.dtype | None,
    features: frozenset[str],
) -> Launch:
    """Build the launch of kernel `quantize_x` for x [m, k], quantized by `scheme`, with codes in `order`.

    If `rounded` is a dtype, it writes x rounded to 8 bits and back in that dtype, instead of codes.
    `features` are of the device (`device_features`).
    """
    from quantkit.kernels.ops.quantize_x_kernel import quantize_x as kernel

    padded = next_power_of_2(blocks_of(k) * BLOCK)
    options = code_options(scheme, k, order, features) | ({} if rounded is None else {"STRIDE": k})
    return Launch(
        kernel,
        (m,),
        K=k,
        KP=padded,
        MOST=0.0 if rounded is None else torch.finfo(rounded).max,
        **options,
        **overlap(features),
        num_warps=rounding_warps(m, padded),
    )
