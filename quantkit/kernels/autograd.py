"""What torch's transforms make of the packed product: gradients, tangents, torch.vmap and `torch.func`.

It is differentiable in x and bias. First is what torch can be told of the operators of `linear`, where it is
registered with them; then what it cannot be told, which is computed beside them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import forward_ad

from quantkit.errors import KernelError
from quantkit.packing.schemes import parse_token


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keep of a call of `quantkit::linear` what `backward` takes."""
    x, parts, layout, _, scheme, _, layout_name = inputs
    # A layout that has the words is what the backward pass takes them from.
    kept = layout if len(parts) < len(parse_token(scheme).part_names) else []
    ctx.save_for_backward(*parts, *kept)
    ctx.scheme, ctx.layout_name = scheme, layout_name
    ctx.in_features = x.shape[-1]
    ctx.parts, ctx.layout_tensors = len(parts), len(layout)


def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradients of x and bias; `KernelError` where a part of the weight asks for one."""
    # Read once: a checkpoint computes them anew and hands them out a single time.
    saved = list(ctx.saved_tensors)
    parts, layout = saved[: ctx.parts], saved[ctx.parts :]
    needs = ctx.needs_input_grad
    if any(needs[1]):
        raise KernelError(
            "a scale of a packed weight asks for a gradient and has none; call requires_grad_(False) on it."
        )
    grad_x = None
    if needs[0]:
        grad_x = torch.ops.quantkit.linear_grad_x(
            grad, parts, layout, ctx.scheme, ctx.in_features, ctx.layout_name
        )
    grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if needs[3] else None
    return grad_x, [None] * len(parts), [None] * ctx.layout_tensors, grad_bias, None, None, None


def setup_context_of_grad_x(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keep of a call of `quantkit::linear_grad_x` what `backward_of_grad_x` takes."""
    grad, parts, layout, ctx.scheme, _, layout_name = inputs
    ctx.save_for_backward(*parts, *layout)
    # Without its tensors the operator is to choose as if none was built.
    ctx.layout_name = layout_name if layout else ""
    ctx.out_features = grad.shape[-1]
    ctx.parts, ctx.layout_tensors = len(parts), len(layout)


def backward_of_grad_x(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of a gradient: the product itself."""
    saved = list(ctx.saved_tensors)
    parts, layout = saved[: ctx.parts], saved[ctx.parts :]
    twice = torch.ops.quantkit.linear(
        grad, parts, layout, None, ctx.scheme, ctx.out_features, ctx.layout_name
    )
    return twice, [None] * ctx.parts, [None] * ctx.layout_tensors, None, None, None


def linear_vmap(
    info: Any,
    in_dims: tuple[Any, ...],
    x: torch.Tensor,
    parts: list[torch.Tensor],
    layout: list[torch.Tensor],
    bias: torch.Tensor | None,
    *of: Any,
) -> tuple[torch.Tensor, int]:
    """`quantkit::linear` over a dimension of x, bias or both, as one product with all rows of x."""
    x_dim, bias_dim = in_dims[0], in_dims[3]
    _check_one_weight(in_dims[1:3])
    x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
    shared = bias if bias_dim is None else None
    y = torch.ops.quantkit.linear(x, parts, layout, shared, *of)
    if bias is not None and bias_dim is not None:
        own = bias.movedim(bias_dim, 0)
        y = y + own.view(-1, *[1] * (y.dim() - 2), y.shape[-1])
    return y, 0


def linear_grad_x_vmap(
    info: Any, in_dims: tuple[Any, ...], grad: torch.Tensor, *weight: Any
) -> tuple[torch.Tensor, int]:
    """`quantkit::linear_grad_x` over a dimension of `grad`."""
    _check_one_weight(in_dims[1:3])
    return torch.ops.quantkit.linear_grad_x(grad.movedim(in_dims[0], 0), *weight), 0


def _check_one_weight(in_dims: tuple[Any, ...]) -> None:
    if any(dim is not None for dims in in_dims for dim in dims):
        raise KernelError(
            "torch.vmap goes over the packed weight; it can go over x and bias only. Loop over the weights."
        )


def is_transformed(x: torch.Tensor) -> bool:
    """Whether tangents are computed with values, or a transform of `torch.func` is on; not whether x has one.

    An operand may also have a tangent of an outer jvp, which cannot be seen within an inner one, and
    gradients of `torch.func.grad`, which operators have none for.
    """
    if torch.compiler.is_compiling():
        return _unpacked(x).primal is not x
    # Within vmap a tensor that it goes over cannot be asked.
    return torch._C._are_functorch_transforms_active() or _unpacked(_PROBE).primal is not _PROBE


#: Any tensor.
_PROBE = torch.empty(0, device="cpu")


def _unpacked(x: torch.Tensor) -> forward_ad.UnpackedDualTensor:
    dual: forward_ad.UnpackedDualTensor = forward_ad.unpack_dual(x)  # type: ignore[no-untyped-call]
    return dual


@dataclass(frozen=True, eq=False)
class WeightOperand:
    """What products with a packed weight [N, K] take beside x, or products with its transpose."""

    parts: tuple[torch.Tensor, ...]
    layout: tuple[torch.Tensor, ...]
    scheme: str
    shape: tuple[int, int]
    layout_name: str
    transposed: bool = False

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        stored, (rows, columns) = (list(self.parts), list(self.layout)), self.shape
        y: torch.Tensor
        if self.transposed:
            y = torch.ops.quantkit.linear_grad_x(x, *stored, self.scheme, columns, self.layout_name)
        else:
            y = torch.ops.quantkit.linear(x, *stored, bias, self.scheme, rows, self.layout_name)
        return y


class _ForwardMode(torch.autograd.Function):
    """A product that torch can transform: its tangent is the product of the tangents of x and bias."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, bias: torch.Tensor | None, weight: WeightOperand) -> torch.Tensor:
        return weight.product(x, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.weight = inputs[2]

    @staticmethod
    def jvp(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, _: None) -> torch.Tensor:
        return with_tangent(x, bias, ctx.weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        transposed = replace(ctx.weight, transposed=not ctx.weight.transposed)
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return with_tangent(grad, None, transposed), grad_bias, None


def with_tangent(x: torch.Tensor, bias: torch.Tensor | None, weight: WeightOperand) -> torch.Tensor:
    """The product of x and the weight, plus bias, of which tangents and transforms are taken too.

    Raises `KernelError` under torch.compile, and for parts of the weight that would have a derivative.
    """
    if torch.compiler.is_compiling():
        raise KernelError(
            "torch.compile leaves out tangents of packed products; call torch.func.jvp eagerly."
        )
    for part in weight.parts:
        if part.requires_grad or (part.is_floating_point() and _unpacked(part).tangent is not None):
            raise KernelError(
                "a scale of a packed weight asks for a gradient or has a tangent, and has no derivative; "
                "detach() it."
            )
    y: torch.Tensor = _ForwardMode.apply(x, bias, weight)  # type: ignore[no-untyped-call]
    return y
