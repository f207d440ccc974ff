"""Quantize Hugging Face checkpoints to packed low-bit formats, run them packed, and measure the cost.

Importing this package touches no GPU and no network and imports neither transformers nor triton. It
registers quantkit's formats with transformers the moment transformers' quantizers are imported, so a
plain `AutoModelForCausalLM.from_pretrained(packed_directory)` works afterwards.
"""

import sys

TYPE_CHECKING = False
# Signals before the command has its own handlers end in a traceback, so slow imports come after this point.
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

    from quantkit.about import VERSION as __version__
    from quantkit.calibrate.methods import quantize_tensor as quantize_tensor
    from quantkit.converting import convert as convert
    from quantkit.errors import QuantkitError as QuantkitError
    from quantkit.eval.evaluate import evaluate as evaluate
    from quantkit.exporting import export as export
    from quantkit.in_memory import QuantkitConfig as QuantkitConfig
    from quantkit.in_memory import quantize_model as quantize_model
    from quantkit.kernels.linear import linear as linear
    from quantkit.merging import merge as merge
    from quantkit.packing.schemes import Scheme as Scheme
    from quantkit.packing.tensor import PackedTensor as PackedTensor
    from quantkit.planning import plan as plan
    from quantkit.quantizing import quantize as quantize
    from quantkit.runtime.load import load as load

#: Public names by the module that defines them, imported when first used: torch alone takes a second.
_LAZY = {
    "__version__": "quantkit.about",
    "PackedTensor": "quantkit.packing.tensor",
    "QuantkitConfig": "quantkit.in_memory",
    "QuantkitError": "quantkit.errors",
    "Scheme": "quantkit.packing.schemes",
    "convert": "quantkit.converting",
    "evaluate": "quantkit.eval.evaluate",
    "export": "quantkit.exporting",
    "linear": "quantkit.kernels.linear",
    "load": "quantkit.runtime.load",
    "merge": "quantkit.merging",
    "plan": "quantkit.planning",
    "quantize": "quantkit.quantizing",
    "quantize_model": "quantkit.in_memory",
    "quantize_tensor": "quantkit.calibrate.methods",
}

__all__ = [
    "PackedTensor",
    "QuantkitConfig",
    "QuantkitError",
    "Scheme",
    "__version__",
    "convert",
    "evaluate",
    "export",
    "linear",
    "load",
    "merge",
    "plan",
    "quantize",
    "quantize_model",
    "quantize_tensor",
]


def __getattr__(name: str) -> "Any":
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LAZY[name]), _NAMES.get(name, name))
    return value


#: Names that differ in the defining module.
_NAMES = {"__version__": "VERSION"}


def __dir__() -> list[str]:
    return sorted(__all__)


_QUANTIZERS = "transformers.quantizers.auto"


def _register_plugin() -> None:
    """Register the plug-in when transformers' quantizers are imported; at once if they already are."""
    import wrapt

    wrapt.register_post_import_hook("quantkit.runtime.transformers.registration:register_plugin", _QUANTIZERS)


class _Quantizers:
    """Import hook on `sys.meta_path` that waits for transformers' quantizers; wrapt is slow to import."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if name != _QUANTIZERS:
            return None
        sys.meta_path.remove(self)
        _register_plugin()
        from importlib.util import find_spec

        # Look again, now that the hook of wrapt is installed too.
        return find_spec(name)


if _QUANTIZERS in sys.modules:
    _register_plugin()
else:
    sys.meta_path.insert(0, _Quantizers())
