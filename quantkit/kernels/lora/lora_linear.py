"""LoRA beside a packed linear, y = x W^T + b + s (d A^T) B^T, as one autograd function.

As modules it is seven operations a pass, each with a node of autograd and tensors that activation
checkpointing saves. Their host time, not the GPU, sets the pace of training (`benchmarks/adapter_steps.py`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from quantkit.kernels.autograd import sum_rows
from quantkit.kernels.eager import KernelLayout, is_eager
from quantkit.kernels.linear import are_tensors, are_trained, plain_product
from quantkit.kernels.linear_grad import Product, SavedOperands, Weight, grad_x, product_with_gradient
from quantkit.packing.schemes import Scheme


class Lora(NamedTuple):
    """Weights of a LoRA of rank r, for y = x W^T + factor * (x A^T) B^T: A [r, K] and B [N, r].

    Both are cast to the dtype of x.
    """

    a: torch.Tensor
    b: torch.Tensor
    factor: float

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """Return factor * (x A^T) B^T [..., N] for x [..., K], in the dtype of A or of autocast."""
        return F.linear(F.linear(x.to(self.a.dtype), self.a), self.b) * self.factor


def lora_parts(
    x: torch.Tensor,
    parts: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    scheme: Scheme,
    out_features: int,
    layout: KernelLayout | None,
    *,
    lora: Lora,
    dropout: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor | None:
    """Return y [..., N] = x [..., K] W^T + bias [N] + s (d A^T) B^T, with gradients of all but W.

        parts, bias, scheme, out_features, layout    the weight W, as in `linear.linear_parts`
        lora                                         A [r, K] and B [N, r], cast to x's dtype; s is `factor`
        dropout                                      d [..., K] is `dropout(x)`, or x if None

    Returns None where torch must see single operators, such as in torch.compile, or if a part of W requires a
    gradient.
    """
    a, b, factor = lora
    layout = layout if layout is not None and layout.dtype == x.dtype else None
    operands = [one for one in (*parts, a, b, bias) if one is not None]
    if torch.compiler.is_compiling() or not is_eager(x) or not are_tensors(operands) or are_trained(parts):
        return None
    weight = Weight(parts, layout, scheme.token, out_features)
    dropped, product = None if dropout is None else dropout(x), plain_product
    if are_trained([one for one in (x, dropped, a, b, bias) if one is not None]):
        product = partial(product_with_gradient, product=plain_product)
    y: torch.Tensor = _LoraLinear.apply(  # type: ignore[no-untyped-call]
        x, dropped, bias, a, b, factor, weight, product
    )
    return y


class _LoraLinear(torch.autograd.Function):
    """Autograd function of `lora_parts`: y = x W^T + bias + factor * (d A^T) B^T, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dropped: torch.Tensor | None,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        factor: float,
        weight: Weight,
        product: Product,
    ) -> torch.Tensor:
        """Compute y [..., N] for `x` [..., K], `bias` [N], `a` [r, K] and `b` [N, r].

        `product` computes x W^T + bias. `dropped` [..., K] is d; None if d is x. d A^T is not saved: the
        backward pass computes it again.
        """
        columns, d = x.shape[-1], x if dropped is None else dropped
        ctx.save_for_backward(d)
        ctx.saved, ctx.factor, ctx.is_same = SavedOperands(weight, a, b), factor, dropped is None
        # A and B are saved as they are: casts would take memory until the backward pass.
        a, b = a.to(x.dtype), b.to(x.dtype)
        y = product(x, bias, weight)
        # In place: y is new, and a sum in its own dtype rounds once.
        y.view(-1, y.shape[-1]).addmm_(d.reshape(-1, columns) @ a.t(), b.t(), alpha=factor)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of x, d, bias, A and B for `grad` [..., N].

        If the backward pass runs with create_graph, they can be differentiated again. Only the product of
        `grad` and W cannot: that raises `KernelError`.
        """
        (d,), (weight, (a, b)) = ctx.saved_tensors, ctx.saved.unpack()
        a, b = a.to(d.dtype), b.to(d.dtype)
        columns, factor, needs = d.shape[-1], ctx.factor, ctx.needs_input_grad
        rows, flat = d.reshape(-1, columns), grad.reshape(-1, grad.shape[-1])
        # s g B [M, r]. With beta = 0 nothing is read of the first operand.
        unread = d.new_empty(1, 1)
        low = torch.addmm(unread, flat, b, beta=0, alpha=factor)
        of_x = grad_x(weight, grad, columns) if needs[0] else None
        of_d = None
        if ctx.is_same and of_x is not None:
            of_x = torch.addmm(of_x.view(-1, columns), low, a).view(d.shape)
        elif needs[1]:
            of_d = (low @ a).view(d.shape)
        return (
            of_x,
            of_d,
            sum_rows(grad) if needs[2] else None,
            low.t() @ rows if needs[3] else None,
            torch.addmm(unread, flat.t(), rows @ a.t(), beta=0, alpha=factor) if needs[4] else None,
            None,
            None,
            None,
        )
