"""Packed products in traced steps: norms and gates that they compute, and when norms start."""

from collections.abc import Callable, Iterator, Sequence
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
from quantkit.runtime.passes.trace import META, OFFSET, Memory, between, part

#: Products of x and a weight, in traced steps.
_PRODUCTS = (OPERATOR, gated_linear)


@dataclass(frozen=True)
class Gated:
    """What runs instead of a product whose halves are gated, and whether its kernel on a device can."""

    run: Callable[..., torch.Tensor]
    can: Callable[[Node, torch.device], bool]


def _gates(product: Node, device: torch.device) -> bool:
    return gates(*_asked(product, device))


def _gates_experts(product: Node, device: torch.device) -> bool:
    of: Any = product.args
    return gates_experts(device, of[0].meta[META], of[1].meta[META], *of[4:])


GATED: dict[Any, Gated] = {
    OPERATOR: Gated(gated_linear, _gates),
    EXPERTS_OPERATOR: Gated(run_experts, _gates_experts),
}


def take_gates(graph: Graph, memory: Memory, device: torch.device) -> None:
    """Have products gate what they compute, where nobody else needs that and their kernels can."""
    for node in graph.find_nodes(op="call_function", target=activation.gate):
        product = memory.source(node.args[0])
        if product.target in GATED and _can_gate(memory, product, node, device):
            _take_gate(graph, memory, product, node)


def _can_gate(memory: Memory, product: Node, gate: Node, device: torch.device) -> bool:
    """Whether `gate` is of the halves of the columns of `product`, which can gate them."""
    made = product.meta[META]
    half = made.shape[-1] // 2
    parts = [(one.meta[META], one.meta[OFFSET]) for one in gate.all_input_nodes]
    return (
        [*_used(memory, product)] == [gate] * 2
        and made.is_contiguous()
        and made.shape[-1] == 2 * half
        and [offset for _, offset in parts] == [0, half]
        and all(one.shape == (*made.shape[:-1], half) and one.stride() == made.stride() for one, _ in parts)
        and GATED[product.target].can(product, device)
    )


def _take_gate(graph: Graph, memory: Memory, product: Node, gate: Node) -> None:
    """Replace a product and the gate of it by one call, at the place of the product."""
    with graph.inserting_after(product):
        call = graph.call_function(GATED[product.target].run, product.args, {"gate": gate.kwargs["kind"]})
    memory.replace(gate, call)
    graph.erase_node(gate)
    _erase(graph, product)


def split_norms(graph: Graph, memory: Memory, device: torch.device) -> None:
    """Have products begin the norm of what they are added to, and those after that end it, where their
    kernels can.
    """
    for node in graph.find_nodes(op="call_function", target=add_rms_norm):
        first, second, _ = node.args
        for operand, other in ((first, second), (second, first)):
            if not node._erased and _can_begin(memory, operand, node, other, device):
                made = _made(node)
                after = [user for one in made[-1:] for user in _used(memory, one)]
                if after and all(_can_end(memory, one, made[-1], device) for one in after):
                    _split(graph, memory, node, made, operand, other)


def _can_begin(memory: Memory, operand: Node, norm: Node, other: Node, device: torch.device) -> bool:
    """Whether the product that `operand` is all of, and only `norm` takes, can begin that at its place, with
    `other` to add.
    """
    product = memory.source(operand)
    if (
        product.target is not OPERATOR
        or [*_used(memory, product)] != [norm]
        or memory.source(other) is product
    ):
        return False
    added, made, read = other.meta[META], product.meta[META], memory.read(product)
    weights: Any = norm.args[2]
    return (
        all(one.meta[META].is_contiguous() for one in (operand, other, weights))
        and (added.numel(), added.shape[-1]) == (made.numel(), made.shape[-1])
        and not any(memory.written(one) & read for one in between(product, norm))
        and does_norm("begin", *_asked(product, device))
    )


def _can_end(memory: Memory, product: Node, made: Node, device: torch.device) -> bool:
    """Whether `product` is one of all rows of `made`, a norm, and can end that."""
    if not _multiplies(memory, product, made):
        return False
    given, rows = _x(product), made.meta[META]
    return (
        given.is_contiguous()
        and (given.numel(), given.shape[-1]) == (rows.numel(), rows.shape[-1])
        and does_norm("end", *_asked(product, device))
    )


def _split(
    graph: Graph, memory: Memory, norm: Node, made: Sequence[Node], operand: Node, other: Node
) -> None:
    """Replace a norm and the products before and after it."""
    product, weight = memory.source(operand), norm.args[2]
    x, *of = product.args
    with graph.inserting_after(norm):
        call = graph.call_function(linear_then_norm, (x, other, weight, norm.kwargs["kind"], *of))
    memory.enter(call)
    results: list[Node] = []
    for number in range(3):
        with graph.inserting_after(results[-1] if results else call):
            results.append(graph.call_function(part, (call, number)))
        memory.enter(results[-1])
    total, begun, squares = results
    for after in list(_used(memory, made[-1])):
        rows, *of_after = after.args
        with graph.inserting_after(after):
            given = (rows, squares, norm.kwargs["eps"], *of_after)
            end = graph.call_function(linear_of_begun, given, after.kwargs)
        memory.replace(after, end)
        graph.erase_node(after)
    for new, old in ((begun, made[-1]), *((total, one) for one in made[:-1])):
        memory.replace(old, new)
    for node in (*made, norm):
        graph.erase_node(node)
    _erase(graph, product)


