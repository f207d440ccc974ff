"""Entry point of vLLM's plug-ins: vLLM calls `register` in every process of its own."""

import warnings

from quantkit.runtime.vllm.versions import moved


def register() -> None:
    """Add the quantization method `quantkit` to vLLM.

    Warns if vLLM moved what that takes, as the process may run another model. vLLM then refuses quantkit's.
    """
    try:
        from vllm.model_executor.layers.quantization import (
            QUANTIZATION_METHODS,
            register_quantization_config,
        )

        from quantkit.runtime.vllm.config import QuantkitConfig
    except (ImportError, AttributeError) as error:
        warnings.warn(moved(error), stacklevel=2)
        return
    if "quantkit" not in QUANTIZATION_METHODS:
        register_quantization_config("quantkit")(QuantkitConfig)
