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
    """Weight repacked to the kernel layout `name`, for activations of `dtype`, with the launch plans for it.

    tensors        tensors of the weight in this layout
    plans          launch plans of products, by `_key`; None for products that only the operator computes
    weight_plans   plans that dequantize the weight, by `Scheme.token`; None if no plan can
    """

    name: str
    dtype: torch.dtype
    tensors: tuple[torch.Tensor, ...]
    plans: dict[tuple[Any, ...], "LaunchPlan | None"] = field(default_factory=dict, init=False, repr=False)
    weight_plans: dict[str, "WeightPlan | None"] = field(default_factory=dict, init=False, repr=False)


class LaunchPlan:
    """Prepared kernel launches for y [..., n] = x [..., k] W^T + bias [n], for one weight and one M."""

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
        """Return y [..., n] for `x` [..., k] with the M and dtype of the plan; None if it is not usable.

        The plan is not usable on another device, or for a bias of another shape or dtype. Nor is it if memory
        is not aligned to 16 bytes, or if launches are skipped or seen by Triton's hooks (`is_watched`).
        """
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
        """Return True if `bias` is contiguous and has the shape [n], dtype and device that the plan needs."""
        return (
            bias.dtype == self._dtype
            and bias.get_device() == self._index
            and tuple(bias.shape) == (self._columns,)
            and bias.is_contiguous()
            and not bias.is_neg()
        )


class WeightPlan:
    """Prepared kernel launches that dequantize one weight to a new tensor [n, k]."""

    __slots__ = ("_bound", "_index", "_launches", "_stream")

    def __init__(self, bound: Bound, launches: tuple[FixedLaunch, ...], index: int) -> None:
        # `bound` keeps the tensors alive whose addresses are in the launches.
        self._bound, self._launches, self._index, self._stream = bound, launches, index, stream_getter()

    def __call__(self) -> torch.Tensor | None:
        """Return the dequantized weight, a new tensor [n, k]; None if the plan is not usable.

        It is not usable on another device, or if launches are skipped or seen by Triton's hooks
        (`is_watched`).
        """
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
    """Return True if a product with `x` [..., K] may skip both autograd and torch's dispatcher.

    That is so if `is_eager(x)` is true and x needs no gradient. Not checked are the weight, the bias, and
    whether torch.compile is tracing.
    """
    return not (x.requires_grad and torch.is_grad_enabled()) and is_eager(x)


def is_eager(x: torch.Tensor) -> bool:
    """Return True if a product with `x` [..., K] may skip torch's dispatcher.

    True if x is a plain strided tensor, and no forward-mode AD, transform of `torch.func`, dispatch or
    function mode, tracing or profiling is active. The caller checks gradients of x and torch.compile.
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
    """Return y [..., N] = `x` [..., K] W^T + `bias` [N] by a stored launch plan; None if no plan can be used.

    layout   kernel layout of W [N, K] for activations of x's dtype; it stores the plans
    x        operand for which `is_plain(x)` is true
    token    `Scheme.token` of W
    """
    plan = layout.plans.get(_key(x, bias, token))
    return None if plan is None else plan(x, bias)


def _key(x: torch.Tensor, bias: torch.Tensor | None, token: str) -> tuple[Any, ...]:
    """Return the key of the launch plan for products with `x` [..., K]; `token` is the `Scheme.token` of W.

    The key has M, the token, whether there is a bias, and the settings that select kernels.
    """
    return (x.numel() // x.shape[-1], token, bias is None, *choosing(x.dtype))


def dense_weight(
    layout: KernelLayout, x: torch.Tensor, scheme: Scheme, rows: int, columns: int
) -> torch.Tensor | None:
    """Return the weight of `layout`, dequantized by kernels to a new tensor [rows, columns].

    Return None if no kernel can do that on the current device, or if launches are skipped or seen by Triton's
    hooks (`is_watched`). The first call stores a launch plan in `layout`.

    x        tensor [..., K] of the layout's device and dtype, for which `is_eager(x)` is true; it is not read
    scheme   scheme of the weight
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
    """Prepare the launches of `x` [..., K] times a weight [rows, K], plus `bias` [rows] or None.

    Call this after the same product was computed, because its kernel must be compiled. The launch plan is
    stored in `layout.plans`; None is stored if such products cannot be planned.

    layout   kernel layout of the weight
    scheme   scheme of the weight, with the rounding of x to 8 bits if there is one
    rows     output features N of the weight
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
