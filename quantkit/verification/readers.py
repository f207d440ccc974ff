"""Find out who can load a packed checkpoint, from config.json and tensor names and shapes alone.

The checkpoint's own class must load it with quantkit. transformers without quantkit relies on
compressed-tensors for which modules are packed: targeted classes, except ignored modules. A dense linear
missing from the ignored ones would be filled with random numbers, with only a warning.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.checkpoint.compressed_tensors import stored_format
from quantkit.checkpoint.model_record import LayerRecord
from quantkit.checkpoint.quantization_config import Assignment, QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import CheckpointError
from quantkit.model.completeness import missing_parameters
from quantkit.model.conversions import conversions
from quantkit.model.model_class import build, meta_model, model_class, model_config, of_mapping, why_no_class
from quantkit.model.names import PART, model_names
from quantkit.model.structure import MOVED
from quantkit.quantization.plan import Plan
from quantkit.quantization.plan_warnings import EXPERTS_OF_SGLANG, Note, reader_notes, readers_beside
from quantkit.runtime.replace import is_elsewhere, swap_modules
from quantkit.runtime.transformers.headers import check_tensors, stored_by_entry
from quantkit.runtime.transformers.registration import register_plugin

#: The name of a matrix of an expert in JSON.
_EXPERT = re.compile(r'\.experts\.\d+\.(\w+)"')


def with_readers(planned: Plan, checkpoint: Checkpoint) -> Plan:
    """Return `planned` with only those readers that load its output; `checkpoint` is the source.

    Raises `CheckpointError` if its own class cannot load it with quantkit. Without such a class this is not
    checked, and a note says so.
    """
    if not planned.quantized_weights:
        return planned
    directory = checkpoint.directory
    tensors = {spec.name: spec for shard in planned.shards for spec in shard.specs}
    check_written(planned, checkpoint, tensors)
    reason = why_no_class(planned.model_config, directory)
    if reason is not None:
        portable = planned.config.container == "compressed-tensors"
        who = "" if portable else ", and other tools do not know its formats: for them take int4, int8 or fp8"
        note = f"{reason}: it is not known who can run the result{who}."
        return replace(planned, notes=(*planned.notes, note))
    if not planned.readers:
        return planned
    reason = _why_none(planned.model_config, directory, tensors)
    return planned if reason is None else replace(planned, readers=(), notes=(*planned.notes, reason))


def check_written(planned: Plan, checkpoint: Checkpoint, tensors: Mapping[str, TensorSpec]) -> None:
    """Raise `CheckpointError` unless the class of `planned` loads the `tensors` of its output.

    Without such a class, the tensors are compared with those of the source `checkpoint`. Each must exist,
    dense or packed as in the output's config, and no other.
    """
    if why_no_class(planned.model_config, checkpoint.directory) is None:
        check_own_class(planned.model_config, checkpoint.directory, tensors, planned.dense)
        return
    config = QuantizationConfig.from_dict(planned.model_config["quantization_config"])
    linears = {f"{one}.weight": (a.module, a.shape) for a in planned.assignments for one in a.stored}
    expected: dict[str, tuple[int, ...]] = {}
    for name, source in checkpoint.tensors.items():
        module, shape = linears.get(name, ("", (0, 0)))
        if name in linears and (scheme := config.scheme_of(module)) is not None:
            stored = stored_format(scheme.for_columns(shape[1]), shape[1], config.container)
            shapes = stored.shapes(scheme.for_columns(shape[1]).storage_shapes(shape))
            expected |= {stored.part_name(name, part): of for part, (_, of) in shapes.items()}
        else:
            expected[name] = source.as_stored.shape
    found = {name: tensor.shape for name, tensor in tensors.items()}
    wrong = sorted(name for name in expected | found if expected.get(name) != found.get(name))
    if wrong:
        has, should = found.get(wrong[0], "nothing"), expected.get(wrong[0], "nothing")
        raise CheckpointError(
            f"{checkpoint.directory}: the output has {has} for {wrong[0]!r}, and should have {should}. That "
            "is a fault of quantkit: please report it with config.json."
        )


def readers_of(
    checkpoint: Checkpoint, layers: Mapping[str, LayerRecord]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return who reads a packed checkpoint of `layers` without quantkit, and notes on who does not."""
    reason = why_no_class(checkpoint.config, checkpoint.directory)
    if reason is not None:
        return (), (f"{reason}: it is not known who can run this.",)
    notes = stored_notes(checkpoint.config, layers)
    if notes is None:
        return (), ()
    reason = _why_none(checkpoint.config, checkpoint.directory, checkpoint.tensors)
    texts = tuple(note.text for note in notes)
    return (readers_beside(notes), texts) if reason is None else ((), (reason,))


