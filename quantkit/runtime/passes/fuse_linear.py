"""Fuse norms and gates around packed linears in a traced step into the linears' kernels.

Each function replaces a chain of nodes of a graph by calls of fused kernels, in place:

    fuse_gates     gate_up linear -> gate         gated_linear
    split_norms    linear -> add_norm -> linear   linear_then_norm, linear_of_begun
    fuse_norms     norm -> linear                 linear_of_norm
    delay_start    sets when the kernel after a norm may start (PDL)

`product` is the node of a linear throughout; `memory` tells which nodes share storage.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from quantkit.kernels.linear import OPERATOR
from quantkit.kernels.linear_fused import (
    does_norm,
    gated_linear,
    gates,
    linear_of_begun,
    linear_of_norm,
    linear_then_norm,
)
from quantkit.kernels.moe.grouped_gemm import EXPERTS_OPERATOR, gates_experts, run_experts
from quantkit.kernels.ops import activation
from quantkit.kernels.ops.norm import add_rms_norm, rms_norm
from quantkit.runtime.passes.trace import META, OFFSET, Memory, part

#: Targets of calls that multiply x with a weight.
PRODUCTS = (OPERATOR, gated_linear)


@dataclass(frozen=True)
class Gated:
    """Fused form of a linear and the gate after it, f(first half of columns) * second half.

    run        computes linear and gate in one call
    supports   returns True if the kernel of a linear node can do so on a device
    """

    run: Callable[..., torch.Tensor]
    supports: Callable[[Node, torch.device], bool]


def _gates(product: Node, device: torch.device) -> bool:
    return gates(*problem_of(product, device))


def _gates_experts(product: Node, device: torch.device) -> bool:
    of: Any = product.args
    return gates_experts(device, of[0].meta[META], of[1].meta[META], *of[4:])


GATED: dict[Any, Gated] = {
    OPERATOR: Gated(gated_linear, _gates),
    EXPERTS_OPERATOR: Gated(run_experts, _gates_experts),
}


def fuse_gates(graph: Graph, memory: Memory, device: torch.device) -> None:
    """Fuse each gate into the epilogue of the linear before it, if nothing else reads the linear's result.

    The kernel of the linear must support this.
    """
    for node in graph.find_nodes(op="call_function", target=activation.gate):
        product = memory.source(node.args[0])
        if product.target in GATED and _can_gate(memory, product, node, device):
            _fuse_gate(graph, memory, product, node)


def _can_gate(memory: Memory, product: Node, gate: Node, device: torch.device) -> bool:
    """Return True if `gate` combines the column halves of `product`, and the kernel on `device` can do so."""
    y = product.meta[META]
    half = y.shape[-1] // 2
    parts = [(one.meta[META], one.meta[OFFSET]) for one in gate.all_input_nodes]
    return (
        [*used(memory, product)] == [gate] * 2
        and y.is_contiguous()
        and y.shape[-1] == 2 * half
        and [offset for _, offset in parts] == [0, half]
        and all(one.shape == (*y.shape[:-1], half) and one.stride() == y.stride() for one, _ in parts)
        and GATED[product.target].supports(product, device)
    )


def _fuse_gate(graph: Graph, memory: Memory, product: Node, gate: Node) -> None:
    """Replace the linear `product` and its `gate` by one call of `Gated.run` at the position of `product`."""
    with graph.inserting_after(product):
        call = graph.call_function(GATED[product.target].run, product.args, {"gate": gate.kwargs["kind"]})
    memory.replace(gate, call)
    graph.erase_node(gate)
    erase(graph, product)


def split_norms(graph: Graph, memory: Memory, device: torch.device) -> None:
    """Split RMSNorms between two linears: the first computes sums of squares, the second divides by the RMS.

    A norm is split only if the kernels of all these linears support it.
    """
    for node in graph.find_nodes(op="call_function", target=add_rms_norm):
        first, second, _ = node.args
        for operand, residual in ((first, second), (second, first)):
            if not node._erased and _can_begin_norm(memory, operand, node, residual, device):
                results = results_of(node)
                after = [user for one in results[-1:] for user in used(memory, one)]
                if after and all(_can_end_norm(memory, one, results[-1], device) for one in after):
                    _split(graph, memory, node, results, operand, residual)


def _can_begin_norm(memory: Memory, operand: Node, norm: Node, residual: Node, device: torch.device) -> bool:
    """Return True if the linear that computes `operand` can begin `norm`: add `residual`, and sum squares.

    The linear must compute all of `operand`, and only `norm` may read `operand`.
    """
    product = memory.source(operand)
    if (
        product.target is not OPERATOR
        or [*used(memory, product)] != [norm]
        or memory.source(residual) is product
    ):
        return False
    added, y, read = residual.meta[META], product.meta[META], memory.read(product)
    weights: Any = norm.args[2]
    return (
        all(one.meta[META].is_contiguous() for one in (operand, residual, weights))
        and (added.numel(), added.shape[-1]) == (y.numel(), y.shape[-1])
        and not memory.writes_between(product, norm, read)
        and does_norm("begin", *problem_of(product, device))
    )


def _can_end_norm(memory: Memory, product: Node, normed: Node, device: torch.device) -> bool:
    """Return True if the kernel of the linear `product` can divide by the RMS of a norm begun before it.

    `normed` [..., K] is the result of that norm; `product` must multiply all rows of `normed`.
    """
    if not multiplies(memory, product, normed):
        return False
    x, rows = _x(product), normed.meta[META]
    return is_whole(x, rows) and does_norm("end", *problem_of(product, device))


def is_whole(x: torch.Tensor, original: torch.Tensor) -> bool:
    """Return True if `x` is contiguous and has the rows and columns of `original`, both [..., K].

    A view `x` of `original` then has all of its values, in order.
    """
    return x.is_contiguous() and (x.numel(), x.shape[-1]) == (original.numel(), original.shape[-1])


def _split(
    graph: Graph, memory: Memory, norm: Node, results: Sequence[Node], operand: Node, residual: Node
) -> None:
    """Replace `norm` and the linears around it by calls of `linear_then_norm` and `linear_of_begun`.

    The linear that computes `operand` then also adds `residual` and sums squares. Linears that read the last
    of `results`, the normed tensor, divide by the RMS. The other result, if used, is the sum with `residual`.
    """
    product, weight = memory.source(operand), norm.args[2]
    x, *of = product.args
    with graph.inserting_after(norm):
        call = graph.call_function(linear_then_norm, (x, residual, weight, norm.kwargs["kind"], *of))
    memory.enter(call)
    total, begun, squares = parts_of(graph, memory, call, range(3))
    for after in list(used(memory, results[-1])):
        rows, *of_after = after.args
        with graph.inserting_after(after):
            arguments = (rows, squares, norm.kwargs["eps"], *of_after)
            end = graph.call_function(linear_of_begun, arguments, after.kwargs)
        memory.replace(after, end)
        graph.erase_node(after)
    for new, old in ((begun, results[-1]), *((total, one) for one in results[:-1])):
        memory.replace(old, new)
    for node in (*results, norm):
        graph.erase_node(node)
    erase(graph, product)


def parts_of(graph: Graph, memory: Memory, call: Node, numbers: Iterable[int]) -> list[Node]:
    """Insert nodes that each select one result of `call`, by its index in `numbers`; return them in order."""
    parts: list[Node] = []
    for number in numbers:
        with graph.inserting_after(parts[-1] if parts else call):
            parts.append(graph.call_function(part, (call, number)))
        memory.enter(parts[-1])
    return parts


def erase(graph: Graph, node: Node) -> None:
    """Erase `node` and the views of its result from `graph`; nothing else may use them."""
    for user in list(node.users):
        erase(graph, user)
    graph.erase_node(node)


def fuse_norms(graph: Graph, memory: Memory, device: torch.device) -> None:
    """Fuse each RMSNorm into the prologue of the linear that alone reads its result.

    The kernel of the linear must support this.
    """
    for target in (rms_norm, add_rms_norm):
        for node in graph.find_nodes(op="call_function", target=target):
            results = results_of(node)
            products = [user for one in results[-1:] for user in used(memory, one)]
            if len(products) == 1 and _can_fuse_norm(memory, node, results, products[0], device):
                _fuse_norm(graph, memory, node, results, products[0])


def results_of(node: Node) -> list[Node]:
    """Return the nodes of the results of the norm `node` that are used, the normed tensor last.

    Empty if that one is unused. `norm.add_rms_norm` has two results: x + residual, and this sum normed.
    """
    if node.target is not add_rms_norm:
        return [node]
    parts = {user.args[1]: user for user in node.users}
    return [parts[number] for number in (0, 1) if number in parts] if 1 in parts else []


def _can_fuse_norm(
    memory: Memory, norm: Node, results: Sequence[Node], product: Node, device: torch.device
) -> bool:
    """Return True if the kernel of `product` can also compute `norm`, whose result nodes are `results`."""
    if not multiplies(memory, product, results[-1]):
        return False
    x, read = _x(product), memory.read(norm)
    operands = [one.meta[META] for one in norm.args if isinstance(one, Node)]
    return (
        x.shape == results[-1].meta[META].shape
        and all(one.is_contiguous() for one in (x, *operands))
        # No earlier node reads the sum, and its operands are unchanged.
        and not any(user < product for one in results[:-1] for user in one.users)
        and not memory.writes_between(norm, product, read)
        and all(len(one.users) == 1 for one in _views(cast(Node, product.args[0]), norm))
        and does_norm("whole", *problem_of(product, device))
    )


def _views(node: Node, of: Node) -> Iterator[Node]:
    """Yield `node`, then the node of which it is a view, and so on; stop before the node `of`."""
    while node is not of:
        yield node
        node = node.all_input_nodes[0]


def _fuse_norm(graph: Graph, memory: Memory, norm: Node, results: Sequence[Node], product: Node) -> None:
    """Replace `norm`, with its `results`, and the linear `product` after it by one `linear_of_norm`."""
    x, *residual, weight = norm.args
    arguments = (x, residual[0] if residual else None, weight, norm.kwargs["eps"], norm.kwargs["kind"])
    with graph.inserting_after(product):
        call = graph.call_function(linear_of_norm, (*arguments, *product.args[1:]), product.kwargs)
    memory.enter(call)
    new = call
    for number, node in ((1, product), *((0, one) for one in results[:-1])):
        with graph.inserting_after(new):
            new = graph.call_function(part, (call, number))
        memory.replace(node, new)
    for node in (product, *results[:-1], *_views(cast(Node, product.args[0]), norm), norm):
        graph.erase_node(node)


def delay_start(graph: Graph, memory: Memory) -> None:
    """Delay the start (PDL) of a linear after a norm if it reads fewer weight bytes than the linear before.

    A linear that starts early loads its first weights and waits for x. It occupies SMs that the linear before
    needs. If that one is long, this costs time: Llama-3 8B, one sequence, H200, fp6: 72.1 us a layer delayed,
    75.8 early. If it is short, an early start gains: int4, 51.0 us a layer early, 51.1 delayed.
    """
    for node in graph.find_nodes(op="call_function", target=add_rms_norm):
        before = max(_weight_bytes(memory.source(one)) for one in node.all_input_nodes)
        if before > max(map(_weight_bytes, used(memory, node)), default=before):
            node.update_kwarg("late", True)


def _x(product: Node) -> torch.Tensor:
    """Return the input x of a linear node as a meta tensor [..., K]."""
    x: torch.Tensor = cast(Node, product.args[0]).meta[META]
    return x


def problem_of(product: Node, device: torch.device) -> tuple[Any, ...]:
    """Return (M, K, dtype of x, device, `Scheme.token`, N, layout name) of the linear node `product`."""
    of: Any = product.args
    x = _x(product)
    columns = x.shape[-1]
    return x.numel() // columns, columns, x.dtype, device, *of[4:]


def multiplies(memory: Memory, node: Node, operand: Node) -> bool:
    """Return True if `node` is a linear with `operand` as x, and not as weight or bias."""
    if node.target not in PRODUCTS:
        return False
    of: Any = node.args
    _, parts, layout, bias, *_ = of
    return not any(memory.of(one) == memory.of(operand) for one in (*parts, *layout, bias) if one is not None)


def _weight_bytes(node: Node) -> int:
    """Return the number of weight bytes that `node` reads if it is a linear, else 0."""
    if node.target not in PRODUCTS:
        return 0
    _, parts, layout, *_ = node.args
    read = [one.meta[META] for one in pytree.tree_leaves(layout or parts)]
    return sum(one.numel() * one.itemsize for one in read)


def used(memory: Memory, node: Node) -> Iterator[Node]:
    """Yield the nodes that read the result of `node`, directly or through views."""
    for user in node.users:
        if memory.is_view(user):
            yield from used(memory, user)
        else:
            yield user
