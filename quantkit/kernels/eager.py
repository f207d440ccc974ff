"""Products of eager mode, whose time on the host counts: what was chosen and looked up once is kept.

With few rows of x a GPU computes a product in some microseconds, in which torch's dispatcher, its layers for
gradients, a choice among kernels and Triton's launcher have only begun. A `LaunchPlan` is what is left for a
weight and a number of rows: room for y, and launches with addresses. It is kept with the kernel layout that
it was made for, and taken only while all is as it was then, so that it computes what the operator would.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad

from quantkit.kernels.gemm.bound import Bound
from quantkit.kernels.jit.launcher import FixedLaunch, is_watched, stream_getter
from quantkit.kernels.problem import Outline, Problem
from quantkit.kernels.registry import choose, choosing
from quantkit.packing.schemes import Scheme

#: Numbers of rows of x, and circumstances, that a layout has plans for.
MOST_PLANS = 64

_current_device = torch.cuda.current_device
_modes = torch._C._len_torch_dispatch_stack
_functions = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active
_jit_trace = torch._C._get_tracing_state
_is_profiled = torch._C._autograd._profiler_enabled


@dataclass(frozen=True, eq=False)
class KernelLayout:
    """What rows built from a weight: private to them, for one activation dtype and one device."""

    name: str
    dtype: torch.dtype
    tensors: tuple[torch.Tensor, ...]
    #: By what they depend on; None where the operator is called.
    plans: dict[tuple[Any, ...], "LaunchPlan | None"] = field(default_factory=dict, init=False, repr=False)


class LaunchPlan:
    """y [..., n] = x [..., k] W^T + bias for one number of rows of x, on a GPU."""

    __slots__ = ("_bound", "_columns", "_dtype", "_index", "_launches", "_stream", "_sums")

    def __init__(self, bound: Bound, launches: tuple[FixedLaunch, ...], index: int) -> None:
        # It keeps the tensors whose addresses launches have.
        self._bound, self._launches = bound, launches
        self._columns, self._dtype, self._sums = bound.size[1], bound.dtype, bound.sums
        self._index, self._stream = index, stream_getter()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """None where this x or bias, or what is going on, is not what the plan is for."""
        if x.get_device() != self._index or (bias is not None and not self._takes(bias)):
            return None
        if _current_device() != self._index or is_watched():
            return None
        x = x if x.is_contiguous() else x.contiguous()
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
        return (
            bias.dtype == self._dtype
            and bias.get_device() == self._index
            and tuple(bias.shape) == (self._columns,)
            and bias.is_contiguous()
            and not bias.is_neg()
        )


def is_plain(x: torch.Tensor) -> bool:
    """Whether nothing but the numbers of a product with x is asked for, so that the operator can be left out.

    x has no gradient or tangent, no transform is on, no mode is to see the operator, nothing is traced. Not
    for torch.compile, whose state the caller asks for first. It looks at x alone, not at weight and bias.
    """
    return (
        type(x) is torch.Tensor
        and x.layout is torch.strided
        and not (x.is_meta or x.is_neg())
        and not (x.requires_grad and torch.is_grad_enabled())
        and not (_modes() or _functions() or _transforms())
        and forward_ad._current_level < 0
        and _jit_trace() is None
        # A profile is to show the operator by its name.
        and not _is_profiled()
    )


def planned(
    layout: KernelLayout, x: torch.Tensor, bias: torch.Tensor | None, token: str
) -> torch.Tensor | None:
    """y of x [..., K], which `is_plain`, by the plan for it; None where there is none.

    `layout` is of a weight [N, K] with the scheme of that token, for the dtype of x.
    """
    plan = layout.plans.get(_key(x, bias, token))
    return None if plan is None else plan(x, bias)


def _key(x: torch.Tensor, bias: torch.Tensor | None, token: str) -> tuple[Any, ...]:
    return (x.numel() // x.shape[-1], token, bias is None, *choosing(x.dtype))


def plan_next(
    layout: KernelLayout, x: torch.Tensor, bias: torch.Tensor | None, scheme: Scheme, rows: int
) -> None:
    """Plan products like that with x [..., K], which was computed just now, with a weight [rows, K]."""
    key = _key(x, bias, scheme.token)
    if key in layout.plans or not x.numel():
        return
    columns = x.shape[-1]
    flat = x.reshape(-1, columns).contiguous()
    chosen = choose(Problem.on(x.device, flat.shape[0], rows, columns, scheme, x.dtype, layout.name))
    plan = None
    if chosen.row.bind is not None and not scheme.column_scale:
        if flat.data_ptr() % 16 or is_watched():
            # The next x may be another.
            return
        bias = None if bias is None else bias.contiguous()
        weight = Outline(scheme, (rows, columns))
        bound: Bound = chosen.row.bind(flat, weight, layout.tensors, bias, chosen.tile)
        launches = bound.fixed(flat, bias)
        plan = None if launches is None else LaunchPlan(bound, launches, x.get_device())
    if len(layout.plans) >= MOST_PLANS:
        layout.plans.clear()
    layout.plans[key] = plan
