"""Entry point of SGLang's plug-ins: SGLang calls `register` in every process of its own."""

import warnings

from quantkit.checkpoint.engines import SGLANG
from quantkit.runtime.serving.versions import moved


def register() -> None:
    """Add the quantization method `quantkit` to SGLang's tables of methods; SGLang has no function for this.

    Only warns if SGLang has moved the classes or tables that this needs, because the process may run a model
    without quantkit.
    """
    try:
        from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
        from sglang.srt.layers.quantization import CPU_QUANTIZATION_METHODS, QUANTIZATION_METHODS

        from quantkit.runtime.sglang.config import QuantkitConfig
    except (ImportError, AttributeError) as error:
        warnings.warn(moved(SGLANG, error), stacklevel=2)
        return
    if "quantkit" not in QUANTIZATION_CHOICES:
        QUANTIZATION_CHOICES.append("quantkit")
    for table in (QUANTIZATION_METHODS, CPU_QUANTIZATION_METHODS):
        table["quantkit"] = QuantkitConfig
