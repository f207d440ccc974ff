"""Launch plans for eager mode, which save host time: the kernel of a product is selected and looked up once.

For few rows of x, a GPU takes a few microseconds. torch's dispatcher, autograd, kernel selection and Triton's
launcher take longer.

A `LaunchPlan` is stored with its kernel layout, for one weight and M: the memory of y, and launches with
addresses. It is used only while all conditions of its creation hold, so it computes the same as the operator.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad

from quantkit.kernels.gemm.bound import Bound
from quantkit.kernels.jit.launcher import FixedLaunch, is_watched, stream_getter
from quantkit.kernels.ops.quantize_x import round_x
from quantkit.kernels.problem import Outline, Problem
from quantkit.kernels.registry import choose, choosing, grad_kernel
from quantkit.packing.activations import ActivationScheme
from quantkit.packing.schemes import Scheme

#: Most plans of a layout: one per M and state of torch.
MOST_PLANS = 64

_UNKNOWN: Any = object()

_current_device = torch.cuda.current_device
_modes = torch._C._len_torch_dispatch_stack
_functions = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active
_jit_trace = torch._C._get_tracing_state
_is_profiled = torch._C._autograd._profiler_enabled


@dataclass(frozen=True, eq=False)
class KernelLayout:
    """Weight as repacked for kernels: the tensors of the layout called `name`, for one activation dtype."""

    name: str
    dtype: torch.dtype
    tensors: tuple[torch.Tensor, ...]
    #: Plans by `_key`; None means that the operator is called.
    plans: dict[tuple[Any, ...], "LaunchPlan | None"] = field(default_factory=dict, init=False, repr=False)
    #: Plans of the whole weight by scheme token; None means that it cannot be planned.
    weight_plans: dict[str, "WeightPlan | None"] = field(default_factory=dict, init=False, repr=False)


class LaunchPlan:
    """Prepared launches of y [..., n] = x [..., k] W^T + bias [n], for one weight and one M (rows of x)."""

    __slots__ = ("_bound", "_columns", "_dtype", "_index", "_launches", "_rounding", "_stream", "_sums")

    def __init__(
        self,
        bound: Bound,
        launches: tuple[FixedLaunch, ...],
        index: int,
        rounding: ActivationScheme | None = None,
    ) -> None:
        # `bound` keeps the tensors alive whose addresses are in the launches.
        self._bound, self._launches = bound, launches
        self._columns, self._dtype, self._sums = bound.size[1], bound.dtype, bound.sums
        self._index, self._stream, self._rounding = index, stream_getter(), rounding

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return y [..., n] for `x` [..., k]; None if the plan does not fit x, bias or the state of torch."""
        if x.get_device() != self._index or (bias is not None and not self._takes(bias)):
            return None
        if _current_device() != self._index or is_watched():
            return None
        x = x if x.is_contiguous() else x.contiguous()
        if self._rounding is not None:
            x = round_x(x.view(-1, x.shape[-1]), self._rounding).view(x.shape)
        y = x.new_empty((*x.shape[:-1], self._columns))
        given, written = x.data_ptr(), y.data_ptr()
        added = written if bias is None else bias.data_ptr()
        if self._sums:
            sums = x.new_empty(self._sums, dtype=torch.float32)
            addresses = given, added, written, sums.data_ptr()
        else:
            addresses = given, added, written, written
        if (given | added | written | addresses[3]) & 15 or not given:
            return None
        stream = self._stream(self._index)
        for launch in self._launches:
            launch(stream, addresses)
        return y

    def _takes(self, bias: torch.Tensor) -> bool:
        """Return True if `bias` has the shape [n], dtype, device and strides that the plan was made for."""
        return (
            bias.dtype == self._dtype
            and bias.get_device() == self._index
            and tuple(bias.shape) == (self._columns,)
            and bias.is_contiguous()
            and not bias.is_neg()
        )


class WeightPlan:
    """Prepared launches that write a weight [n, k], in the dtype of its layout, to new memory."""

    __slots__ = ("_bound", "_index", "_launches", "_stream")

    def __init__(self, bound: Bound, launches: tuple[FixedLaunch, ...], index: int) -> None:
        # `bound` keeps the tensors alive whose addresses are in the launches.
        self._bound, self._launches, self._index, self._stream = bound, launches, index, stream_getter()

    def __call__(self) -> torch.Tensor | None:
        """Return the weight [n, k]; None if another device is current, or something watches launches."""
        if _current_device() != self._index or is_watched():
            return None
        bound = self._bound
        weight = torch.empty(bound.size, dtype=bound.dtype, device=bound.device)
        addresses = (weight.data_ptr(),) * 4
        if addresses[0] & 15:
            return None
        stream = self._stream(self._index)
        for launch in self._launches:
            launch(stream, addresses)
        return weight


