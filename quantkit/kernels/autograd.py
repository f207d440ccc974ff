"""Backward pass of the packed linear: first-order gradients of x and bias.

Second-order gradients, forward-mode derivatives (tangents), torch.vmap and the transforms of `torch.func` are
refused. torch would otherwise silently leave the product out of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from quantkit.errors import KernelError


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    """Save on `ctx` what `backward` needs: the tensors, scheme, K and kernel layout of the weight.

    `inputs` are the arguments of the operator `quantkit::linear`, of which x [..., K] is the first. `output`
    [..., N] is its result, which is not saved.
    """
    x, parts, layout, _, scheme, _, layout_name = inputs
    ctx.save_for_backward(*parts, *layout)
    ctx.scheme, ctx.layout_name = scheme, layout_name
    ctx.in_features = x.shape[-1]
    ctx.parts, ctx.layout_tensors = len(parts), len(layout)


def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradients of all arguments of `quantkit::linear`, from `grad` [..., N], the gradient of y.

    x [..., K] and bias [N] get a gradient of their shape if they require one. All other entries are None.
    Raises `KernelError` if a tensor of the packed weight, such as a scale, requires a gradient.
    """
    needs = ctx.needs_input_grad
    if any(needs[1]):
        raise KernelError(
            "a scale of a packed weight asks for a gradient and has none; call requires_grad_(False) on it."
        )
    # Read once: activation checkpointing recomputes them and returns them a single time.
    saved = list(ctx.saved_tensors)
    parts, layout = saved[: ctx.parts], saved[ctx.parts :]
    of_x = None
    if needs[0]:
        of_x = torch.ops.quantkit.linear_grad_x(
            grad, parts, layout, ctx.scheme, ctx.in_features, ctx.layout_name
        )
    of_bias = sum_rows(grad) if needs[3] else None
    return of_x, [None] * ctx.parts, [None] * ctx.layout_tensors, of_bias, None, None, None


def sum_rows(grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a bias, [N], for `grad` [..., N], the gradient of y."""
    return grad.reshape(-1, grad.shape[-1]).sum(0)


def setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save nothing, because `quantkit::linear_grad_x`, whose `output` is [..., K], has no backward pass."""


def refuse_second_order(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Raise `KernelError`: the gradient of x has no gradient of its own. `grad` [..., K] is not read."""
    raise KernelError(
        "packed products have no gradients of gradients. Leave out create_graph=True, or compute with "
        "dequantize() of the weight."
    )


def is_transformed(x: torch.Tensor) -> bool:
    """Return True if forward-mode AD, or a transform of `torch.func` such as vmap, is active.

    Under torch.compile, return True if x [..., K] has a forward-mode tangent.
    """
    if torch.compiler.is_compiling():
        return _has_tangent(x)
    # Inside vmap, a batched tensor cannot be queried.
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_transforms(x: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[torch.Tensor]) -> None:
    """Raise `KernelError` if an operand has a forward-mode tangent, or a transform of `torch.func` is active.

    The operands are x [..., K], `bias` [N] or None, and `parts`, the tensors of the packed weight. Call this
    only if `is_transformed(x)` is true: under torch.compile it always raises.
    """
    if not torch.compiler.is_compiling():
        operands = (x, *parts) if bias is None else (x, bias, *parts)
        # Inside transforms an operand may have the tangent of an outer transform, which is not visible.
        if not (torch._C._are_functorch_transforms_active() or any(map(_has_tangent, operands))):
            return
    raise KernelError(
        "packed products have gradients of x and bias, but no forward derivatives, and do not go with "
        "torch.vmap and torch.func. Use backward() or torch.autograd.grad for gradients, a batch dimension "
        "of x for vmap, or compute with dequantize() of the weight."
    )


def _has_tangent(x: torch.Tensor) -> bool:
    # Integer tensors have no tangent and cannot be queried.
    """Return True if x [...] has a forward-mode tangent."""
    return x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]
