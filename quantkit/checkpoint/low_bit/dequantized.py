"""Present a low-bit checkpoint as a source: each weight is one tensor, dequantized when it is read.

Weights have the dtype of the model, and equal those of the format's own tools bit by bit. Reading rows of a
weight takes memory for these rows only.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from quantkit.checkpoint.low_bit.low_bit_formats import FORMATS, LowBitFormat
from quantkit.checkpoint.low_bit.static_scales import ACTIVATION_SUFFIXES, ActivationTensors
from quantkit.checkpoint.low_bit.weight import LowBitTensor, Settings
from quantkit.checkpoint.safetensors_header import read_json
from quantkit.checkpoint.source import CONFIG_NAME, Checkpoint
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.errors import CheckpointError
from quantkit.files import shown

#: Sections of config.json about quantization; the last is MLX's, and other models use it for other things.
_SECTIONS = ("quantization_config", "compression_config", "quantization")
#: Files that replace such a section, with the method of each.
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
#: Dtypes of codes, which unquantized weights never have.
_CODES = frozenset({"U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F8_E4M3", "F8_E5M2", "F8_E8M0"})
_FP8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0"})
#: Names of codes, whatever their dtype.
_TRACES = (".qweight", ".weight_packed", "_blocks")
_MODEL_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ORIGINAL = "Start from the original checkpoint"


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with each low-bit weight as one tensor in the model's dtype.

    Returns `checkpoint` itself if it has no low-bit weight. Reads no weights, except for the stored shape in
    some formats. Adds a note on the formats found. Raises `CheckpointError` for anything that no reader
    supports: quantkit's own packed directories, unknown formats, codes without scales, and parts that do not
    fit together.
    """
    settings = _settings(checkpoint)
    read = None if checkpoint.headers_only else checkpoint.read_stored
    found: dict[str, StoredTensor] = {}
    counts: Counter[str] = Counter()
    used: set[str] = set()
    dtype = _model_dtype(checkpoint)
    for name, codes in checkpoint.tensors.items():
        match = _match(name, codes, checkpoint.tensors)
        if match is None:
            continue
        row, base, parts = match
        weight = row.read(parts, settings, read)
        parameter = base + row.parameter
        if parameter in checkpoint.tensors and parameter != name:
            raise _refusal(checkpoint, f"it has both {parameter!r} and {name!r}; expected one of them")
        found[name] = LowBitTensor(
            parameter,
            dtype,
            weight.spec.parameter_shape,
            codes.file,
            codes.offset,
            weight=weight,
            stored_in=row.name,
            stored_module=parameter.removesuffix(".weight"),
        )
        counts[row.name] += 1
        used |= {part.name for part in parts.values()} | {base + suffix for suffix in row.unused}
    if not found:
        _check_plain(checkpoint, settings)
        return checkpoint
    tensors: dict[str, StoredTensor] = {}
    activations: dict[str, StoredTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if name in found:
            tensors[found[name].name] = found[name]
        elif name.endswith(ACTIVATION_SUFFIXES):
            activations[name] = tensor
        elif name not in used:
            tensors[name] = tensor
    stored = ActivationTensors(settings, activations)
    _check_no_codes(checkpoint, tensors)
    return replace(
        checkpoint,
        config=_without_sections(checkpoint.config),
        tensors=tensors,
        side_files=tuple(path for path in checkpoint.side_files if path.name not in _FILES),
        notes=(*checkpoint.notes, _note(counts), *_notes_on_inputs(stored)),
        activations=stored,
    )


def _match(
    name: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> tuple[LowBitFormat, str, dict[str, StoredTensor]] | None:
    """Return the format of which a tensor is the codes, its name without suffix, and the parts by role.

    `codes` is the tensor `name`, `tensors` are all of the checkpoint. None if it is not the codes of any
    format, or if a part is missing.
    """
    for row in FORMATS:
        suffix, dtypes = row.codes
        if codes.dtype not in dtypes or not name.endswith(suffix):
            continue
        base = name.removesuffix(suffix)
        parts = {"codes": codes}
        for role, (ending, kinds) in (*row.parts.items(), *row.optional.items()):
            part = tensors.get(base + ending)
            if part is not None and part.dtype in kinds:
                parts[role] = part
        if parts.keys() >= row.parts.keys() and row.fits(parts):
            return row, base, parts
    return None


def _settings(checkpoint: Checkpoint) -> Settings:
    """Return the quantization settings of config.json, or of a file beside it."""
    config = checkpoint.config
    # Multimodal models keep the section in the config of one part.
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for key in _SECTIONS:
        for section in (part[key] for part in parts if part.get(key)):
            where = f"{key} of {CONFIG_NAME}"
            if isinstance(section, dict):
                method = section.get("quant_method")
                if "quantkit" in section or method == "quantkit":
                    found = f"{where} has quant_method {method!r} and is quantkit's own"
                    raise _refusal(
                        checkpoint, f"{found}; expected plain weights, or what another tool packed"
                    )
                stated = key != "quantization"
                return Settings(str(method or ""), section, where, stated)
            if key != "quantization":
                raise _refusal(
                    checkpoint, f"{where} is {shown(section)}; expected plain weights, or an object"
                )
    for path in checkpoint.side_files:
        if path.name in _FILES:
            return Settings(_FILES[path.name], read_json(path), path.name, stated=True)
    return Settings()


def _model_dtype(checkpoint: Checkpoint) -> str:
    """Return the safetensors dtype of the model in config.json, by default bfloat16."""
    config = checkpoint.config
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("dtype", "torch_dtype"):
            stated = part.get(key)
            if isinstance(stated, str) and stated.removeprefix("torch.") in _MODEL_DTYPES:
                return _MODEL_DTYPES[stated.removeprefix("torch.")]
    return "BF16"


def _without_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_sections(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _SECTIONS
    }


def _check_plain(checkpoint: Checkpoint, settings: Settings) -> None:
    """Raise `CheckpointError` if config.json declares quantization but no weight is read as low-bit."""
    _check_no_codes(checkpoint, checkpoint.tensors)
    if settings.stated:
        raise _refusal(
            checkpoint,
            f"{settings.where} has quant_method {shown(settings.method)}, and no tensor is stored as "
            f"quantkit reads it; expected plain weights, or {_readable()}",
        )


def _check_no_codes(checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise `CheckpointError` for codes of no known format, whose values are unknown."""
    for name, tensor in tensors.items():
        if isinstance(tensor, LowBitTensor):
            continue
        if tensor.dtype in _FP8:
            raise _refusal(
                checkpoint,
                f"tensor {name!r} is {tensor.dtype} and has no scales, without which its numbers are not the "
                "weights; expected plain weights, or scales",
            )
        if name.endswith(_TRACES) or (tensor.dtype in _CODES and name.endswith(".weight")):
            beside = sorted(
                other.removeprefix(name.rpartition(".")[0])
                for other in tensors
                if other != name and other.startswith(f"{name.rpartition('.')[0]}.")
            )
            company = f"with {shown(beside)} beside it" if beside else "alone"
            raise _refusal(
                checkpoint,
                f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)} {company}; "
                f"expected plain weights, or {_readable()}",
            )


def _refusal(checkpoint: Checkpoint, why: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.directory}: the checkpoint is quantized already: {why}. {_ORIGINAL}."
    )


def _readable() -> str:
    return ", ".join(dict.fromkeys(row.name for row in FORMATS))


def _notes_on_inputs(stored: ActivationTensors) -> Iterator[str]:
    """Yield a note if the source rounds the inputs of its linears: only their weights are read."""
    if stored.are_rounded:
        yield (
            f"by {stored.settings.where} linears of the source round their inputs too. Those of the result "
            "do only where --activations or --scheme of `quantkit quantize` says so."
        )


def _note(counts: Mapping[str, int]) -> str:
    names = dict.fromkeys(row.name for row in FORMATS if row.name in counts)
    found = " and ".join(f"{counts[name]} are {name}" for name in names)
    return (
        f"the source is low-bit already: of its weights {found}, dequantized as they are read. The errors of "
        "both roundings add up. `quantkit convert` keeps every value where a format has the same grid."
    )
