"""Entry point of vLLM's plug-ins: vLLM calls `register` in every process of its own."""

import warnings

from quantkit.checkpoint.engines import VLLM
from quantkit.runtime.serving.versions import moved


def register() -> None:
    """Add the quantization method `quantkit` to vLLM.

    Only warns if vLLM has moved the classes or functions that this needs, because the process may run a model
    without quantkit.
    """
    try:
        from vllm.model_executor.layers.quantization import (
            QUANTIZATION_METHODS,
            register_quantization_config,
        )

        from quantkit.runtime.vllm.config import QuantkitConfig
    except (ImportError, AttributeError) as error:
        warnings.warn(moved(VLLM, error), stacklevel=2)
        return
    if "quantkit" not in QUANTIZATION_METHODS:
        register_quantization_config("quantkit")(QuantkitConfig)
