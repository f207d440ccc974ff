"""Work around faults of transformers and accelerate in loading and saving a packed model."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
)

from quantkit.model.experts import MATRICES
from quantkit.model.names import own_name
from quantkit.model.weight_reads import passes_on, reads_weight
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.replace import packed_modules

#: Key for the original dtype of an entry in accelerate's index of offloaded weights.
_DTYPE_BEFORE = "quantkit_dtype_before"
#: Attributes of a conversion that say in which submodel it applies.
_SCOPES = ("scope_prefix", "base_model_prefix")
#: Attribute of modules whose `_is_hf_initialized` quantkit has set.
_MARKED = "_quantkit_marked_initialized"


def skip_initializing(model: nn.Module) -> None:
    """Skip the initialization of modules that would read the weight of a packed child, which has no weight.

    Mamba and ModernBERT read weights of projections, even after loading, and Qwen3-Omni reads weights of
    experts. Modules with buffers are still initialized, because that computes the buffers.
    """
    for name, module in packed_modules(model):
        parameters = module.spec.parameters if isinstance(module, PackedExperts) else ("weight",)
        parent, _, leaf = name.rpartition(".")
        owner: Any = model.get_submodule(parent)
        setup = _setup_of(model, parent)
        read = any(reads_weight(setup, leaf, parameter) for parameter in parameters)
        if not owner._buffers and (read or passes_on(setup, leaf)):
            owner._is_hf_initialized = True
            setattr(owner, _MARKED, True)


def _setup_of(model: nn.Module, name: str) -> Any:
    """Return the method `_init_weights` that initializes module `name`: of the innermost model around it."""
    parts = name.split(".")
    inside = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts), 0, -1))
    owner: Any = next((one for one in inside if hasattr(one, "_init_weights")), model)
    return type(owner)._init_weights


def initialize_again(model: nn.Module) -> None:
    """Undo `skip_initializing`: no module of `model` is skipped any longer."""
    for module in model.modules():
        if vars(module).pop(_MARKED, False):
            vars(module).pop("_is_hf_initialized", None)


def skips_initializing(model: nn.Module) -> bool:
    """Return True if `skip_initializing` made transformers skip a module of `model`."""
    return any(_MARKED in vars(module) for module in model.modules())


def input_parts_of_experts(model: nn.Module) -> frozenset[str]:
    """Return the names of the parts of packed experts that are static input scales, such as "input_scale"."""
    return frozenset(
        scheme.part
        for _, module in packed_modules(model)
        if isinstance(module, PackedExperts)
        for scheme in module.activations
        if scheme.part is not None
    )


def parameters_of_experts(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names of parameters, such as "gate_up_proj", by the name of each packed experts module."""
    return {
        name: tuple(module.spec.parameters)
        for name, module in packed_modules(model)
        if isinstance(module, PackedExperts)
    }


def merge_experts(experts: Mapping[str, Sequence[str]], conversions: Iterable[Any]) -> list[Any]:
    """Return `WeightConverter`s that merge one tensor per expert and matrix into fused parameters.

    `experts` has the names of the parameters by module. Parameters that `conversions`, those of the model's
    class, merge already are left out.
    """
    merged = [
        pattern
        for one in conversions
        if any(isinstance(operation, MergeModulelist) for operation in getattr(one, "operations", ()))
        for pattern in one._original_target_patterns
    ]
    found: dict[str, Any] = {}
    for name, parameters in experts.items():
        # By the last name of the module, a pattern matches all layers.
        owner = rf"\.{name.rpartition('.')[2]}"
        for parameter in parameters:
            if any(re.search(f"{pattern}$", f"{name}.{parameter}") for pattern in merged):
                continue
            parts = range(len(MATRICES[parameter]))
            sources = [f"{owner}.{own_name('', '*', parameter, part).lstrip('.')}" for part in parts]
            stack = [MergeModulelist(dim=0), *([Concatenate(dim=1)] if len(parts) > 1 else [])]
            # In 5.17 a pattern also matches longer names that begin with it.
            found[f"{owner}.{parameter}"] = WeightConverter(sources, f"{owner}.{parameter}(?!_bias)", stack)
    return list(found.values())


def merge_input_scales(conversions: Iterable[Any], parts: Iterable[str]) -> list[Any]:
    """Return `WeightConverter`s that merge `parts`, such as "input_scale", as `conversions` merge weights.

    `parts` are names of input scales of experts. transformers itself merges only parts whose names begin with
    "weight".
    """
    found = []
    for one in conversions:
        merges = any(isinstance(operation, MergeModulelist) for operation in getattr(one, "operations", ()))
        sources = one._original_source_patterns if merges else ()
        if not sources or not all(source.endswith(".weight") for source in sources):
            continue
        for part in parts:
            own = WeightConverter(
                [source.removesuffix("weight") + part for source in sources],
                [f"{target}_{part}" for target in one._original_target_patterns],
                list(one.operations),
            )
            # A submodel may have conversions of its own.
            for name in _SCOPES:
                if hasattr(one, name):
                    setattr(own, name, getattr(one, name))
            found.append(own)
    return found


