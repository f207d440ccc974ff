"""Gradient of x of the packed linear: g W for the gradient g of y, by a torch operator or without one.

torch's own wrapper around operators with gradients takes the host 0.3 ms a call, more than a GPU needs for
many products. `eager_linear` goes without it, if nothing traces or transforms the product.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from quantkit.kernels.autograd import gradients, refuse_second_order, setup_context, setup_nothing
from quantkit.kernels.eager import KernelLayout, is_eager
from quantkit.kernels.gemm.unpack import dequantized_blocks
from quantkit.kernels.problem import Outline, Problem
from quantkit.kernels.registry import grad_kernel
from quantkit.kernels.weight_layouts import whole_weight
from quantkit.packing.schemes import parse_token
from quantkit.packing.tensor import PackedTensor

torch.library.define(
    "quantkit::linear_grad_x",
    "(Tensor grad, Tensor[] parts, Tensor[] layout, str scheme, int in_features, str layout_name) -> Tensor",
)


def linear_grad_x(
    grad: torch.Tensor,
    parts: Sequence[torch.Tensor],
    layout: Sequence[torch.Tensor],
    scheme: str,
    in_features: int,
    layout_name: str,
) -> torch.Tensor:
    """Return the gradient of x, `grad` [..., N] @ W [N, K], in grad's dtype: by a kernel, or in float32.

    W is given as stored, `parts`, or as repacked in the layout `layout_name`, `layout`; `scheme` is a
    `Scheme.token`, `in_features` K.
    """
    rows, parsed = grad.shape[-1], parse_token(scheme).of_weights
    flat = grad.reshape(-1, rows).contiguous()
    outline = Outline(parsed, (rows, in_features))
    problem = Problem.on(grad.device, len(flat), rows, in_features, parsed, grad.dtype, layout_name)
    kernel = grad_kernel(problem) if len(flat) else None
    if kernel is not None:
        assert kernel.grad_x is not None
        out = kernel.grad_x(flat, outline, tuple(layout) if kernel.layout is not None else ())
    else:
        out = _in_float32(flat.float(), whole_weight(parts, layout, layout_name, parsed, outline.shape))
    if parsed.column_scale:
        # Counted from the end, as the words may be missing.
        column_scale = parts[parsed.part_names.index("column_scale") - len(parsed.part_names)]
        out = out * column_scale.to(out.dtype)
    return out.to(grad.dtype).view(*grad.shape[:-1], in_features)


def _in_float32(grad: torch.Tensor, weight: PackedTensor) -> torch.Tensor:
    """Return `grad` [M, N] @ `weight` [N, K] without column scale, dequantizing a block of rows at a time."""
    out = torch.zeros(len(grad), weight.shape[1], dtype=torch.float32, device=grad.device)
    for block, values in dequantized_blocks(weight):
        out.addmm_(grad[:, block], values)
    return out


def _grad_x_fake(
    grad: torch.Tensor, parts: object, layout: object, scheme: object, in_features: int, _: object
) -> torch.Tensor:
    """Return an empty gradient of x, [..., K], for `grad` [..., N], for tracing."""
    return grad.new_empty(*grad.shape[:-1], in_features)


torch.library.impl("quantkit::linear_grad_x", "default", linear_grad_x)
torch.library.register_fake("quantkit::linear_grad_x", _grad_x_fake)
torch.library.register_autograd("quantkit::linear_grad_x", refuse_second_order, setup_context=setup_nothing)


class Weight(NamedTuple):
    """Weight [out_features, K] of `eager_linear`.

    parts    tensors as stored
    layout   the weight as repacked for a kernel, or None
    token    `Scheme.token`
    """

    parts: Sequence[torch.Tensor]
    layout: KernelLayout | None
    token: str
    out_features: int


#: Computes y [..., N] from x, parts, bias, token, out_features and layout.
Product = Callable[
    [torch.Tensor, Sequence[torch.Tensor], torch.Tensor | None, str, int, KernelLayout | None], torch.Tensor
]


def eager_linear(
    x: torch.Tensor, bias: torch.Tensor | None, weight: Weight, product: Product
) -> torch.Tensor:
    """Return y [..., N] = x [..., K] W^T + bias [N], computed by `product`, with gradients of x and bias.

    The weight is frozen. `eager.is_eager(x)` must be true.
    """
    y: torch.Tensor = _EagerLinear.apply(x, bias, weight, product)  # type: ignore[no-untyped-call]
    return y


class _EagerLinear(torch.autograd.Function):
    """Autograd function of `eager_linear`: the product, and its gradients for x and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: Weight, product: Product
    ) -> torch.Tensor:
        """Compute y [..., N] of `x` [..., K] and `bias` [N] by `product`; save the weight alone."""
        parts, layout, token, rows = weight
        tensors, name = ((), "") if layout is None else (layout.tensors, layout.name)
        setup_context(ctx, (x, parts, tensors, bias, token, rows, name), None)
        return product(x, parts, bias, token, rows, layout)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of x and bias for `grad` [..., N]."""
        # With create_graph, the operator refuses to be differentiated again, and transforms.
        is_plain = is_eager(grad) and not torch.is_grad_enabled()
        run = linear_grad_x if is_plain else torch.ops.quantkit.linear_grad_x
        needs = ctx.needs_input_grad
        return *gradients(ctx, grad, run, of_x=needs[0], of_bias=needs[1]), None, None
