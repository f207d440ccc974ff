"""Experts in traced steps: who chooses them for few tokens orders the pairs in passing."""

from typing import Any, cast

from torch.fx import Graph, Node

from quantkit.kernels import router
from quantkit.kernels.experts import ORDER_OPERATOR
from quantkit.model.trace import META, Memory, between, part


def take_orders(graph: Graph, memory: Memory) -> None:
    """Have `router.route` order the pairs of all experts that it chooses, where one program does both."""
    for node in graph.find_nodes(op="call_function", target=ORDER_OPERATOR):
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
        and router.orders_pairs(logits, call.kwargs["slots"])
        # Nobody changes who was chosen before that is ordered.
        and not any(memory.written(one) & lies for one in between(call, order))
    )
    return cast(Node, call) if fits else None


def _take(graph: Graph, memory: Memory, route: Node, order: Node) -> None:
    """Replace both by one call, at the place of `route`."""
    with graph.inserting_after(route):
        options = {**route.kwargs, "spread": order.args[2]}
        call = graph.call_function(router.route_pairs, route.args, options)
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
