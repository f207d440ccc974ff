"""What transformers and accelerate get wrong of one packed model while it is loaded, or saved."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import MergeModulelist, SplitModulelist, build_glob_alternation

from quantkit.model.structure import reads_weight
from quantkit.runtime.replace import packed_modules

#: Where an entry of accelerate's index keeps the dtype that it had.
_DTYPE_BEFORE = "quantkit_dtype_before"
#: Where a module keeps that quantkit set its flag.
_MARKED = "_quantkit_marked_initialized"


def skip_initializing(model: nn.Module) -> None:
    """Have transformers initialize no module of whose packed children it asks for the weight.

    Mambas ask for that of a projection, loaded or not. Modules with buffers compute those then.
    """
    for name, _ in packed_modules(model):
        parent, _, leaf = name.rpartition(".")
        owner: Any = model.get_submodule(parent)
        if not owner._buffers and reads_weight(type(model)._init_weights, leaf):  # type: ignore[attr-defined]
            owner._is_hf_initialized = True
            setattr(owner, _MARKED, True)


def initialize_again(model: nn.Module) -> None:
    """Take back what `skip_initializing` set."""
    for module in model.modules():
        if vars(module).pop(_MARKED, False):
            vars(module).pop("_is_hf_initialized", None)


def skips_initializing(model: nn.Module) -> bool:
    """Whether `skip_initializing` set something in `model`."""
    return any(_MARKED in vars(module) for module in model.modules())


def keep_expert_shapes(model: Any) -> None:
    """Make `save_pretrained` split merged experts exactly.

    Before 5.22 `[E, N, 1]` becomes E tensors of shape `[N]`: the scales of experts with one group per row.
    """
    probe = SplitModulelist(dim=0).convert({"*": torch.empty(1, 1, device="cpu")}, ["*"], ["*"])
    if all(tensor.ndim == 1 for tensor in probe.values()):
        return
    _replace_operations(model, lambda one: _Merge(one.dim) if type(one) is MergeModulelist else one)


def split_as_before(model: Any) -> None:
    """Take back what `keep_expert_shapes` did."""
    _replace_operations(model, lambda one: MergeModulelist(one.dim) if isinstance(one, _Merge) else one)


def keeps_expert_shapes(model: Any) -> bool:
    """Whether `keep_expert_shapes` replaced something in `model`."""
    return any(isinstance(one, _Merge) for operations in _operations(model) for one in operations)


def _operations(model: Any) -> Iterator[list[Any]]:
    for conversion in getattr(model, "_weight_conversions", None) or ():
        yield getattr(conversion, "operations", [])


def _replace_operations(model: Any, replaced: Callable[[Any], Any]) -> None:
    for operations in _operations(model):
        operations[:] = [replaced(one) for one in operations]


def keep_offloaded_dtypes(model: Any) -> None:
    """Make accelerate read offloaded words and scales as they are in the file.

    5.12 tells it to cast everything to the model's dtype, which rounds the words.
    """
    for entry, parameter in _offloaded(model):
        dtype = str(parameter.dtype).removeprefix("torch.")
        if entry["dtype"] != dtype:
            entry[_DTYPE_BEFORE], entry["dtype"] = entry["dtype"], dtype


def cast_offloaded(model: Any) -> None:
    """Take back what `keep_offloaded_dtypes` did."""
    for entry, _ in _offloaded(model):
        entry["dtype"] = entry.pop(_DTYPE_BEFORE, entry["dtype"])


def keeps_offloaded_dtypes(model: Any) -> bool:
    """Whether `keep_offloaded_dtypes` changed something of `model`."""
    return any(_DTYPE_BEFORE in entry for entry, _ in _offloaded(model))


def _offloaded(model: Any) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
    """What accelerate knows of each parameter of a packed module that is in a file, and the parameter."""
    for _, module in packed_modules(model):
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        index = getattr(getattr(weights, "dataset", None), "index", {})
        for name, parameter in module.named_parameters():
            entry = index.get(f"{getattr(weights, 'prefix', '')}{name}", {})
            if "safetensors_file" in entry and "dtype" in entry:
                yield entry, parameter


def cast_renamed(model: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give dense parameters of `model` the dtype that it was asked for in; `dtypes` are those before loading.

    In 5.12 and 5.17 those that are loaded under another name than that in the file, such as routers of
    Mixtral, keep the file's, if anything of the model is packed. It changes numbers of the model, and nothing
    of transformers, so there is nothing to undo.
    """
    plan = model._get_dtype_plan(model.dtype)
    # Those that the model wants in another dtype than its own.
    planned = build_glob_alternation(list(plan))[0] if plan else None
    packed = {id(p) for _, module in packed_modules(model) for p in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        dtype = dtypes.get(name, parameter.dtype)
        known = id(parameter) in packed or parameter.is_meta or (planned and planned.search(name))
        if parameter.dtype != dtype and not known:
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
