"""Map names of stored tensors to parameters of the model, by the renaming rules of transformers."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import TransposedTensor
from quantkit.errors import CheckpointError
from quantkit.model.model_class import build, model_class, model_config, of_mapping
from quantkit.model.parts import embeddings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quantkit.model.experts import ExpertsSpec

#: Suffix of a part of a packed matrix.
PART = re.compile(r"\.weight_\w+$")
#: quantkit's names for matrices of experts that transformers reads from one fused tensor.
_OWN = re.compile(r"(.+)\.\d+\.(gate_proj|up_proj|down_proj)\.weight")
#: Fused parameters and places of such matrices.
_OWN_PLACES = {
    "gate_proj": (("gate_up_proj", 0),),
    "up_proj": (("gate_up_proj", 1), ("up_proj", 0)),
    "down_proj": (("down_proj", 0),),
}
#: Sequences of transformers' operations that stack experts.
STACKED = ("MergeModulelist",), ("MergeModulelist", "Concatenate")


@dataclass(frozen=True)
class Renamed:
    """Parameter of a stored tensor, and the loading operations that create the parameter from tensors.

    Without operations, the tensor is the parameter. `converter` is transformers' record of the operations.
    """

    parameter: str
    operations: tuple[Any, ...] = ()
    part: int = 0
    #: True if the name is quantkit's own.
    own: bool = False
    converter: Any = None

    @property
    def is_fused(self) -> bool:
        """Return True if the parameter contains more than this tensor."""
        return self.own or bool(self.operations)

    @property
    def is_stacked(self) -> bool:
        """Return True if the tensor is a matrix of one expert in the parameter."""
        return self.own or tuple(type(one).__name__ for one in self.operations) in STACKED


def model_names(model: "nn.Module", stored: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """Map each stored name to (model parameter, True if the parameter fuses several stored tensors)."""
    return {name: (one.parameter, one.is_fused) for name, one in renamed(model, stored)}


def as_matrices(checkpoint: Checkpoint, stored: Iterable[str]) -> Checkpoint:
    """Return `checkpoint` with the tensors `stored`, [K, N] in files, read as [N, K]."""
    changed = {name: checkpoint.tensors[name] for name in stored}
    turned = {name: TransposedTensor.from_stored(one.as_stored) for name, one in changed.items()}
    return replace(checkpoint, tensors={**checkpoint.tensors, **turned}) if turned else checkpoint


def other_names(
    model: "nn.Module", names: Mapping[str, tuple[str, bool]], checkpoint: Checkpoint
) -> tuple[dict[str, tuple[str, ...]], str | None]:
    """Map modules of `model` to their names in the class that AutoModelForCausalLM builds.

    Also return the name of that class's head if `model` has none. `names` is `model_names` of `model`. The
    mapping is empty if the class is the same, or there is none.
    """
    config, directory = checkpoint.config, checkpoint.directory
    found = of_mapping("MODEL_FOR_CAUSAL_LM_MAPPING", model_config(config, directory))
    if found is None or found[0] is type(model):
        return {}, None
    try:
        text: Any = build(*found, directory)
    except CheckpointError:
        return {}, None
    entries = text.state_dict(keep_vars=True)
    aliases: dict[str, dict[str, None]] = {}
    for stored, (parameter, fused) in model_names(text, checkpoint.tensors).items():
        own, _ = names[stored]
        if (fused or parameter in entries) and parameter != own:
            aliases.setdefault(own.removesuffix(".weight"), {})[parameter.removesuffix(".weight")] = None
    embedding, head = (
        tuple(_name_of(one, embeddings(one, side)) for one in (model, text)) for side in ("input", "output")
    )
    # A tied head has no tensor.
    for mine, other in (embedding, head):
        if mine is not None and other is not None and mine != other:
            aliases.setdefault(mine, {})[other] = None
    return {name: tuple(of) for name, of in aliases.items()}, head[1] if head[0] is None else None


@dataclass(frozen=True)
class OwnNames:
    """Names in the checkpoint's own class, for a model of another class.

    modules   own name by module of the other class; without modules that have no tensor, such as a new head
    prefix    prefix of the base model, in the files and in the other class; None if transformers maps it
    """

    modules: Mapping[str, str]
    prefix: tuple[str, str] | None = None


def names_in_own_class(
    model: "nn.Module", config: Mapping[str, Any], directory: Path, stored: Iterable[str]
) -> OwnNames | None:
    """Return the names of a checkpoint for `model`; None if `model` is of the checkpoint's own class.

    `stored` are the tensors of the checkpoint, packed or not.
    """
    cls, parsed = model_class(config, directory)
    if cls is type(model) or cls.__name__ == type(model).__name__:
        return None
    weights = list(dict.fromkeys(PART.sub(".weight", name) for name in stored))
    own = model_names(build(cls, parsed, directory), weights)
    prefix = _base_prefix(cls.base_model_prefix, model)
    inside = {name: _with_prefix(name, prefix) for name in weights}
    here = model_names(model, inside.values())
    modules = {
        here[inside[name]][0].removesuffix(".weight"): parameter.removesuffix(".weight")
        for name, (parameter, _) in own.items()
    }
    return OwnNames(modules, prefix)


def _base_prefix(own: str, model: Any) -> tuple[str, str] | None:
    """Return the prefixes of the base model in the files and in `model`, each with its dot, or None.

    `own` is its name in the files. The second prefix is "" if `model` has no base model inside. None if both
    names are equal, `own` is "", or `model` has a module of that name.
    """
    here = model.base_model_prefix
    if own in ("", here) or hasattr(model, own):
        return None
    return f"{own}.", f"{here}." if hasattr(model, here) else ""


def _with_prefix(name: str, prefix: tuple[str, str] | None) -> str:
    return name if prefix is None or not name.startswith(prefix[0]) else prefix[1] + name[len(prefix[0]) :]


def _name_of(model: "nn.Module", module: "nn.Module | None") -> str | None:
    return next((name for name, one in model.named_modules() if one is module), None)


@dataclass(frozen=True)
class ExpertPart:
    """Place of a stored matrix in a fused parameter: its expert, and its index there (gate 0, up 1)."""

    parameter: str
    expert: int
    part: int
    spec: "ExpertsSpec"

    def of(self, fused: "torch.Tensor") -> "torch.Tensor":
        """Return the view of this part, [N, K], in `fused`, the parameter with all experts."""
        return self.spec.matrix(fused[self.expert], self.parameter.rpartition(".")[2], self.part)


def expert_parts(model: "nn.Module", stored: Iterable[str]) -> dict[str, ExpertPart]:
    """Map each stored name that is stacked with other experts to its place.

    Leaves out tensors that transformers does more to when it loads them than stack them.
    """
    from quantkit.model.experts import ExpertsSpec, spec_of

    experts: dict[tuple[str, int, bool], list[str]] = {}
    for name, one in renamed(model, stored):
        if one.is_stacked:
            experts.setdefault((one.parameter, one.part, one.own), []).append(name)
    # transformers' operations stack matrices, with up below gate.
    stacked = ExpertsSpec()
    owners = {parameter.rpartition(".")[0] for parameter, _, own in experts if own}
    specs = {owner: spec_of(model.get_submodule(owner)) for owner in owners}
    return {
        name: ExpertPart(parameter, expert, part, specs[parameter.rpartition(".")[0]] if own else stacked)
        for (parameter, part, own), names in experts.items()
        # transformers stacks in this order.
        for expert, name in enumerate(sorted(names, key=natural))
    }


def own_name(owner: str, expert: int | str, parameter: str, part: int) -> str:
    """Return the name, such as `experts.3.up_proj.weight`, that quantkit gives to a matrix of experts.

    `owner` is the name of the experts, `parameter` the fused parameter inside them, and `part` the index of
    the matrix in it.
    """
    leaf = next(leaf for leaf, places in _OWN_PLACES.items() if (parameter, part) in places)
    return f"{owner}.{expert}.{leaf}.weight"


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts dotted names with numbers by value: expert 10 comes after expert 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def renamed(model: "nn.Module", stored: Iterable[str]) -> Iterator[tuple[str, Renamed]]:
    """Yield each stored name with its parameter and loading operations."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    parameters = model.state_dict(keep_vars=True)
    prefix = getattr(model, "base_model_prefix", "")

    for name in stored:
        target, found = name, Renamed(name)
        for renaming in renamings:
            target = renaming.rename_source_key(target)[0]
        for converter in converters:
            target, matched = converter.rename_source_key(target)
            if matched is not None:
                part = converter.source_patterns.index(matched)
                found = Renamed(target, tuple(converter.operations), part, converter=converter)
                break
        if not found.operations:
            found = _own(target, parameters, prefix) or _at(found, target)
        target = found.parameter
        inside = target.removeprefix(f"{prefix}.")
        if target not in parameters and f"{prefix}.{target}" in parameters:
            # A file of the bare decoder, without lm_head.
            target = f"{prefix}.{target}"
        elif target not in parameters and inside in parameters and not hasattr(model, prefix):
            # The bare decoder of a file with lm_head.
            target = inside
        if target not in parameters and name in parameters:
            # As transformers treats the norm of DeepSeek-V4, which a rule for names inside blocks renames.
            target, found = name, Renamed(name)
        yield name, _at(found, target)


def _at(found: Renamed, parameter: str) -> Renamed:
    """Return `found` with another parameter, without a copy if it is the same: models have many tensors."""
    return found if found.parameter == parameter else replace(found, parameter=parameter)


def _own(name: str, parameters: Mapping[str, Any], prefix: str) -> Renamed | None:
    """Return the parameter and place of a matrix of experts, if `name` is the name that quantkit gives it.

    `parameters` are those of the model, `prefix` is the name of its base model. None for other names.
    """
    match = None if name in parameters else _OWN.fullmatch(name)
    if match is None:
        return None
    for leaf, part in _OWN_PLACES[match[2]]:
        parameter = f"{match[1]}.{leaf}"
        if {parameter, f"{prefix}.{parameter}", parameter.removeprefix(f"{prefix}.")} & parameters.keys():
            return Renamed(parameter, part=part, own=True)
    return None


def tied_parameters(model: Any, stored: Mapping[str, str]) -> dict[str, str]:
    """Map each parameter without a tensor to the stored name of the parameter to which it is tied."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    pairs = [(name, other) for group in groups.values() for name in group for other in group]
    pairs += [*ties.items(), *((source, target) for target, source in ties.items())]
    return {name: stored[other] for name, other in pairs if name not in stored and other in stored}
