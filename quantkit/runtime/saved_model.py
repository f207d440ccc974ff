"""Read packed directories written by `save_pretrained`: config and weights, but no manifest.

Formats and shapes come from config.json and headers. Only a manifest has the source, the method, the errors,
and the hashes of the files.
"""

import math
from pathlib import Path

from torch import nn

from quantkit.checkpoint.compressed_tensors import why_not_compressed_tensors
from quantkit.checkpoint.gguf.open_gguf import gguf_file
from quantkit.checkpoint.manifest import MANIFEST_NAME, is_export, read_manifest, verify_manifest
from quantkit.checkpoint.model_record import LayerRecord, ModelRecord
from quantkit.checkpoint.output.journal import JOURNAL_NAME
from quantkit.checkpoint.quantization_config import PACKED_TABLE, SECTION, QuantizationConfig
from quantkit.checkpoint.safetensors_header import read_json
from quantkit.checkpoint.source import CONFIG_NAME, Checkpoint
from quantkit.errors import CheckpointError
from quantkit.files import os_error_text
from quantkit.model.model_class import meta_model
from quantkit.model.structure import check_layer_counts
from quantkit.runtime.packed_embedding import PackedEmbedding
from quantkit.runtime.packed_module import PackedModule
from quantkit.runtime.replace import packed_modules
from quantkit.runtime.transformers.headers import check_headers, stored_by_entry
from quantkit.runtime.transformers.registration import register_plugin

NO_MANIFEST = (
    f"there is no {MANIFEST_NAME}, as save_pretrained writes none: source, method and errors are not known, "
    "nor whether a byte has changed"
)


def is_saved(directory: Path) -> bool:
    """Return True if `directory` holds a packed model without a manifest, and no interrupted run.

    Raises `CheckpointError` if the directory cannot be read.
    """
    config = directory / CONFIG_NAME
    try:
        own = any((directory / name).exists() for name in (MANIFEST_NAME, JOURNAL_NAME))
        if own or not config.is_file():
            return False
    except OSError as error:
        raise CheckpointError(
            f"cannot examine {directory}: {os_error_text(error)}. Check the disk and the permissions."
        ) from error
    section = read_json(config).get("quantization_config")
    return isinstance(section, dict) and SECTION in section


def is_foreign(path: Path) -> bool:
    """Return True for a GGUF file, or a checkpoint directory that quantkit did not write."""
    if path.suffix == ".gguf" or gguf_file(path) is not None:
        return True
    try:
        own = any((path / name).exists() for name in (MANIFEST_NAME, JOURNAL_NAME)) and not is_export(path)
        return not own and (path / CONFIG_NAME).is_file() and not is_saved(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot examine {path}: {os_error_text(error)}. Check the disk and the permissions."
        ) from error


def read_record(directory: Path) -> ModelRecord:
    """Return the record of a packed directory: from its manifest, or from config.json and headers.

    Raises `CheckpointError` for a directory that is not packed, or whose manifest was changed.
    """
    if is_saved(directory):
        return record_of(Checkpoint.open(directory))
    record = ModelRecord.from_manifest(read_manifest(directory))
    # Last, because problems inside the manifest give more precise errors.
    for problem in verify_manifest(directory):
        raise CheckpointError(
            f"{directory}: {problem}, so its figures may be wrong. Write the checkpoint again or download it "
            "again."
        )
    return record


def file_names(directory: Path) -> list[str]:
    """Return the sorted names of the checkpoint files in a packed directory."""
    if not is_saved(directory):
        return sorted([*read_manifest(directory)["files"], MANIFEST_NAME])
    checkpoint = Checkpoint.open(directory)
    names = {path.name for path in (*checkpoint.stamps, *checkpoint.side_files)}
    return sorted(names)


def record_of(checkpoint: Checkpoint) -> ModelRecord:
    """Return the record of a packed checkpoint, made from config.json and the headers of its files.

    What only a manifest has is None or empty, such as the source.
    Raises `CheckpointError` if a part is missing, or has another dtype or shape.
    """
    register_plugin()
    from quantkit.runtime.replace import swap_modules
    from quantkit.runtime.transformers.quantizer import QuantkitConfig, QuantkitQuantizer

    section = checkpoint.config["quantization_config"]
    config = QuantizationConfig.from_dict(section)
    check_layer_counts(checkpoint)
    model = meta_model(checkpoint.config, checkpoint.directory)
    head = model.get_output_embeddings()  # type: ignore[operator]
    heads = {name for name, module in model.named_modules() if module is head}
    swap_modules(model, config)
    quantizer = QuantkitQuantizer(QuantkitConfig(**section))
    check_headers(model, quantizer, checkpoint.shards)
    by_entry = stored_by_entry(model, quantizer, checkpoint.tensors)
    layers: dict[str, LayerRecord] = {}
    packed_bytes, packed_elements, packed_weights, reasons = 0, 0, 0, []
    for name, module in packed_modules(model):
        for parameter, (scheme, shape, _) in module.logical().items():
            layer = name if parameter == "weight" else f"{name}.{parameter}"
            specs = {
                entry: spec
                for entry, spec in module.part_specs().items()
                if spec.parameter(entry) == parameter
            }
            # A head tied to a packed embedding has no tensors of its own.
            own = specs if module.table is None else {}
            tensors = [tensor for entry in own for tensor in by_entry[f"{name}.{entry}"]]
            matrices = max((count for spec in own.values() for count in spec.stored), default=0)
            nbytes, weights = sum(tensor.nbytes for tensor in tensors), matrices * math.prod(shape)
            kind = _kind(module, parameter, name in heads)
            bits = 8 * nbytes / weights if weights else None
            layers[layer] = LayerRecord(kind, shape, matrices, str(scheme), None, bits, None, "default")
            reason = why_not_compressed_tensors(scheme, shape[1], experts=kind == "experts")
            reason = PACKED_TABLE if kind == "embedding" else reason
            reasons += [] if reason is None else [f"{layer}: {reason}"]
            packed_bytes, packed_weights = packed_bytes + nbytes, packed_weights + weights
            packed_elements += sum(tensor.elements for tensor in tensors)
    elements = sum(tensor.elements for tensor in checkpoint.tensors.values())
    bits_per_weight = {
        "linears": 8 * packed_bytes / packed_weights if packed_weights else None,
        "model": 8 * checkpoint.nbytes / (elements - packed_elements + packed_weights),
    }
    return ModelRecord(
        source=None,
        source_bytes=None,
        container=config.container,
        needs_quantkit=tuple(reasons) if config.container == "quantkit" else (),
        bits_per_weight=bits_per_weight,
        versions={},
        recipe={},
        layers={**layers, **_dense(model, heads)},
        dense={},
    )


def _kind(module: PackedModule, parameter: str, is_head: bool) -> str:
    if isinstance(module, PackedEmbedding):
        return "embedding"
    return "lm_head" if is_head else "linear" if parameter == "weight" else "experts"


def _dense(model: nn.Module, heads: set[str]) -> dict[str, LayerRecord]:
    return {
        name: LayerRecord(
            "lm_head" if name in heads else "linear",
            (module.out_features, module.in_features),
            *(1, None, None, None, None, "dense in config.json"),
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, PackedModule)
    }
