"""Fuse a traced step: replace each chain of torch operations of `FUSIONS` by its kernel."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from quantkit.kernels.problem import ACTIVATION_DTYPES, device_features
from quantkit.kernels.registry import is_verbose
from quantkit.runtime.passes.fold_constants import fold_constants, merge_counters
from quantkit.runtime.passes.fuse_attention import fuse_head_norms, fuse_rotations
from quantkit.runtime.passes.fuse_linear import delay_start, fuse_gates, fuse_norms, split_norms
from quantkit.runtime.passes.fuse_moe import fuse_permutations, fuse_router_norms
from quantkit.runtime.passes.fuse_rounding import extract_rounding, fuse_codes, fuse_prologues, fuse_rounding
from quantkit.runtime.passes.fusions import FUSIONS, Fusion, Shapes
from quantkit.runtime.passes.matcher import Match, Pattern, find_match, pattern_of
from quantkit.runtime.passes.trace import META, Memory, part, trace

logger = logging.getLogger("quantkit.model")


@lru_cache(maxsize=256)
def _pattern(fusion: Fusion, dtype: torch.dtype, device: torch.device, inference: bool) -> Pattern:
    """Return the pattern of the reference of `fusion`, traced with activations of `dtype` on `device`.

    `inference` is part of the cache key, because torch runs other views in inference mode.
    """
    tensors = [
        torch.zeros(shape, dtype=fusion.dtypes.get(name, dtype), device=device)
        for name, shape in fusion.shapes.items()
    ]
    reference = partial(fusion.reference, dtype=dtype) if fusion.passes_dtype else fusion.reference
    return pattern_of(reference, tensors)


def can_fuse(device: torch.device) -> bool:
    """Return True if the fused kernels run on `device`."""
    return "triton" in device_features(device)


def fused(step: Callable[..., Any], inputs: Sequence[torch.Tensor], what: str) -> GraphModule:
    """Trace `step` once into a module that computes the same, with one launch per chain in `FUSIONS`.

    Tensors that depend on no input are folded (`fold_constants`). `what` names the step in the log.
    """
    module = trace(step, inputs)
    graph = module.graph
    memory = Memory(module)
    merge_counters(graph, memory)
    replace_chains(graph, memory, FUSIONS, inputs[0].device)
    fuse_head_norms(graph, memory)
    fuse_rotations(graph, memory, inputs[0].device)
    fuse_router_norms(graph, memory)
    fuse_permutations(graph, memory)
    extract_rounding(graph, memory, inputs[0].device)
    fuse_gates(graph, memory, inputs[0].device)
    split_norms(graph, memory, inputs[0].device)
    fuse_norms(graph, memory, inputs[0].device)
    fuse_rounding(graph, memory)
    fuse_prologues(graph, memory, inputs[0].device)
    delay_start(graph, memory)
    fuse_codes(graph, memory, inputs[0].device)
    # Last, because references contain such operations too.
    fold_constants(module, memory)
    if is_verbose():
        logger.warning("%s launch %s", what, _launches(graph, memory))
    module.recompile()
    return module


def replace_chains(graph: Graph, memory: Memory, fusions: Sequence[Fusion], device: torch.device) -> None:
    """Replace each chain of `fusions` in `graph`, whose activations are on `device`, in place.

    `memory` tells which nodes share storage.
    """
    dtypes = {node.meta[META].dtype for node in graph.nodes if META in node.meta}
    # float32 last: it would match the inner part of chains that convert to float32 and back.
    for dtype in (one for one in ACTIVATION_DTYPES[::-1] if one in dtypes):
        for fusion in fusions:
            pattern = _pattern(fusion, dtype, device, torch.is_inference_mode_enabled())
            for anchor in graph.find_nodes(op="call_function", target=pattern.outputs[-1].target):
                # The node may have been replaced with an earlier one.
                if not anchor._erased:
                    _replace(graph, memory, fusion, dtype, pattern, anchor)


def _launches(graph: Graph, memory: Memory) -> str:
    """Return text with the number of calls per operation in `graph`, most frequent first, without views."""
    names = Counter(
        str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
        for node in graph.nodes
        if node.op == "call_function" and not memory.is_view(node)
    )
    return ", ".join(f"{number} {name}" for name, number in names.most_common())


def _is_supported(
    memory: Memory,
    fusion: Fusion,
    dtype: torch.dtype,
    inputs: Mapping[str, Node],
    outputs: Sequence[Node],
    match: Match,
) -> bool:
    """Return True if `fusion` supports the nodes `inputs`, and its results get the strides of `outputs`.

    `dtype` is that of activations; `match` has the numbers that the pattern leaves open.
    """
    if any(META not in node.meta for node in inputs.values()):
        return False
    tensors: Shapes = {name: node.meta[META] for name, node in inputs.items()}
    return (
        all(tensor.dtype == fusion.dtypes.get(name, dtype) for name, tensor in tensors.items())
        and all(memory.is_constant(inputs[name]) for name in fusion.constants)
        and fusion.supports(tensors, match.numbers)
        # Results written in place keep their strides.
        and all(
            _has_strides(node.meta[META], fusion, tensors) for node in outputs if memory.of(node) == {node}
        )
    )


def _has_strides(output: torch.Tensor, fusion: Fusion, inputs: Shapes) -> bool:
    """Return True if the meta tensor `output` has the strides of the result of `fusion` for `inputs`."""
    if fusion.result_like is None:
        return output.is_contiguous()
    strides = zip(output.shape, output.stride(), fusion.result_like(inputs).stride(), strict=True)
    return all(stride == expected for size, stride, expected in strides if size > 1)


def _can_move(
    memory: Memory, inputs: Sequence[Node], outputs: Sequence[Node], operations: Sequence[Node]
) -> bool:
    """Return True if running `operations` (`inputs` to `outputs`) at the last of them changes no result."""
    last = operations[-1]
    roots = [root for node in inputs for root in memory.of(node)]
    if any(roots.count(root) > 1 for node in operations for root in memory.written(node)):
        return False
    early = (user for node in outputs for user in node.users if user < last and user not in operations)
    if any(node in operations for node in inputs) or next(early, None) is not None:
        return False
    read = {root for node in operations for root in memory.read(node)}
    written = {root for node in operations for root in memory.written(node)}
    node = operations[0]
    while node is not last:
        node = node.next
        if node in operations:
            continue
        if memory.written(node) & read or memory.read(node) & written:
            return False
    return True


def _replace(
    graph: Graph, memory: Memory, fusion: Fusion, dtype: torch.dtype, pattern: Pattern, anchor: Node
) -> None:
    """Replace the chain that matches `pattern` and ends at `anchor` by `fusion.fast`.

    Does nothing without a match, or if `fusion` does not support it for activations of `dtype`.
    """
    match = find_match(graph, pattern, anchor)
    if match is None:
        return
    inputs = dict(zip(fusion.shapes, (match.nodes[node] for node in pattern.inputs), strict=True))
    outputs = [match.nodes[node] for node in pattern.outputs]
    operations = match.operations()
    if not _is_supported(memory, fusion, dtype, inputs, outputs, match):
        return
    if not _can_move(memory, list(inputs.values()), outputs, operations):
        return
    options = {name: match.numbers[name] for name in fusion.numbers} | dict(fusion.options)
    options |= {"dtype": dtype} if fusion.passes_dtype else {}
    with graph.inserting_after(operations[-1]):
        call = graph.call_function(fusion.fast, tuple(inputs.values()), options)
    memory.enter(call, written=frozenset().union(*map(memory.written, operations)))
    new = call
    for number, node in enumerate(outputs):
        if len(outputs) > 1:
            with graph.inserting_after(new):
                new = graph.call_function(part, (call, number))
        memory.replace(node, new, lambda user: user not in operations)
    for node in reversed(operations):
        # Unused results of operations with several.
        for unused in [user for user in node.users if user.target is part and not user.users]:
            graph.erase_node(unused)
        if not node.users:
            graph.erase_node(node)
