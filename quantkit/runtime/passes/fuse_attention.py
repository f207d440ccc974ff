"""Fuse launches around attention in a traced decoding step: norms of heads, rotary embedding and KV append.

One launch does all of it where nothing else reads the results in between:

    before   norm(q), norm(k) -> rotate_append(q, k, v, cache) -> decode_attention
    after    rotated_attention(q, k, v, cache, norms)          one launch
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


def fuse_head_norms(graph: Graph, memory: Memory) -> None:
    """Fuse the RMSNorms of q and k into the `rope.rotate_append` after them, in place.

    Both q and k must have such a norm, and nothing else may read its result. `memory` tells which nodes of
    `graph` share storage.
    """
    for rotation in graph.find_nodes(op="call_function", target=rope.rotate_append):
        q, k = (_head_norm(memory, cast(Node, one), rotation) for one in rotation.args[:2])
        if q is None or k is None or q.kwargs != k.kwargs:
            continue
        for place, norm in enumerate((q, k)):
            _fuse_norm(graph, memory, rotation, place, norm)
        weights: Any = q.args[1], k.args[1]
        rotation.update_kwarg("norms", HeadNorms(*weights, **cast(Any, q.kwargs)))
        for norm in (q, k):
            graph.erase_node(norm)


def _head_norm(memory: Memory, operand: Node, rotation: Node) -> Node | None:
    """Return the RMSNorm node that computes `operand` of `rotation`, a `rope.rotate_append`, or None.

    `operand` may be the norm's result, transposed. Nothing else may read that result. x of the norm must be
    contiguous along features, and must not be written before `rotation`.
    """
    norm = operand.args[0] if operand.target is _TRANSPOSE and operand.args[1:] == (1, 2) else operand
    assert isinstance(norm, Node)
    is_its_own = [*operand.users] == [rotation] and rotation.args.count(operand) == 1
    if norm.target is not rms_norm or not is_its_own or (operand is not norm and [*norm.users] != [operand]):
        return None
    x, weight = cast(tuple[Node, Node], norm.args)
    writes = (memory.written(one) & memory.of(x) for one in (*between(norm, rotation), rotation))
    has_unit_stride = x.meta[META].stride(-1) == weight.meta[META].stride(0) == 1
    return norm if has_unit_stride and not any(writes) else None


def _fuse_norm(graph: Graph, memory: Memory, rotation: Node, place: int, norm: Node) -> None:
    """Let the node `rotation` apply `norm` itself: its argument number `place` becomes the norm's input x.

    Until now that argument is the norm's result. If it was transposed, x is transposed alike.
    """
    operand, x = cast(Node, rotation.args[place]), cast(Node, norm.args[0])
    if operand is not norm:
        with graph.inserting_before(rotation):
            transposed = graph.call_function(_TRANSPOSE, (x, 1, 2))
        transposed.meta = {**x.meta, META: x.meta[META].transpose(1, 2)}
        memory.enter(transposed, of=memory.of(x))
        x = transposed
    rotation.update_arg(place, x)
    if operand is not norm:
        graph.erase_node(operand)


def fuse_rotations(graph: Graph, memory: Memory, device: torch.device) -> None:
    """Fuse each `rope.rotate_append` into the decode attention that alone reads its results, in place.

    `memory` tells which nodes of `graph` share storage; `device` runs them.
    """
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        rotation = _rotation(node)
        if rotation is not None and _can_fuse(memory, rotation, node, device):
            _fuse(graph, memory, rotation, node)
    calls = graph.find_nodes(op="call_function", target=rotated_attention)
    for before, node in itertools.pairwise(calls):
        if _is_cache_ready(memory, before, node):
            node.update_kwarg("cache_ready", True)


def _rotation(attention: Node) -> Node | None:
    """Return the `rope.rotate_append` node that computes q, keys and values of `attention`, or None."""
    operands = cast(tuple[Node, ...], attention.args[:3])
    if attention.kwargs or any(
        one.target is not part or one.args[1] != number for number, one in enumerate(operands)
    ):
        return None
    calls = {one.args[0] for one in operands}
    call = cast(Node, calls.pop())
    return call if not calls and call.target is rope.rotate_append else None


def _can_fuse(memory: Memory, rotation: Node, attention: Node, device: torch.device) -> bool:
    """Return True if `rotation` can run inside `attention`, in one launch that is faster.

    Only `attention` may read the results of `rotation`. No node in between may read or write memory that
    `rotation` changes.
    """
    read, written = memory.read(rotation), memory.written(rotation)
    mask = attention.args[3]
    q, keys, values = (cast(Node, one).meta[META] for one in attention.args[:3])
    middle = [one for one in between(rotation, attention) if one not in rotation.users]
    return (
        len(rotation.users) == 3
        and not (mask is not None and memory.of(mask) & written)
        and all([*one.users] == [attention] for one in rotation.users)
        and not any(memory.written(one) & read or memory.read(one) & written for one in middle)
        and rotates(q, keys, values, device)
    )


def _is_cache_ready(memory: Memory, before: Node, attention: Node) -> bool:
    """Return True if nothing changes cache, length or mask of `attention` since the attention `before`.

    Then `attention` can read them before it waits (PDL): `before` has waited for all kernels that came first.
    """
    *_, keys, values, length, mask, _ = attention.args
    inputs = frozenset().union(*(memory.of(one) for one in (keys, values, length, mask) if one is not None))
    since = (before, *between(before, attention))
    return not any(memory.written(one) & inputs or _computed(memory, one) & inputs for one in since)


def _computed(memory: Memory, node: Node) -> frozenset[Any]:
    """Return the roots (see `Memory`) of the memory that `node` computes; empty for views and constants."""
    computes = node.op == "call_function" and (node.target is part or not memory.is_view(node))
    return memory.of(node) if computes else frozenset()


def _fuse(graph: Graph, memory: Memory, rotation: Node, attention: Node) -> None:
    """Replace the nodes `rotation` and `attention` by one `rotated_attention` in place of `attention`."""
    with graph.inserting_after(attention):
        call = graph.call_function(rotated_attention, (*rotation.args, *attention.args[3:]), rotation.kwargs)
    memory.enter(call, written=memory.written(rotation))
    memory.replace(attention, call)
    for node in (attention, *rotation.users, rotation):
        graph.erase_node(node)
