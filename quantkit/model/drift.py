"""Faults of supported transformers versions that packed models meet, mended after loading."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.core_model_loading import MergeModulelist, SplitModulelist

from quantkit.model.modules import packed_modules


def mend(model: Any) -> None:
    """Mend what applies; does nothing with a version that needs nothing."""
    _keep_expert_shapes(model)
    _keep_offloaded_dtypes(model)


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
