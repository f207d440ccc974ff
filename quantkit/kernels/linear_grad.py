"""Gradient of x of the packed linear: g W for the gradient g of y, by a torch operator or without one.

torch's own wrapper around operators with gradients takes the host 0.3 ms a call, more than a GPU needs for
many products. `eager_linear` goes without it, if nothing traces or transforms the product.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from quantkit.errors import KernelError
from quantkit.kernels.autograd import refuse_second_order, setup_nothing, sum_rows
from quantkit.kernels.eager import KernelLayout, dense_weight, is_eager
from quantkit.kernels.gemm.unpack import dequantized_blocks
from quantkit.kernels.problem import Outline, Problem
from quantkit.kernels.registry import forced_kernel, grad_kernel, is_verbose, say_once
from quantkit.kernels.weight_layouts import whole_weight
from quantkit.packing.schemes import Scheme, parse_token
from quantkit.packing.tensor import PackedTensor

#: Rows of x from which a product with a gradient takes the weight in the dtype of x, written by a prepared
#: launch. On an H200 fused kernels are as fast there, but their launch takes the host 50 us longer.
DENSE_ROWS = 512

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
    """Return the gradient of x, `grad` [..., N] @ W [N, K], in grad's dtype.

        grad           [..., N]: the gradient of y
        parts          the tensors of W as stored
        layout         the tensors of W, repacked in the layout `layout_name`; empty for none
        scheme         a `Scheme.token`
        in_features    K

    If no kernel supports these operands, W is dequantized and multiplied in float32.
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
    """Return `grad` [M, N] @ `weight` [N, K], float32, without the weight's column scale.

    The weight is dequantized a block of rows at a time.
    """
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


#: Computes y [..., N] from x [..., K], bias [N] or None, and the weight.
Product = Callable[[torch.Tensor, torch.Tensor | None, Weight], torch.Tensor]


class SavedOperands:
    """Tensors that a backward pass reads without `save_for_backward`: a weight, and others such as a LoRA.

    Activation checkpointing packs and unpacks each tensor that was saved by `save_for_backward`. That takes
    the host longer than a product.
    """

    __slots__ = ("_tensors", "_versions", "_weight")

    def __init__(self, weight: Weight, *others: torch.Tensor) -> None:
        self._weight: Weight | None = weight
        self._tensors = others
        self._versions = _versions(weight, others)

    def unpack(self) -> tuple[Weight, tuple[torch.Tensor, ...]]:
        """Return (the weight, the other tensors) in a backward pass; free them unless the graph is retained.

        Raises `KernelError` if one was changed in place since the forward pass, or if they were freed.
        """
        weight, others = self._weight, self._tensors
        if weight is None:
            raise KernelError(
                "the backward pass of a packed product runs a second time, and its tensors were freed after "
                "the first. Call the first backward() with retain_graph=True."
            )
        if _versions(weight, others) != self._versions:
            scheme = parse_token(weight.token)
            raise KernelError(
                f"a packed weight ({scheme.format.name}, {weight.out_features} rows), or the LoRA beside it, "
                "was changed in place between its forward and its backward pass, so that gradients would be "
                "wrong. Change it before the forward pass or after backward()."
            )
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._weight, self._tensors = None, ()
        return weight, others


def _versions(weight: Weight, others: Sequence[torch.Tensor]) -> list[int]:
    """Return how often the weight's tensors and `others` [...] were changed in place: each `_version`.

    It is -1 for tensors of inference mode, which have none.
    """
    layout = () if weight.layout is None else weight.layout.tensors
    return [-1 if one.is_inference() else one._version for one in (*weight.parts, *layout, *others)]


def product_with_gradient(
    x: torch.Tensor, bias: torch.Tensor | None, weight: Weight, product: Product
) -> torch.Tensor:
    """Return y [..., N] = `x` [..., K] W^T + `bias` [N], by `product` or with the dequantized weight.

    If x has at least `DENSE_ROWS` rows and the kernels' layout of the weight allows it, the weight is
    dequantized and torch multiplies.
    """
    scheme = parse_token(weight.token)
    # Kernels round x as the scheme says, and convert a bias of another dtype.
    is_alike = scheme.activations is None and (bias is None or bias.dtype == x.dtype)
    dense = _dense(weight, x, scheme, x.shape[-1]) if is_alike and not forced_kernel() else None
    if dense is not None:
        if is_verbose():
            rows, (n, k) = x.numel() // x.shape[-1], dense.shape
            problem = Problem.on(x.device, rows, n, k, scheme, x.dtype)
            say_once((str(problem), "dense"), f"{problem}: multiplied dense, as the product has a gradient")
        y = F.linear(x, dense, bias)
        if bias is None:
            return y
        # It may be a view, and a view out of an autograd function refuses changes in place.
        unsafe_view: torch.Tensor = torch.ops.aten._unsafe_view(y, list(y.shape))
        return unsafe_view
    return product(x, bias, weight)


def _dense(weight: Weight, x: torch.Tensor, scheme: Scheme, columns: int) -> torch.Tensor | None:
    """Return the dequantized weight [N, columns] if `x` has at least `DENSE_ROWS` rows, else None.

    `x` is [..., K] in the forward pass and the gradient [..., N] in the backward pass. `columns` is K. None
    also if the weight has no layout for the dtype of x.
    """
    layout = weight.layout
    if layout is None or layout.dtype != x.dtype or x.numel() < DENSE_ROWS * x.shape[-1]:
        return None
    return dense_weight(layout, x, scheme, weight.out_features, columns)


def grad_x(weight: Weight, grad: torch.Tensor, in_features: int) -> torch.Tensor:
    """Return g W [..., K] for `grad` g [..., N], the gradient of y, inside a backward pass."""
    parts, layout, token, _ = weight
    # With create_graph, the operator refuses to be differentiated again, and transforms.
    is_plain = is_eager(grad) and not torch.is_grad_enabled()
    if is_plain:
        dense = _dense(weight, grad, parse_token(token).of_weights, in_features)
        if dense is not None:
            return grad @ dense
    tensors, name = ((), "") if layout is None else (layout.tensors, layout.name)
    run = linear_grad_x if is_plain else torch.ops.quantkit.linear_grad_x
    found: torch.Tensor = run(grad, list(parts), list(tensors), token, in_features, name)
    return found


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
        """Compute y [..., N] of `x` [..., K] and `bias` [N] by `product`; save only the weight."""
        ctx.saved, ctx.in_features = SavedOperands(weight), x.shape[-1]
        return product_with_gradient(x, bias, weight, product)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of x and bias for `grad` [..., N]."""
        of_x, of_bias = ctx.needs_input_grad[:2]
        weight, _ = ctx.saved.unpack()
        return (
            grad_x(weight, grad, ctx.in_features) if of_x else None,
            sum_rows(grad) if of_bias else None,
            None,
            None,
        )
