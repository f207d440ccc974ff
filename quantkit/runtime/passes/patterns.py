"""Fuse a traced step: replace each known chain of torch operations by one kernel.

No model or module is named here. A chain is defined by its reference function in torch, which is traced like
the model. So anything that computes the same is found (`matcher`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from quantkit.kernels.moe import router
from quantkit.kernels.ops import activation, kv_append, rope
from quantkit.kernels.ops.embedding import embed, embed_reference, padded_embed_reference
from quantkit.kernels.ops.norm import (
    MOST_COLUMNS,
    add_rms_norm,
    rms_norm,
    rms_norm_gemma_reference,
    rms_norm_olmo_reference,
    rms_norm_reference,
)
from quantkit.kernels.problem import ACTIVATION_DTYPES, device_features
from quantkit.kernels.registry import is_verbose
from quantkit.runtime.passes.fold_constants import fold_constants, merge_counters
from quantkit.runtime.passes.fuse_attention import fuse_head_norms, fuse_rotations
from quantkit.runtime.passes.fuse_linear import delay_start, fuse_gates, fuse_norms, split_norms
from quantkit.runtime.passes.fuse_moe import fuse_permutations, fuse_router_norms
from quantkit.runtime.passes.fuse_rounding import extract_rounding, fuse_codes, fuse_prologues, fuse_rounding
from quantkit.runtime.passes.matcher import ANY, Match, Pattern, find_match, pattern_of
from quantkit.runtime.passes.trace import META, Memory, part, trace

logger = logging.getLogger("quantkit.model")
aten = torch.ops.aten

Shapes = Mapping[str, torch.Tensor]
_Sizes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Fusion:
    """Chain of operations to find, given as a function `reference`, and the kernel that replaces it.

    fast          called with the tensors of the reference, `options`, and the matched numbers in `numbers`
    shapes        example shape of each tensor; others match too. Its dtype is in `dtypes`, or of activations
    supports      returns True if `fast` handles given tensors and numbers
    constants     tensors that `fast` reads while earlier kernels may still run (PDL)
    passes_dtype  True if the reference and `fast` have an argument for the dtype of activations
    result_like   returns an example of the memory layout of results; None if they are contiguous
    """

    reference: Callable[..., Any]
    fast: Callable[..., Any]
    shapes: Mapping[str, tuple[int, ...]]
    supports: Callable[[Shapes, Mapping[str, float]], bool]
    numbers: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    constants: tuple[str, ...] = ()
    passes_dtype: bool = False
    result_like: Callable[[Shapes], torch.Tensor] | None = None


def _supports_rows(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    return inputs["ids"].numel() > 0


def _supports_norm(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    x, weight = inputs["x"], inputs["weight"]
    residual = inputs.get("residual", x)
    return (
        weight.dtype == x.dtype == residual.dtype
        and residual.shape == x.shape
        and weight.shape == x.shape[-1:]
        and x.shape[-1] <= MOST_COLUMNS
    )


def _supports_gate(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    x, up = inputs["x"], inputs["up"]
    return x.dtype == up.dtype and x.shape == up.shape and x.dim() > 0


def _supports_angles(x: torch.Tensor, inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    cos, sin = inputs["cos"], inputs["sin"]
    return (
        x.dtype == cos.dtype == sin.dtype
        and x.dim() == 4
        and x.shape[-1] == 2 * numbers["half"]
        and cos.shape == sin.shape
        and cos.shape[1:] == (1, *x.shape[2:])
        and cos.shape[0] in (1, x.shape[0])
    )


def _supports_positions(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    frequencies, positions = inputs["frequencies"], inputs["positions"]
    return (
        frequencies.dim() == 1
        and positions.dim() == 2
        and positions.numel() > 0
        and numbers.get("batch", len(positions)) == len(positions)
    )


def _supports_rotation(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    return _supports_angles(inputs["x"], inputs, numbers)


def _supports_keys(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    k, v, keys, values = (inputs[name] for name in ("k", "v", "keys", "values"))
    return (
        all(part.dim() == 4 for part in (k, v, keys, values))
        and k.shape[:3] == v.shape[:3]
        and k.shape[2] == numbers["tokens"]
        and keys.shape[:3] == values.shape[:3]
        and keys.shape[:2] == k.shape[:2]
        and (keys.shape[3], values.shape[3]) == (k.shape[3], v.shape[3])
        # Shape [1] in transformers 5.12.1, [] from 5.17 on.
        and inputs["cache_length"].shape in ((), (1,))
        and len({part.dtype for part in (k, v, keys, values)}) == 1
        and all(part.stride(-1) == 1 for part in (keys, values))
    )


def _supports_rotated_keys(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    q, k = inputs["q"], inputs["k"]
    return (
        _supports_keys(inputs, numbers)
        and all(_supports_angles(part, inputs, numbers) for part in (q, k))
        and (q.dtype, q.shape[0], q.shape[2]) == (k.dtype, k.shape[0], k.shape[2])
    )


def _supports_small(products: int, inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    x, weight = inputs["x"], inputs["weight"]
    return (
        x.dim() == weight.dim() == 2
        # The kernel reads it in place, before earlier kernels that might copy it have ended.
        and weight.stride(1) == 1
        and 0 < weight.shape[0] <= router.SMALL_ROWS
        and 0 < x.shape[0] * weight.shape[0] <= router.SMALL
        and 0 < x.shape[1] <= router.MOST_COLUMNS
        and x.shape[0] * weight.numel() <= products
    )


def _supports_wide(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    # float32 needs no conversion, so its reference would match any linear.
    return inputs["x"].dtype != torch.float32 and _supports_small(router.WIDE_PRODUCTS, inputs, numbers)


def _supports_logits(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    logits = inputs["logits"]
    return (
        logits.dim() == 2
        and logits.numel() > 0
        and logits.shape[1] <= router.MOST_EXPERTS
        and numbers["top_k"] <= router.MAX_TOP_K
    )


def _supports_scores(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    logits, bias = inputs["logits"], inputs["bias"]
    if not _supports_logits(inputs, numbers) or bias.shape != logits.shape[1:]:
        return False
    experts, groups, kept = logits.shape[1], int(numbers.get("groups", 1)), int(numbers.get("kept", 1))
    return (
        (numbers["tokens"], numbers["experts"]) == logits.shape
        and groups * numbers.get("each", experts) == experts
        # The kernel handles groups as blocks, and the kept groups must have at least top-k experts.
        and (groups == 1 or experts & (experts - 1) == 0)
        and experts // groups * kept >= numbers["top_k"]
    )


def _padded_embed_reference(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return padded_embed_reference(ids, weight, ANY.padding)


def _add_norm_reference(reference: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        total = x + residual
        return total, reference(total, weight, ANY.eps)

    return add_norm


def _cos_sin_reference(reference: Callable[..., Any]) -> Callable[..., Any]:
    return lambda frequencies, positions, dtype: reference(frequencies, positions, ANY.scaling, dtype)


def _norm_reference(reference: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda x, weight: reference(x, weight, ANY.eps)


def _route_reference(reference: Callable[..., Any]) -> Callable[..., Any]:
    return lambda logits: reference(logits, ANY.top_k)


def _route_of_one_group_reference(logits: torch.Tensor, bias: torch.Tensor) -> Any:
    return router.route_deepseek_reference(logits, bias, ANY.top_k, ANY.factor, 1, 1)


def _route_of_groups_reference(logits: torch.Tensor, bias: torch.Tensor) -> Any:
    return router.route_deepseek_reference(logits, bias, ANY.top_k, ANY.factor, ANY.groups, ANY.kept)


def _norm(reference: Callable[..., Any], fast: Callable[..., Any], shapes: _Sizes, kind: str) -> Fusion:
    return Fusion(reference, fast, shapes, _supports_norm, ("eps",), {"kind": kind}, constants=("weight",))


def _fusions() -> Iterator[Fusion]:
    """Yield all fusions, longest chains first."""
    tokens, size = ANY.tokens, 2 * ANY.half
    angles: _Sizes = {"cos": (2, 1, tokens, size), "sin": (2, 1, tokens, size)}
    heads: _Sizes = {"q": (2, 4, tokens, size), "k": (2, 2, tokens, size), "v": (2, 2, tokens, 9)}
    cache: _Sizes = {"keys": (2, 2, 50, size), "values": (2, 2, 50, 9), "cache_length": ()}
    yield Fusion(
        rope.rotate_append_reference,
        rope.rotate_append,
        heads | angles | cache,
        _supports_rotated_keys,
        dtypes={"cache_length": torch.int64},
    )
    written = cache | {name: heads[name] for name in ("k", "v")}
    yield Fusion(
        kv_append.append_reference,
        kv_append.append,
        written,
        _supports_keys,
        dtypes={"cache_length": torch.int64},
    )
    yield Fusion(
        rope.rotate_reference,
        rope.rotate,
        {"x": (2, 4, tokens, size)} | angles,
        _supports_rotation,
        result_like=lambda inputs: rope.empty_heads(inputs["x"]),
    )
    turns: _Sizes = {"frequencies": (ANY.half,), "positions": (ANY.batch, tokens)}
    for turn in (rope.cos_sin_reference, rope.cos_sin_matmul_reference):
        yield Fusion(
            _cos_sin_reference(turn),
            rope.cos_sin,
            turns,
            _supports_positions,
            ("scaling",),
            dtypes={"frequencies": torch.float32, "positions": torch.int64},
            passes_dtype=True,
        )
    table: _Sizes = {"ids": (2, 3), "weight": (53, 20)}
    for embedding in (embed_reference, _padded_embed_reference):
        yield Fusion(embedding, embed, table, _supports_rows, dtypes={"ids": torch.int64})
    norms = {"llama": rms_norm_reference, "olmo": rms_norm_olmo_reference, "gemma": rms_norm_gemma_reference}
    x: _Sizes = {"x": (2, 3, 20)}
    weight: _Sizes = {"weight": (20,)}
    for kind, reference in norms.items():
        shapes = x | {"residual": (2, 3, 20)} | weight
        yield _norm(_add_norm_reference(reference), add_rms_norm, shapes, kind)
    for kind, reference in norms.items():
        yield _norm(_norm_reference(reference), rms_norm, x | weight, kind)
    gates = {"silu": activation.silu_gate_reference, "gelu": activation.gelu_gate_reference}
    for kind, gate in gates.items():
        yield Fusion(gate, activation.gate, x | {"up": (2, 3, 20)}, _supports_gate, (), {"kind": kind})
    small: _Sizes = {"x": (3, 20), "weight": (7, 20)}
    for linear, takes, wide in (
        (router.wide_linear_reference, _supports_wide, True),
        (router.small_linear_reference, partial(_supports_small, router.SMALL_PRODUCTS), False),
    ):
        how = {"wide": wide}
        yield Fusion(linear, router.small_linear, small, takes, options=how, constants=("weight",))
    scores: _Sizes = {"logits": (tokens, ANY.experts), "bias": (ANY.experts,)}
    for route, more in (
        (_route_of_groups_reference, ("groups", "kept")),
        (_route_of_one_group_reference, ()),
    ):
        numbers = ("top_k", "factor", *more)
        yield Fusion(route, router.route, scores, _supports_scores, numbers, dtypes={"logits": torch.float32})
    logits: _Sizes = {"logits": (3, 73)}
    for route, options in router.ROUTERS:
        yield Fusion(_route_reference(route), router.route, logits, _supports_logits, ("top_k",), options)


FUSIONS = tuple(_fusions())


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
    dtypes = {node.meta[META].dtype for node in graph.nodes if META in node.meta}
    # float32 last: it would match the inner part of chains that convert to float32 and back.
    for dtype in (one for one in ACTIVATION_DTYPES[::-1] if one in dtypes):
        for fusion in FUSIONS:
            pattern = _pattern(fusion, dtype, inputs[0].device, torch.is_inference_mode_enabled())
            for anchor in graph.find_nodes(op="call_function", target=pattern.outputs[-1].target):
                # The node may have been replaced with an earlier one.
                if not anchor._erased:
                    _replace(graph, memory, fusion, dtype, pattern, anchor)
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