def stored_notes(config: Mapping[str, Any], layers: Mapping[str, LayerRecord]) -> tuple[Note, ...] | None:
    """Return notes on engines that cannot read a packed checkpoint of `layers`.

    None if only quantkit reads it. `config` is its config.json.
    """
    section = config["quantization_config"]
    if QuantizationConfig.from_dict(section).container != "compressed-tensors":
        return None
    return tuple(reader_notes(config, stored_assignments(section, layers)))


def stored_assignments(section: Mapping[str, Any], layers: Mapping[str, LayerRecord]) -> list[Assignment]:
    """Return the `Assignment` of each of the `layers` of a checkpoint with this `quantization_config`."""
    parsed = QuantizationConfig.from_dict(section)
    # Experts that are not all stored in one way are named.
    leaf = min(set(_EXPERT.findall(json.dumps(section))) - EXPERTS_OF_SGLANG, default="")
    return [
        Assignment(
            name,
            (f"{name}.{leaf}".rstrip("."),) * layer.matrices,
            (layer.shape[0], layer.shape[1]),
            None if layer.scheme is None else parsed.scheme_of(name),
            head=layer.kind == "lm_head",
        )
        for name, layer in layers.items()
    ]


def _why_none(config: Mapping[str, Any], directory: Path, tensors: Mapping[str, TensorSpec]) -> str | None:
    reason = why_not_transformers(config, directory, tensors)
    return None if reason is None else f"only quantkit reads this: {reason}."


def check_own_class(
    config: Mapping[str, Any], directory: Path, tensors: Mapping[str, TensorSpec], dense: Mapping[str, str]
) -> None:
    """Raise `CheckpointError` unless the class of `config` finds each of its parameters in `tensors`.

    No tensor may be missing, of another shape or unexpected, except for tensors that are no parameters in the
    source either. `dense` are its dense tensors with the reason for each.
    """
    register_plugin()
    from quantkit.runtime.transformers.quantizer import QuantkitConfig, QuantkitQuantizer

    section = config["quantization_config"]
    model = meta_model(config, directory)
    swap_modules(model, QuantizationConfig.from_dict(section))
    quantizer = QuantkitQuantizer(QuantkitConfig(**section))
    check_tensors(model, quantizer, tensors)
    by_entry = stored_by_entry(model, quantizer, tensors)
    entries = model.state_dict()
    unexpected = [
        one.name
        for target, several in by_entry.items()
        for one in several
        if target not in entries
        and one.name not in dense
        and not is_elsewhere(model, target.rpartition(".")[0])
    ]
    # transformers may make several parameters from one tensor.
    missing = [] if not MOVED.isdisjoint(dense.values()) else missing_parameters(model, by_entry)
    if missing or unexpected:
        what = f"no tensor for {missing[0]!r}" if missing else f"no place for tensor {unexpected[0]!r}"
        raise CheckpointError(
            f"{directory}: a {type(model).__name__} has {what} of the packed checkpoint. That is a fault of "
            "quantkit: please report it with config.json, and leave the linear dense with --rule 'NAME=keep'."
        )


