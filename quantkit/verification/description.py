"""Describe a checkpoint of any tool: storage of the weights, readers, and usable commands.

Everything comes from config.json and headers, or from the header of a GGUF file. Formats that quantkit does
not read are described by their settings, and their weights are counted by the class of the model.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.gguf.gguf_names import ARCHITECTURE_KEY
from quantkit.checkpoint.gguf.header import GgufHeader, read_gguf_header
from quantkit.checkpoint.gguf.open_gguf import gguf_file
from quantkit.checkpoint.low_bit.dequantized import dequantized
from quantkit.checkpoint.low_bit.grid import GridSpec
from quantkit.checkpoint.low_bit.static_scales import ActivationTensors
from quantkit.checkpoint.low_bit.weight import stored_module
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.errors import CheckpointError
from quantkit.model.model_class import parameter_count
from quantkit.quantization.nesting import why_not_nested

#: Tools that a method is for, by their documentation: names of `quant_method`, of MLX's section, and GGUF.
MADE_FOR: Mapping[str, tuple[str, ...]] = {
    "": ("transformers",),
    "compressed-tensors": ("vLLM", "SGLang", "transformers with compressed-tensors"),
    "gptq": ("vLLM", "SGLang", "transformers with optimum and gptqmodel"),
    "awq": ("vLLM", "SGLang", "transformers with gptqmodel"),
    "bitsandbytes": ("transformers with bitsandbytes", "vLLM"),
    "fp8": ("vLLM", "SGLang", "transformers"),
    "mxfp4": ("vLLM", "SGLang", "transformers with kernels"),
    "modelopt": ("TensorRT-LLM", "vLLM", "SGLang"),
    "quark": ("vLLM", "transformers with amd-quark"),
    "torchao": ("transformers with torchao", "vLLM"),
    "hqq": ("transformers with hqq",),
    "quanto": ("transformers with optimum-quanto",),
    "auto-round": ("transformers with auto-round", "vLLM", "SGLang"),
    "bitnet": ("transformers",),
    "mlx": ("mlx-lm",),
    "gguf": ("llama.cpp",),
}
#: Keys of settings that have the bits of a weight, and the weights that share a scale.
_BITS = ("bits", "nbits", "w_bit", "num_bits", "wbits", "weight_bits")
_GROUPS = ("group_size", "q_group_size")
#: Settings within settings that are of activations.
_OF_INPUTS = ("activation", "input", "kv_cache", "output")
#: Keys of config.json with settings; the last is MLX's.
_SECTIONS = ("quantization_config", "compression_config", "quantization")


@dataclass(frozen=True)
class StoredKind:
    """Tensors of one storage format: number, logical weights, and bytes of all parts."""

    stored_as: str
    low_bit: bool
    tensors: int
    weights: int
    nbytes: int

    @property
    def bits_per_weight(self) -> float:
        """Return the stored bits per weight."""
        return 8 * self.nbytes / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class Description:
    """Description of a checkpoint.

    method            quant_method or the like; "" for an unquantized checkpoint
    architecture      class or architecture by its own metadata, None without it
    kinds             storage formats, the most bytes first
    nbytes            bytes of all tensors
    bits_per_weight   `linears` counts the low-bit tensors, `model` all; None if unknown
    settings          bits and group size of the config, if tensors do not determine them
    made_for          tools that read such checkpoints, by their documentation
    not_read          why quantkit cannot read the weights, else None
    not_converted     why `convert` cannot keep the values, else None
    inputs            how low-bit linears round their inputs, "" if they do not
    """

    method: str
    architecture: str | None
    kinds: tuple[StoredKind, ...]
    nbytes: int
    bits_per_weight: Mapping[str, float | None]
    settings: str = ""
    made_for: tuple[str, ...] = ()
    not_read: str | None = None
    not_converted: str | None = None
    inputs: str = ""


def describe(path: Path) -> Description:
    """Describe the checkpoint in a directory, or a GGUF file.

    Raises `CheckpointError` if it is neither, or is damaged.
    """
    file = gguf_file(path)
    if file is not None:
        return _of_gguf(read_gguf_header(file))
    checkpoint = Checkpoint.open(path, allow_auto_map=True)
    section = _section(checkpoint.config)
    method = _method(checkpoint, section)
    settings = _settings(section)
    try:
        opened = dequantized(checkpoint)
    except CheckpointError as error:
        return _unread(checkpoint, method, settings, str(error))
    tensors = opened.tensors.values()
    low_bit = [tensor for tensor in tensors if tensor.stored_as is not None]
    if low_bit and not method:
        method = str(low_bit[0].stored_as)
    kinds = _kinds(tensors)
    inputs, unkept = _inputs(low_bit, opened.activations)
    return Description(
        method,
        _architecture(checkpoint.config),
        kinds,
        checkpoint.nbytes,
        _bits(kinds, checkpoint.nbytes),
        made_for=_made_for(method),
        not_converted=_why_not_converted(low_bit) or unkept,
        inputs=inputs,
    )


def _unread(checkpoint: Checkpoint, method: str, settings: str, why: str) -> Description:
    """Describe a checkpoint whose weights quantkit does not read; the class of the model counts them."""
    kinds = _kinds(checkpoint.tensors.values())
    weights = parameter_count(checkpoint.config, checkpoint.directory)
    bits = {"linears": None, "model": None if weights is None else 8 * checkpoint.nbytes / weights}
    return Description(
        method or "unknown",
        _architecture(checkpoint.config),
        kinds,
        checkpoint.nbytes,
        bits,
        settings,
        _made_for(method),
        not_read=why,
    )


def _of_gguf(header: GgufHeader) -> Description:
    groups: dict[str, list[tuple[int, int]]] = {}
    low_bit: dict[str, bool] = {}
    why = None
    for tensor in header.tensors.values():
        kind = tensor.block_type
        elements = tensor.nbytes // kind.nbytes * kind.elements
        groups.setdefault(kind.name, []).append((elements, tensor.nbytes))
        low_bit[kind.name] = kind.dtype is None
        if kind.dtype is None and kind.grid is None and why is None:
            why = f"{tensor.name} is {kind.name}, whose scales have scales"
    kinds = _sorted(
        StoredKind(name, low_bit[name], len(of), sum(n for n, _ in of), sum(size for _, size in of))
        for name, of in groups.items()
    )
    nbytes = sum(kind.nbytes for kind in kinds)
    architecture = header.get(ARCHITECTURE_KEY, str, None)
    return Description(
        "gguf",
        architecture,
        kinds,
        nbytes,
        _bits(kinds, nbytes),
        made_for=_made_for("gguf"),
        not_converted=why,
    )


def _kinds(tensors: Iterable[StoredTensor]) -> tuple[StoredKind, ...]:
    groups: dict[tuple[str, bool], list[StoredTensor]] = {}
    for tensor in tensors:
        grid = tensor.grid_spec
        name = tensor.stored_as or str(tensor.torch_dtype).removeprefix("torch.")
        if grid is not None:
            name = f"{name}: {_grid_text(grid)}"
        groups.setdefault((name, tensor.stored_as is not None), []).append(tensor)
    return _sorted(
        StoredKind(
            name,
            low_bit,
            len(of),
            sum(tensor.elements for tensor in of),
            sum(tensor.stored_bytes for tensor in of),
        )
        for (name, low_bit), of in groups.items()
    )


def _sorted(kinds: Iterable[StoredKind]) -> tuple[StoredKind, ...]:
    return tuple(sorted(kinds, key=lambda kind: (not kind.low_bit, -kind.nbytes)))


def _grid_text(grid: GridSpec) -> str:
    """Return format, group and zero-points of a grid, in words."""
    rows, columns = grid.shape
    if grid.group_rows >= rows and grid.group_size >= columns and rows > 1:
        groups = "one scale per tensor"
    elif grid.group_rows > 1:
        groups = f"blocks of {grid.group_rows}x{grid.group_size}"
    elif grid.group_size >= columns:
        groups = "a scale per channel"
    else:
        groups = f"groups of {grid.group_size}"
    offsets = {"none": "", "zeros": ", zero-points", "biases": ", minimums"}[grid.affine]
    return f"{grid.format.name}, {groups}{offsets}{', desc_act' if grid.permuted else ''}"


def _bits(kinds: Iterable[StoredKind], nbytes: int) -> dict[str, float | None]:
    """Return bits per weight of the low-bit tensors, and of all; `nbytes` counts parts of no weight too."""
    every = tuple(kinds)
    packed = [kind for kind in every if kind.low_bit]
    weights, in_packed = sum(kind.weights for kind in every), sum(kind.weights for kind in packed)
    return {
        "linears": 8 * sum(kind.nbytes for kind in packed) / in_packed if in_packed else None,
        "model": 8 * nbytes / weights if weights else None,
    }


def _why_not_converted(low_bit: Iterable[StoredTensor]) -> str | None:
    for tensor in low_bit:
        grid = tensor.grid_spec
        reason = "its scales have scales" if grid is None else why_not_nested(grid)
        if reason is not None:
            return f"{tensor.name}: {reason}"
    return None


def _inputs(low_bit: Iterable[StoredTensor], stored: ActivationTensors) -> tuple[str, str | None]:
    """Return how low-bit linears round their inputs, as text, and why `convert` cannot keep that, or None."""
    counts: Counter[str] = Counter()
    for tensor in low_bit:
        if (grid := tensor.grid_spec) is not None:
            try:
                found = stored.of_inputs(stored_module(tensor), grid.format)
            except CheckpointError as error:
                return "inputs may be rounded by static scales", str(error)
            counts.update([] if found is None else [str(found[0])])
    kinds = (
        f"inputs of {count} linears are rounded to {kind} by static scales" for kind, count in counts.items()
    )
    return ", ".join(kinds) or ("inputs are rounded by dynamic scales" if stored.are_rounded else ""), None


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    found = (part[key] for key in _SECTIONS for part in parts if isinstance(part.get(key), Mapping))
    return next(found, {})


def _method(checkpoint: Checkpoint, section: Mapping[str, Any]) -> str:
    """Return the method that the settings name; "" without settings."""
    method = section.get("quant_method")
    if method is None and section and section == checkpoint.config.get("quantization"):
        method = "mlx"
    return str(method or section.get("quant_algo") or "")


def _settings(section: Mapping[str, Any]) -> str:
    """Return bits and group size of the settings, at any depth, in words.

    A number that is missing, or differs between parts of the settings, is left out: "" without either.
    """
    found = {}
    for what, keys in (("bits", _BITS), ("weights per scale", _GROUPS)):
        values = {value for key, value in _entries(section) if key in keys and type(value) is int}
        if len(values) == 1:
            found[what] = values.pop()
    return ", ".join(f"{value} {what}" for what, value in found.items())


def _entries(section: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        yield key, value
        if isinstance(value, Mapping) and depth < 6 and not any(name in key for name in _OF_INPUTS):
            yield from _entries(value, depth + 1)


def _architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    found = names[0] if isinstance(names, list) and names else config.get("model_type")
    return None if found is None else str(found)


def _made_for(method: str) -> tuple[str, ...]:
    name = method.lower().replace("_", "-")
    # Such as `bitsandbytes_4bit`, and `MXFP4` of a row of the formats.
    found = (tools for key, tools in MADE_FOR.items() if name == key or (key and name.startswith(key)))
    return next(found, ())
