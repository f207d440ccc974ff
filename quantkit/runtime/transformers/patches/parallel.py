"""Tensor parallelism for packed modules in transformers: parallel styles and `forward` methods.

In transformers, the plan of a model gives each parameter name a style, which says how ranks divide the
parameter. quantkit wraps these styles: it divides packed parameters itself, and leaves dense parameters, in
other layers, to the wrapped style.

    RowsForward      x [..., K] on all ranks     -> y [..., N / ranks]         no communication
    ColumnsForward   x [..., K / ranks]          -> y [..., N]                 all-reduce
    GatherForward    x [..., K] on all ranks     -> y [..., N]                 all-gather
    LookupForward    ids [...] on all ranks      -> rows [..., H]              all-reduce
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quantkit.errors import EnvironmentProblem, UsageError
from quantkit.runtime.packed_embedding import PackedEmbedding
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.packed_module import PackedModule
from quantkit.runtime.parallel_plan import TensorParallelPlan, local
from quantkit.runtime.replace import packed_modules
from quantkit.runtime.tensor_parallel import cut_of, division, group_of, not_by_expert, tensor_parallel_plan

#: Prefix of the style names, before the name in transformers.
PREFIX = "quantkit_"
#: Attribute of a model that stores the original entries of its plan.
_BEFORE = "_quantkit_plan_before"


def divide_packed(model: Any) -> None:
    """Put quantkit's styles in the tensor-parallel plan of `model`, before transformers divides the model.

    Raises `UsageError` if packed experts would be divided by expert, and `EnvironmentProblem` if transformers
    is too old. Later, transformers' division raises `UsageError` if the number of ranks does not fit.
    """
    distributed = getattr(model.config, "distributed_config", None)
    experts = [name for name, module in packed_modules(model) if isinstance(module, PackedExperts)]
    if experts and (getattr(distributed, "ep_size", None) or 1) > 1:
        raise not_by_expert(experts[0])
    try:
        from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard as wildcard
    except ImportError as error:
        from transformers import __version__

        raise EnvironmentProblem(
            f"transformers {__version__} cannot run packed models tensor-parallel. Install transformers 5.17 "
            "or later, or load with device_map='auto'."
        ) from error
    plan = tensor_parallel_plan(model)
    originals: dict[str, str | None] = getattr(model, _BEFORE, {})
    for name, module in packed_modules(model):
        module.tensor_parallel = plan
        module.shares_x = False
        for entry, spec in module.part_specs().items():
            if entry not in module._parameters:
                continue
            key = wildcard(f"{name}.{entry}")
            # Experts have one style per parameter, linears one per module.
            parameter = wildcard(f"{name}.{spec.parameter(entry)}")
            candidates = (model._tp_plan.get(one) for one in (key, parameter, wildcard(name)))
            style = next((one for one in candidates if one is not None), None)
            # Words of 8-bit floats are called `weight`: the style of their scale is quantkit's already.
            if style is not None and model._tp_plan.get(key) != (own := _own_style(style)):
                originals.setdefault(key, model._tp_plan.get(key))
                model._tp_plan[key] = own
    setattr(model, _BEFORE, originals)


def check_joinable(model: nn.Module) -> None:
    """Raise `EnvironmentProblem` if torch cannot gather the shards of a parameter of `model`, as saving does.

    torch 2.11 cannot gather gate and up that are one parameter, packed or dense.
    """
    in_pieces = any(
        type(placement).__name__ == "_StridedShard"
        for parameter in model.parameters()
        for placement in getattr(parameter, "placements", ())
    )
    if in_pieces and torch.__version__.startswith("2.11."):
        raise EnvironmentProblem(
            f"torch {torch.__version__} cannot join the shares of experts whose gate and up are one matrix. "
            "Install torch 2.12 or later, or save the model from one process."
        )


def undo_plan(model: Any) -> None:
    """Restore the tensor-parallel plan that `model` had before `divide_packed`."""
    for key, style in vars(model).pop(_BEFORE, {}).items():
        if style is None:
            model._tp_plan.pop(key, None)
        else:
            model._tp_plan[key] = style


def has_plan(model: Any) -> bool:
    """Return True if `divide_packed` changed the tensor-parallel plan of `model`."""
    return bool(vars(model).get(_BEFORE))


def _own_style(name: str) -> str:
    """Return the name of quantkit's tensor-parallel style for the style `name`; register a new one.

    `name` is a style of transformers, such as "colwise", or one of quantkit already, "quantkit_colwise".
    """
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    own = PREFIX + name.removeprefix(PREFIX)
    if own not in ALL_PARALLEL_STYLES:
        type(ALL_PARALLEL_STYLES).register(own, PackedStyle(ALL_PARALLEL_STYLES[name]))
    return own


def undo_styles() -> None:
    """Remove quantkit's styles from the registry of transformers."""
    for registry in _registries():
        for name in [one for one in registry if one.startswith(PREFIX)]:
            del registry._global_mapping[name]


