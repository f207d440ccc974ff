"""Compare every weight of a packed checkpoint with its source."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.checkpoint.compressed_tensors import stored_format
from quantkit.checkpoint.hub.repository import resolve
from quantkit.checkpoint.low_bit.static_scales import StoredScale
from quantkit.checkpoint.low_bit.weight import stored_module
from quantkit.checkpoint.open_source import exactly, open_source
from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.model.model_free import with_other_parts
from quantkit.model.prefixes import read_names
from quantkit.model.structure import Structure
from quantkit.packing.names import KV_PARTS
from quantkit.packing.tensor import PackedTensor
from quantkit.progress import Progress, counting

#: Weights compared at a time.
_PIECE = 1 << 21
#: Most tensors named in a message.
_NAMED = 20


@dataclass(frozen=True)
class Compared:
    """Numbers of compared and of packed tensors, and texts of differences."""

    tensors: int
    packed: int
    problems: tuple[str, ...]


def compare_with_source(directory: Path, source: str | Path, progress: Progress | None = None) -> Compared:
    """Compare every weight of a packed checkpoint with `source`, in float32 and bit by bit.

    `source` is a checkpoint directory, a GGUF file or a hub id, as for `convert`. Raises `CheckpointError` if
    it cannot be read.
    """
    checkpoint, structure = with_other_parts(*read_names(exactly(open_source(resolve(source)))))
    packed = Checkpoint.open(directory)
    config = QuantizationConfig.from_dict(packed.config.get("quantization_config", {}))
    modules = {f"{one}.weight": name for name, linear in structure.linears.items() for one in linear.stored}
    if not isinstance(structure.table, str) and config.modules.get(structure.table.module) is not None:
        modules[f"{structure.table.stored[0]}.weight"] = structure.table.module
    advance = counting(checkpoint.nbytes, progress)
    problems: list[str] = []
    count, seen = 0, set[str]()
    for name, tensor in checkpoint.tensors.items():
        found = _packed(packed, config, tensor, modules.get(name))
        count += found is not None
        # Dense experts keep their one fused tensor.
        cut = structure.cuts.get(name) if found is None else None
        own = name if cut is None else cut.source.name
        if own in seen:
            pass
        elif found is None and own not in packed.tensors:
            problems.append(f"{own} of the source is not there")
        else:
            problems += _differences(checkpoint, packed, own, found)
        seen.add(own)
        advance(tensor.stored_bytes, name)
    problems += _scale_differences(checkpoint, structure, packed, config)
    more = [f"and {len(problems) - _NAMED} more"] if len(problems) > _NAMED else []
    return Compared(len(checkpoint.tensors), count, (*problems[:_NAMED], *more))


def _packed(
    checkpoint: Checkpoint, config: QuantizationConfig, source: StoredTensor, module: str | None
) -> PackedTensor | None:
    """Return the packed tensor of a tensor of the source; None for a dense one."""
    scheme = None if module is None else config.scheme_of(module)
    if scheme is None:
        return None
    name, (rows, columns) = source.name, source.shape
    shape = (rows, columns)
    scheme = scheme.for_columns(columns)
    stored = stored_format(scheme, columns, config.container)
    parts = {}
    for part, (dtype, _) in scheme.storage_shapes(shape).items():
        if part in scheme.part_names:
            tensor = checkpoint.read(stored.part_name(name, part))
            parts[part] = stored.from_file(part, tensor, dtype)
    return PackedTensor.from_parts(parts, scheme, shape)


def _scale_differences(
    source: Checkpoint, structure: Structure, packed: Checkpoint, config: QuantizationConfig
) -> Iterator[str]:
    """Yield the static scales of inputs, keys and values that are not those of the source, if it has any."""
    stored = [
        (config.scheme_of(name), one) for name, linear in structure.linears.items() for one in linear.stored
    ]
    for scheme, name in stored:
        tensor = source.tensors.get(f"{name}.weight")
        spec = None if tensor is None else tensor.grid_spec
        if scheme is None or tensor is None or spec is None:
            continue
        own, (parent, _, leaf) = stored_module(tensor), name.rpartition(".")
        expected: dict[str, StoredScale | None] = {}
        if scheme.activations is not None and scheme.activations.part is not None:
            found = source.activations.of_inputs(own, spec.format)
            expected[f"{name}.{scheme.activations.part}"] = None if found is None else found[1]
        if config.kv_scales and leaf in KV_PARTS:
            states = source.activations.of_states(own.rpartition(".")[0])
            expected[f"{parent}.{KV_PARTS[leaf]}"] = dict(zip(KV_PARTS, states, strict=True))[leaf]
        for entry, scale in expected.items():
            if scale is None:
                continue
            right = scale.value(source.read_stored)
            if entry not in packed.tensors:
                yield f"{entry}, a static scale of the source, is not there"
            elif (value := packed.read(entry).flatten().tolist()) != [right]:
                yield f"{entry} is {value}, and {right} in the source"


def _differences(
    source: Checkpoint, packed: Checkpoint, name: str, found: PackedTensor | None
) -> Iterator[str]:
    """Yield the first difference of a tensor, if there is one."""
    tensor = source.tensors.get(name) or source.uncut[name]
    shape = tensor.shape
    if found is None and (other := packed.tensors[name].shape) != shape:
        yield f"{name} has shape {other}, and {shape} in the source"
        return
    rows = shape[0] if shape else 1
    step = max(1, _PIECE * rows // max(1, tensor.elements))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        expected = source.read(name, start, stop)
        values = packed.read(name, start, stop) if found is None else found.dequantize(start=start, stop=stop)
        wrong = values.to(torch.promote_types(values.dtype, expected.dtype)) != expected
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            index = ", ".join(map(str, [start + at[0], *at[1:]]))
            yield (
                f"{name}[{index}] is {values[tuple(at)].item()!r}, and {expected[tuple(at)].item()!r} in the "
                "source"
            )
            return
