"""Fuse the rounding of inputs of linears into the norm or the gate that computes the inputs.

    show_rounding   linear of rounded x      -> round_inputs -> linear of x as it is
    fuse_rounding   norm or gate -> round_inputs   -> norm or gate that writes rounded numbers

The numbers are those of three launches. Linears whose kernel rounds x itself stay as they are.
"""

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from quantkit.kernels.linear import OPERATOR
from quantkit.kernels.linear_fused import rounds_before
from quantkit.kernels.ops import activation
from quantkit.kernels.ops.norm import add_rms_norm, rms_norm
from quantkit.kernels.ops.quantize_x import round_inputs, rounding_of, why_not_quantized
from quantkit.packing.schemes import parse_token
from quantkit.runtime.passes.fuse_linear import problem_of, results_of, used
from quantkit.runtime.passes.trace import META, OFFSET, Memory, between

#: Number of the scheme's token in the arguments of a linear.
_TOKEN = 4


def show_rounding(graph: Graph, memory: Memory, device: torch.device) -> None:
    """Round the inputs of linears in nodes of their own, if the kernels of the linears do not round them."""
    for product in graph.find_nodes(op="call_function", target=OPERATOR):
        if not rounds_before(*problem_of(product, device)):
            continue
        x, token = product.args[0], product.args[_TOKEN]
        earlier = (one for one in x.users if one < product and _rounds(one, token))
        node = next((one for one in earlier if not _is_written(memory, x, one, product)), None)
        if node is None:
            with graph.inserting_before(product):
                node = graph.call_function(round_inputs, (x, token))
            like = x.meta[META]
            node.meta = {META: torch.empty(like.shape, dtype=like.dtype, device="meta"), OFFSET: 0}
            memory.enter(node)
        product.update_arg(0, node)
        product.update_arg(_TOKEN, parse_token(token).of_weights.token)


def _is_written(memory: Memory, x: Node, first: Node, last: Node) -> bool:
    """Return True if a node between `first` and `last` writes the memory of `x`."""
    return any(memory.written(one) & memory.of(x) for one in between(first, last))


def _rounds(node: Node, token: str) -> bool:
    """Return True if `node` rounds as the scheme of `token` rounds inputs."""
    return node.target is round_inputs and rounding_of(str(node.args[1])) == rounding_of(token)


def fuse_rounding(graph: Graph, memory: Memory) -> None:
    """Let norms and gates round their results, if nothing reads them but equal roundings."""
    for target in (rms_norm, add_rms_norm, activation.gate):
        for node in graph.find_nodes(op="call_function", target=target):
            results = results_of(node)
            roundings = [user for one in results[-1:] for user in used(memory, one)]
            if roundings and _can_round(memory, results[-1], roundings):
                node.update_kwarg("rounding", roundings[0].args[1])
                for rounding in roundings:
                    rounding.replace_all_uses_with(rounding.args[0])
                    graph.erase_node(rounding)


def _can_round(memory: Memory, result: Node, roundings: Sequence[Node]) -> bool:
    """Return True if all `roundings` round whole rows of `result` in one way, for which there is a kernel."""
    if any(one.target is not round_inputs for one in roundings):
        return False
    rows, token = result.meta[META], str(roundings[0].args[1])
    return (
        all(_rounds(one, token) for one in roundings)
        and all(_is_whole(one.args[0].meta[META], rows) for one in roundings)
        and not any(_is_written(memory, result, result, one) for one in roundings)
        and rows.dtype != torch.float32
        and why_not_quantized(rounding_of(token), rows.shape[-1]) is None
    )


def _is_whole(x: torch.Tensor, rows: torch.Tensor) -> bool:
    """Return True if `x` [..., K] has the memory of `rows` [..., K], in its order."""
    return x.is_contiguous() and x.shape[-1:] == rows.shape[-1:] and x.numel() == rows.numel()
