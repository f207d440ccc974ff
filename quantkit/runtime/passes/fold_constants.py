"""What a traced module computes of numbers alone, such as places in a cache: computed once, before it runs.

A graph would launch it at each replay.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from quantkit.runtime.passes.trace import META, Memory

aten = torch.ops.aten

#: The most bytes of a tensor that is kept: a mask of a long prompt costs less to compute than to keep.
MOST_BYTES = 1 << 20
_HELD = "held_"
#: What makes tensors of numbers.
_MADE = (
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
#: What makes tensors with any numbers in them.
_UNFILLED = (
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)


def hold_constants(module: GraphModule, memory: Memory) -> None:
    """Replace what `module` computes of numbers alone by tensors that it holds.

    Not what lies in memory that the module writes or returns, nor what is random.
    """
    graph = module.graph
    known = _known(module, memory)
    found: dict[Node, Any] = {}
    for node in known:
        arguments, options = torch.fx.map_arg((node.args, node.kwargs), found.__getitem__)
        found[node] = node.target(*arguments, **options)  # type: ignore[operator]
    for number, node in enumerate(node for node in known if any(user not in found for user in node.users)):
        name = f"{_HELD}{number}"
        module.register_buffer(name, found[node], persistent=False)
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        # Views of it that stay have that for their memory.
        memory.replace(node, constant, lambda user: user not in found)
    for node in reversed(known):
        graph.erase_node(node)


def held_by(module: GraphModule) -> list[torch.Tensor]:
    """The tensors that nobody but `module` holds."""
    return [tensor for name, tensor in module.named_buffers() if name.startswith(_HELD)]


def _known(module: GraphModule, memory: Memory) -> list[Node]:
    """The nodes that compute something of numbers alone that stays what it is, in order."""
    nodes = list(module.graph.nodes)
    taken = memory.read(module.graph.output_node()).union(*map(memory.written, nodes))
    found: dict[Node, None] = {}
    for node in nodes:
        if _is_pure(node, found) and not memory.of(node) & taken:
            found[node] = None
    return list(found)


def _is_pure(node: Node, known: Mapping[Node, Any]) -> bool:
    """Whether `node` makes one small tensor, always the same of what is `known`."""
    operation, tensor = node.target, node.meta.get(META)
    if not isinstance(operation, torch._ops.OpOverload) or tensor is None:
        return False
    if tensor.numel() * tensor.itemsize > MOST_BYTES:
        return False
    if not node.all_input_nodes:
        return operation in _MADE
    return (
        all(one in known for one in node.all_input_nodes)
        and operation.namespace == "aten"
        and operation not in _UNFILLED
        and not operation._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in operation.tags
    )