def is_plain(x: torch.Tensor) -> bool:
    """Return True if a product with `x` [..., K] needs no autograd and no dispatcher, only its values.

    `is_eager(x)` is true, and x has no gradient. The caller checks torch.compile, weight and bias.
    """
    return not (x.requires_grad and torch.is_grad_enabled()) and is_eager(x)


def is_eager(x: torch.Tensor) -> bool:
    """Return True if a product with `x` [..., K] may skip torch's dispatcher, except for a gradient.

    That is so if x has no tangent, no transform or mode is active, and nothing is traced or profiled. The
    caller checks torch.compile.
    """
    return (
        type(x) is torch.Tensor
        and x.layout is torch.strided
        and not (x.is_meta or x.is_neg())
        and not (_modes() or _functions() or _transforms())
        and forward_ad._current_level < 0
        and _jit_trace() is None
        # A profile must show the operator's name.
        and not _is_profiled()
    )


def planned(
    layout: KernelLayout, x: torch.Tensor, bias: torch.Tensor | None, token: str
) -> torch.Tensor | None:
    """Return y [..., N] for `x` [..., K] by an existing launch plan; None if no plan fits.

    `is_plain(x)` must be true. `layout` belongs to a weight [N, K] with the scheme of `token`, for the dtype
    of x.
    """
    plan = layout.plans.get(_key(x, bias, token))
    return None if plan is None else plan(x, bias)


def _key(x: torch.Tensor, bias: torch.Tensor | None, token: str) -> tuple[Any, ...]:
    """Return the key of the launch plan for `x` [..., K]: what launches depend on, such as rows and dtype.

    `token` is the `Scheme.token` of the weight.
    """
    return (x.numel() // x.shape[-1], token, bias is None, *choosing(x.dtype))


def dense_weight(
    layout: KernelLayout, x: torch.Tensor, scheme: Scheme, rows: int, columns: int
) -> torch.Tensor | None:
    """Return the weight [rows, columns] of `layout` in its dtype, written anew by a launch plan.

    None if no kernel writes it whole, or its launch cannot be planned. `is_eager(x)` must be true of x
    [..., K], which has the dtype and device of the layout. `scheme` is that of the weight.
    """
    plan = layout.weight_plans.get(scheme.token, _UNKNOWN)
    if plan is not _UNKNOWN:
        return None if plan is None else plan()
    # A launch is on the current device.
    if is_watched() or (x.is_cuda and _current_device() != x.get_device()):
        return None
    problem = Problem.on(x.device, 1, rows, columns, scheme, x.dtype, layout.name)
    kernel, bound = grad_kernel(problem), None
    if kernel is not None and kernel.bind_weight is not None and not scheme.column_scale:
        bound = kernel.bind_weight(x, Outline(scheme, (rows, columns)), layout.tensors)
    if bound is None:
        layout.weight_plans[scheme.token] = None
        return None
    weight: torch.Tensor = bound(x, None)
    # Nothing reads x: a tensor that is aligned stands for it.
    launches = bound.fixed(weight, None)
    layout.weight_plans[scheme.token] = launches and WeightPlan(bound, launches, x.get_device())
    return weight


def plan_next(
    layout: KernelLayout, x: torch.Tensor, bias: torch.Tensor | None, scheme: Scheme, rows: int
) -> None:
    """Make a launch plan for products like the one just computed, and store it in the weight's `layout`.

    The product was `x` [..., K] times a weight [rows, K], plus `bias` [rows] or None. `scheme` is the scheme
    of the weight, and may say how x is rounded. If such products cannot be planned, None is stored.
    """
    key = _key(x, bias, scheme.token)
    if key in layout.plans or not x.numel():
        return
    columns = x.shape[-1]
    flat = x.reshape(-1, columns).contiguous()
    problem = Problem.on(x.device, flat.shape[0], rows, columns, scheme, x.dtype, layout.name)
    chosen = choose(problem)
    plan, rounding = None, scheme.activations
    if chosen.kernel.bind is not None and not scheme.column_scale:
        options = {}
        if rounding is not None and chosen.rounds(problem):
            options, rounding = {"activations": rounding}, None
        flat = flat if rounding is None else round_x(flat, rounding)
        if flat.data_ptr() % 16 or is_watched():
            # The next x may fit a plan.
            return
        bias = None if bias is None else bias.contiguous()
        weight = Outline(scheme.of_weights, (rows, columns))
        bound: Bound = chosen.kernel.bind(flat, weight, layout.tensors, bias, chosen.tile, **options)
        launches = bound.fixed(flat, bias)
        plan = None if launches is None else LaunchPlan(bound, launches, x.get_device(), rounding)
    if len(layout.plans) >= MOST_PLANS:
        layout.plans.clear()
    layout.plans[key] = plan