def has_styles() -> bool:
    """Return True if the registry of transformers has styles of quantkit."""
    return any(name.startswith(PREFIX) for registry in _registries() for name in registry)


def _registries() -> Iterator[Any]:
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    except ImportError:
        return
    yield ALL_PARALLEL_STYLES


class PackedStyle:
    """Parallel style that divides parameters of packed modules like `original` divides dense ones."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        """Replace parameter `param`, on meta, by a DTensor that is divided along the axis of the style.

        Raises `UsageError` if the ranks of `mesh` cannot divide the packed parameter along this axis.
        """
        spec = module.part_specs().get(param) if isinstance(module, PackedModule) else None
        if spec is None:
            self.original.shard_param(module, param, mesh)
            return
        assert isinstance(module, PackedModule) and module.tensor_parallel is not None
        if isinstance(module, PackedEmbedding) or module.table is not None:
            raise UsageError(
                "the embedding is packed, and its table is not divided among ranks. Load the model with "
                "device_map='auto', or quantize it with dense embeddings."
            )
        ranks, parameter = mesh.size(), spec.parameter(param)
        module.tensor_parallel.check(ranks)
        axis, pieces = division(self)
        scheme, (rows, columns), halves = module.logical()[parameter]
        if (axis is None and isinstance(module, PackedExperts)) or (
            axis == "rows" and halves not in (1, pieces)
        ):
            raise not_by_expert(f"{type(module).__name__}.{parameter}")
        if axis is None:
            return
        cut = cut_of(param, axis, scheme, (rows, columns), pieces // halves, {})
        TensorParallelPlan("", (cut,)).check(ranks)
        share = (rows // ranks, columns) if axis == "rows" else (rows, columns // ranks)
        whole, part = (scheme.storage_shapes(shape)[spec.part][1] for shape in ((rows, columns), share))
        # A part whose shard is as long as the whole is on all ranks, such as the one scale of a row that is
        # divided along K.
        for dim, (length, of_share) in enumerate(zip(whole, part, strict=True), len(spec.shape) - len(whole)):
            if length != of_share:
                _distribute(module, param, mesh, dim, pieces)
        if axis == "columns" and spec.part == "packed":
            module.keep_columns(parameter, share[1])

    def validate_param(
        self, module: nn.Module, param: str, mesh: Any, parameter_name: str | None = None
    ) -> None:
        """Skip packed modules: transformers would take every parameter for a dense matrix."""
        if not isinstance(module, PackedModule):
            self.original.validate_param(module, param, mesh, parameter_name=parameter_name)


def _distribute(module: nn.Module, param: str, mesh: Any, dim: int, pieces: int) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    placement = Shard(dim) if pieces == 1 else _StridedShard(dim=dim, split_factor=pieces)
    divided = distribute_tensor(getattr(module, param), mesh, [placement], src_data_rank=None)
    module._parameters[param] = nn.Parameter(divided, requires_grad=False)


@dataclass(frozen=True, eq=False)
class ShareForward:
    """Forward of a module divided among the ranks of `group`, in place of transformers' `original`.

    `original` wraps tensors in DTensors, which takes host time. Without gradients, `of_share` uses local
    tensors and at most one collective operation.
    """

    module: Any
    original: Callable[..., Any]
    group: Any

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() or named or len(arguments) != 1 or hasattr(arguments[0], "placements"):
            return self.original(*arguments, **named)
        return self.of_share(arguments[0])

    def of_share(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of `original` for the local `x`."""
        raise NotImplementedError


class RowsForward(ShareForward):
    """Linear divided along N: each rank computes its columns of y."""

    def of_share(self, x: torch.Tensor) -> torch.Tensor:
        """Return y [..., N / ranks] of x [..., K]."""
        # Not through the module call, whose hooks are running.
        y: torch.Tensor = type(self.module).forward(self.module, x)
        return y


