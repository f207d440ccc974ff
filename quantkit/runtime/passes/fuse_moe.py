"""Experts in traced steps: who chooses them for few tokens takes the norm before, and orders pairs after."""

from typing import Any, cast

from torch.fx import Graph, Node

from quantkit.kernels.moe import router
from quantkit.kernels.moe.grouped_gemm import SORT_OPERATOR
from quantkit.kernels.ops.norm import add_rms_norm
from quantkit.runtime.passes.trace import META, Memory, between, part


def take_router_norms(graph: Graph, memory: Memory) -> None:
    """Have routers of few tokens compute the norm that they multiply with, which others take from them."""
    for route in graph.find_nodes(op="call_function", target=router.route):
        product = memory.source(cast(Node, route.args[0]))
        if product.target is not router.small_linear:
            continue
        norm = memory.source(cast(Node, product.args[0]))
        if norm.target is add_rms_norm and _can_take_norm(memory, norm, product):
            _take_norm(graph, memory, norm, product)


def _can_take_norm(memory: Memory, norm: Node, product: Node) -> bool:
    """Whether `product`, of all rows that `norm` made, can run at the place of that and instead of it."""
    x = cast(Node, product.args[0])
    made = next((one for one in norm.users if one.args[1] == 1 and memory.of(one) == memory.of(x)), None)
    if made is None:
        return False
    given = [cast(Node, one).meta[META] for one in norm.args]
    rows, columns = x.meta[META].shape
    weight = cast(Node, product.args[1])
    lies = memory.of(made) | memory.of(weight)
    return (
        rows <= router.NORMED_ROWS
        and made.meta[META].shape[-1] == columns
        and made.meta[META].numel() == rows * columns
        and (weight.op == "get_attr" or weight < norm)
        and all(one.is_contiguous() for one in (*given, x.meta[META]))
        and not any(memory.written(one) & lies for one in between(norm, product))
    )


def _take_norm(graph: Graph, memory: Memory, norm: Node, product: Node) -> None:
    """Replace both by one call, at the place of `norm`."""
    weight = cast(Node, product.args[1])
    if weight > norm:
        # A constant comes where it is first used.
        norm.prepend(weight)
    with graph.inserting_after(norm):
        call = graph.call_function(
            router.norm_linear, (*norm.args, weight), {**norm.kwargs, "wide": product.kwargs["wide"]}
        )
    memory.enter(call)
    new = call
    for number, node in (*((user.args[1], user) for user in [*norm.users]), (2, product)):
        with graph.inserting_after(new):
            new = graph.call_function(part, (call, cast(int, number)))
        memory.replace(node, new)
        graph.erase_node(node)
    graph.erase_node(norm)


def take_orders(graph: Graph, memory: Memory) -> None:
    """Have `router.route` order the pairs of all experts that it chooses, where one program does both."""
    for node in graph.find_nodes(op="call_function", target=SORT_OPERATOR):
        call = _router(memory, node)
        if call is not None:
            _take(graph, memory, call, node)


def _router(memory: Memory, order: Node) -> Node | None:
    """The call of `router.route` whose experts, all as they are, `order` orders, if one program can."""
    index, experts, _ = cast(tuple[Any, ...], order.args)
    if index.target is not part or index.args[1] != 1 or index.args[0].target is not router.route:
        return None
    call, lies = index.args[0], memory.of(index)
    logits = call.args[0].meta[META]
    fits = (
        logits.shape[1] == experts
        and router.can_route_and_sort(logits, call.kwargs["top_k"])
        # Nobody changes who was chosen before that is ordered.
        and not any(memory.written(one) & lies for one in between(call, order))
    )
    return cast(Node, call) if fits else None


def _take(graph: Graph, memory: Memory, route: Node, order: Node) -> None:
    """Replace both by one call, at the place of `route`."""
    with graph.inserting_after(route):
        options = {**route.kwargs, "single_row_ratio": order.args[2]}
        call = graph.call_function(router.route_and_sort, route.args, options)
    memory.enter(call, written=memory.written(route))
    new = call
    for old, ahead in ((route, 0), (order, 2)):
        for node in [one for one in old.users if one.target is part]:
            with graph.inserting_after(new):
                new = graph.call_function(part, (call, ahead + cast(int, node.args[1])))
            memory.replace(node, new)
            graph.erase_node(node)
    graph.erase_node(order)
    graph.erase_node(route)
