"""Patterns: twins as they are traced, and what in the graph of a model computes the same.

An operation stands for one that is called alike; what is added or multiplied may come in either order. A
number stands for itself, but for those of a table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from quantkit.runtime.passes.trace import trace

#: Numbers in twins that stand for any, which the match then has by name.
_NUMBERS: Mapping[float, str] = {
    0.0123: "eps",
    0.0456: "scaling",
    0.0789: "factor",
    37: "half",
    41: "tokens",
    43: "batch",
    47: "padding",
    53: "kept",
    59: "groups",
    61: "top_k",
    67: "each",
    67 * 59: "experts",
}
_COMMUTATIVE = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)


@dataclass(frozen=True)
class Pattern:
    """A traced twin: its tensors, and what it returns."""

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


def pattern_of(twin: Callable[..., Any], given: Sequence[torch.Tensor]) -> Pattern:
    """What `twin` is traced as with tensors `given`."""
    graph = trace(twin, given).graph
    results = graph.output_node().args[0]
    return Pattern(
        tuple(node for node in graph.nodes if node.op == "placeholder"),
        results if isinstance(results, tuple) else (results,),  # type: ignore[arg-type]
    )


@dataclass
class Match:
    """The nodes that nodes of a pattern stand for, and the numbers."""

    nodes: dict[Node, Node] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def copy(self) -> "Match":
        return Match(dict(self.nodes), dict(self.numbers))

    def operations(self) -> list[Node]:
        """What computes, in order."""
        return sorted({node for one, node in self.nodes.items() if one.op != "placeholder"})


def matched(graph: Graph, pattern: Pattern, anchor: Node) -> Match | None:
    """What computes all outputs of `pattern`, of which `anchor` is the last."""
    match = Match()
    if not _matches(pattern.outputs[-1], anchor, match):
        return None
    for output in pattern.outputs[:-1]:
        if output in match.nodes:
            continue
        taken = [match.nodes.get(other) for other in pattern.outputs]
        for node in graph.find_nodes(op="call_function", target=output.target):
            attempt = match.copy()
            if node not in taken and _matches(output, node, attempt):
                match = attempt
                break
        else:
            return None
    return match


def _matches(pattern: Any, found: Any, match: Match) -> bool:
    """Whether `found` computes what `pattern` does; nodes and numbers go to `match`."""
    if isinstance(pattern, Node):
        if pattern in match.nodes or not isinstance(found, Node):
            return match.nodes.get(pattern) is found
        if pattern.op != "placeholder" and not _calls(pattern, found, match):
            return False
        match.nodes[pattern] = found
        return True
    if isinstance(pattern, list | tuple):
        return (
            isinstance(found, list | tuple)
            and len(pattern) == len(found)
            and all(_matches(one, other, match) for one, other in zip(pattern, found, strict=True))
        )
    if type(pattern) in (int, float) and pattern in _NUMBERS:
        return type(found) in (int, float) and match.numbers.setdefault(_NUMBERS[pattern], found) == found
    return type(pattern) is type(found) and bool(pattern == found)


def _calls(pattern: Node, found: Node, match: Match) -> bool:
    """Whether both call the same with what matches."""
    if found.op != "call_function" or found.target is not pattern.target:
        return False
    if pattern.kwargs.keys() != found.kwargs.keys():
        return False
    if not all(_matches(pattern.kwargs[name], found.kwargs[name], match) for name in pattern.kwargs):
        return False
    for arguments in [found.args, found.args[::-1]][: 1 + (pattern.target in _COMMUTATIVE)]:
        attempt = match.copy()
        if _matches(pattern.args, arguments, attempt):
            match.nodes, match.numbers = attempt.nodes, attempt.numbers
            return True
    return False
