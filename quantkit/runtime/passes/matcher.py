"""Pattern matcher: find the nodes of a graph that compute the same as a traced reference function.

Nodes match if they call the same operation with matching arguments; operands of add and mul may be swapped.
Numbers must be equal, except placeholders, which match any number and are reported by name.

    reference   x * rsqrt(mean(x * x) + 0.0123)
    model       h * rsqrt(mean(h * h) + 1e-06)      match: x = h, eps = 1e-06
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from quantkit.runtime.passes.trace import trace


class Placeholders(NamedTuple):
    """Numbers in traced reference functions that match any number; a match reports them by name.

    torch needs values to trace with. The values here occur nowhere else in a reference: unusual floats,
    and primes for sizes.
    """

    eps: float = 0.0123
    scaling: float = 0.0456
    factor: float = 0.0789
    half: int = 37
    tokens: int = 41
    batch: int = 43
    padding: int = 47
    kept: int = 53
    groups: int = 59
    top_k: int = 61
    each: int = 67
    experts: int = 59 * 67
    columns: int = 71
    width: int = 79
    rank: int = 83


ANY = Placeholders()
_NAMES = {value: name for name, value in ANY._asdict().items()}
_COMMUTATIVE = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)


@dataclass(frozen=True)
class Pattern:
    """Traced reference function to search a graph for: its input nodes and its output nodes."""

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


def pattern_of(reference: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Pattern:
    """Return the `Pattern` of a function `reference`, traced with the tensors `inputs`."""
    graph = trace(reference, inputs).graph
    results = graph.output_node().args[0]
    return Pattern(
        tuple(node for node in graph.nodes if node.op == "placeholder"),
        results if isinstance(results, tuple) else (results,),  # type: ignore[arg-type]
    )


@dataclass
class Match:
    """Result of matching a pattern in a graph.

    nodes     node of the graph for each node of the pattern
    numbers   number in the graph for each placeholder, by name
    """

    nodes: dict[Node, Node] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def copy(self) -> "Match":
        return Match(dict(self.nodes), dict(self.numbers))

    def operations(self) -> list[Node]:
        """Return the matched nodes of the graph in order, without those for inputs of the pattern."""
        return sorted({node for one, node in self.nodes.items() if one.op != "placeholder"})


def find_match(graph: Graph, pattern: Pattern, anchor: Node) -> Match | None:
    """Match all outputs of `pattern` in `graph`, the last one with `anchor`; return None if that fails."""
    match = Match()
    if not _matches(pattern.outputs[-1], anchor, match):
        return None
    for output in pattern.outputs[:-1]:
        if output in match.nodes:
            continue
        matched = [match.nodes.get(output) for output in pattern.outputs]
        for node in graph.find_nodes(op="call_function", target=output.target):
            attempt = match.copy()
            if node not in matched and _matches(output, node, attempt):
                match = attempt
                break
        else:
            return None
    return match


def _matches(pattern: Any, value: Any, match: Match) -> bool:
    """Return True if `value`, a node or argument of the graph, computes the same as `pattern`.

    Matched nodes and numbers are entered in `match`.
    """
    if isinstance(pattern, Node):
        if pattern in match.nodes or not isinstance(value, Node):
            return match.nodes.get(pattern) is value
        if pattern.op != "placeholder" and not _calls(pattern, value, match):
            return False
        match.nodes[pattern] = value
        return True
    if isinstance(pattern, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(pattern) == len(value)
            and all(_matches(*pair, match) for pair in zip(pattern, value, strict=True))
        )
    if type(pattern) in (int, float) and pattern in _NAMES:
        return type(value) in (int, float) and match.numbers.setdefault(_NAMES[pattern], value) == value
    return type(pattern) is type(value) and bool(pattern == value)


def _calls(pattern: Node, node: Node, match: Match) -> bool:
    """Return True if `node` calls the same operation as `pattern`, with matching arguments.

    Matched nodes and numbers are entered in `match`.
    """
    if node.op != "call_function" or node.target is not pattern.target:
        return False
    if pattern.kwargs.keys() != node.kwargs.keys():
        return False
    if not all(_matches(pattern.kwargs[name], node.kwargs[name], match) for name in pattern.kwargs):
        return False
    for arguments in [node.args, node.args[::-1]][: 1 + (pattern.target in _COMMUTATIVE)]:
        attempt = match.copy()
        if _matches(pattern.args, arguments, attempt):
            match.nodes, match.numbers = attempt.nodes, attempt.numbers
            return True
    return False
