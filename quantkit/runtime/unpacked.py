"""Find packed weights that no fused kernel supports."""

from collections import Counter
from typing import Any

from quantkit.kernels.gemm.unpack import UNPACK_KERNEL
from quantkit.kernels.problem import Problem
from quantkit.kernels.report import selection_of
from quantkit.runtime.packed_module import PackedModule


def unpacked(model: Any, rows_of_x: int) -> tuple[str, ...]:
    """Return text on packed weights of `model` that no fused kernel multiplies, for `rows_of_x` rows of x.

    Such weights are dequantized before each GEMM. A line has the scheme, the number of weights, and why each
    fused kernel does not support them. Empty if there are no such weights.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        if not isinstance(module, PackedModule):
            continue
        for scheme, (n, k), _ in module.logical().values():
            selection = selection_of(Problem.on(model.device, rows_of_x, n, k, scheme, model.dtype))
            if selection.kernel == UNPACK_KERNEL.name:
                reasons = "; ".join(f"not {row}: {reason}" for row, reason in selection.refusals)
                counts[str(scheme), reasons] += 1
    return tuple(
        f"{count} packed parameters of {scheme} are unpacked for every product at M={rows_of_x} ({reasons})"
        for (scheme, reasons), count in counts.items()
    )
