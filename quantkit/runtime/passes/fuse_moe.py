"""Fuse the MoE router of few tokens with the norm before it and the sort of tokens by expert after it.

Two launches per layer remain of four:

    before   add_norm -> small_linear -> route -> sort tokens by expert
    after    norm_linear              -> route_and_sort
"""

from typing import Any, cast

from torch.fx import Graph, Node

from quantkit.kernels.moe import router
from quantkit.kernels.moe.grouped_gemm import SORT_OPERATOR
from quantkit.kernels.ops.norm import add_rms_norm
from quantkit.runtime.passes.trace import META, Memory, part


def fuse_router_norms(graph: Graph, memory: Memory) -> None:
    """Replace an add + RMSNorm and the router linear that reads it by one `router.norm_linear`, in place.

    That node also returns the normed tensor, which other readers then use. `memory` tells which nodes of
    `graph` share storage. `_can_take_norm` says where this is possible.
    """
    for route in graph.find_nodes(op="call_function", target=router.route):
        product = memory.source(cast(Node, route.args[0]))
        if product.target is not router.small_linear:
            continue
        norm = memory.source(cast(Node, product.args[0]))
        if norm.target is add_rms_norm and _can_take_norm(memory, norm, product):
            _fuse_norm(graph, memory, norm, product)


def _can_take_norm(memory: Memory, norm: Node, product: Node) -> bool:
    """Return True if `router.norm_linear` can compute `norm` and the router linear `product` in one launch.

    `product` must multiply all rows of the normed tensor, at most `router.NORMED_ROWS`. All tensors must be
    contiguous. Nothing may write the normed tensor or the weight in between. The weight must exist before
    `norm`.
    """
    x = cast(Node, product.args[0])
    normed = next((one for one in norm.users if one.args[1] == 1 and memory.of(one) == memory.of(x)), None)
    if normed is None:
        return False
    operands = [cast(Node, one).meta[META] for one in norm.args]
    rows, columns = x.meta[META].shape
    weight = cast(Node, product.args[1])
    memory_read = memory.of(normed) | memory.of(weight)
    return (
        rows <= router.NORMED_ROWS
        and normed.meta[META].shape[-1] == columns
        and normed.meta[META].numel() == rows * columns
        and (weight.op == "get_attr" or weight < norm)
        and all(one.is_contiguous() for one in (*operands, x.meta[META]))
        and not memory.writes_between(norm, product, memory_read)
    )


def _fuse_norm(graph: Graph, memory: Memory, norm: Node, product: Node) -> None:
    """Replace `norm` and the router linear `product` by one `router.norm_linear` in place of `norm`."""
    weight = cast(Node, product.args[1])
    if weight > norm:
        # Constants are defined at their first use.
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


def fuse_permutations(graph: Graph, memory: Memory) -> None:
    """Fuse each sort of tokens by expert into the `router.route` before it, so that one launch does both.

    `router.can_route_and_sort` must support the logits [T, E], and nothing may write the experts in between.
    `memory` tells which nodes of `graph` share storage.
    """
    for node in graph.find_nodes(op="call_function", target=SORT_OPERATOR):
        call = _router(memory, node)
        if call is not None:
            _fuse_permutation(graph, memory, call, node)


def _router(memory: Memory, order: Node) -> Node | None:
    """Return the `router.route` node that selects the experts by which the node `order` sorts tokens.

    None if one launch cannot do both: `can_route_and_sort` must support the logits [T, E], and no node may
    write the selected experts in between.
    """
    index, experts, _ = cast(tuple[Any, ...], order.args)
    if index.target is not part or index.args[1] != 1 or index.args[0].target is not router.route:
        return None
    call, memory_of_index = index.args[0], memory.of(index)
    logits = call.args[0].meta[META]
    fits = (
        logits.shape[1] == experts
        and router.can_route_and_sort(logits, call.kwargs["top_k"])
        # No node changes the selected experts before they are sorted.
        and not memory.writes_between(call, order, memory_of_index)
    )
    return cast(Node, call) if fits else None


def _fuse_permutation(graph: Graph, memory: Memory, route: Node, order: Node) -> None:
    """Replace `route` and the sort `order` by one `router.route_and_sort` at the position of `route`."""
    with graph.inserting_after(route):
        options = {**route.kwargs, "single_row_ratio": order.args[2]}
        call = graph.call_function(router.route_and_sort, route.args, options)
    memory.enter(call, written=memory.written(route))
    new = call
    for old, offset in ((route, 0), (order, 2)):
        for node in [one for one in old.users if one.target is part]:
            with graph.inserting_after(new):
                new = graph.call_function(part, (call, offset + cast(int, node.args[1])))
            memory.replace(node, new)
            graph.erase_node(node)
    graph.erase_node(order)
    graph.erase_node(route)
