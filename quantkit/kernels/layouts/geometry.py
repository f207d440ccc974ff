"""Sizes of a weight in the fragment layout (`layouts.fragment_layout`), which kernels and launchers need."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from quantkit.kernels.layouts.dequant_expressions import (
    BFLOAT16,
    arithmetic,
    bias_factor,
    fragments_per_span,
    registers,
)
from quantkit.kernels.layouts.fragment_scales import scale_kind
from quantkit.packing.formats import FloatFormat
from quantkit.packing.schemes import Scheme

#: Rows of a row tile, and columns of a run: two fragments.
ROWS = 16
RUN = 32


@dataclass(frozen=True)
class Geometry:
    """Sizes of a weight [n, k], n outputs and k inputs, in the fragment layout.

    bits            bits of a code
    fragments       fragments (16 columns) of a span; a halfword of each register has a code of each
    registers       registers in which the codes of a span are stored
    span            columns whose codes are stored in the same registers: 16 * `fragments`
    spans           spans of a row, padding included
    row_tiles       n / 16 rounded up: a row tile is 16 rows
    dot             columns whose products are summed before a scale applies: 32, 64 or 128
    group           columns that share a scale; k for one scale per row or tensor
    on_weights      True if scales multiply weights, False if they multiply sums of products
    folded_factor   power of two that kernels leave out of dequantized weights, and scales include; 1 for none
    scale_kind      encoding of scales: a result of `fragment_scales.scale_kind`
    """

    n: int
    k: int
    bits: int
    fragments: int
    registers: int
    span: int
    spans: int
    row_tiles: int
    dot: int
    group: int
    on_weights: bool
    folded_factor: float
    scale_kind: str

    @property
    def groups(self) -> int:
        """Return the number of groups of a row: columns that share a scale. 1 for one scale per row."""
        return -(-self.k // self.group)

    @property
    def k_step(self) -> int:
        """Return the number of columns that a warp dequantizes at a time, a k_step: 128, or a longer span.

        A span is the columns whose codes are stored in the same registers.
        """
        return max(128, self.span)

    @property
    def k_steps(self) -> int:
        """Return the number of k_steps (128 columns or more) of a row, padding included."""
        return self.spans * self.span // self.k_step

    @property
    def per_block(self) -> int:
        """Return the number of columns of a scale block: 128, or one group if that is longer."""
        return max(128, self.group)

    @property
    def in_block(self) -> int:
        """Return V, the number of groups in a scale block, which is 128 columns or one longer group."""
        return 1 if self.groups == 1 else self.per_block // self.group

    @property
    def blocks(self) -> int:
        """Return the number of scale blocks of a row: 128 columns each, or one group if that is longer."""
        return -(-self.groups // self.in_block)


@lru_cache(maxsize=1024)
def geometry(n: int, k: int, scheme: Scheme, dtype: torch.dtype) -> Geometry:
    """Return the sizes of a weight [n, k] in the fragment layout, for activations of `dtype`.

    Groups of the scheme must have 16 columns, a multiple of 32, or all columns of a row.
    """
    bits = scheme.format.bits
    span = 16 * fragments_per_span(bits)
    group = scheme.group_columns(k)
    folded_factor = 1.0 if group == k else _folded_factor(scheme, dtype)
    on_weights = group != k and (group == RUN // 2 or folded_factor != 1.0)
    whole = 128 if on_weights or group == k else group
    dot = next(size for size in (128, 64, 32) if whole % size == 0)
    if group != k and 128 % group and group % 128:
        # A group that straddles blocks, such as 96, becomes several groups with the same scale.
        group = next(size for size in (128, 64, 32) if group % size == 0)
    # K is padded to whole blocks, so that no kernel has half a k_step.
    block = max(span, 128)
    spans = -(-k // block) * block // span
    kind = scale_kind(scheme.scale_dtype, on_weights, folded_factor != 1.0)
    count, row_tiles = registers(bits), -(-n // ROWS)
    return Geometry(
        n,
        k,
        bits,
        fragments_per_span(bits),
        count,
        span,
        spans,
        row_tiles,
        dot,
        group,
        on_weights,
        folded_factor,
        kind,
    )


def _folded_factor(scheme: Scheme, dtype: torch.dtype) -> float:
    """Return the factor, a power of two, that kernels leave out of dequantized weights; 1 for none.

    8-bit scales then include the factor. That needs scale * value to be exact in bfloat16.
    """
    if dtype == torch.float16 or not isinstance(scheme.format, FloatFormat):
        return 1.0
    digits = scheme.format.mantissa_bits + 1 + scheme.scale_type.digits
    if digits > 8 or arithmetic(scheme.format, BFLOAT16) is None:
        return 1.0
    return bias_factor(scheme.format, BFLOAT16)


def value_sizes(shape: Geometry, scheme: Scheme) -> tuple[int, int]:
    """Return (bytes of a group's scale, bytes of a zero-point) in the layout of a weight with `scheme`.

    The first is 0 if there is one scale per row, the second 0 if there are no zero-points.
    """
    # 8-bit scales without a `scale_kind` become bfloat16.
    scale = 1 if shape.scale_kind else max(2, scheme.scale_dtype.itemsize)
    zero = scheme.zero_point_type.kernel_dtype.itemsize if scheme.has_zero_point else 0
    return 0 if shape.groups == 1 else scale, zero
