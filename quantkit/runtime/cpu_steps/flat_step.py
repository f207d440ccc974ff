"""Flatten a forward on a CPU to a list of torch operations.

With few rows of x, a CPU computes for less time than Python needs between operations: modules, hooks, keyword
arguments, kernel selection. So operations are traced once, kernels are selected once, and equal operations
run once. The results are bit-identical to the forward of the model: same operations, same order.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from quantkit.kernels.linear import OPERATOR
from quantkit.kernels.problem import Outline, Problem
from quantkit.kernels.registry import choose, log_choice
from quantkit.packing.schemes import parse_token
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime.cuda_graphs import refusals
from quantkit.runtime.cuda_graphs.capture import NotCaptured
from quantkit.runtime.passes.fold_constants import fold_constants, folded_constants, merge_counters
from quantkit.runtime.passes.fusions import Fusion
from quantkit.runtime.passes.matcher import ANY
from quantkit.runtime.passes.patterns import replace_chains
from quantkit.runtime.passes.trace import META, Memory, part, trace

aten = torch.ops.aten

#: Tags of operations whose result size or host number depends on values in tensors.
_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
#: Operations whose result is a view of all numbers of the first argument.
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.transpose.int, aten.unsqueeze.default})
#: Python functions equal to an operation with the same arguments, in a third of its time: calls by name parse
#: the schema of the operation.
FASTER: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (
        torch._scaled_dot_product_flash_attention_for_cpu
    ),
    aten._unsafe_view.default: torch.Tensor.view,
    aten.add.Tensor: torch.add,
    aten.cat.default: torch.cat,
    aten.cos.default: torch.cos,
    aten.expand.default: torch.Tensor.expand,
    aten.index_copy_.default: torch.Tensor.index_copy_,
    aten.le.Tensor: torch.le,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.silu.default: torch.nn.functional.silu,
    aten.sin.default: torch.sin,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
    aten.where.self: torch.where,
    part: operator.getitem,
}


def _normalized(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) for `x` [..., N] in its dtype, computed in float32."""
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the same by `torch.rms_norm`, which runs the same operations from C++."""
    return torch.rms_norm(x, x.shape[-1:], None, eps)


#: Norms of 16 bits: one of 576 numbers takes 13 us instead of 18.
_NORM = Fusion(
    lambda x: _normalized(x, ANY.eps),
    _rms_norm,
    {"x": (2, 3, 20)},
    lambda inputs, numbers: inputs["x"].dtype != torch.float32,
    ("eps",),
)


def flat(forward: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Trace `forward` on a CPU, and return a function that runs its torch operations from a list.

    `forward` reads the tensors `inputs`. The function takes tensors of their shapes and dtypes instead, and
    returns what `forward` returns. All other tensors, such as weights, are constants of the list. Tracing
    runs `forward` once. Raises `NotCaptured` if Python branches on tensor values, because the list always
    takes the same branch.
    """
    module = trace(forward, inputs)
    graph, memory = module.graph, Memory(module)
    _refuse_decisions(graph, memory)
    merge_counters(graph, memory)
    fold_constants(module, memory)
    _share_constants(module)
    _eliminate_common(graph, memory)
    replace_chains(graph, memory, (_NORM,), torch.device("cpu"))
    _merge_views(graph)
    for number, node in enumerate(graph.find_nodes(op="call_function", target=OPERATOR)):
        # Not a call target, because graphs keep references to targets after nodes are erased.
        vars(module)[f"product_{number}"] = _product(module, node)
        with graph.inserting_before(node):
            product = graph.create_node("get_attr", f"product_{number}")
        node.target, node.args = operator.call, (product, node.args[0])
    graph.eliminate_dead_code()
    for node in graph.nodes:
        _use_faster(node)
    graph.lint()
    module.recompile()
    return _without_graph(module)


def _without_graph(module: GraphModule) -> Callable[..., Any]:
    """Return the compiled `forward` of `module`, bound to its constants but not to its graph.

    Nodes of a graph refer to each other, so constants in a graph live until the garbage collector runs.
    Without the graph, they are freed with the last reference.
    """
    constants = {
        str(node.target): getattr(module, str(node.target))
        for node in module.graph.nodes
        if node.op == "get_attr"
    }
    code = type(module).forward
    del type(module).forward
    module._buffers.clear()
    module._parameters.clear()
    for name in constants:
        vars(module).pop(name, None)
    return partial(code, SimpleNamespace(**constants))


def _refuse_decisions(graph: Graph, memory: Memory) -> None:
    """Raise `NotCaptured` if an operation of `graph` returns a number or a shape that depends on inputs.

    Such operations, as `item` or `nonzero`, have a tag in `_DEPENDENT`. Tensors that a call changes, such as
    the position counter of a cache, count as inputs; `memory` tells which these are.
    """
    dependent: set[Node] = set()
    for node in graph.nodes:
        depends = node.op == "placeholder" or any(one in dependent for one in node.all_input_nodes)
        # Counters of a cache are no inputs, but change with every call.
        if depends or not all(map(memory.is_constant, node.all_input_nodes)):
            dependent.add(node)
            tags = set(getattr(node.target, "tags", ()))
            if tags & _DEPENDENT:
                raise NotCaptured(refusals.BRANCHES.because(operation=node.target))


