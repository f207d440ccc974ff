"""Build the kernel layout of a weight, for the kernel that decodes fastest, and join layouts."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from quantkit.kernels.eager import KernelLayout
from quantkit.kernels.jit.building import building, wait_for
from quantkit.kernels.problem import Problem
from quantkit.kernels.registry import choose, layout_named, warn_unfused
from quantkit.packing.activations import ActivationScheme
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor


def build_layout(
    weight: PackedTensor, activation_dtype: torch.dtype, rounding: ActivationScheme | None = None
) -> KernelLayout | None:
    """Build the layout with which decoding (M = 1) is fastest on the device of `weight` [N, K].

    x has `activation_dtype` and is rounded as `rounding` says, unless that is None. Returns None if the
    fastest kernel reads the weight as stored. Raises `KernelError` if no kernel supports the weight, and
    `FormatError` for NaN codes or scales. Inside a `building` block (`jit.building`), the layout is valid,
    and that `FormatError` raised, at the end of the block.
    """
    scheme = weight.scheme if rounding is None else replace(weight.scheme, activations=rounding)
    problem = Problem.on(weight.device, 1, *weight.shape, scheme, activation_dtype)
    row = choose(problem).kernel
    if row.layout is None:
        warn_unfused(problem, row)
        return None
    # Tensors of inference mode could not be saved for a backward pass.
    with torch.no_grad(), torch.inference_mode(False), building():
        tensors = row.layout.build(weight, activation_dtype)
    return KernelLayout(row.layout.name, activation_dtype, tensors)


def join_layouts(
    layouts: Sequence[KernelLayout], rows: Sequence[int], scheme: Scheme, k: int
) -> tuple[KernelLayout, tuple[KernelLayout, ...]] | None:
    """Join kernel layouts of weights [rows[i], k] of one scheme along N: (joined layout, view per weight).

    `linear_parts` computes all products at once with the joined layout. Returns None if the layouts cannot be
    joined.
    """
    names, dtypes = {layout.name for layout in layouts}, {layout.dtype for layout in layouts}
    if len(names) != 1 or len(dtypes) != 1:
        return None
    name, dtype = names.pop(), dtypes.pop()
    with torch.no_grad(), torch.inference_mode(False), building():
        joined = layout_named(name).join([layout.tensors for layout in layouts], rows, scheme, k, dtype)
        if joined is None:
            return None
        whole, parts = joined
        wait_for(whole[0].device)
    return KernelLayout(name, dtype, whole), tuple(KernelLayout(name, dtype, part) for part in parts)


def most_joined_rows(layout: KernelLayout) -> int:
    """Return the largest M for which one product with all weights joined in `layout` is computed."""
    return layout_named(layout.name).most_rows


def can_restore(layout: KernelLayout | None) -> bool:
    """Return True if the stored words of a weight can be restored from its layout, and may be freed."""
    return layout is not None and layout_named(layout.name).restore is not None


def restored_words(
    layout: Sequence[torch.Tensor], scale: torch.Tensor, name: str, scheme: Scheme, shape: tuple[int, int]
) -> torch.Tensor:
    """Return the stored words int32 [N, words per row] of a weight of `shape` [N, K] from its kernel layout.

    `layout` are the tensors of the layout called `name`, `scale` the scales as stored.
    """
    restore = layout_named(name).restore
    assert restore is not None, name
    with torch.no_grad():
        return restore(tuple(layout), scheme, shape, scale)


def whole_weight(
    parts: Sequence[torch.Tensor],
    layout: Sequence[torch.Tensor],
    layout_name: str,
    scheme: Scheme,
    shape: tuple[int, int],
) -> PackedTensor:
    """Return the weight of `shape` [N, K] as a `PackedTensor`, with its stored words.

    parts         tensors of the weight, in the order of `scheme.part_names`; the words, which are first, may
                  be missing
    layout        its tensors in the kernel layout `layout_name`, from which missing words are restored
    """
    if layout and len(parts) < len(scheme.part_names):
        parts = (restored_words(layout, parts[0], layout_name, scheme, shape), *parts)
    return PackedTensor(tuple(parts), scheme, shape)
