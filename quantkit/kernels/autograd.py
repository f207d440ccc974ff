"""The backward pass of the packed product: gradients of x and bias, of first order.

Gradients of gradients, tangents (forward derivatives), torch.vmap and the transforms of `torch.func` are
refused: torch by itself would leave the product out of a tangent or a second gradient, in silence.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from quantkit.errors import KernelError
from quantkit.packing.schemes import parse_token


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save for `backward` what it needs of a call of `quantkit::linear` with x [..., K] and `output` [...,
    N].
    """
    x, parts, layout, _, scheme, _, layout_name = inputs
    # A layout that has the words is what the backward pass takes them from.
    kept = layout if len(parts) < len(parse_token(scheme).part_names) else []
    ctx.save_for_backward(*parts, *kept)
    ctx.scheme, ctx.layout_name = scheme, layout_name
    ctx.in_features = x.shape[-1]
    ctx.parts, ctx.layout_tensors = len(parts), len(layout)


def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradients of x [..., K] and bias [N] from that of y, `grad` [..., N], in their dtypes.

    Raises `KernelError` where a part of the weight asks for a gradient.
    """
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


def setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save nothing of a call of `quantkit::linear_grad_x` with `output` [..., K]: `refuse_second_order` needs
    nothing.
    """


def refuse_second_order(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Raise `KernelError` where the gradient of a gradient is asked for; `grad` is [..., K]."""
    raise KernelError(
        "packed products have no gradients of gradients. Leave out create_graph=True, or compute with "
        "dequantize() of the weight."
    )


def is_transformed(x: torch.Tensor) -> bool:
    """Return True if x [..., K] has a tangent, or torch.vmap or another transform of `torch.func` is on."""
    if torch.compiler.is_compiling():
        return _has_tangent(x)
    # Within vmap a tensor that it goes over cannot be asked.
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_transforms(x: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[torch.Tensor]) -> None:
    """Raise `KernelError` for operands with tangents, and within torch.vmap and transforms of `torch.func`.

    To be called where x [..., K] `is_transformed`; bias is [N]. torch.compile is asked for the tangent of x
    alone.
    """
    if not torch.compiler.is_compiling():
        operands = (x, *parts) if bias is None else (x, bias, *parts)
        # Within transforms an operand may have a tangent of an outer one, which cannot be seen.
        if not (torch._C._are_functorch_transforms_active() or any(map(_has_tangent, operands))):
            return
    raise KernelError(
        "packed products have gradients of x and bias, but no forward derivatives, and do not go with "
        "torch.vmap and torch.func. Use backward() or torch.autograd.grad for gradients, a batch dimension "
        "of x for vmap, or compute with dequantize() of the weight."
    )


def _has_tangent(x: torch.Tensor) -> bool:
    # Integers have none and cannot be asked.
    """Return True if x [...] has a tangent of forward derivatives."""
    return x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]
