"""Tensor parallelism of packed models: transformers divides matrices among ranks, by rows or by columns.

A rank's share has to be a weight of the same scheme. Rows of words can be cut between words alone, as can the
zero-points of several rows in a word, and a group has one scale. So not every number of ranks fits a packed
matrix, and some of its parts are divided while others are whole on all ranks. transformers by itself would
divide all of them, and experts, whose parts its plan does not name, not at all. `TensorParallelPlan` says
what fits, and `divide_packed` has the parallel styles of transformers divide packed modules as it says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from quantkit.errors import EnvironmentProblem, UsageError
from quantkit.model.experts import PackedExperts
from quantkit.model.modules import packed_modules
from quantkit.model.packed_module import PackedModule
from quantkit.packing.schemes import Scheme

if TYPE_CHECKING:
    from quantkit.checkpoint.source import Checkpoint

Axis = Literal["rows", "columns"]

#: Numbers of ranks that are looked at.
MOST_RANKS = 64


@dataclass(frozen=True)
class Cut:
    """A matrix that ranks divide along `axis`: `length` rows or columns.

    `units` are what whole numbers of them are stored or used in, and how many each takes.
    """

    name: str
    axis: Axis
    length: int
    units: Mapping[str, int]

    def why_not(self, ranks: int) -> str | None:
        """None if so many ranks can have equal shares, else the reason."""
        share, rest = divmod(self.length, ranks)
        if ranks == 1:
            return None
        if rest:
            return f"the {self.length} {self.axis} of {self.name!r} have no equal shares for {ranks} ranks"
        for what, size in self.units.items():
            if share % size:
                return (
                    f"with {ranks} ranks each has {share} of the {self.length} {self.axis} of {self.name!r}, "
                    f"which are no whole {what}"
                )
        return None


@dataclass(frozen=True)
class TensorParallelPlan:
    """What ranks divide of a model whose class is `model`."""

    model: str
    cuts: tuple[Cut, ...]

    def why_not(self, ranks: int) -> str | None:
        """None if so many ranks can run the model, else the reason: of the first matrix that does not fit."""
        if ranks > 1 and not self.cuts:
            return f"transformers has no tensor-parallel plan for {self.model}"
        return next((reason for cut in self.cuts if (reason := cut.why_not(ranks)) is not None), None)

    @property
    def first_refused(self) -> int:
        """The smallest power of two that does not fit."""
        ranks = 2
        while self.why_not(ranks) is None:
            ranks *= 2
        return ranks

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of ranks that can run the model, up to `MOST_RANKS`."""
        return tuple(ranks for ranks in range(1, MOST_RANKS + 1) if self.why_not(ranks) is None)

    def check(self, ranks: int) -> None:
        """`UsageError` unless so many ranks can run the model."""
        reason = self.why_not(ranks)
        if reason is not None:
            raise UsageError(
                f"{reason}. The tensor parallel sizes of this checkpoint are "
                f"{', '.join(map(str, self.sizes))}. Use one of them, or quantize the model with another "
                "format or group size."
            )


