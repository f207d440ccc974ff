"""Whether a model can be recorded as it is now, and whether it is what it was when it was recorded."""

from collections.abc import Sequence
from typing import Any

import torch

from quantkit.kernels.registry import forced_kernel
from quantkit.runtime.packed_module import PackedModule, local
from quantkit.runtime.tensor_parallel import why_ranks_unfit


def modules_of(model: Any) -> list[Any]:
    """What `model.modules()` has, in another order and in a third of the time: each prompt waits for it."""
    found: dict[Any, None] = {}
    left = [model]
    for module in left:
        if module is not None and module not in found:
            found[module] = None
            left += module._modules.values()
    return list(found)


def fingerprint(model: Any, modules: Sequence[Any]) -> tuple[Any, ...]:
    """What a graph of `model` depends on besides its inputs: its `modules`, and where their tensors lie."""
    states = tuple((id(module), module.training) for module in modules)
    held = (group for module in modules for group in (module._parameters, module._buffers) if group)
    tensors = tuple(
        local(tensor).data_ptr() for group in held for tensor in group.values() if tensor is not None
    )
    packed = (module for module in modules if isinstance(module, PackedModule))
    layouts = tuple(address for module in packed for address in module.layout_addresses())
    # What the config asks for beside logits.
    asked = tuple(name for name, value in vars(model.config).items() if value and "output_" in name)
    return states, tensors, layouts, asked, model.config._attn_implementation, forced_kernel()


def why_unfit(model: Any, modules: Sequence[Any]) -> str | None:
    """None if steps of `model`, with these `modules`, may be recorded, else the reason and what to do."""
    if model.training:
        return "the model is in training mode; call model.eval()"
    if (reason := why_ranks_unfit(modules)) is not None:
        return reason
    if any("_hf_hook" in vars(module) for module in modules) or len(_devices_of(modules)) > 1:
        return (
            "the model is divided among devices or offloaded; load it on one GPU, with device_map='cuda:0', "
            "where it fits"
        )
    if any(_package(kind) == "peft" for kind in {type(module) for module in modules}):
        return "adapters may change what it computes from step to step; unload them where they are not needed"
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            # Those of transformers do nothing until somebody asks for outputs.
            if hooks and any(_package(hook) != "transformers" for hook in hooks.values()):
                name = next(name for name, one in model.named_modules() if one is module)
                return f"a hook of {name or type(module).__name__!r} is to be called at each; remove it"
    return None


def _devices_of(modules: Sequence[Any]) -> set[torch.device]:
    """Where parameters of `modules` are; words that kernel layouts hold are nowhere."""
    parameters = (one for module in modules for one in module._parameters.values() if one is not None)
    return {one.device for one in parameters if not one.is_meta}


def _package(of: Any) -> str:
    return str(getattr(of, "__module__", "")).partition(".")[0]
