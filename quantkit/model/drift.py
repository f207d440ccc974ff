"""Faults of supported transformers versions that packed models meet, mended after loading."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.core_model_loading import MergeModulelist, SplitModulelist, build_glob_alternation

from quantkit.model.modules import packed_modules


def mend(model: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Mend what applies; does nothing with a version that needs nothing.

    `dtypes` are those that the parameters of `model` had before they were loaded.
    """
    _keep_expert_shapes(model)
    _keep_offloaded_dtypes(model)
    _cast_renamed(model, dtypes)


def _keep_expert_shapes(model: Any) -> None:
    """Make `save_pretrained` split merged experts exactly.

    Before 5.22 `[E, N, 1]` becomes E tensors of shape `[N]`: the scales of experts with one group per row.
    """
    probe = SplitModulelist(dim=0).convert({"*": torch.empty(1, 1, device="cpu")}, ["*"], ["*"])
    if all(tensor.ndim == 1 for tensor in probe.values()):
        return
    for conversion in getattr(model, "_weight_conversions", None) or ():
        operations = getattr(conversion, "operations", [])
        for i, operation in enumerate(operations):
            if type(operation) is MergeModulelist:
                operations[i] = _Merge(operation.dim)


def _keep_offloaded_dtypes(model: Any) -> None:
    """Make accelerate read offloaded words and scales as they are in the file.

    5.12 tells it to cast everything to the model's dtype, which rounds the words.
    """
    for _, module in packed_modules(model):
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        index = getattr(getattr(weights, "dataset", None), "index", {})
        for name, parameter in module.named_parameters():
            entry = index.get(f"{getattr(weights, 'prefix', '')}{name}", {})
            if "safetensors_file" in entry and "dtype" in entry:
                entry["dtype"] = str(parameter.dtype).removeprefix("torch.")


def _cast_renamed(model: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give dense parameters the dtype that the model was asked for in.

    In 5.12 and 5.17 those that are loaded under another name than that in the file, such as routers of
    Mixtral, keep the file's, if anything of the model is packed.
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
