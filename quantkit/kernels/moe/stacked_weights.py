"""The fragment layouts of many weights, such as all matrices of a layer's experts.

To build one takes the host longer than the GPU, whatever its size. So they are built as one weight, one above
the other, where the layout of that has theirs one after the other.
"""

from collections.abc import Sequence

import torch

from quantkit.kernels.gemm.fused_kernels import build_fragments
from quantkit.kernels.jit.building import wait_for
from quantkit.kernels.layouts.fragment_layout import ROWS
from quantkit.packing.tensor import PackedTensor

#: Bytes of words that are laid out at a time, unless one weight has more: to copy them, and to put scales in
#: order, takes several times as much memory.
BYTES_AT_ONCE = 1 << 26


def stacked(weights: Sequence[PackedTensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The fragment layouts of weights of one scheme and shape, one after the other in each part, for
    activations of `dtype`.
    """
    first, count = weights[0], len(weights)
    together = max(1, BYTES_AT_ONCE // first.words.nbytes) if can_be_one(first) else 1
    stacks: tuple[torch.Tensor, ...] = ()
    for start in range(0, count, together):
        some = weights[start : start + together]
        layouts = _as_one(some, dtype)
        stacks = stacks or tuple(part.new_empty(count, *part.shape[1:]) for part in layouts)
        for stack, part in zip(stacks, layouts, strict=True):
            stack[start : start + len(some)] = part
    wait_for(stacks[0].device)
    return stacks


def can_be_one(weight: PackedTensor) -> bool:
    """Whether the layout of such weights as one has theirs one after the other."""
    scheme, rows = weight.scheme, weight.shape[0]
    return (
        # No row tile has rows of two weights, nor a word zero-points of two.
        all(rows % count == 0 for count in (ROWS, *scheme.row_units().values()))
        # All parts are of rows, or what scales are divided by.
        and not (scheme.per_tensor or scheme.is_fitted or scheme.column_scale)
    )


def _as_one(weights: Sequence[PackedTensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The layouts of weights that `can_be_one`, or of one that need not."""
    scheme, (n, k), count = weights[0].scheme, weights[0].shape, len(weights)
    of_all = zip(*(weight.tensors for weight in weights), strict=True)
    parts = {name: torch.cat(tensors) for name, tensors in zip(scheme.part_names, of_all, strict=True)}
    divisors = parts.get("global_scale")
    if divisors is not None:
        # They are multiplied with what the layout of the one weight has as its factors with 1.
        parts["global_scale"] = torch.ones_like(divisors[:1])
    whole = PackedTensor.from_parts(parts, scheme, (n * count, k))
    codes, scale, zero, factor, values = build_fragments(whole, dtype, count)
    if divisors is not None:
        factor = factor * divisors
    of_each = [part.view(count, len(part) // count, *part.shape[1:]) for part in (codes, scale, zero, factor)]
    return *of_each, values.expand(count, -1)
