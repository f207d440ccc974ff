"""Count the weights of a packed checkpoint by scheme and shape, for kernels."""

from pathlib import Path

from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.packing.schemes import Scheme
from quantkit.runtime.saved_model import read_record


def packed_weights(directory: Path) -> dict[tuple[Scheme, tuple[int, int]], int]:
    """Return how many packed matrices of a checkpoint there are by (scheme, (N, K)), in layer order.

    Kernels are tuned for these, for example. Embeddings are not counted, because no kernel multiplies them.
    Reads config.json, headers, and the manifest if there is one. Raises `CheckpointError` if the directory is
    not a packed checkpoint.
    """
    record = read_record(directory)
    config = QuantizationConfig.from_dict(Checkpoint.open(directory).config.get("quantization_config", {}))
    counts: dict[tuple[Scheme, tuple[int, int]], int] = {}
    for module, layer in record.layers.items():
        scheme = config.scheme_of(module)
        # Embeddings multiply nothing; a head on the same table is listed too.
        if scheme is not None and layer.kind != "embedding":
            key = scheme.for_columns(layer.shape[1]), layer.shape
            # A head on the table has no matrix of its own.
            counts[key] = counts.get(key, 0) + max(1, layer.matrices)
    return counts