def plan_of_checkpoint(checkpoint: "Checkpoint") -> TensorParallelPlan:
    """The plan of a packed checkpoint, from its config.json alone; `CheckpointError` for one that is not."""
    from quantkit.checkpoint.quantization_config import QuantizationConfig
    from quantkit.model.plugin import swap_modules
    from quantkit.model.structure import meta_model

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
                axis, pieces = _division(styles(key))
                if axis is not None:
                    cuts.append(
                        _cut(key, axis, scheme, shape, pieces // halves, _heads(modules, name, shape[0]))
                    )
        elif type(module) is nn.Linear:
            # A dense one may be divided anywhere, but within a head.
            heads = _heads(modules, name, module.out_features)
            if heads and _division(styles(name))[0] == "rows":
                cuts.append(Cut(name, "rows", module.out_features, heads))
    return TensorParallelPlan(type(model).__name__, tuple(cuts))


def _heads(modules: Mapping[str, nn.Module], name: str, rows: int) -> dict[str, int]:
    """What the rows of a linear of attention are for; nothing for another linear."""
    size = getattr(modules[name.rpartition(".")[0]], "head_dim", None)
    return {f"heads of {size}": size} if isinstance(size, int) and rows % size == 0 else {}


def _cut(
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


def _division(style: Any) -> tuple[Axis | None, int]:
    """Along what a style divides a matrix, None if not at all, and in how many pieces, all divided."""
    if style is None:
        return None, 1
    from transformers.distributed import tensor_parallel as styles

    if isinstance(style, styles.PackedColwiseParallel):
        return "rows", style.split_factor
    if isinstance(style, styles.ColwiseParallel):
        return "rows", 1
    return ("columns" if isinstance(style, styles.RowwiseParallel) else None), 1


def divide_packed(model: Any) -> None:
    """Have transformers, which is about to divide `model` among ranks, divide its packed modules right.

    It then raises `UsageError` for a number of ranks that does not fit, or for a plan of another kind.
    `EnvironmentProblem` for a transformers without parallel styles that divide parameters one by one.
    """
    distributed = getattr(model.config, "distributed_config", None)
    experts = [name for name, module in packed_modules(model) if isinstance(module, PackedExperts)]
    if experts and (getattr(distributed, "ep_size", None) or 1) > 1:
        raise _not_by_expert(experts[0])
    try:
        from transformers.distributed.tensor_parallel import (
            ALL_PARALLEL_STYLES,
            replace_layer_number_by_wildcard,
        )
    except ImportError as error:
        from transformers import __version__

        raise EnvironmentProblem(
            f"transformers {__version__} cannot run packed models tensor-parallel. Install transformers 5.17 "
            "or later, or load with device_map='auto'."
        ) from error
    for style in ALL_PARALLEL_STYLES.values():
        for method in (_shard_param, _validate_param):
            own = getattr(style, method.__name__.removeprefix("_"), None)
            if own is not None and not isinstance(own, partial):
                setattr(style, method.__name__.removeprefix("_"), partial(method, style, own))
    plan = tensor_parallel_plan(model)
    for name, module in packed_modules(model):
        module.tensor_parallel = plan
        for entry, spec in module.part_specs().items() if isinstance(module, PackedExperts) else ():
            parameter = replace_layer_number_by_wildcard(f"{name}.{entry.removesuffix(spec.suffix)}")
            if parameter in model._tp_plan:
                model._tp_plan[f"{parameter}{spec.suffix}"] = model._tp_plan[parameter]


def _shard_param(style: Any, original: Callable[..., None], module: nn.Module, param: str, mesh: Any) -> None:
    """In place of a style's `shard_param`: on the meta device, what is divided becomes a DTensor."""
    spec = module.part_specs().get(param) if isinstance(module, PackedModule) else None
    if spec is None:
        original(module, param, mesh)
        return
    assert isinstance(module, PackedModule) and module.tensor_parallel is not None
    ranks, parameter = mesh.size(), param.removesuffix(spec.suffix)
    module.tensor_parallel.check(ranks)
    axis, pieces = _division(style)
    scheme, (rows, columns), halves = module.logical()[parameter]
    if (axis is None and isinstance(module, PackedExperts)) or (axis == "rows" and halves not in (1, pieces)):
        raise _not_by_expert(f"{type(module).__name__}.{parameter}")
    if axis is None:
        return
    cut = _cut(param, axis, scheme, (rows, columns), pieces // halves, {})
    TensorParallelPlan("", (cut,)).check(ranks)
    share = (rows // ranks, columns) if axis == "rows" else (rows, columns // ranks)
    whole, part = (scheme.storage_shapes(shape)[spec.part][1] for shape in ((rows, columns), share))
    # What is no shorter in a share is whole on all ranks, such as the one scale of a row that is divided.
    for dim, (length, of_share) in enumerate(zip(whole, part, strict=True), len(spec.shape) - len(whole)):
        if length != of_share:
            _distribute(module, param, mesh, dim, pieces)
    if axis == "columns" and spec.part == "packed":
        module.keep_columns(parameter, share[1])


def _distribute(module: nn.Module, param: str, mesh: Any, dim: int, pieces: int) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    placement = Shard(dim) if pieces == 1 else _StridedShard(dim=dim, split_factor=pieces)
    divided = distribute_tensor(getattr(module, param), mesh, [placement], src_data_rank=None)
    module._parameters[param] = nn.Parameter(divided, requires_grad=False)


def _validate_param(
    style: Any,
    original: Callable[..., None],
    module: nn.Module,
    param: str,
    mesh: Any,
    parameter_name: Any = None,
) -> None:
    """In place of a style's `validate_param`, which takes every parameter for a matrix."""
    if not isinstance(module, PackedModule):
        original(module, param, mesh, parameter_name=parameter_name)


def _not_by_expert(name: str) -> UsageError:
    return UsageError(
        f"{name!r}: packed experts are divided by the rows of gate and up and the columns of down alone, "
        "not by expert. Load with tp_plan='auto' and without expert parallelism."
    )
