"""Tensor parallelism of packed models: transformers divides matrices among ranks, by rows or by columns.

A rank's share has to be a weight of the same scheme. Rows of words can be cut between words alone, as can the
zero-points of several rows in a word, and a group has one scale. So not every number of ranks fits a packed
matrix, and some of its parts are divided while others are whole on all ranks. transformers by itself would
divide all of them, and experts, whose parts its plan does not name, not at all. `TensorParallelPlan` says
what fits, and `patches/parallel.py` has transformers divide packed modules as it says.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quantkit.errors import UsageError
from quantkit.packing.schemes import Scheme
from quantkit.runtime.packed_module import PackedModule
from quantkit.runtime.parallel_plan import Axis, Cut, TensorParallelPlan

if TYPE_CHECKING:
    from quantkit.checkpoint.source import Checkpoint


#: What torch calls the backend whose sums CUDA graphs can have.
RECORDED = "cuda:nccl"


def plan_of_checkpoint(checkpoint: "Checkpoint") -> TensorParallelPlan:
    """The plan of a packed checkpoint, from its config.json alone; `CheckpointError` for one that is not."""
    from quantkit.checkpoint.quantization_config import QuantizationConfig
    from quantkit.model.structure import meta_model
    from quantkit.runtime.replace import swap_modules

    model = meta_model(checkpoint.config, checkpoint.directory)
    swap_modules(model, QuantizationConfig.from_dict(checkpoint.config.get("quantization_config") or {}))
    return tensor_parallel_plan(model)


def tensor_parallel_plan(model: Any) -> TensorParallelPlan:
    """The plan of a model with packed modules, on any device, by transformers' own plan for its class."""
    styles, modules = _styles_of(model), dict(model.named_modules())
    cuts = []
    for name, module in modules.items():
        if isinstance(module, PackedModule):
            for parameter, (scheme, shape, halves) in module.logical().items():
                key = name if parameter == "weight" else f"{name}.{parameter}"
                axis, pieces = division(styles(key))
                if axis is not None:
                    cuts.append(
                        cut_of(key, axis, scheme, shape, pieces // halves, _heads(modules, name, shape[0]))
                    )
        elif type(module) is nn.Linear:
            # A dense one may be divided anywhere, but within a head.
            heads = _heads(modules, name, module.out_features)
            if heads and division(styles(name))[0] == "rows":
                cuts.append(Cut(name, "rows", module.out_features, heads))
    return TensorParallelPlan(type(model).__name__, tuple(cuts))


def _heads(modules: Mapping[str, nn.Module], name: str, rows: int) -> dict[str, int]:
    """What the rows of a linear of attention are for; nothing for another linear."""
    size = getattr(modules[name.rpartition(".")[0]], "head_dim", None)
    return {f"heads of {size}": size} if isinstance(size, int) and rows % size == 0 else {}


def cut_of(
    name: str, axis: Axis, scheme: Scheme, shape: tuple[int, int], pieces: int, heads: Mapping[str, int]
) -> Cut:
    rows, columns = shape
    if axis == "columns":
        return Cut(name, axis, columns, scheme.column_units(columns))
    return Cut(name, axis, rows // max(1, pieces), {**heads, **scheme.row_units()})


def _styles_of(model: Any) -> Callable[[str], Any]:
    """The parallel style of a module or parameter of `model` by name; None for what ranks do not divide."""
    try:
        from transformers.distributed.tensor_parallel import (
            ALL_PARALLEL_STYLES,
            replace_layer_number_by_wildcard,
        )
    except ImportError:
        return lambda name: None
    plan = getattr(model, "_tp_plan", None) or {}
    return lambda name: ALL_PARALLEL_STYLES.get(plan.get(replace_layer_number_by_wildcard(name)))


def division(style: Any) -> tuple[Axis | None, int]:
    """Along what a style divides a matrix, None if not at all, and in how many pieces, all divided."""
    # Of one of quantkit's, the style of transformers that it is for.
    style = getattr(style, "original", style)
    if style is None:
        return None, 1
    from transformers.distributed import tensor_parallel as styles

    if isinstance(style, styles.PackedColwiseParallel):
        return "rows", style.split_factor
    if isinstance(style, styles.ColwiseParallel):
        return "rows", 1
    return ("columns" if isinstance(style, styles.RowwiseParallel) else None), 1


def group_of(divided: Any) -> Any:
    """The process group of the ranks that have shares of a DTensor."""
    mesh = divided.device_mesh
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def ranks_of(modules: Sequence[nn.Module]) -> Any:
    """The process group of the ranks that share `modules`; None without."""
    if not any(isinstance(module, PackedModule) and module.tensor_parallel for module in modules):
        return None
    parameters = (one for module in modules for one in module._parameters.values())
    divided = next((one for one in parameters if hasattr(one, "device_mesh")), None)
    return None if divided is None else group_of(divided)


def why_ranks_unfit(modules: Sequence[nn.Module]) -> str | None:
    """None if steps of `modules` may be recorded on all ranks that share them, else the reason."""
    if not any(isinstance(module, PackedModule) and module.tensor_parallel for module in modules):
        return None
    group = ranks_of(modules)
    backend = "no backend" if group is None else str(torch.distributed.get_backend_config(group))
    if RECORDED in backend:
        return None
    return (
        f"ranks share the model (tensor parallelism) and sum through {backend}, not nccl; load it on GPUs, "
        "or on one where it fits"
    )


def all_agree(group: Any, found: bool, device: torch.device) -> bool:
    """Whether all ranks of `group` found what this one may have; all of them call it."""
    missing = torch.tensor(int(not found), device=device)
    torch.distributed.all_reduce(missing, group=group)
    return not missing.item()


def not_by_expert(name: str) -> UsageError:
    return UsageError(
        f"{name!r}: packed experts are divided by the rows of gate and up and the columns of down alone, "
        "not by expert. Load with tp_plan='auto' and without expert parallelism."
    )
