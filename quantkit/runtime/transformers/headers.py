"""Check the files of a packed checkpoint against a model before weights are loaded.

transformers compares shapes only: it casts words of another dtype, and fills missing tensors with random
values.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.checkpoint.safetensors_header import read_header
from quantkit.checkpoint.tensors import StoredTensor, TensorSpec
from quantkit.errors import CheckpointError
from quantkit.files import open_regular, os_error_text
from quantkit.runtime.packed_module import PartSpec
from quantkit.runtime.replace import is_elsewhere, packed_modules

Tensor = TypeVar("Tensor", bound=TensorSpec)

_AGAIN = "Download the checkpoint again, or quantize the model again."


def check_headers(model: Any, quantizer: Any, files: Sequence[Path]) -> None:
    """Check that `files` hold each part of the packed modules of `model` once, in its dtype and shape.

    `quantizer` is the active `HfQuantizer`, which affects how transformers renames tensors. Raises
    `CheckpointError` with the tensor, what was found, and what was expected.
    """
    check_tensors(model, quantizer, _read_headers(files))


def check_tensors(model: Any, quantizer: Any, stored: Mapping[str, TensorSpec]) -> None:
    """Check that `stored`, tensors by name, has each part of the packed modules of `model` once.

    Each part must have the expected dtype and shape. The tensors may be planned, not yet in a file. For
    `quantizer` and errors see `check_headers`.
    """
    if not quantizer.is_for_another_class:
        _check_elsewhere(model, quantizer.quantization_config.parsed, stored)
    by_target = stored_by_entry(model, quantizer, stored)
    for name, module in packed_modules(model):
        if module.table is not None:
            continue
        specs = {f"{name}.{entry}": spec for entry, spec in module.part_specs().items()}
        _check_complete(specs, by_target)
        for target, spec in specs.items():
            _check_part(spec, by_target[target])


def _check_elsewhere(model: Any, config: QuantizationConfig, stored: Mapping[str, TensorSpec]) -> None:
    """Raise `CheckpointError` if `config` packs a module that neither the model nor a file has."""
    modules = {name.rpartition(".")[0] for name in stored}
    absent = [
        name
        for name, scheme in config.modules.items()
        if scheme is not None and name not in modules and is_elsewhere(model, name)
    ]
    if absent:
        raise CheckpointError(
            f"quantization_config packs {absent[0]!r}, which {type(model).__name__} does not have, nor any "
            "file. Restore config.json, or quantize the model again."
        )


def _read_headers(files: Sequence[Path]) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in stored:
                raise CheckpointError(
                    f"tensor {name!r} is in {stored[name].file} and in {file}; expected in one file. {_AGAIN}"
                )
            stored[name] = tensor
    return stored


def stored_by_entry(model: Any, quantizer: Any, stored: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the `stored` tensors (by name) that transformers loads into each state-dict entry of `model`.

    `quantizer` affects how transformers renames tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    quantizer.note_experts(model)
    transforms = get_model_conversion_mapping(model, None, quantizer)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    entries = model.state_dict()
    targets: dict[str, list[Tensor]] = {}
    for name, tensor in stored.items():
        target, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, entries)
        if target not in entries and name in entries:
            target = name
        targets.setdefault(target, []).append(tensor)
    return targets


def _check_complete(specs: Mapping[str, PartSpec], by_target: Mapping[str, Sequence[TensorSpec]]) -> None:
    """Raise `CheckpointError` if a part is missing, or a parameter has the wrong number of matrices.

    `specs` has the expected part of each state-dict entry, `by_target` the stored tensors of each entry.
    """
    by_parameter: dict[str, list[tuple[str, PartSpec]]] = {}
    for target, spec in specs.items():
        by_parameter.setdefault(spec.parameter(target), []).append((target, spec))
    for parameter, entries in by_parameter.items():
        parts: dict[str, set[str]] = {}
        for target, spec in entries:
            for tensor in by_target.get(target, ()):
                parts.setdefault(spec.parameter(tensor.name), set()).add(spec.part)
        for matrix in parts or {parameter: set()}:
            for _, spec in entries:
                if spec.part not in parts.get(matrix, set()):
                    name = spec.format.part_name(matrix, spec.part)
                    raise CheckpointError(f"tensor {name!r} is missing. {_AGAIN}")
        counts = entries[0][1].stored
        if len(parts) not in counts:
            raise CheckpointError(
                f"{parameter!r} is stored as {len(parts)} matrices, {min(parts)!r} and others; expected "
                f"{' or '.join(map(str, counts))}. {_AGAIN}"
            )


def _check_part(spec: PartSpec, tensors: Sequence[TensorSpec]) -> None:
    expected = spec.stored[len(tensors)]
    for tensor in tensors:
        where = f" in {tensor.file}" if isinstance(tensor, StoredTensor) else ""
        if tensor.torch_dtype != spec.dtype or tensor.shape != expected:
            raise CheckpointError(
                f"tensor {tensor.name!r}{where} is {tensor.torch_dtype} {tensor.shape}; "
                f"expected {spec.dtype} {expected}. {_AGAIN}"
            )
        if spec.part == "shape" and len(tensors) in spec.logical and isinstance(tensor, StoredTensor):
            logical = _read_shape(tensor)
            if logical != spec.logical[len(tensors)]:
                raise CheckpointError(
                    f"tensor {tensor.name!r}{where} says {logical}; the model expects "
                    f"{spec.logical[len(tensors)]}. {_AGAIN}"
                )


def _read_shape(tensor: StoredTensor) -> tuple[int, ...]:
    try:
        with open_regular(tensor.file) as file:
            file.seek(tensor.offset)
            data = file.read(tensor.nbytes)
    except OSError as error:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} cannot be read: {os_error_text(error)}. Check the disk."
        ) from error
    return tuple(int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8))