def _erase(graph: Graph, node: Node) -> None:
    """Erase a node, and views of it that nobody takes."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


def take_norms(graph: Graph, memory: Memory, device: torch.device) -> None:
    """Have products compute the norm that they alone multiply with, where their kernels can."""
    for target in (rms_norm, add_rms_norm):
        for node in graph.find_nodes(op="call_function", target=target):
            made = _made(node)
            products = [user for one in made[-1:] for user in _used(memory, one)]
            if len(products) == 1 and _can_take(memory, node, made, products[0], device):
                _take_norm(graph, memory, node, made, products[0])


def _made(node: Node) -> list[Node]:
    """What norms make that is used: that of `norm.add_rms_norm` after the sum; none without it."""
    if node.target is not add_rms_norm:
        return [node]
    parts = {user.args[1]: user for user in node.users}
    return [parts[number] for number in (0, 1) if number in parts] if 1 in parts else []


def _can_take(memory: Memory, norm: Node, made: Sequence[Node], product: Node, device: torch.device) -> bool:
    """Whether `product` can compute the norm that it multiplies with, at its own place."""
    if not _multiplies(memory, product, made[-1]):
        return False
    given, read = _x(product), memory.read(norm)
    operands = [one.meta[META] for one in norm.args if isinstance(one, Node)]
    return (
        given.shape == made[-1].meta[META].shape
        and all(one.is_contiguous() for one in (given, *operands))
        # Nobody needs the sum before, and what that is of is there still.
        and not any(user < product for one in made[:-1] for user in one.users)
        and not any(memory.written(one) & read for one in between(norm, product))
        and all(len(one.users) == 1 for one in _views(cast(Node, product.args[0]), norm))
        and does_norm("whole", *_asked(product, device))
    )


def _views(node: Node, of: Node) -> Iterator[Node]:
    """`node`, and what it is a view of, up to a result of `of`."""
    while node is not of:
        yield node
        node = node.all_input_nodes[0]


def _take_norm(graph: Graph, memory: Memory, norm: Node, made: Sequence[Node], product: Node) -> None:
    """Replace a norm and the product of it by one call."""
    x, *others, weight = norm.args
    given = (x, others[0] if others else None, weight, norm.kwargs["eps"], norm.kwargs["kind"])
    with graph.inserting_after(product):
        call = graph.call_function(linear_of_norm, (*given, *product.args[1:]), product.kwargs)
    memory.enter(call)
    new = call
    for number, node in ((1, product), *((0, one) for one in made[:-1])):
        with graph.inserting_after(new):
            new = graph.call_function(part, (call, number))
        memory.replace(node, new)
    for node in (product, *made[:-1], *_views(cast(Node, product.args[0]), norm), norm):
        graph.erase_node(node)


def hold_back(graph: Graph, memory: Memory) -> None:
    """Start what follows a norm late, where the product before that reads more than the one after it.

    The programs of a product that wait for x hold its first weights, and take room from the product that
    still runs: a loss where that takes long, a gain where it is short. One sequence of Llama-3 8B on an H200,
    fp6: 72.1 us a layer instead of 75.8; int4, whose product before is short, 51.1 instead of 51.0.
    """
    for node in graph.find_nodes(op="call_function", target=add_rms_norm):
        before = max(_weight_bytes(memory.source(one)) for one in node.all_input_nodes)
        if before > max(map(_weight_bytes, _used(memory, node)), default=before):
            node.update_kwarg("late", True)


def _x(product: Node) -> torch.Tensor:
    """What a product multiplies the rows of."""
    x: torch.Tensor = cast(Node, product.args[0]).meta[META]
    return x


def _asked(product: Node, device: torch.device) -> tuple[Any, ...]:
    """What `does_norm` and `gates` are asked of a product."""
    of: Any = product.args
    given = _x(product)
    columns = given.shape[-1]
    return given.numel() // columns, columns, given.dtype, device, *of[4:]


def _multiplies(memory: Memory, node: Node, made: Node) -> bool:
    """Whether `node`, which takes `made`, is a product of it, and has it neither as weight nor as bias."""
    if node.target not in _PRODUCTS:
        return False
    of: Any = node.args
    _, parts, layout, bias, *_ = of
    return not any(memory.of(one) == memory.of(made) for one in (*parts, *layout, bias) if one is not None)


def _weight_bytes(node: Node) -> int:
    """What a product reads of its weight; 0 of other operations."""
    if node.target not in _PRODUCTS:
        return 0
    _, parts, layout, *_ = node.args
    read = [one.meta[META] for one in pytree.tree_leaves(layout or parts)]
    return sum(one.numel() * one.itemsize for one in read)


def _used(memory: Memory, node: Node) -> Iterator[Node]:
    """What takes the results of `node`, or views of them."""
    for user in node.users:
        if memory.is_view(user):
            yield from _used(memory, user)
        else:
            yield user