class RenamedBase(WeightRenaming):  # type: ignore[misc]
    """Renaming of the base model's prefix, for files that a model of another class saved."""

    @classmethod
    def of(cls, own: str, here: str) -> "RenamedBase":
        """Return the renaming of the prefix `own` to `here`, such as "model." to "transformer."."""
        return cls(rf"^{re.escape(own)}", here)


def forget_renamed_base(model: Any) -> None:
    """Make `save_pretrained` write the names of the model's own class, not the names in the loaded files."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions:
        model._weight_conversions = [one for one in conversions if not isinstance(one, RenamedBase)]


def keep_expert_shapes(model: Any) -> None:
    """Make `save_pretrained` split a tensor [E, ...] of merged experts into E tensors of exact shape [...].

    transformers before 5.22 splits [E, N, 1], the shape of scales for one group per row, into E tensors [N].
    """
    probe = SplitModulelist(dim=0).convert({"*": torch.empty(1, 1, device="cpu")}, ["*"], ["*"])
    if all(tensor.ndim == 1 for tensor in probe.values()):
        return
    _replace_operations(model, lambda one: _Merge(one.dim) if type(one) is MergeModulelist else one)


def split_as_before(model: Any) -> None:
    """Undo `keep_expert_shapes`: `save_pretrained` splits merged experts as transformers does."""
    _replace_operations(model, lambda one: MergeModulelist(one.dim) if isinstance(one, _Merge) else one)


def keeps_expert_shapes(model: Any) -> bool:
    """Return True if `keep_expert_shapes` changed `model`."""
    return any(isinstance(one, _Merge) for operations in _operations(model) for one in operations)


def _operations(model: Any) -> Iterator[list[Any]]:
    for conversion in getattr(model, "_weight_conversions", None) or ():
        yield getattr(conversion, "operations", [])


def _replace_operations(model: Any, replaced: Callable[[Any], Any]) -> None:
    for operations in _operations(model):
        operations[:] = [replaced(one) for one in operations]


def keep_offloaded_dtypes(model: Any) -> None:
    """Make accelerate read offloaded words and scales in the dtype of the file.

    transformers 5.12 makes accelerate cast everything to the dtype of the model, which rounds words.
    """
    for entry, parameter in _offloaded(model):
        dtype = str(parameter.dtype).removeprefix("torch.")
        if entry["dtype"] != dtype:
            entry[_DTYPE_BEFORE], entry["dtype"] = entry["dtype"], dtype


def cast_offloaded(model: Any) -> None:
    """Undo `keep_offloaded_dtypes`: accelerate casts offloaded words and scales again."""
    for entry, _ in _offloaded(model):
        entry["dtype"] = entry.pop(_DTYPE_BEFORE, entry["dtype"])


def keeps_offloaded_dtypes(model: Any) -> bool:
    """Return True if `keep_offloaded_dtypes` changed `model`."""
    return any(_DTYPE_BEFORE in entry for entry, _ in _offloaded(model))


def _offloaded(model: Any) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
    """Yield (entry in accelerate's index, parameter) for each packed parameter offloaded to a file."""
    for _, module in packed_modules(model):
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        index = getattr(getattr(weights, "dataset", None), "index", {})
        for name, parameter in module.named_parameters():
            entry = index.get(f"{getattr(weights, 'prefix', '')}{name}", {})
            if "safetensors_file" in entry and "dtype" in entry:
                yield entry, parameter


def cast_renamed(model: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Cast dense parameters of `model` back to their dtypes before loading, in place.

    `dtypes` has these dtypes by parameter name. Beside packed modules, transformers 5.12 and 5.17 leave
    parameters that are renamed on loading, such as routers of Mixtral, in the dtype of the file. There is no
    undo, because only values change.
    """
    plan = model._get_dtype_plan(model.dtype)
    # Parameters that the model keeps in another dtype than its own.
    planned = build_glob_alternation(list(plan))[0] if plan else None
    packed = {id(p) for _, module in packed_modules(model) for p in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        dtype = dtypes.get(name, parameter.dtype)
        keeps_dtype = id(parameter) in packed or parameter.is_meta or (planned and planned.search(name))
        if parameter.dtype != dtype and not keeps_dtype:
            parameter.data = parameter.data.to(dtype)


class _Merge(MergeModulelist):  # type: ignore[misc]
    @property
    def reverse_op(self) -> Any:
        return _Split(self.dim)


class _Split(SplitModulelist):  # type: ignore[misc]
    def convert(self, input_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        shapes: list[list[int]] = []
        for tensors in input_dict.values():
            shape = list((tensors[0] if isinstance(tensors, list) else tensors).shape)
            count = shape.pop(self.dim)
            shapes += [shape] * count
        split = super().convert(input_dict, *args, **kwargs)
        return {name: part.reshape(shape) for (name, part), shape in zip(split.items(), shapes, strict=True)}