class ColumnsForward(ShareForward):
    """Packed linear divided along K: all-reduce the products, add the bias once."""

    def of_share(self, x: torch.Tensor) -> torch.Tensor:
        """Return y [..., N] of x [..., K / ranks]."""
        parameters = self.module._parameters
        bias = parameters["bias"]
        if bias is None:
            return self._sum(type(self.module).forward(self.module, x))
        parameters["bias"] = None
        try:
            y = type(self.module).forward(self.module, x)
        finally:
            parameters["bias"] = bias
        total: torch.Tensor = self._sum(y) + local(bias)
        return total

    def _sum(self, y: torch.Tensor) -> torch.Tensor:
        y = y.contiguous()
        torch.distributed.all_reduce(y, group=self.group)
        return y


class GatherForward(ShareForward):
    """Linear divided along N, packed or dense: all-gather the columns of y."""

    def of_share(self, x: torch.Tensor) -> torch.Tensor:
        """Return y [..., N] of x [..., K]."""
        if isinstance(self.module, PackedLinear):
            y = type(self.module).forward(self.module, x)
        else:
            y = F.linear(x, local(self.module.weight), local(self.module.bias))
        shares = [torch.empty_like(y) for _ in range(self.group.size())]
        torch.distributed.all_gather(shares, y.contiguous(), group=self.group)
        return torch.cat(shares, dim=-1)


class LookupForward(ShareForward):
    """Dense embedding [V, H] divided along V: each row comes from one rank, the others add zeros."""

    def of_share(self, x: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [..., H] of token ids `x`, int64 [...], which are the same on all ranks."""
        weight = local(self.module.weight)
        ids = x - self.group.rank() * weight.shape[0]
        foreign = (ids < 0) | (ids >= weight.shape[0])
        rows = F.embedding(ids.masked_fill(foreign, 0), weight)
        rows = rows.masked_fill_(foreign[..., None], 0)
        torch.distributed.all_reduce(rows, group=self.group)
        return rows


def divide_forwards(model: Any) -> None:
    """Replace `forward` methods of a divided, loaded `model` by `ShareForward`s, which take less host time.

    Modules for which `_kind_of` returns None keep their `forward`.
    """
    if not has_plan(model):
        return
    for name, module in model.named_modules():
        kind = _kind_of(model, name, module) if "forward" in vars(module) else None
        if kind is None:
            continue
        divided: Any = next((one for one in module.parameters() if hasattr(one, "device_mesh")), None)
        if divided is None:
            continue
        module.forward = kind(module, module.forward, group_of(divided))
        if kind is RowsForward:
            module.shares_x = True


def _kind_of(model: Any, name: str, module: nn.Module) -> type[ShareForward] | None:
    """Return the `ShareForward` class for module `name`; None if its style has none or shards are unequal."""
    from torch.distributed.tensor import Replicate, Shard
    from transformers.distributed import tensor_parallel as styles

    plan = model._tp_plan.get(styles.replace_layer_number_by_wildcard(name))
    style: Any = None if plan is None else styles.ALL_PARALLEL_STYLES[plan]
    if not getattr(style, "use_local_output", False):
        return None
    if type(module) is nn.Embedding:
        plain = module.max_norm is None and not module.scale_grad_by_freq
        is_looked_up = plain and _has_equal_rows(module.weight)
        return LookupForward if is_looked_up and plan == "embedding_rowwise" else None
    layouts = type(style), getattr(style, "input_layouts", None), getattr(style, "output_layouts", None)
    if isinstance(module, PackedLinear):
        if layouts == (styles.ColwiseParallel, Replicate(), Shard(-1)):
            return RowsForward
        if layouts == (styles.RowwiseParallel, Shard(-1), Replicate()):
            return ColumnsForward
    gathers = layouts == (styles.ColwiseParallel, Replicate(), Replicate())
    fits = isinstance(module, PackedLinear) or (type(module) is nn.Linear and _has_equal_rows(module.weight))
    return GatherForward if gathers and fits else None


def _has_equal_rows(weight: Any) -> bool:
    """Return True if `weight` is divided along dimension 0 into equal shards."""
    from torch.distributed.tensor import Shard

    placements = getattr(weight, "placements", None)
    return placements == (Shard(0),) and weight.shape[0] % weight.device_mesh.size() == 0


def undo_forwards(model: Any) -> None:
    """Restore the `forward` methods transformers installed for tensor parallelism; remove quantkit's."""
    for module in model.modules():
        own = vars(module).get("forward")
        if isinstance(own, ShareForward):
            module.forward = own.original
            if isinstance(module, PackedLinear):
                module.shares_x = False
                module.drop_kernel_layouts()


def has_forwards(model: Any) -> bool:
    """Return True if `divide_forwards` changed a module of `model`."""
    return any(isinstance(vars(module).get("forward"), ShareForward) for module in model.modules())
