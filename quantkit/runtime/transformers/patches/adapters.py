"""Make PEFT put LoRA on packed linears.

PEFT recognizes the quantized linears of each tool by their classes, and has no registry for more.
"""

import inspect
import sys
from functools import cache
from typing import Any

import torch
import wrapt
from torch import nn

from quantkit.errors import UsageError
from quantkit.kernels.lora.lora_linear import Lora
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.packed_linear import PackedLinear, has_hooks
from quantkit.runtime.packed_module import PackedModule
from quantkit.runtime.replace import packed_modules
from quantkit.runtime.transformers.patches.experts_adapters import (
    DENSE,
    check_start,
    experts_lora_class,
    named_as_dense,
)

_LORA = "peft.tuners.lora.model"
_ALL_LINEAR = "all-linear"


def apply_once_imported() -> None:
    """Call `apply` when PEFT is imported, or now if PEFT is already imported."""
    wrapt.register_post_import_hook(apply, _LORA)


def apply(*_: Any) -> None:
    """Change PEFT so that LoRA wraps packed linears, and raises `UsageError` for other packed modules.

    target_modules="all-linear" then includes packed linears. Does nothing if already applied.
    """
    from peft.tuners import tuners_utils
    from peft.tuners.lora.model import LoraModel

    if is_applied():
        return
    original, targets = LoraModel._create_new_module, tuners_utils._maybe_include_all_linear_layers
    prepare, injected = LoraModel._prepare_model, LoraModel._inject_parameters

    def create(lora_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        if isinstance(base, PackedExperts) and kwargs.get("parameter_name"):
            return experts_lora_class()(target, adapter_name, config=lora_config, **kwargs)
        if isinstance(base, PackedModule) and not isinstance(base, PackedLinear):
            raise _not_for(kwargs.get("target_name") or type(base).__name__, base)
        if not isinstance(base, PackedLinear):
            return original(lora_config, adapter_name, target, **kwargs)
        return _lora_class()(target, adapter_name, config=lora_config, **kwargs)

    def include(peft_config: Any, model: Any) -> Any:
        modules = getattr(peft_config, "target_modules", None)
        found = targets(peft_config, model)
        if isinstance(modules, str) and modules.lower() == _ALL_LINEAR:
            head = getattr(model, "get_output_embeddings", lambda: None)()
            packed = {
                name
                for name, module in model.named_modules()
                if isinstance(module, PackedLinear) and module is not head
            }
            found.target_modules = {*found.target_modules, *packed}
        return found

    def prepared(self: Any, peft_config: Any, model: Any) -> Any:
        # PEFT warns only that no parameter has this name, and trains without.
        for target in getattr(peft_config, "target_parameters", None) or ():
            for name, module in packed_modules(model):
                for parameter in () if isinstance(module, PackedExperts) else module.logical():
                    if f".{name}.{parameter}".endswith(f".{target}"):
                        raise _not_for(f"{name}.{parameter}", module, model)
        return prepare(self, peft_config, model)

    def inject(self: Any, *arguments: Any, **options: Any) -> Any:
        with named_as_dense(self.model):
            return injected(self, *arguments, **options)

    create.quantkit_original = original  # type: ignore[attr-defined]
    include.quantkit_original = targets  # type: ignore[attr-defined]
    prepared.quantkit_original = prepare  # type: ignore[attr-defined]
    inject.quantkit_original = injected  # type: ignore[attr-defined]
    LoraModel._create_new_module = staticmethod(create)
    LoraModel._prepare_model, LoraModel._inject_parameters = prepared, inject
    tuners_utils._maybe_include_all_linear_layers = include


def _not_for(name: str, module: PackedModule, model: Any = None) -> UsageError:
    linears = () if model is None else packed_modules(model)
    names = {path.rpartition(".")[2] for path, one in linears if isinstance(one, PackedLinear)}
    example = f", such as target_modules={sorted(names)}" if names else ""
    remedy = f"Name linears only{example}."
    if isinstance(module, PackedExperts):
        parent = ".".join(name.split(".")[-2:])
        parameters = [f"{parent}.{parameter}" for parameter in module.logical()]
        remedy = f"Name its parameters instead, target_parameters={parameters}."
    return UsageError(
        f"{name!r} is packed, as {type(module).__name__}, which takes no LoRA. {remedy} Or make the model "
        "dense first, with model.dequantize()."
    )


def undo() -> None:
    """Restore the functions of PEFT that `apply` replaced."""
    if not is_applied():
        return
    from peft.tuners import tuners_utils
    from peft.tuners.lora.model import LoraModel

    LoraModel._create_new_module = staticmethod(LoraModel._create_new_module.quantkit_original)
    LoraModel._prepare_model = LoraModel._prepare_model.quantkit_original
    LoraModel._inject_parameters = LoraModel._inject_parameters.quantkit_original
    include = tuners_utils._maybe_include_all_linear_layers
    tuners_utils._maybe_include_all_linear_layers = include.quantkit_original


def is_applied() -> bool:
    """Return True if PEFT is imported and `apply` was called."""
    model = getattr(sys.modules.get(_LORA), "LoraModel", None)
    return hasattr(getattr(model, "_create_new_module", None), "quantkit_original")


def _is_plain(matrix: nn.Module) -> bool:
    """Return True if `matrix`, A or B of a LoRA, is a plain `nn.Linear` without bias and hooks."""
    return type(matrix) is nn.Linear and matrix.bias is None and not has_hooks(matrix)


@cache
def _lora_class() -> type:
    from peft.tuners.lora.layer import Linear

    if "config" not in inspect.signature(Linear.__init__).parameters:
        from peft import __version__

        raise UsageError(f"LoRA on packed linears takes peft 0.19 or newer; found {__version__}. Upgrade it.")

    class PackedLoraLinear(Linear):  # type: ignore[misc]
        """LoRA beside a packed linear: y = x W^T + b + scaling * B A x, with gradients of A and B."""

        def __init__(self, base_layer: Any, adapter_name: str, config: Any, **kwargs: Any) -> None:
            check_start(config, "linear")
            super().__init__(base_layer, adapter_name, config=config, **kwargs)

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # Without gradients the modules run, also in a traced step: both then compute the same.
            may_join = torch.is_grad_enabled() and not (args or kwargs)
            name = self._single_adapter() if may_join else None
            if name is not None:
                a, b, dropout = (of[name] for of in (self.lora_A, self.lora_B, self.lora_dropout))
                lora = Lora(a.weight, b.weight, self.scaling[name])
                y: torch.Tensor | None = self.base_layer.with_lora(
                    x, lora, None if type(dropout) is nn.Identity else dropout
                )
                if y is not None:
                    return y
            by_modules: torch.Tensor = super().forward(x, *args, **kwargs)
            return by_modules

        def _single_adapter(self) -> str | None:
            """Return the name of the active adapter; None if there are several, or `with_lora` cannot run it.

            `with_lora` runs an unmerged adapter without variant, whose A and B satisfy `_is_plain`.
            """
            names = [name for name in self.active_adapters if name in self.lora_A]
            if len(names) != 1 or self.disable_adapters or self.merged or names[0] in self.lora_variant:
                return None
            matrices = self.lora_A[names[0]], self.lora_B[names[0]]
            if type(self.base_layer) is not PackedLinear or not all(map(_is_plain, matrices)):
                return None
            return str(names[0])

        def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: Any = None) -> None:
            # PEFT takes the device of a tensor `weight`: words, which are on meta once they are freed.
            super()._move_adapter_to_device_of_base_layer(adapter_name, device or self.base_layer.device)

        def _get_in_out_features(self, module: Any) -> tuple[int, int]:
            return module.in_features, module.out_features

        def resolve_lora_variant(self, **options: Any) -> None:
            variant = super().resolve_lora_variant(**options)
            if variant is not None:
                raise UsageError(
                    f"{type(variant).__name__} may read or change the dense weight, which a packed linear "
                    f"does not have. {DENSE}use plain LoRA."
                )

        def merge(self, *args: Any, **kwargs: Any) -> None:
            raise UsageError(
                "a LoRA cannot be merged into a packed linear: its sum with the codes is not on their grid. "
                "Save it and run `quantkit merge`, which adds it to the original weights and rounds. "
                f"{DENSE}load the adapter into the original model, to merge there."
            )

    return PackedLoraLinear
