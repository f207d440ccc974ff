"""Fuse the rounding of inputs of linears to 8 bits into the norm or the gate that computes the inputs.

    extract_rounding  linear of rounded x            -> round_inputs -> linear of x as it is
    fuse_rounding     norm -> round_inputs           -> norm that writes rounded values
    fuse_prologues    round_inputs -> linear         -> linear that rounds x
    fuse_codes        norm or gate -> linear that quantizes x   -> norm_codes or gate_codes -> linear_of_codes

Results are the same as with one launch for each operation. `product` is the node of a linear throughout;
`memory` tells which nodes share storage.
"""

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import cast

import torch
from torch.fx import Graph, Node

from quantkit.kernels.linear import OPERATOR
from quantkit.kernels.linear_fused import code_order, linear_of_codes, rounds_before, rounds_within
from quantkit.kernels.ops import activation
from quantkit.kernels.ops.activation import gate_codes
from quantkit.kernels.ops.norm import add_rms_norm, norm_codes, rms_norm
from quantkit.kernels.ops.quantize_x import CodeOrder, round_inputs, rounding_of, why_not_quantized
from quantkit.packing.schemes import parse_token
from quantkit.runtime.passes.fuse_linear import (
    PRODUCTS,
    erase,
    is_whole,
    multiplies,
    parts_of,
    problem_of,
    results_of,
    used,
)
from quantkit.runtime.passes.trace import META, OFFSET, Memory

#: Number of the scheme's token in the arguments of a linear.
_TOKEN = 4


def _x(node: Node) -> Node:
    """Return the node that computes the input x of a linear, or of `round_inputs`."""
    return cast(Node, node.args[0])


def _token(product: Node) -> str:
    """Return the `Scheme.token` of a linear's weight."""
    return str(product.args[_TOKEN])


def extract_rounding(graph: Graph, memory: Memory, device: torch.device) -> None:
    """Insert a node `round_inputs` before each linear whose kernel does not round its inputs x itself.

    The linear then takes rounded x, and its token (`Scheme.token`) names the scheme of the weights alone.
    Linears that round the same x in the same way share one node.
    """
    for product in graph.find_nodes(op="call_function", target=OPERATOR):
        if not rounds_before(*problem_of(product, device)):
            continue
        x, token = _x(product), _token(product)
        earlier = (one for one in x.users if one < product and _rounds(one, token))
        node = next((one for one in earlier if not memory.writes_between(one, product, memory.of(x))), None)
        if node is None:
            with graph.inserting_before(product):
                node = graph.call_function(round_inputs, (x, token))
            like = x.meta[META]
            node.meta = {META: torch.empty(like.shape, dtype=like.dtype, device="meta"), OFFSET: 0}
            memory.enter(node)
        product.update_arg(0, node)
        product.update_arg(_TOKEN, parse_token(token).of_weights.token)


def _rounds(node: Node, token: str) -> bool:
    """Return True if `node` is a `round_inputs` that rounds as the scheme of `token` rounds inputs."""
    return node.target is round_inputs and rounding_of(str(node.args[1])) == rounding_of(token)


def fuse_rounding(graph: Graph, memory: Memory) -> None:
    """Let each norm write its result rounded, if only `round_inputs` nodes that all round alike read it.

    Gates are left out: each program of their kernel would have to compute a whole row. That takes 5.8 us for
    16 rows of 14336 on an H200; two launches take 1.6 and 3.9 us.
    """
    for target in (rms_norm, add_rms_norm):
        for node in graph.find_nodes(op="call_function", target=target):
            results = results_of(node)
            roundings = [user for one in results[-1:] for user in used(memory, one)]
            if roundings and _can_round(memory, results[-1], roundings):
                node.update_kwarg("rounding", roundings[0].args[1])
                for rounding in roundings:
                    rounding.replace_all_uses_with(_x(rounding))
                    graph.erase_node(rounding)


