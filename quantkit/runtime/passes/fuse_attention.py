"""Attention in traced steps: norms of heads, rotation and keeping a token in passing, where a step can do
without them.
"""

import itertools
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from quantkit.kernels.ops import rope
from quantkit.kernels.ops.attention import rotated_attention, rotates
from quantkit.kernels.ops.norm import HeadNorms, rms_norm
from quantkit.runtime.passes.trace import META, Memory, between, part

_ATTENTION = torch.ops.quantkit.decode_attention.default
_TRANSPOSE = torch.ops.aten.transpose.int


def take_head_norms(graph: Graph, memory: Memory) -> None:
    """Have `rope.rotate_append` take norms of the queries and keys that it rotates, where they are for it."""
    for rotation in graph.find_nodes(op="call_function", target=rope.rotate_append):
        q, k = (_head_norm(memory, cast(Node, one), rotation) for one in rotation.args[:2])
        if q is None or k is None or q.kwargs != k.kwargs:
            continue
        for place, norm in enumerate((q, k)):
            _take_norm(graph, memory, rotation, place, norm)
        weights: Any = q.args[1], k.args[1]
        rotation.update_kwarg("norms", HeadNorms(*weights, **cast(Any, q.kwargs)))
        for norm in (q, k):
            graph.erase_node(norm)


def _head_norm(memory: Memory, given: Node, rotation: Node) -> Node | None:
    """The norm that `rotation` is given, or its heads and tokens exchanged, if it is for nothing else."""
    norm = given.args[0] if given.target is _TRANSPOSE and given.args[1:] == (1, 2) else given
    assert isinstance(norm, Node)
    is_its_own = [*given.users] == [rotation] and rotation.args.count(given) == 1
    if norm.target is not rms_norm or not is_its_own or (given is not norm and [*norm.users] != [given]):
        return None
    x, weight = cast(tuple[Node, Node], norm.args)
    changed = (memory.written(one) & memory.of(x) for one in (*between(norm, rotation), rotation))
    lies_as_taken = x.meta[META].stride(-1) == weight.meta[META].stride(0) == 1
    return norm if lies_as_taken and not any(changed) else None


def _take_norm(graph: Graph, memory: Memory, rotation: Node, place: int, norm: Node) -> None:
    """Give `rotation` what `norm` is taken of in its place."""
    given, x = cast(Node, rotation.args[place]), cast(Node, norm.args[0])
    if given is not norm:
        with graph.inserting_before(rotation):
            turned = graph.call_function(_TRANSPOSE, (x, 1, 2))
        turned.meta = {**x.meta, META: x.meta[META].transpose(1, 2)}
        memory.enter(turned, of=memory.of(x))
        x = turned
    rotation.update_arg(place, x)
    if given is not norm:
        graph.erase_node(given)


def take_rotations(graph: Graph, memory: Memory, device: torch.device) -> None:
    """Have attention of one token do what `rope.rotate_append` does for it, where that is for it alone."""
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        rotation = _rotation(node)
        if rotation is not None and _can_take(memory, rotation, node, device):
            _take(graph, memory, rotation, node)
    calls = graph.find_nodes(op="call_function", target=rotated_attention)
    for before, node in itertools.pairwise(calls):
        if _is_settled(memory, before, node):
            node.update_kwarg("settled", True)


def _rotation(attention: Node) -> Node | None:
    """The call of `rope.rotate_append` whose three results, in their order, are what `attention` is of."""
    given = cast(tuple[Node, ...], attention.args[:3])
    if attention.kwargs or any(
        one.target is not part or one.args[1] != number for number, one in enumerate(given)
    ):
        return None
    calls = {one.args[0] for one in given}
    found = cast(Node, calls.pop())
    return found if not calls and found.target is rope.rotate_append else None


def _can_take(memory: Memory, rotation: Node, attention: Node, device: torch.device) -> bool:
    """Whether nobody else takes what `rotation` makes, and it may run as late as `attention` does."""
    read, written = memory.read(rotation), memory.written(rotation)
    mask = attention.args[3]
    q, keys, values = (cast(Node, one).meta[META] for one in attention.args[:3])
    others = [one for one in between(rotation, attention) if one not in rotation.users]
    return (
        len(rotation.users) == 3
        and not (mask is not None and memory.of(mask) & written)
        and all([*one.users] == [attention] for one in rotation.users)
        and not any(memory.written(one) & read or memory.read(one) & written for one in others)
        and rotates(q, keys, values, device)
    )


def _is_settled(memory: Memory, before: Node, attention: Node) -> bool:
    """Whether what it finds in the cache, how much that is, and the mask were there when the one before ran.

    That waits until all kernels before it have ended, and lets no other start earlier.
    """
    *_, keys, values, held, mask, _ = attention.args
    given = frozenset().union(*(memory.of(one) for one in (keys, values, held, mask) if one is not None))
    since = (before, *between(before, attention))
    return not any(memory.written(one) & given or _makes(memory, one) & given for one in since)


def _makes(memory: Memory, node: Node) -> frozenset[Any]:
    """The memory of what a node computes, rather than hands on."""
    computes = node.op == "call_function" and (node.target is part or not memory.is_view(node))
    return memory.of(node) if computes else frozenset()


def _take(graph: Graph, memory: Memory, rotation: Node, attention: Node) -> None:
    """Replace both by one call, at the place of `attention`."""
    with graph.inserting_after(attention):
        call = graph.call_function(rotated_attention, (*rotation.args, *attention.args[3:]), rotation.kwargs)
    memory.enter(call, written=memory.written(rotation))
    memory.replace(attention, call)
    for node in (attention, *rotation.users, rotation):
        graph.erase_node(node)
