"""Constant folding in a traced step: tensors that depend on no input, such as positions, are computed once.

Without this pass a CUDA graph launches their computation at each replay.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from quantkit.runtime.passes.trace import META, Memory

aten = torch.ops.aten

#: Largest folded tensor in bytes: the mask of a long prompt costs less to compute than to store.
MOST_BYTES = 1 << 20
_FOLDED = "folded_"
#: Operations that create tensors from numbers.
_CREATING = (
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.eye.default,
    aten.eye.m,
    aten.full.default,
    aten.linspace.default,
    aten.ones.default,
    aten.scalar_tensor.default,
    aten.zeros.default,
)
#: Operations that leave the values of their result undefined.
_UNINITIALISED = (
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)


def fold_constants(module: GraphModule, memory: Memory) -> None:
    """Replace nodes of a traced `module` that depend on no input by buffers with their values, in place.

    Random numbers are excluded, and so are results in memory that the module writes or returns. `memory`
    tells which nodes of the module share storage.
    """
    graph = module.graph
    folded = _foldable(module, memory)
    values: dict[Node, Any] = {}
    for node in folded:
        arguments, options = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*arguments, **options)  # type: ignore[operator]
    for number, node in enumerate(node for node in folded if any(user not in values for user in node.users)):
        name = f"{_FOLDED}{number}"
        module.register_buffer(name, values[node], persistent=False)
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        # Remaining views of the constant refer to its memory.
        memory.replace(node, constant, lambda user: user not in values)
    for node in reversed(folded):
        graph.erase_node(node)


def folded_constants(module: GraphModule) -> list[torch.Tensor]:
    """Return the constants that `fold_constants` added to `module`; no other object refers to them."""
    return [tensor for name, tensor in module.named_buffers() if name.startswith(_FOLDED)]


def _foldable(module: GraphModule, memory: Memory) -> list[Node]:
    """Return the nodes of `module` that can be folded, in order: each always computes the same small tensor.

    Nodes whose memory the module writes or returns are excluded; `memory` tells which nodes share storage.
    """
    nodes = list(module.graph.nodes)
    excluded = memory.read(module.graph.output_node()).union(*map(memory.written, nodes))
    foldable: dict[Node, None] = {}
    for node in nodes:
        if _is_pure(node, foldable) and not memory.of(node) & excluded:
            foldable[node] = None
    return list(foldable)


def _is_pure(node: Node, constants: Mapping[Node, Any]) -> bool:
    """Return True if `node` always computes the same small tensor, and all its inputs are in `constants`."""
    operation, tensor = node.target, node.meta.get(META)
    if not isinstance(operation, torch._ops.OpOverload) or tensor is None:
        return False
    if tensor.numel() * tensor.itemsize > MOST_BYTES:
        return False
    if not node.all_input_nodes:
        return operation in _CREATING
    return (
        all(one in constants for one in node.all_input_nodes)
        and operation.namespace == "aten"
        and operation not in _UNINITIALISED
        and not operation._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in operation.tags
    )


def merge_counters(graph: Graph, memory: Memory) -> None:
    """Merge in-place additions of the same int to counters (of cached tokens) into one launch.

    The launch is the last of `graph`. An addition is moved there only if no later node reads its counter;
    `memory` tells which nodes share storage.
    """
    last: dict[Any, Node] = {}
    for node in graph.nodes:
        last.update(dict.fromkeys(memory.read(node), node))
    by_increment: dict[int, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        counter, increment = node.args
        if node.kwargs:
            continue
        if (
            type(increment) is int
            and not node.users
            and all(last[root] is node for root in memory.of(counter))
        ):
            by_increment.setdefault(increment, []).append(node)
    for increment, additions in by_increment.items():
        with graph.inserting_before(graph.output_node()):
            counters = [node.args[0] for node in additions]
            call = graph.call_function(aten._foreach_add_.Scalar, (counters, increment))
        memory.enter(call, written=frozenset().union(*map(memory.written, additions)))
        for node in additions:
            graph.erase_node(node)
