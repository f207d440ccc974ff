"""LoRA of PEFT on packed experts, by the class that PEFT has for parameters.

PEFT targets fused experts as parameters (`target_parameters`), and adds scaling * B A to the weights of all
experts in each forward. Packed experts add (x A^T) B^T to the products instead. Names and shapes are PEFT's,
so its checkpoints are the same for both. If both parameters are adapted, one wrapper wraps the other.

    experts                lora_A, lora_B of down_proj
    experts.base_layer     lora_A, lora_B of gate_up_proj
    ....base_layer         PackedExperts
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from quantkit.errors import UsageError
from quantkit.kernels.moe.experts_lora import ExpertsLora
from quantkit.runtime.packed_experts import PackedExperts

#: Initializations of LoRA that do not read the weight, beside True and False.
_WITHOUT_WEIGHT = ("gaussian",)
DENSE = "Make the model dense first, with model.dequantize(), or "
_MERGE = (
    "a LoRA cannot be merged into packed experts: its sum with the codes is not on their grid. Save it and "
    "run `quantkit merge`, which adds it to the original weights and rounds. "
    f"{DENSE}load the adapter into the original model, to merge there."
)


def check_start(config: Any, kind: str) -> None:
    """Raise `UsageError` if the LoRA `config` initializes by the dense weight of a packed `kind`."""
    start = config.init_lora_weights
    if isinstance(start, str) and start not in _WITHOUT_WEIGHT:
        raise UsageError(
            f"init_lora_weights={start!r} reads or changes the dense weight, which a packed {kind} "
            f"does not have. {DENSE}use True or 'gaussian'."
        )


@contextmanager
def named_as_dense(model: Any) -> Iterator[None]:
    """Context manager: packed experts in `model` name their own parameters as the dense ones do.

    `parameters()` of a module with its children is as before.
    """
    experts = [module for module in model.modules() if isinstance(module, PackedExperts)]
    for module in experts:
        vars(module)["named_parameters"] = partial(_named_parameters, module)
    try:
        yield
    finally:
        for module in experts:
            del vars(module)["named_parameters"]


def _named_parameters(module: PackedExperts, prefix: str = "", recurse: bool = True, **options: Any) -> Any:
    if recurse:
        return PackedExperts.named_parameters(module, prefix, recurse, **options)
    return ((name, logical_parameter(module, name)) for name in module.logical())


def logical_parameter(experts: PackedExperts, name: str) -> torch.Tensor:
    """Return a meta tensor of the shape that the parameter has in the dense module, such as [E, 2I, H]."""
    _, (rows, columns), count = experts.logical()[name]
    shape = (columns, count * rows) if experts.spec.transposed else (count * rows, columns)
    return torch.empty((experts.num_experts, *shape), dtype=torch.float32, device="meta")


@cache
def experts_lora_class() -> type:
    """Return the class of a LoRA on a parameter of packed experts; its base is PEFT's `ParamWrapper`.

    Raises `UsageError` if PEFT has none.
    """
    try:
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError as error:
        from peft import __version__

        raise UsageError(
            f"LoRA on packed experts takes a peft with target_parameters; found {__version__}. Upgrade it."
        ) from error

    class PackedLoraExperts(ParamWrapper):  # type: ignore[misc]
        """LoRA beside one parameter of packed experts, with gradients of A and B."""

        def __init__(self, base_layer: Any, adapter_name: str, config: Any, **kwargs: Any) -> None:
            check_start(config, "module of experts")
            packed = base_layer.get_base_layer() if hasattr(base_layer, "get_base_layer") else base_layer
            if packed.spec.transposed != packed.is_transposed or packed.tensor_parallel is not None:
                what = "stored transposed" if packed.tensor_parallel is None else "divided among ranks"
                raise UsageError(
                    f"{kwargs.get('target_name')!r} is of packed experts that are {what}, which takes no "
                    f"LoRA. {DENSE}name linears only."
                )
            super().__init__(base_layer, adapter_name, config=config, **kwargs)

        def get_param(self) -> torch.Tensor:
            return logical_parameter(self.get_base_layer(), self.parameter_name)

        def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: Any = None) -> None:
            parameters = self.get_base_layer()._parameters.values()
            found = next(one.device for one in parameters if one is not None and not one.is_meta)
            super(ParamWrapper, self)._move_adapter_to_device_of_base_layer(adapter_name, device or found)

        def forward(self, *call: torch.Tensor, **options: Any) -> torch.Tensor:
            self._check_forward_args(*call, **options)
            loras, layer = {}, self
            while isinstance(layer, PackedLoraExperts):
                loras[layer.parameter_name] = layer._active_loras()
                layer = layer.base_layer
            y: torch.Tensor = layer(*call, loras=loras)
            return y

        def _active_loras(self) -> list[ExpertsLora]:
            names = () if self.disable_adapters else self.active_adapters
            return [
                ExpertsLora(
                    self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name], self.num_experts
                )
                for name in names
                if name in self.lora_A
            ]

        def get_delta_weight(self, adapter_name: str, *_: Any, **__: Any) -> torch.Tensor:
            raise UsageError(_MERGE)

        def merge(self, *_: Any, **__: Any) -> None:
            raise UsageError(_MERGE)

    # PEFT knows wrappers, which it nests, by the name of their class.
    PackedLoraExperts.__name__ = "ParamWrapper"
    return PackedLoraExperts