def why_not_transformers(
    config: Mapping[str, Any], directory: Path, tensors: Mapping[str, TensorSpec]
) -> str | None:
    """Return why transformers without quantkit would misread a checkpoint; None if it reads it.

    Looks at the class that config.json names and at what AutoModelForCausalLM makes of it.
    """
    own = model_class(config, directory)
    causal = of_mapping("MODEL_FOR_CAUSAL_LM_MAPPING", model_config(config, directory))
    for cls, parsed in dict([own] if causal is None else [own, causal]).items():
        try:
            model = build(cls, parsed, directory)
        except CheckpointError:
            if cls is own[0]:
                raise
            continue  # That class refuses this config, as ReformerModelWithLMHead refuses an encoder's.
        for problem in chain(
            _misread(model, config["quantization_config"], tensors), _stopped(model, tensors)
        ):
            return f"{cls.__name__} {problem}"
    return None


def _stopped(model: nn.Module, tensors: Mapping[str, TensorSpec]) -> Iterator[str]:
    """Yield the reasons why transformers cannot load packed weights into `model`, which is consumed."""
    packed = _packed_names(tensors)
    weights = dict.fromkeys(PART.sub(".weight", name) for name in tensors)
    for parameter, one in conversions(model, weights).items():
        sources = {name for names in one.sources.values() for name in names}
        # transformers looks for packed parts of tensors that match such a rule.
        by_weight = any(pattern.endswith(".weight") for pattern in one.converter.source_patterns)
        if by_weight and parameter.endswith(".weight") and not sources & packed:
            yield f"has {parameter!r} in several tensors, which transformers does not join beside packed ones"
    modules = dict(model.named_modules())
    for name, (parameter, fused) in model_names(model, weights).items():
        owner = modules.get(parameter.rpartition(".")[0])
        if name in packed and not fused and owner is not None:
            owner._parameters.pop("weight", None)
    initialize: Any = getattr(model, "_init_weights", None)
    with torch.device("meta"), torch.no_grad():
        for name, module in model.named_modules():
            try:
                initialize(module)
            except Exception as error:  # Another model's code may fail in any way.
                if "no attribute 'weight'" in str(error):
                    yield f"initializes {name!r} by weights that packed linears do not have"
                    return


def taken_as_packed(model: nn.Module, section: Mapping[str, Any]) -> set[str]:
    """Return the names of linears and embeddings that compressed-tensors replaces for a config."""
    targets = {target for group in section["config_groups"].values() for target in group["targets"]}
    ignored = set(section["ignore"])
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
        and _matches(name, module, targets)
        and not _matches(name, module, ignored)
    }


def _packed_names(tensors: Mapping[str, TensorSpec]) -> set[str]:
    return {PART.sub(".weight", name) for name in tensors if name.endswith(".weight_scale")}


def _matches(name: str, module: nn.Module, patterns: Collection[str]) -> bool:
    """Return True if one of `patterns`, names of modules or classes, matches `module`."""
    return name in patterns or any(cls.__name__ in patterns for cls in type(module).__mro__)


def _misread(
    model: nn.Module, section: Mapping[str, Any], tensors: Mapping[str, TensorSpec]
) -> Iterator[str]:
    packed = _packed_names(tensors)
    weights = dict.fromkeys(PART.sub(".weight", name) for name in tensors)
    stored = {
        parameter.removesuffix(".weight"): name in packed
        for name, (parameter, _) in model_names(model, weights).items()
    }
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    taken = taken_as_packed(model, section)
    for name, _ in model.named_modules():
        # A tied weight has no tensor. A module with neither is new in this class, also in a dense checkpoint.
        is_packed = stored.get(name, False if f"{name}.weight" in ties else None)
        if is_packed is not None and is_packed != (name in taken):
            yield f"would take {name!r} to be {'dense' if is_packed else 'packed'}, which it is not"
