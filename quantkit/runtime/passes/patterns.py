"""What a model computes, with fewer launches: traced once, chains of operations replaced by one kernel each.

No model is known here, nor any of its modules. A chain is known by its twin: torch code that is traced like
the model, so that whatever computes the same is found (`pattern`).
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
from quantkit.kernels.ops.norm import MOST_COLUMNS, NORM_REFERENCES, add_rms_norm, rms_norm
from quantkit.kernels.problem import ACTIVATION_DTYPES, device_features
from quantkit.kernels.registry import is_verbose
from quantkit.runtime.passes.fold_constants import hold_constants
from quantkit.runtime.passes.fuse_attention import take_head_norms, take_rotations
from quantkit.runtime.passes.fuse_linear import hold_back, split_norms, take_gates, take_norms
from quantkit.runtime.passes.fuse_moe import take_orders, take_router_norms
from quantkit.runtime.passes.matcher import Match, Pattern, matched, pattern_of
from quantkit.runtime.passes.trace import META, Memory, part, trace

logger = logging.getLogger("quantkit.model")
aten = torch.ops.aten

Shapes = Mapping[str, torch.Tensor]
_Sizes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Fusion:
    """A chain of operations, and what is launched in its place."""

    twin: Callable[..., Any]
    #: Called with the tensors of the twin, `options`, and what `numbers` names of the match.
    fast: Callable[..., Any]
    #: Shapes of the twin's tensors.
    shapes: Mapping[str, tuple[int, ...]]
    #: Whether `fast` takes tensors of such shapes and dtypes, and such numbers.
    takes: Callable[[Shapes, Mapping[str, float]], bool]
    numbers: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Those of the twin's tensors that are not of the dtype of activations.
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    #: Those that `fast` reads while the kernels before it may still run.
    constants: tuple[str, ...] = ()
    #: Whether the twin and `fast` are told the dtype of activations.
    told_dtype: bool = False
    #: Memory that lies as results do; without, they are contiguous.
    made: Callable[[Shapes], torch.Tensor] | None = None


def _takes_rows(given: Shapes, numbers: Mapping[str, float]) -> bool:
    return given["ids"].numel() > 0


def _takes_norm(given: Shapes, numbers: Mapping[str, float]) -> bool:
    x, weight = given["x"], given["weight"]
    other = given.get("other", x)
    return (
        weight.dtype == x.dtype == other.dtype
        and other.shape == x.shape
        and weight.shape == x.shape[-1:]
        and x.shape[-1] <= MOST_COLUMNS
    )


def _takes_gate(given: Shapes, numbers: Mapping[str, float]) -> bool:
    x, up = given["x"], given["up"]
    return x.dtype == up.dtype and x.shape == up.shape and x.dim() > 0


def _takes_angles(x: torch.Tensor, given: Shapes, numbers: Mapping[str, float]) -> bool:
    cos, sin = given["cos"], given["sin"]
    return (
        x.dtype == cos.dtype == sin.dtype
        and x.dim() == 4
        and x.shape[-1] == 2 * numbers["half"]
        and cos.shape == sin.shape
        and cos.shape[1:] == (1, *x.shape[2:])
        and cos.shape[0] in (1, x.shape[0])
    )


def _takes_positions(given: Shapes, numbers: Mapping[str, float]) -> bool:
    frequencies, positions = given["frequencies"], given["positions"]
    return (
        frequencies.dim() == 1
        and positions.dim() == 2
        and positions.numel() > 0
        and numbers.get("batch", len(positions)) == len(positions)
    )


def _takes_rotation(given: Shapes, numbers: Mapping[str, float]) -> bool:
    return _takes_angles(given["x"], given, numbers)


def _takes_keys(given: Shapes, numbers: Mapping[str, float]) -> bool:
    k, v, keys, values = (given[name] for name in ("k", "v", "keys", "values"))
    return (
        all(part.dim() == 4 for part in (k, v, keys, values))
        and k.shape[:3] == v.shape[:3]
        and k.shape[2] == numbers["tokens"]
        and keys.shape[:3] == values.shape[:3]
        and keys.shape[:2] == k.shape[:2]
        and (keys.shape[3], values.shape[3]) == (k.shape[3], v.shape[3])
        # Of one dimension in transformers 5.12.1, of none in 5.17.
        and given["held"].shape in ((), (1,))
        and len({part.dtype for part in (k, v, keys, values)}) == 1
        and all(part.stride(-1) == 1 for part in (keys, values))
    )


def _takes_rotated_keys(given: Shapes, numbers: Mapping[str, float]) -> bool:
    q, k = given["q"], given["k"]
    return (
        _takes_keys(given, numbers)
        and all(_takes_angles(part, given, numbers) for part in (q, k))
        and (q.dtype, q.shape[0], q.shape[2]) == (k.dtype, k.shape[0], k.shape[2])
    )


def _takes_small(products: int, given: Shapes, numbers: Mapping[str, float]) -> bool:
    x, weight = given["x"], given["weight"]
    return (
        x.dim() == weight.dim() == 2
        # It is read where it lies, before kernels that might copy it have ended.
        and weight.stride(1) == 1
        and 0 < weight.shape[0] <= router.SMALL_ROWS
        and 0 < x.shape[0] * weight.shape[0] <= router.SMALL
        and 0 < x.shape[1] <= router.MOST_COLUMNS
        and x.shape[0] * weight.numel() <= products
    )


def _takes_wide(given: Shapes, numbers: Mapping[str, float]) -> bool:
    # In float32 there is nothing to convert, and the twin is that of any product.
    return given["x"].dtype != torch.float32 and _takes_small(router.WIDE_PRODUCTS, given, numbers)


def _takes_logits(given: Shapes, numbers: Mapping[str, float]) -> bool:
    logits = given["logits"]
    return (
        logits.dim() == 2
        and logits.numel() > 0
        and logits.shape[1] <= router.MOST_EXPERTS
        and numbers["top_k"] <= router.MAX_TOP_K
    )


def _takes_scores(given: Shapes, numbers: Mapping[str, float]) -> bool:
    logits, bias = given["logits"], given["bias"]
    if not _takes_logits(given, numbers) or bias.shape != logits.shape[1:]:
        return False
    experts, groups, kept = logits.shape[1], int(numbers.get("groups", 1)), int(numbers.get("kept", 1))
    return (
        (numbers["tokens"], numbers["experts"]) == logits.shape
        and groups * numbers.get("each", experts) == experts
        # Groups are blocks of a kernel, and those that are kept have experts enough.
        and (groups == 1 or experts & (experts - 1) == 0)
        and experts // groups * kept >= numbers["top_k"]
    )


def _padded_embed_reference(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return padded_embed_reference(ids, weight, 47)


def _add_norm_reference(twin: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def add_norm(x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor) -> Any:
        total = x + other
        return total, twin(total, weight, 0.0123)

    return add_norm


def _cos_sin_reference(twin: Callable[..., Any]) -> Callable[..., Any]:
    return lambda frequencies, positions, dtype: twin(frequencies, positions, 0.0456, dtype)


def _norm_reference(twin: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda x, weight: twin(x, weight, 0.0123)


def _route_reference(twin: Callable[..., Any]) -> Callable[..., Any]:
    return lambda logits: twin(logits, 61)


def _route_of_one_group_reference(logits: torch.Tensor, bias: torch.Tensor) -> Any:
    return router.route_deepseek_reference(logits, bias, 61, 0.0789, 1, 1)


def _route_of_groups_reference(logits: torch.Tensor, bias: torch.Tensor) -> Any:
    return router.route_deepseek_reference(logits, bias, 61, 0.0789, 59, 53)


def _norm(twin: Callable[..., Any], fast: Callable[..., Any], shapes: _Sizes, kind: str) -> Fusion:
    return Fusion(twin, fast, shapes, _takes_norm, ("eps",), {"kind": kind}, constants=("weight",))


def _fusions() -> Iterator[Fusion]:
    """All that is known, longest chains first."""
    angles: _Sizes = {"cos": (2, 1, 41, 74), "sin": (2, 1, 41, 74)}
    heads: _Sizes = {"q": (2, 4, 41, 74), "k": (2, 2, 41, 74), "v": (2, 2, 41, 9)}
    cache: _Sizes = {"keys": (2, 2, 50, 74), "values": (2, 2, 50, 9), "held": ()}
    yield Fusion(
        rope.rotate_append_reference,
        rope.rotate_append,
        heads | angles | cache,
        _takes_rotated_keys,
        dtypes={"held": torch.int64},
    )
    written = cache | {name: heads[name] for name in ("k", "v")}
    yield Fusion(
        kv_append.append_reference, kv_append.append, written, _takes_keys, dtypes={"held": torch.int64}
    )
    yield Fusion(
        rope.rotate_reference,
        rope.rotate,
        {"x": (2, 4, 41, 74)} | angles,
        _takes_rotation,
        made=lambda given: rope.empty_heads(given["x"]),
    )
    turns: _Sizes = {"frequencies": (37,), "positions": (43, 41)}
    for turn in (rope.cos_sin_reference, rope.cos_sin_matmul_reference):
        yield Fusion(
            _cos_sin_reference(turn),
            rope.cos_sin,
            turns,
            _takes_positions,
            ("scaling",),
            dtypes={"frequencies": torch.float32, "positions": torch.int64},
            told_dtype=True,
        )
    table: _Sizes = {"ids": (2, 3), "weight": (53, 20)}
    for embedding in (embed_reference, _padded_embed_reference):
        yield Fusion(embedding, embed, table, _takes_rows, dtypes={"ids": torch.int64})
    x: _Sizes = {"x": (2, 3, 20)}
    weight: _Sizes = {"weight": (20,)}
    for kind, twin in NORM_REFERENCES.items():
        shapes = x | {"other": (2, 3, 20)} | weight
        yield _norm(_add_norm_reference(twin), add_rms_norm, shapes, kind)
    for kind, twin in NORM_REFERENCES.items():
        yield _norm(_norm_reference(twin), rms_norm, x | weight, kind)
    for kind, gate in activation.GATE_REFERENCES.items():
        yield Fusion(gate, activation.gate, x | {"up": (2, 3, 20)}, _takes_gate, (), {"kind": kind})
    small: _Sizes = {"x": (3, 20), "weight": (7, 20)}
    for linear, takes, wide in (
        (router.wide_linear_reference, _takes_wide, True),
        (router.small_linear_reference, partial(_takes_small, router.SMALL_PRODUCTS), False),
    ):
        how = {"wide": wide}
        yield Fusion(linear, router.small_linear, small, takes, options=how, constants=("weight",))
    scores: _Sizes = {"logits": (41, 67 * 59), "bias": (67 * 59,)}
    for route, found in (
        (_route_of_groups_reference, ("groups", "kept")),
        (_route_of_one_group_reference, ()),
    ):
        given = ("top_k", "factor", *found)
        yield Fusion(route, router.route, scores, _takes_scores, given, dtypes={"logits": torch.float32})
    logits: _Sizes = {"logits": (3, 73)}
    for route, options in router.ROUTERS:
        yield Fusion(_route_reference(route), router.route, logits, _takes_logits, ("top_k",), options)


FUSIONS = tuple(_fusions())


@lru_cache(maxsize=256)
def _pattern(fusion: Fusion, dtype: torch.dtype, device: torch.device, inference: bool) -> Pattern:
    """The twin as it is traced now; with `inference`, in that mode, where torch runs other views."""
    given = [
        torch.zeros(shape, dtype=fusion.dtypes.get(name, dtype), device=device)
        for name, shape in fusion.shapes.items()
    ]
    twin = partial(fusion.twin, dtype=dtype) if fusion.told_dtype else fusion.twin
    return pattern_of(twin, given)


def is_possible(device: torch.device) -> bool:
    """Whether what chains are replaced by runs on `device`."""
    return "triton" in device_features(device)


def fused(step: Callable[..., Any], inputs: Sequence[torch.Tensor], what: str) -> GraphModule:
    """A module that computes what `step` does, with one launch for each chain that `FUSIONS` knows.

    As for `trace`, of which it is the graph; `step` runs once. What is computed of numbers alone is held by
    the module. `what` is what such steps are called in the log.
    """
    module = trace(step, inputs)
    graph = module.graph
    memory = Memory(module)
    count_at_the_end(graph, memory)
    dtypes = {node.meta[META].dtype for node in graph.nodes if META in node.meta}
    # float32 last: of what is rounded before or at the end it would take all but that.
    for dtype in (one for one in ACTIVATION_DTYPES[::-1] if one in dtypes):
        for fusion in FUSIONS:
            pattern = _pattern(fusion, dtype, inputs[0].device, torch.is_inference_mode_enabled())
            for anchor in graph.find_nodes(op="call_function", target=pattern.outputs[-1].target):
                # It may have been replaced together with one before.
                if not anchor._erased:
                    _replace(graph, memory, fusion, dtype, pattern, anchor)
    take_head_norms(graph, memory)
    take_rotations(graph, memory, inputs[0].device)
    take_router_norms(graph, memory)
    take_orders(graph, memory)
    take_gates(graph, memory, inputs[0].device)
    split_norms(graph, memory, inputs[0].device)
    take_norms(graph, memory, inputs[0].device)
    hold_back(graph, memory)
    # Last, as twins have such operations too.
    hold_constants(module, memory)
    if is_verbose():
        logger.warning("%s launch %s", what, _launches(graph, memory))
    module.recompile()
    return module


def _launches(graph: Graph, memory: Memory) -> str:
    """How often the operations of `graph` that are more than views are called, the most frequent first."""
    names = Counter(
        str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
        for node in graph.nodes
        if node.op == "call_function" and not memory.is_view(node)
    )
    return ", ".join(f"{number} {name}" for name, number in names.most_common())


def count_at_the_end(graph: Graph, memory: Memory) -> None:
    """Add to the counters of tokens that each layer of a cache has in one launch, at the end of a step."""
    last: dict[Any, Node] = {}
    for node in graph.nodes:
        last.update(dict.fromkeys(memory.read(node), node))
    counted: dict[int, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        counter, added = node.args
        if node.kwargs:
            continue
        if type(added) is int and not node.users and all(last[root] is node for root in memory.of(counter)):
            counted.setdefault(added, []).append(node)
    for added, additions in counted.items():
        with graph.inserting_before(graph.output_node()):
            counters = [node.args[0] for node in additions]
            call = graph.call_function(aten._foreach_add_.Scalar, (counters, added))
        memory.enter(call, written=frozenset().union(*map(memory.written, additions)))
        for node in additions:
            graph.erase_node(node)


def _suits(
    memory: Memory,
    fusion: Fusion,
    dtype: torch.dtype,
    given: Mapping[str, Node],
    outputs: Sequence[Node],
    match: Match,
) -> bool:
    """Whether `fusion` takes the tensors `given` and makes `outputs` of the same strides."""
    if any(META not in node.meta for node in given.values()):
        return False
    tensors: Shapes = {name: node.meta[META] for name, node in given.items()}
    return (
        all(tensor.dtype == fusion.dtypes.get(name, dtype) for name, tensor in tensors.items())
        and all(memory.is_constant(given[name]) for name in fusion.constants)
        and fusion.takes(tensors, match.numbers)
        # But for what it writes where it was.
        and all(
            _lies_as_made(node.meta[META], fusion, tensors) for node in outputs if memory.of(node) == {node}
        )
    )


def _lies_as_made(output: torch.Tensor, fusion: Fusion, given: Shapes) -> bool:
    """Whether `output` has the strides of what `fusion` makes of tensors `given`."""
    if fusion.made is None:
        return output.is_contiguous()
    strides = zip(output.shape, output.stride(), fusion.made(given).stride(), strict=True)
    return all(one == other for size, one, other in strides if size > 1)


def _is_free(
    memory: Memory, given: Sequence[Node], outputs: Sequence[Node], operations: Sequence[Node]
) -> bool:
    """Whether all `operations` on `given`, which are in order, may run at once at the place of the last."""
    last = operations[-1]
    lies = [root for node in given for root in memory.of(node)]
    if any(lies.count(root) > 1 for node in operations for root in memory.written(node)):
        return False
    early = (user for node in outputs for user in node.users if user < last and user not in operations)
    if any(node in operations for node in given) or next(early, None) is not None:
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
    """Replace what `anchor` is the end of by one call, if that is what `fusion` knows."""
    match = matched(graph, pattern, anchor)
    if match is None:
        return
    given = dict(zip(fusion.shapes, (match.nodes[node] for node in pattern.inputs), strict=True))
    outputs = [match.nodes[node] for node in pattern.outputs]
    operations = match.operations()
    if not _suits(memory, fusion, dtype, given, outputs, match):
        return
    if not _is_free(memory, list(given.values()), outputs, operations):
        return
    options = {name: match.numbers[name] for name in fusion.numbers} | dict(fusion.options)
    options |= {"dtype": dtype} if fusion.told_dtype else {}
    with graph.inserting_after(operations[-1]):
        call = graph.call_function(fusion.fast, tuple(given.values()), options)
    memory.enter(call, written=frozenset().union(*map(memory.written, operations)))
    new = call
    for number, node in enumerate(outputs):
        if len(outputs) > 1:
            with graph.inserting_after(new):
                new = graph.call_function(part, (call, number))
        memory.replace(node, new, lambda user: user not in operations)
    for node in reversed(operations):
        # Results of several that nobody takes.
        for unused in [user for user in node.users if user.target is part and not user.users]:
            graph.erase_node(unused)
        if not node.users:
            graph.erase_node(node)
