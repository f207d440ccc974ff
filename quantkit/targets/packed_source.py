"""A packed directory as a checkpoint of matrices whose codes and scales can be read a few rows at a time."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quantkit.checkpoint.compressed_tensors import stored_formats
from quantkit.checkpoint.manifest import MANIFEST_NAME, check_beside
from quantkit.checkpoint.quantization_config import SECTION, QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import Read, StoredTensor
from quantkit.errors import CheckpointError
from quantkit.model.prefixes import read_names
from quantkit.model.structure import Structure
from quantkit.packing.activations import INPUT_PARTS
from quantkit.packing.bitpack import BLOCK
from quantkit.packing.names import KV_PARTS, StoredFormat, packed_parameters
from quantkit.packing.schemes import PARTS, Scheme
from quantkit.packing.tensor import PackedTensor

#: Weights that are unpacked at a time.
PIECE = 1 << 21
#: Parts that a matrix has one of, for all rows.
_WHOLE = ("global_scale", "column_scale", "codebook")


@dataclass(frozen=True, kw_only=True)
class StoredMatrix(StoredTensor):
    """Packed matrix [N, K] of a directory; its values are float32.

    module  name of the linear, or of the embedding
    parts   tensor in a file of each part: words, scales and others
    stored  names and dtypes of the parts in a file
    """

    scheme: Scheme
    module: str
    parts: Mapping[str, StoredTensor]
    stored: StoredFormat

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def stored_as(self) -> str:
        """Return the scheme as text."""
        return str(self.scheme)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield row ranges of about `PIECE` weights, at which every stored part can be cut."""
        rows, columns = self.shape
        step = max(1, PIECE // columns // self._unit) * self._unit
        yield from ((start, min(start + step, rows)) for start in range(0, rows, step))

    def packed(self, read: Read, start: int, stop: int) -> PackedTensor:
        """Read rows `[start, stop)`, one of the ranges of `pieces`, as a separate packed tensor.

        `read` reads rows of a stored tensor.
        """
        columns = self.shape[1]
        before, after = (self.scheme.storage_shapes((rows, columns)) for rows in (start, stop))
        found = {}
        for part, tensor in self.parts.items():
            whole = part in _WHOLE or (part == "scale" and self.scheme.per_tensor)
            first, last = (0, tensor.shape[0]) if whole else (before[part][1][0], after[part][1][0])
            found[part] = self.stored.from_file(part, read(tensor, first, last), after[part][0])
        return PackedTensor.from_parts(found, self.scheme, (stop - start, columns))

    def values(self, read: Read, start: int, stop: int) -> torch.Tensor:
        """Read rows `[start, stop)`, float32 [R, K]."""
        first = start // self._unit * self._unit
        last = min(self.shape[0], -(-stop // self._unit) * self._unit)
        return self.packed(read, first, last).dequantize(start=start - first, stop=stop - first)

    @property
    def _unit(self) -> int:
        return math.lcm(BLOCK, *self.scheme.row_units().values())


def open_packed(directory: Path) -> tuple[Checkpoint, Structure]:
    """Open the model in a packed directory: packed matrices as `StoredMatrix`, other tensors as stored.

    Reads headers and logical shapes. Raises `CheckpointError` for a directory that quantkit did not pack or
    that has changed since, and for names that the model class lacks.
    """
    checkpoint = Checkpoint.open(directory)
    section = checkpoint.config.get("quantization_config")
    if not isinstance(section, dict) or SECTION not in section:
        raise CheckpointError(
            f"{directory}: is no packed directory of quantkit; expected what 'quantize' or 'convert' wrote. "
            "Export that, or pack this checkpoint first."
        )
    config = QuantizationConfig.from_dict(section)
    check_beside(checkpoint.shards)
    dtypes = {name: tensor.torch_dtype for name, tensor in checkpoint.tensors.items()}
    stored = dict(packed_parameters(dtypes, stored_formats(config.container)))
    parts = {name: _parts(checkpoint, name, one) for name, one in stored.items()}
    used = {part.name for of_one in parts.values() for part in of_one.values()}
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in used}
    for name, one in stored.items():
        words = parts[name]["packed"]
        shape = words.shape[0], _columns(checkpoint, parts[name], one)
        tensors[name] = StoredTensor(name, "F32", shape, words.file, words.offset)
    plain = replace(
        checkpoint,
        config={key: value for key, value in checkpoint.config.items() if key != "quantization_config"},
        tensors=tensors,
        side_files=tuple(path for path in checkpoint.side_files if path.name != MANIFEST_NAME),
    )
    view, structure = read_names(plain)
    modules = {one: name for name, linear in structure.linears.items() for one in linear.stored}
    if not isinstance(structure.table, str) and config.modules.get(structure.table.module) is not None:
        modules[structure.table.stored[0]] = structure.table.module
    packed = {}
    for name, one in stored.items():
        module = modules.get(name.removesuffix(".weight"))
        scheme = None if module is None else config.scheme_of(module)
        if scheme is None or module is None:
            raise CheckpointError(
                f"{directory}: tensor {name!r} is packed, and config.json has no scheme for it. Download the "
                "checkpoint again, or quantize the model again."
            )
        tensor = view.tensors[name]
        packed[name] = StoredMatrix(
            *(name, tensor.dtype, tensor.shape, tensor.file, tensor.offset),
            scheme=scheme.for_columns(tensor.shape[1]),
            module=module,
            parts={part: one for part, one in parts[name].items() if part in PARTS and part != "shape"},
            stored=one,
        )
    return replace(view, tensors={**view.tensors, **packed}), structure


def _parts(checkpoint: Checkpoint, parameter: str, stored: StoredFormat) -> dict[str, StoredTensor]:
    names = {part: stored.part_name(parameter, part) for part in (*PARTS, *INPUT_PARTS.values())}
    parent = parameter.removesuffix(".weight").rpartition(".")[0]
    names |= {part: f"{parent}.{part}" for part in KV_PARTS.values()}
    return {part: checkpoint.tensors[name] for part, name in names.items() if name in checkpoint.tensors}


def _columns(checkpoint: Checkpoint, parts: Mapping[str, StoredTensor], stored: StoredFormat) -> int:
    if stored.codes_per_element is not None:
        return parts["packed"].shape[-1] * stored.codes_per_element
    return int(checkpoint.read_stored(parts["shape"])[1])
