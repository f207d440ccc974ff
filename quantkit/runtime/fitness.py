"""Check if a model can be captured as CUDA graphs, and if it changed since its graphs were captured."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from quantkit.kernels.registry import forced_kernel
from quantkit.runtime.cuda_graphs import refusals
from quantkit.runtime.cuda_graphs.active_adapters import lora_layers, why_unfit_adapters
from quantkit.runtime.packed_module import PackedModule
from quantkit.runtime.parallel_plan import local
from quantkit.runtime.tensor_parallel import why_ranks_unfit
from quantkit.runtime.transformers.patches.attention import implementation_of


def modules_of(model: Any) -> list[Any]:
    """Return all modules of `model` like `model.modules()`, in another order, in a third of the time.

    This runs for every prompt.
    """
    modules: dict[Any, None] = {}
    pending = [model]
    for module in pending:
        if module is not None and module not in modules:
            modules[module] = None
            pending += module._modules.values()
    return list(modules)


def fingerprint(model: Any, modules: Sequence[Any]) -> tuple[Any, ...]:
    """Return a value that changes when the CUDA graphs captured for `model` may not be replayed any more.

    The value has all on which `why_unfit` and the graphs depend, except inputs. That is: `modules` (all
    modules), whether they train, their hooks, the addresses of their tensors, their kernel layouts, options
    of the config, and the forced kernel. Which adapters are active is in the keys of graphs instead. The GPU
    waits while this runs for every prompt, so attributes are read from the dicts of modules.
    """
    attributes = [vars(module) for module in modules]
    states = [*map(id, modules)], [of["training"] for of in attributes]
    hooks = [
        (place, "_hf_hook" in of, *of["_forward_pre_hooks"], *of["_forward_hooks"])
        for place, of in enumerate(attributes)
        if "_hf_hook" in of or of["_forward_pre_hooks"] or of["_forward_hooks"]
    ]
    tensors = [
        local(tensor).data_ptr()
        for of in attributes
        for group in (of["_parameters"], of["_buffers"])
        if group
        for tensor in group.values()
        if tensor is not None
    ]
    layouts = [ref for module in modules if isinstance(module, PackedModule) for ref in module.layout_refs()]
    # A module made after another was deleted may have its address, but not its weak reference.
    adapters = [weakref.ref(a) for of in lora_layers(modules) for a in of["_modules"]["lora_A"].children()]
    # Outputs other than logits that the config turns on.
    requested = [name for name, value in vars(model.config).items() if value and "output_" in name]
    options = requested, implementation_of(model.config), forced_kernel()
    return states, hooks, tensors, layouts, adapters, *options


def why_unfit(model: Any, modules: Sequence[Any]) -> str | None:
    """Return why steps of `model` cannot be captured, and a remedy; None if they can.

    `modules` are all modules of `model`.
    """
    if model.training:
        return refusals.TRAINING.because()
    if (reason := why_ranks_unfit(modules)) is not None:
        return reason
    if any("_hf_hook" in vars(module) for module in modules) or len(_devices_of(modules)) > 1:
        return refusals.DIVIDED.because()
    if (reason := why_unfit_adapters(model, modules)) is not None:
        return reason
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            # Hooks of transformers do nothing until extra outputs are requested.
            if hooks and any(_package(hook) != "transformers" for hook in hooks.values()):
                name = next(name for name, one in model.named_modules() if one is module)
                return refusals.HOOK.because(module=name or type(module).__name__)
    return None


def _devices_of(modules: Sequence[Any]) -> set[torch.device]:
    """Return the devices of the parameters of `modules`, without the meta device, where freed weights are."""
    parameters = (one for module in modules for one in module._parameters.values() if one is not None)
    return {one.device for one in parameters if not one.is_meta}


def _package(of: Any) -> str:
    return str(getattr(of, "__module__", "")).partition(".")[0]
