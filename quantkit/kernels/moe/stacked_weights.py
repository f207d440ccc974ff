"""Build fragment layouts of stacked weights, such as all matrices of the experts of a layer.

Building one layout takes the host longer than the GPU, for any size. So weights of one scheme and shape are
concatenated along N and built as one weight.
"""

from collections.abc import Sequence

import torch

from quantkit.kernels.gemm.fused_kernels import build_fragments
from quantkit.kernels.jit.building import wait_for
from quantkit.kernels.layouts.geometry import ROWS
from quantkit.packing.tensor import PackedTensor

#: Bytes of words repacked at a time, or one weight if that has more. Copies of words and scales take several
#: times this memory.
BYTES_AT_ONCE = 1 << 26


def stacked(weights: Sequence[PackedTensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Build the fragment layouts of `weights`, [N, K] each, and stack them: the tensors of one layout.

    The weights have one scheme and shape; `dtype` is that of activations. Each returned tensor is
    [len(weights), ...]. In the layout, codes are in the order of `mma` operands.
    """
    first, count = weights[0], len(weights)
    per_build = max(1, BYTES_AT_ONCE // first.words.nbytes) if can_be_one(first) else 1
    tensors: tuple[torch.Tensor, ...] = ()
    for start in range(0, count, per_build):
        some = weights[start : start + per_build]
        layouts = _as_one(some, dtype)
        tensors = tensors or tuple(part.new_empty(count, *part.shape[1:]) for part in layouts)
        for tensor, part in zip(tensors, layouts, strict=True):
            tensor[start : start + len(some)] = part
    wait_for(tensors[0].device)
    return tensors


def can_be_one(weight: PackedTensor) -> bool:
    """Return True if weights [N, K] like `weight` may be joined along N and built as one weight.

    The layout of the joined weight is then the layouts of all weights, one after the other.
    """
    scheme, rows = weight.scheme, weight.shape[0]
    return (
        # No row tile or word of zero-points has rows of two weights.
        all(rows % count == 0 for count in (ROWS, *scheme.row_units().values()))
        # All tensors are per row, except the global scale.
        and not (scheme.per_tensor or scheme.is_fitted or scheme.column_scale)
    )


def _as_one(weights: Sequence[PackedTensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Build the fragment layouts (codes in the order of `mma` operands) of `weights` [N, K] as one weight.

    The weights are joined along N; if there are several, `can_be_one` must be true. The first dimension of
    each returned tensor is the number of weights.
    """
    scheme, (n, k), count = weights[0].scheme, weights[0].shape, len(weights)
    of_all = zip(*(weight.tensors for weight in weights), strict=True)
    parts = {name: torch.cat(tensors) for name, tensors in zip(scheme.part_names, of_all, strict=True)}
    divisors = parts.get("global_scale")
    if divisors is not None:
        # Build the layout with divisors of 1, and multiply its factors by the divisors afterwards.
        parts["global_scale"] = torch.ones_like(divisors[:1])
    whole = PackedTensor.from_parts(parts, scheme, (n * count, k))
    codes, scale, zero, factor, values = build_fragments(whole, dtype, count)
    if divisors is not None:
        factor = factor * divisors
    of_each = [part.view(count, len(part) // count, *part.shape[1:]) for part in (codes, scale, zero, factor)]
    return *of_each, values.expand(count, -1)
