"""Register the quantizer "quantkit", and dispatch compressed-tensors configs.

A config with a `quantkit` section goes to quantkit, any other to the original class.
"""

from collections.abc import Mapping
from typing import Any

from quantkit.checkpoint.quantization_config import SECTION
from quantkit.packing.names import Container

NAME = "quantkit"
COMPRESSED_TENSORS: Container = "compressed-tensors"
#: Attribute of a dispatcher that stores the original class.
_ORIGINAL = "_quantkit_original"


def apply(config: type, quantizer: type) -> None:
    """Register quantkit's classes `config` and `quantizer` in transformers; does nothing if registered."""
    from transformers.quantizers import auto

    configs, quantizers = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    if is_applied():
        return
    configs[NAME] = config
    quantizers[NAME] = quantizer
    configs[COMPRESSED_TENSORS] = _config_dispatcher(configs[COMPRESSED_TENSORS], config)
    quantizers[COMPRESSED_TENSORS] = _quantizer_dispatcher(quantizers[COMPRESSED_TENSORS], quantizer, config)


def undo() -> None:
    """Restore transformers' tables of config classes and quantizer classes."""
    from transformers.quantizers import auto

    for table in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
        table.pop(NAME, None)
        # Read the class's own attributes: the original class would have none to inherit.
        original = vars(table[COMPRESSED_TENSORS]).get(_ORIGINAL)
        if original is not None:
            table[COMPRESSED_TENSORS] = original


def is_applied() -> bool:
    """Return True if the quantizer is registered with transformers."""
    from transformers.quantizers import auto

    return NAME in auto.AUTO_QUANTIZATION_CONFIG_MAPPING


def _config_dispatcher(original: Any, ours: type) -> type:
    # A subclass, so that `issubclass` checks and class attributes work as for the original. `__new__` returns
    # an instance of another class, so the dispatcher has no instances.
    class CompressedTensorsConfig(original):  # type: ignore[misc]
        _quantkit_original = original

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return ours(**kwargs) if SECTION in kwargs else original(*args, **kwargs)

        @classmethod
        def from_dict(cls, config_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            target: Any = ours if SECTION in config_dict else original
            return target.from_dict(config_dict, *args, **kwargs)

    return CompressedTensorsConfig


def _quantizer_dispatcher(original: Any, ours: type, config: type) -> type:
    class CompressedTensorsHfQuantizer(original):  # type: ignore[misc]
        _quantkit_original = original

        def __new__(cls, quantization_config: Any, **kwargs: Any) -> Any:
            target = ours if isinstance(quantization_config, config) else original
            return target(quantization_config, **kwargs)

    return CompressedTensorsHfQuantizer