def fuse_prologues(graph: Graph, memory: Memory, device: torch.device) -> None:
    """Let the kernel of a linear round its inputs x, if it can and no other node reads the rounded x."""
    for node in graph.find_nodes(op="call_function", target=round_inputs):
        product = next(iter(node.users))
        if len(node.users) > 1 or product.target not in PRODUCTS or _x(product) is not node:
            continue
        scheme = replace(parse_token(_token(product)), activations=rounding_of(str(node.args[1])))
        known = problem_of(product, device)
        if rounds_within(*known[:4], scheme.token, *known[5:]) and not memory.writes_between(
            node, product, memory.of(_x(node))
        ):
            product.update_arg(0, _x(node))
            product.update_arg(_TOKEN, scheme.token)
            graph.erase_node(node)


def _can_round(memory: Memory, result: Node, roundings: Sequence[Node]) -> bool:
    """Return True if the norm that computes `result` [..., K] can write it rounded, in place of `roundings`.

    All `roundings` must be `round_inputs` nodes that round whole rows in the same way, for which there must
    be a kernel. Nothing may write `result` before them, and `result` must not be float32.
    """
    if any(one.target is not round_inputs for one in roundings):
        return False
    rows, token = result.meta[META], str(roundings[0].args[1])
    return (
        all(_rounds(one, token) for one in roundings)
        and all(is_whole(_x(one).meta[META], rows) for one in roundings)
        and not any(memory.writes_between(result, one, memory.of(result)) for one in roundings)
        and rows.dtype != torch.float32
        and why_not_quantized(rounding_of(token), rows.shape[-1]) is None
    )


def fuse_codes(graph: Graph, memory: Memory, device: torch.device) -> None:
    """Let norms and gates write x as 8-bit codes, which the linears after them then read.

    All nodes that read x must be linears that quantize it in the same way, with kernels that read the codes
    in the same order.
    """
    for target in (rms_norm, add_rms_norm, activation.gate):
        for node in graph.find_nodes(op="call_function", target=target):
            results = results_of(node)
            products = [user for one in results[-1:] for user in used(memory, one)]
            order = _order_of(memory, results, products, device)
            if order is not None and not node.kwargs.get("rounding"):
                _fuse_codes(graph, memory, node, results, products, order)


def _order_of(
    memory: Memory, results: Sequence[Node], products: Sequence[Node], device: torch.device
) -> CodeOrder | None:
    """Return the order of columns in which the kernels of all `products` read 8-bit codes of x.

    x is the last of `results`, which `products` read. None if kernels differ in this order or one reads no
    codes. None also if one of `products` is no linear, does not multiply all rows, or quantizes x
    differently.
    """
    if not products or not all(
        one.target is OPERATOR
        and multiplies(memory, one, results[-1])
        and is_whole(_x(one).meta[META], results[-1].meta[META])
        and not memory.writes_between(results[-1], one, memory.of(results[-1]))
        for one in products
    ):
        return None
    tokens = [_token(one) for one in products]
    orders = {code_order(*problem_of(one, device)) for one in products}
    if len(orders) > 1 or None in orders or len({parse_token(token).activations for token in tokens}) > 1:
        return None
    return orders.pop()


def _fuse_codes(
    graph: Graph,
    memory: Memory,
    node: Node,
    results: Sequence[Node],
    products: Sequence[Node],
    order: CodeOrder,
) -> None:
    """Replace a norm or gate, `node`, and the linears `products` after it by calls that pass on 8-bit codes.

    `results` are the nodes of the results of `node`. `order` is the order of columns of the codes.
    """
    how = {**node.kwargs, "rounding": _token(products[0]), "span": order.span, "sums": order.sums}
    with graph.inserting_after(node):
        if node.target is activation.gate:
            call = graph.call_function(gate_codes, node.args, how)
        else:
            x, *other, weight = node.args
            call = graph.call_function(norm_codes, (x, other[0] if other else None, weight), how)
    memory.enter(call)
    # The sum of an `add_rms_norm`, if it is read, then codes, scales and sums of codes.
    count = 3 if node.target is activation.gate else 4
    parts = parts_of(graph, memory, call, range(count - 2 - len(results), count))
    for product in products:
        like: torch.Tensor = _x(product).meta[META]
        with graph.inserting_after(product):
            new = graph.call_function(
                linear_of_codes,
                (*parts[-3:], astuple(order), tuple(like.shape), like.dtype, *product.args[1:]),
            )
        memory.replace(product, new)
        graph.erase_node(product)
    for total in results[:-1]:
        memory.replace(total, parts[0])
    erase(graph, node)
