"""Prepare a loaded model: repack its weights for kernels, and warn about anything slow."""

import logging
from functools import lru_cache
from typing import Any

from quantkit.kernels.jit.building import building
from quantkit.kernels.ops.attention import DTYPES
from quantkit.kernels.problem import Problem, device_features
from quantkit.kernels.registry import why_rounded_before
from quantkit.kernels.triton_support import why_slow
from quantkit.runtime.cuda_graphs import capture
from quantkit.runtime.packed_embedding import activation_dtype
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.replace import packed_modules
from quantkit.runtime.shared_input import shared_inputs

logger = logging.getLogger("quantkit.model")
#: Rows of x at which 8-bit kernels are looked for: with many, as in a prompt, they beat those of 16 bits.
MANY_ROWS = 512


def make_ready(model: Any) -> None:
    """Build the kernel layouts of `model`, and log what runs slower than it could.

    Called after loading, and at the first forward after a move or cast. Raises `FormatError` for NaN codes or
    scales.
    """
    dtype = activation_dtype(model)
    with building():
        # Join layouts while building, so that at most the weights of one shared input are in memory twice.
        for shared in shared_inputs(model):
            shared.build(dtype)
        for _, module in packed_modules(model):
            module.build_kernel_layouts(dtype)
    _tell_of_rounding(model)
    if capture.captures_on(model.device):
        _tell(model)


def _tell_of_rounding(model: Any) -> None:
    """If linears round their inputs but no 8-bit kernel multiplies them, log why; each text once per process.

    Such a model multiplies in its dtype: it shows the accuracy of rounded inputs, not the speed.
    """
    found: dict[str, list[str]] = {}
    for _, module in packed_modules(model):
        for scheme, (rows, columns), _ in module.logical().values():
            if scheme.activations is None:
                continue
            problem = Problem.on(model.device, MANY_ROWS, rows, columns, scheme, model.dtype)
            # Grouped GEMMs, which compute all experts in one launch on a GPU, take inputs of 16 bits.
            grouped = isinstance(module, PackedExperts) and problem.device == "cuda"
            reason = "experts are grouped" if grouped else why_rounded_before(problem)
            kinds = found.setdefault(reason or "", [])
            kinds += [kind for kind in (str(scheme.activations),) if kind not in kinds]
    for reason, kinds in found.items():
        if reason:
            _warn_once(
                f"inputs of linears are rounded to {' and '.join(sorted(kinds))}, and multiplied in "
                f"{str(model.dtype).removeprefix('torch.')}, as no 8-bit kernel runs them ({reason}): this "
                "shows the accuracy of low-bit products, not their speed. Serve the model with an engine "
                "that reads it (quantkit formats --schemes) for that."
            )


def _tell(model: Any) -> None:
    """If packed products, or the attention of new tokens, run slower on the GPU than they could, log why."""
    if (reason := why_slow(model.device)) is not None:
        _warn_once(f"packed products run slower than they could: {reason}")
    if "triton" in device_features("cuda") and model.dtype not in DTYPES:
        logger.warning(
            "attention of new tokens is torch's, not quantkit's: the model computes in %s, quantkit's kernel "
            "in bfloat16 and float16. Load the model with one of these as dtype.",
            str(model.dtype).removeprefix("torch."),
        )


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    """Log the warning `text` once per process; each model on a GPU has the same."""
    logger.warning("%s", text)
