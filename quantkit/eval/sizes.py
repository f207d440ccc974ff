"""Compute bits per weight: all stored bits, from headers, over all logical weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.compressed_tensors import stored_formats
from quantkit.checkpoint.low_bit.dequantized import dequantized
from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest
from quantkit.checkpoint.quantization_config import SECTION, QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.errors import CheckpointError
from quantkit.model.model_class import parameter_count
from quantkit.packing.names import StoredFormat, packed_parameters
from quantkit.packing.schemes import PARTS, Scheme


@dataclass(frozen=True)
class Sizes:
    """Bytes and bits per weight of one checkpoint.

    linears      8 x all stored bytes of the packed linears (words, padding, scales, zero-points, shapes)
                 over their logical weights; dense linears do not count. None if none is packed
    model        8 x the bytes of all tensors over all logical parameters, by the manifest if there is one: an
                 lm_head that was tied to the embedding has no parameters of its own
    nbytes       bytes of all tensors, as `plan` counts them: files have headers too, and others lie beside
    format       the schemes of the linears, or the formats of another tool; `dense` if none is packed
    method       the quantization methods of the linears; None without a manifest
    """

    linears: float | None
    model: float
    nbytes: int
    format: str
    method: str | None = None


def measure(checkpoint: Checkpoint) -> Sizes:
    """Measure `checkpoint` by headers, manifest and the stored logical shapes.

    Raises `CheckpointError` for a quantization config or packed tensor that quantkit would not have written.
    """
    section = checkpoint.config.get("quantization_config")
    tensors: Mapping[str, StoredTensor] = checkpoint.tensors
    packed_bytes, packed_weights, packed_elements = 0, 0, 0
    counted: int | None = None
    described = " + ".join(_low_bit(checkpoint.tensors)) or "dense"
    if isinstance(section, dict) and SECTION in section:
        config = QuantizationConfig.from_dict(section)
        described = describe(config)
        dtypes = {name: tensor.torch_dtype for name, tensor in checkpoint.tensors.items()}
        for parameter, stored in packed_parameters(dtypes, stored_formats(config.container)):
            names = [stored.part_name(parameter, part) for part in PARTS]
            parts = [checkpoint.tensors[name] for name in names if name in checkpoint.tensors]
            packed_bytes += sum(tensor.nbytes for tensor in parts)
            packed_elements += sum(tensor.elements for tensor in parts)
            packed_weights += _logical_weights(checkpoint, parameter, stored)
    elif section:
        method = section.get("quant_method") if isinstance(section, dict) else section
        described = f"quant_method {method}"
        tensors, counted = _logical_tensors(checkpoint)
        described = ", ".join((described, *_low_bit(tensors)))
    if not packed_weights:
        low_bit = [tensor for tensor in tensors.values() if tensor.stored_as is not None]
        packed_bytes = sum(tensor.stored_bytes for tensor in low_bit)
        packed_weights = packed_elements = sum(tensor.elements for tensor in low_bit)
    elements = counted or sum(tensor.elements for tensor in tensors.values())
    manifest = manifest_of(checkpoint.directory)
    found = 8 * checkpoint.nbytes / (elements - packed_elements + packed_weights)
    return Sizes(
        8 * packed_bytes / packed_weights if packed_weights else None,
        _recorded_bits(manifest) or found,
        checkpoint.nbytes,
        described,
        _methods(manifest),
    )


def _low_bit(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Return the low-bit formats of dequantized tensors, each once."""
    return list(dict.fromkeys(tensor.stored_as for tensor in tensors.values() if tensor.stored_as))


def _logical_tensors(checkpoint: Checkpoint) -> tuple[Mapping[str, StoredTensor], int | None]:
    """Return the tensors of another tool's checkpoint with logical shapes, and the weights of its class.

    Only one of them is known: formats that transformers runs and quantkit does not read may have several
    weights in an element, so that the parameters of the class count.
    """
    try:
        return dequantized(checkpoint).tensors, None
    except CheckpointError:
        return checkpoint.tensors, parameter_count(checkpoint.config, checkpoint.directory)


def describe(config: QuantizationConfig) -> str:
    """Return the distinct schemes of a packed checkpoint, the default first."""
    schemes: dict[Scheme | None, None] = dict.fromkeys([config.default, *config.modules.values()])
    return " + ".join(str(scheme) for scheme in schemes if scheme is not None)


def manifest_of(directory: Path) -> Mapping[str, Any]:
    """Return the manifest of a directory; empty without one. Raises `CheckpointError` for a damaged one."""
    return read_manifest(directory) if (directory / MANIFEST_NAME).is_file() else {}


def _recorded_bits(manifest: Mapping[str, Any]) -> float | None:
    """Return the bits per weight of the whole model that a manifest records; None if it records none."""
    bits = manifest.get("bits_per_weight")
    found = bits.get("model") if isinstance(bits, dict) else None
    return found if isinstance(found, float) else None


def _methods(manifest: Mapping[str, Any]) -> str | None:
    layers = manifest.get("layers")
    rows = layers.values() if isinstance(layers, dict) else ()
    found = dict.fromkeys(row["method"] for row in rows if isinstance(row, dict) and row.get("method"))
    return " + ".join(map(str, found)) or None


def _logical_weights(checkpoint: Checkpoint, parameter: str, stored: StoredFormat) -> int:
    words = checkpoint.tensors[stored.part_name(parameter, "packed")]
    if stored.codes_per_element is not None:
        return words.elements * stored.codes_per_element
    name = stored.part_name(parameter, "shape")
    tensor = checkpoint.tensors[name]
    if tensor.dtype != "I64" or tensor.shape != (2,):
        raise CheckpointError(
            f"{tensor.file}: tensor {name!r} is {tensor.dtype} {tensor.shape}; expected I64 (2,), the "
            "logical shape. Quantize the model again."
        )
    shape = [int(size) for size in checkpoint.read(name)]
    # A code has at least one bit: a larger shape than the words hold would make the figure too small.
    if min(shape) < 1 or math.prod(shape) > 8 * words.nbytes or shape[0] != words.shape[0]:
        raise CheckpointError(
            f"{tensor.file}: tensor {name!r} says {shape}, but the words are {words.dtype} {words.shape}; "
            "expected [N, K] with N rows of words and no more weights than bits. Quantize the model again."
        )
    return math.prod(shape)
