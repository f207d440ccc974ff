"""A packed model before it computes: its kernel layouts are built, and a user is told what will be slow."""

import logging
from functools import lru_cache
from typing import Any

from quantkit.kernels.jit.building import building
from quantkit.kernels.ops.attention import DTYPES
from quantkit.kernels.problem import device_features
from quantkit.kernels.triton_support import why_slow
from quantkit.runtime.cuda_graphs import capture
from quantkit.runtime.replace import packed_modules
from quantkit.runtime.shared_input import shared_inputs

logger = logging.getLogger("quantkit.model")


def make_ready(model: Any) -> None:
    """Build the kernel layouts of `model`, and log what is slow on the GPU that it is on, if it is on one.

    Called when it is loaded, and at the first forward after it was moved or cast. Raises `FormatError` for
    weights that are not sound.
    """
    with building():
        # Joined as they are built, so that no more than those of one input are there twice.
        for shared in shared_inputs(model):
            shared.build(model.dtype)
        for _, module in packed_modules(model):
            module.build_kernel_layouts(model.dtype)
    if capture.records_on(model.device):
        _tell(model)


def _tell(model: Any) -> None:
    """Log, once for each model and place, why what `model` runs on its GPU is slower than it could be."""
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
    """Log `text` at its first call of the process: it is the same for every model on a GPU."""
    logger.warning("%s", text)