def _share_constants(module: GraphModule) -> None:
    """Replace equal constants of `module` by the first of them, in place.

    Constants are equal if they are the same tensor, or results of constant folding with the same dtype,
    shape, strides and values.
    """
    folded = {id(tensor) for tensor in folded_constants(module)}
    by_key: dict[Any, Node] = {}
    for node in list(module.graph.find_nodes(op="get_attr")):
        tensor = getattr(module, str(node.target))
        key: Any = id(tensor)
        if key in folded:
            key = (tensor.dtype, tensor.shape, tensor.stride(), tuple(tensor.flatten().tolist()))
        first = by_key.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)


def _eliminate_common(graph: Graph, memory: Memory) -> None:
    """Eliminate common subexpressions: of nodes with the same operation and arguments, keep the first.

    Kept as they are: packed linears, random operations, and nodes that read or write memory which `graph`
    writes. `memory` tells what each node reads and writes.
    """
    written = frozenset().union(*map(memory.written, graph.nodes))
    by_key: dict[Any, Node] = {}
    for node in list(graph.nodes):
        operation = node.target
        if not isinstance(operation, torch._ops.OpOverload) or operation is OPERATOR:
            continue
        if torch.Tag.nondeterministic_seeded in operation.tags or META not in node.meta:
            continue
        if written & (memory.of(node) | memory.read(node) | memory.written(node)):
            continue
        key = repr((operation, node.args, sorted(node.kwargs.items())))
        first = by_key.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _merge_views(graph: Graph) -> None:
    """Make each contiguous view of views one view of the first contiguous tensor of the chain.

    A view has the storage, offset and order of that tensor then. With one token, heads [1, T, H, D] and
    [1, H, T, D] are such views.
    """
    for node in graph.nodes:
        source = node
        while source.target in _VIEWS and all(map(_is_contiguous, (source, source.args[0]))):
            source = source.args[0]
        if source is not node and source is not node.args[0]:
            node.target, node.args, node.kwargs = aten.view.default, (source, [*node.meta[META].shape]), {}


def _is_contiguous(node: Node) -> bool:
    """Return True if `node` is known to compute a contiguous tensor."""
    return META in node.meta and bool(node.meta[META].is_contiguous())


def _product(module: GraphModule, node: Node) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function x [..., K] -> y [..., N] for `node`, a call of the packed linear `OPERATOR`.

    The kernel for the shapes of this call is selected here, once. The function holds it, and from `module`
    the packed weight and bias.
    """
    arguments: Any = map_arg(node.args[1:], lambda one: _constant(module, one))
    parts, layout, bias, token, rows, name = arguments
    x, shape = node.args[0].meta[META], node.meta[META].shape  # type: ignore[union-attr]
    columns, parsed = x.shape[-1], parse_token(token)
    problem = Problem.on(torch.device("cpu"), x.numel() // columns, rows, columns, parsed, x.dtype, name)
    chosen, scheme, rounding = choose(problem), parsed.of_weights, parsed.activations
    log_choice(problem, chosen)
    # A joined weight has a layout only.
    weight = (
        PackedTensor(tuple(parts), scheme, (rows, columns)) if parts else Outline(scheme, (rows, columns))
    )
    tensors = tuple(layout) if chosen.kernel.layout is not None else ()
    scale = weight.part("column_scale") if isinstance(weight, PackedTensor) else None
    scale = None if scale is None else scale.to(x.dtype)
    launch, flat_shape = chosen.launch, (problem.m, columns)
    if rounding is not None and chosen.kernel.rounds_x:
        launch, rounding = partial(launch, activations=rounding), None

    def product(x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(flat_shape).contiguous()
        flat = flat if rounding is None else rounding.round(flat)
        return launch(flat if scale is None else flat * scale, weight, tensors, bias).view(shape)

    def plain_product(x: torch.Tensor) -> torch.Tensor:
        return launch(x.view(flat_shape), weight, tensors, bias).view(shape)

    return plain_product if scale is None and rounding is None and x.is_contiguous() else product


def _constant(module: GraphModule, node: Node) -> Any:
    """Return the tensor of `node`: a constant of `module`, or an operation on constants, computed here.

    An operation is a view of words that a file stores in another dtype, such as fp8.
    """
    if node.op == "get_attr":
        return getattr(module, str(node.target))
    arguments, options = map_arg((node.args, node.kwargs), lambda one: _constant(module, one))
    return node.target(*arguments, **options)  # type: ignore[operator]


def _use_faster(node: Node) -> None:
    """Replace the operation of `node`, in place, by a faster function with equal results.

    `FASTER` lists these functions; casts become `Tensor.to`.
    """
    if node.op != "call_function":
        return
    if node.target is aten._to_copy.default and node.kwargs.keys() == {"dtype"}:
        source = node.args[0]
        # `to` returns the tensor itself if it has the dtype, which `_to_copy` must not.
        if isinstance(source, Node) and source.meta[META].dtype != node.kwargs["dtype"]:
            node.target, node.args, node.kwargs = torch.Tensor.to, (source, node.kwargs["dtype"]), {}
    elif node.target is _rms_norm:
        x, eps = cast(Node, node.args[0]), node.kwargs["eps"]
        node.target, node.args, node.kwargs = torch.rms_norm, (x, [x.meta[META].shape[-1]], None, eps), {}
    elif node.target is aten.slice.Tensor and len(node.args) == 4 and not node.kwargs:
        _use_narrow(node, *node.args[:3])
    else:
        node.target = FASTER.get(node.target, node.target)


def _use_narrow(node: Node, source: Any, axis: Any, start: Any) -> None:
    """Replace `node`, a slice of `source` from `start` on along `axis`, by `narrow` where they agree."""
    if isinstance(start, int) and 0 <= start <= source.meta[META].shape[axis]:
        node.target, node.args = torch.narrow, (source, axis, start, node.meta[META].shape[axis])
