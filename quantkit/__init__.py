"""Quantize Hugging Face checkpoints to packed low-bit formats, run them packed, and measure the cost.

Importing this package touches no GPU and no network and imports neither transformers nor triton. It
registers quantkit's formats with transformers the moment transformers' quantizers are imported, so a
plain `AutoModelForCausalLM.from_pretrained(packed_directory)` works afterwards.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import wrapt

from quantkit.about import VERSION as __version__

if TYPE_CHECKING:
    from quantkit.calibrate.methods import quantize_tensor as quantize_tensor
    from quantkit.errors import QuantkitError as QuantkitError
    from quantkit.eval.evaluate import evaluate as evaluate
    from quantkit.kernels.linear import linear as linear
    from quantkit.model.load import load as load
    from quantkit.model.quantize import quantize as quantize
    from quantkit.packing.schemes import Scheme as Scheme
    from quantkit.packing.tensor import PackedTensor as PackedTensor

#: Public names by the module that defines them, imported when first used: torch alone takes a second.
_LAZY = {
    "PackedTensor": "quantkit.packing.tensor",
    "QuantkitError": "quantkit.errors",
    "Scheme": "quantkit.packing.schemes",
    "evaluate": "quantkit.eval.evaluate",
    "linear": "quantkit.kernels.linear",
    "load": "quantkit.model.load",
    "quantize": "quantkit.model.quantize",
    "quantize_tensor": "quantkit.calibrate.methods",
}

__all__ = [
    "PackedTensor",
    "QuantkitError",
    "Scheme",
    "__version__",
    "evaluate",
    "linear",
    "load",
    "quantize",
    "quantize_tensor",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


# Runs at once if transformers' quantizers are imported already.
wrapt.register_post_import_hook("quantkit.model.versions:register_plugin", "transformers.quantizers.auto")
