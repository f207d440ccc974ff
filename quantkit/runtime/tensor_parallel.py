"""Plan tensor parallelism of packed models, whose matrices ranks divide by rows or by columns.

A rank's shard must be a packed weight of the same scheme: whole words, whole words of zero-points (which span
several rows), and whole groups. So some numbers of ranks do not fit; `TensorParallelPlan` tells which do.
`patches/parallel.py` makes transformers divide packed weights like this.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quantkit.errors import UsageError
from quantkit.packing.schemes import Scheme
from quantkit.runtime.cuda_graphs import refusals
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.packed_module import PackedModule
from quantkit.runtime.parallel_plan import Axis, Cut, TensorParallelPlan

if TYPE_CHECKING:
    from quantkit.checkpoint.source import Checkpoint

logger = logging.getLogger("quantkit.model")
#: Backend of torch whose all-reduce CUDA graphs can capture.
CAPTURED = "cuda:nccl"


def plan_of_checkpoint(checkpoint: "Checkpoint") -> TensorParallelPlan:
    """Return how ranks divide the matrices of a packed checkpoint, from its config.json alone.

    Raises `CheckpointError` for a checkpoint that is not packed.
    """
    from quantkit.checkpoint.quantization_config import QuantizationConfig
    from quantkit.model.model_class import meta_model
    from quantkit.runtime.replace import swap_modules

    model = meta_model(checkpoint.config, checkpoint.directory)
    swap_modules(model, QuantizationConfig.from_dict(checkpoint.config.get("quantization_config") or {}))
    return tensor_parallel_plan(model)


def tensor_parallel_plan(model: Any) -> TensorParallelPlan:
    """Return how ranks divide the matrices of `model`, which has packed modules and may be on meta.

    The axis of each matrix follows from the tensor-parallel plan that transformers has for the model's class.
    """
    styles, modules = _styles_of(model), dict(model.named_modules())
    cuts = []
    for name, module in modules.items():
        if isinstance(module, PackedModule):
            for parameter, (scheme, shape, halves) in module.logical().items():
                key = name if parameter == "weight" else f"{name}.{parameter}"
                axis, pieces = division(styles(key))
                refusal = _why_undivided(key, module)
                if axis is not None and refusal is not None:
                    cuts.append(Cut(key, axis, shape[0], {}, refusal))
                elif axis is not None:
                    cuts.append(
                        cut_of(key, axis, scheme, shape, pieces // halves, _heads(modules, name, shape[0]))
                    )
        elif type(module) is nn.Linear:
            # A dense linear may be cut between any rows, but not inside a head.
            heads = _heads(modules, name, module.out_features)
            if heads and division(styles(name))[0] == "rows":
                cuts.append(Cut(name, "rows", module.out_features, heads))
    return TensorParallelPlan(type(model).__name__, tuple(cuts))


def _why_undivided(name: str, module: PackedModule) -> str | None:
    """Return why ranks cannot divide the packed `module`, called `name`; None if they can.

    Fused experts that the model stores transposed, or with biases, cannot be divided.
    """
    if isinstance(module, PackedExperts) and (module.spec.transposed or module.spec.biased):
        kind = "transposed" if module.spec.transposed else "with biases"
        return f"ranks cannot divide {name!r}: the model has these experts {kind}"
    return None


def _heads(modules: Mapping[str, nn.Module], name: str, rows: int) -> dict[str, int]:
    """Return {"heads of D": D} for an attention linear `name`, so that ranks get whole heads; {} for others.

    D is the attribute `head_dim` of the parent of `name` in `modules`. The result is also {} if D does not
    divide `rows`, the output features N of the linear.
    """
    size = getattr(modules[name.rpartition(".")[0]], "head_dim", None)
    return {f"heads of {size}": size} if isinstance(size, int) and rows % size == 0 else {}


def cut_of(
    name: str, axis: Axis, scheme: Scheme, shape: tuple[int, int], pieces: int, heads: Mapping[str, int]
) -> Cut:
    """Return how ranks divide matrix `name`, of `scheme` and `shape` (N, K), along `axis`.

    The matrix may be `pieces` matrices stacked along N, each of which is divided. `heads` is {"heads of D":
    D} if ranks get whole heads of D rows, else {}.
    """
    rows, columns = shape
    if axis == "columns":
        return Cut(name, axis, columns, scheme.column_units(columns))
    return Cut(name, axis, rows // max(1, pieces), {**heads, **scheme.row_units()})


def _styles_of(model: Any) -> Callable[[str], Any]:
    """Return a function that maps the name of a module or parameter to its parallel style in transformers.

    The style is an object that says how ranks divide a matrix, by the tensor-parallel plan of `model`. It is
    None for names not in the plan, and for all names if this transformers has no such styles.
    """
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
    """Return how the parallel style of transformers divides a parameter: (axis, matrices stacked along N).

    The axis is None if ranks do not divide the parameter. Of stacked matrices, such as gate and up, each is
    divided.
    """
    # A style of quantkit wraps a style of transformers.
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
    """Return the process group of the ranks that share a DTensor."""
    mesh = divided.device_mesh
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def ranks_of(modules: Sequence[nn.Module]) -> Any:
    """Return the process group of the ranks that share `modules`; None if they are not divided."""
    if not any(isinstance(module, PackedModule) and module.tensor_parallel for module in modules):
        return None
    parameters = (one for module in modules for one in module._parameters.values())
    divided = next((one for one in parameters if hasattr(one, "device_mesh")), None)
    return None if divided is None else group_of(divided)


def why_ranks_unfit(modules: Sequence[nn.Module]) -> str | None:
    """Return why ranks cannot capture CUDA graphs of a model with these `modules`; None if they can."""
    if not any(isinstance(module, PackedModule) and module.tensor_parallel for module in modules):
        return None
    group = ranks_of(modules)
    backend = "no backend" if group is None else str(torch.distributed.get_backend_config(group))
    if CAPTURED in backend:
        return None
    return refusals.RANKS.because(backend=backend)


def all_agree(group: Any, succeeded: bool, device: torch.device) -> bool:
    """Return True if `succeeded` is True on all ranks of `group`; every rank must call this.

    `device` is the device of the calling rank, for the all-reduce.
    """
    missing = torch.tensor(int(not succeeded), device=device)
    torch.distributed.all_reduce(missing, group=group)
    return not missing.item()


@lru_cache(maxsize=1)
def tell_of_ranks() -> None:
    """Log once, on the first rank, how ranks run CUDA graphs."""
    if is_first_rank():
        logger.warning(
            "ranks share the model (tensor parallelism): decoding steps are CUDA graphs with more launches "
            "than on one GPU, and prompts are launched one kernel at a time; load it on one GPU where it fits"
        )


def is_first_rank() -> bool:
    """Return True if this process is rank 0 or the only one."""
    ranks = torch.distributed
    return not (ranks.is_available() and ranks.is_initialized() and ranks.get_rank())


def not_by_expert(name: str) -> UsageError:
    """Return the error for packed experts `name` if the plan is expert-parallel: whole experts per rank."""
    return UsageError(
        f"{name!r}: packed experts are divided by the rows of gate and up and the columns of down alone, "
        "not by expert. Load with tp_plan='auto' and without expert parallelism."
    )
