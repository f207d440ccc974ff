"""Tensor parallelism of transformers for packed modules: styles, and forwards, of their own.

The plan of a model that is divided names styles of quantkit for the parameters of its packed modules. Where
such a module is, they divide each part as the scheme allows; where a dense one has the same name in another
layer, they do what the style of transformers does that they are for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quantkit.errors import EnvironmentProblem
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.packed_module import PackedModule, local
from quantkit.runtime.parallel_plan import TensorParallelPlan
from quantkit.runtime.replace import packed_modules
from quantkit.runtime.tensor_parallel import cut_of, division, group_of, not_by_expert, tensor_parallel_plan

#: What names of the styles begin with, before those of transformers.
PREFIX = "quantkit_"
#: Where a model keeps the entries that its plan had before.
_BEFORE = "_quantkit_plan_before"


def divide_packed(model: Any) -> None:
    """Have transformers, which is about to divide `model` among ranks, divide its packed modules right.

    It then raises `UsageError` for a number of ranks that does not fit, or for a plan of another kind.
    `EnvironmentProblem` for a transformers without parallel styles that divide parameters one by one.
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
    before: dict[str, str | None] = getattr(model, _BEFORE, {})
    for name, module in packed_modules(model):
        module.tensor_parallel = plan
        module.shares_x = False
        for entry, spec in module.part_specs().items():
            if entry not in module._parameters:
                continue
            key = wildcard(f"{name}.{entry}")
            # Experts have a style for each of their parameters, linears one for the module.
            parameter = wildcard(f"{name}.{entry.removesuffix(spec.suffix)}")
            found = (model._tp_plan.get(one) for one in (key, parameter, wildcard(name)))
            style = next((one for one in found if one is not None), None)
            if style is not None and not style.startswith(PREFIX):
                before.setdefault(key, model._tp_plan.get(key))
                model._tp_plan[key] = _own_style(style)
    setattr(model, _BEFORE, before)


def undo_plan(model: Any) -> None:
    """Give the plan of `model` back what it had before `divide_packed`."""
    for key, style in vars(model).pop(_BEFORE, {}).items():
        if style is None:
            model._tp_plan.pop(key, None)
        else:
            model._tp_plan[key] = style


def has_plan(model: Any) -> bool:
    """Whether `divide_packed` changed the plan of `model`."""
    return bool(vars(model).get(_BEFORE))


def _own_style(name: str) -> str:
    """The name of the style for packed modules in place of that which transformers calls `name`."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    own = PREFIX + name
    if own not in ALL_PARALLEL_STYLES:
        type(ALL_PARALLEL_STYLES).register(own, PackedStyle(ALL_PARALLEL_STYLES[name]))
    return own


def undo_styles() -> None:
    """Take the styles out of transformers' registry again."""
    for registry in _registries():
        for name in [one for one in registry if one.startswith(PREFIX)]:
            del registry._global_mapping[name]


def has_styles() -> bool:
    """Whether there are styles of quantkit in transformers' registry."""
    return any(name.startswith(PREFIX) for registry in _registries() for name in registry)


def _registries() -> Iterator[Any]:
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    except ImportError:
        return
    yield ALL_PARALLEL_STYLES


class PackedStyle:
    """How parameters of packed modules are divided where those of dense ones are by `original`."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        """Make a parameter on the meta device a DTensor along what is divided of it."""
        spec = module.part_specs().get(param) if isinstance(module, PackedModule) else None
        if spec is None:
            self.original.shard_param(module, param, mesh)
            return
        assert isinstance(module, PackedModule) and module.tensor_parallel is not None
        ranks, parameter = mesh.size(), param.removesuffix(spec.suffix)
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
        # What is no shorter in a share is whole on all ranks, such as the one scale of a row that is divided.
        for dim, (length, of_share) in enumerate(zip(whole, part, strict=True), len(spec.shape) - len(whole)):
            if length != of_share:
                _distribute(module, param, mesh, dim, pieces)
        if axis == "columns" and spec.part == "packed":
            module.keep_columns(parameter, share[1])

    def validate_param(
        self, module: nn.Module, param: str, mesh: Any, parameter_name: str | None = None
    ) -> None:
        """Nothing for packed modules: that of transformers takes every parameter for a matrix."""
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
    """The forward of a module of which a rank has a share, in place of `original`, which transformers made.

    That wraps tensors as DTensors. Without gradients `of_share` calls the share as it is, and what the ranks
    of `group` have is put together by one operation.
    """

    module: Any
    original: Callable[..., Any]
    group: Any

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() or named or len(arguments) != 1 or hasattr(arguments[0], "placements"):
            return self.original(*arguments, **named)
        return self.of_share(arguments[0])

    def of_share(self, x: torch.Tensor) -> torch.Tensor:
        """What `original` returns of x, which all ranks have or of which each has a share."""
        raise NotImplementedError


class RowsForward(ShareForward):
    """A linear of which ranks have rows: each has its columns of y, and there is nothing to put together."""

    def of_share(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N / ranks]."""
        # Not by calling the module, whose hooks run already.
        y: torch.Tensor = type(self.module).forward(self.module, x)
        return y


class ColumnsForward(ShareForward):
    """A packed linear of which ranks have columns: their products are added up, and the bias once."""

    def of_share(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K / ranks] -> [..., N]."""
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
    """A linear, packed or dense, of which ranks have rows and all want the whole output."""

    def of_share(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        if isinstance(self.module, PackedLinear):
            y = type(self.module).forward(self.module, x)
        else:
            y = F.linear(x, local(self.module.weight), local(self.module.bias))
        shares = [torch.empty_like(y) for _ in range(self.group.size())]
        torch.distributed.all_gather(shares, y.contiguous(), group=self.group)
        return torch.cat(shares, dim=-1)


class LookupForward(ShareForward):
    """A dense embedding [V, H] of which ranks have rows: all but one add zeros."""

    def of_share(self, x: torch.Tensor) -> torch.Tensor:
        """Ids int64 [...] -> [..., H]."""
        weight = local(self.module.weight)
        ids = x - self.group.rank() * weight.shape[0]
        others = (ids < 0) | (ids >= weight.shape[0])
        rows = F.embedding(ids.masked_fill(others, 0), weight)
        rows = rows.masked_fill_(others[..., None], 0)
        torch.distributed.all_reduce(rows, group=self.group)
        return rows


def divide_forwards(model: Any) -> None:
    """Give modules of `model`, which is divided and loaded, forwards that cost the host less.

    Those with a style that splits on its way, or shares of several lengths, keep what transformers gave them.
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
    """The forward for a module of `model` by that name; None for what transformers gave it."""
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
    known = isinstance(module, PackedLinear) or (type(module) is nn.Linear and _has_equal_rows(module.weight))
    return GatherForward if gathers and known else None


def _has_equal_rows(weight: Any) -> bool:
    """Whether ranks have each as many rows of a weight."""
    from torch.distributed.tensor import Shard

    placements = getattr(weight, "placements", None)
    return placements == (Shard(0),) and weight.shape[0] % weight.device_mesh.size() == 0


def undo_forwards(model: Any) -> None:
    """Give modules of `model` back the forwards that transformers made."""
    for module in model.modules():
        own = vars(module).get("forward")
        if isinstance(own, ShareForward):
            module.forward = own.original
            if isinstance(module, PackedLinear):
                module.shares_x = False
                module.drop_kernel_layouts()


def has_forwards(model: Any) -> bool:
    """Whether `divide_forwards` changed a module of `model`."""
    return any(isinstance(vars(module).get("forward"), ShareForward) for module in model.modules())
