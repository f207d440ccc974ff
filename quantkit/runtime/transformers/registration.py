"""Register the plug-in when transformers imports its quantizers."""

import warnings
from importlib import import_module
from types import ModuleType

from quantkit.model.transformers_version import why_unsupported


def register_plugin(module: ModuleType | None = None) -> None:
    """Register the plug-in with transformers; runs when `transformers.quantizers.auto` is imported.

    Warns about an unsupported version instead of raising, as the importing program may not use quantkit.
    `module`, which import hooks pass, is not used.
    """
    problem = why_unsupported()
    if problem is not None:
        warnings.warn(f"quantkit's formats are not registered with transformers: {problem}", stacklevel=2)
        return
    import_module("quantkit.runtime.transformers.quantizer")
