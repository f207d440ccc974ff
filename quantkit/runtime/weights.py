"""Which weights a packed checkpoint has, as kernels see them."""

from pathlib import Path

from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.packing.schemes import Scheme
from quantkit.runtime.saved_model import read_record


def packed_weights(directory: Path) -> dict[tuple[Scheme, tuple[int, int]], int]:
    """How many matrices [N, K] there are of each scheme and shape, in the order of the layers.

    Reads config.json, headers, and the manifest if there is one. `CheckpointError` for what is no packed
    checkpoint.
    """
    record = read_record(directory)
    config = QuantizationConfig.from_dict(Checkpoint.open(directory).config.get("quantization_config", {}))
    found: dict[tuple[Scheme, tuple[int, int]], int] = {}
    for module, layer in record.layers.items():
        scheme = config.scheme_of(module)
        if scheme is not None:
            key = scheme.for_columns(layer.shape[1]), layer.shape
            found[key] = found.get(key, 0) + layer.matrices
    return found
