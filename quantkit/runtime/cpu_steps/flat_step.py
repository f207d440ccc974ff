"""A forward on a CPU as a flat list of torch's operations.

With few rows of x a CPU computes for less time than Python needs to find out what is next: modules, hooks,
arguments by name, and the choice of a kernel for each product. So the operations are traced once, and what is
the same at each call is computed once or only once per call. Each number is that of the model's own forward:
the same operations run in the same order.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from quantkit.kernels.linear import OPERATOR
from quantkit.kernels.problem import Outline, Problem
from quantkit.kernels.registry import choose, log_choice
from quantkit.packing.schemes import parse_token
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime.cuda_graphs.capture import NotRecorded
from quantkit.runtime.passes.fold_constants import held_by, hold_constants
from quantkit.runtime.passes.patterns import count_at_the_end
from quantkit.runtime.passes.trace import META, Memory, part, trace

aten = torch.ops.aten

#: Operations whose results have a size, or are numbers for the host, that follow from what tensors hold.
_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
#: What computes the same as an operation with the same arguments, in a third of the time: calls of operations
#: by name go through a parser of their schema.
FASTER: dict[Any, Callable[..., Any]] = {
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


def flat(forward: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """A function that computes what `forward`, which runs once, does for `inputs` on a CPU, as `trace`
    has it.

    Raises `NotRecorded` where Python decides by numbers in tensors what runs.
    """
    module = trace(forward, inputs)
    graph, memory = module.graph, Memory(module)
    _refuse_decisions(graph, memory)
    count_at_the_end(graph, memory)
    hold_constants(module, memory)
    _share_constants(module)
    _run_once(graph, memory)
    for number, node in enumerate(graph.find_nodes(op="call_function", target=OPERATOR)):
        # Not a target, of which graphs keep more than their nodes.
        vars(module)[f"product_{number}"] = _product(module, node)
        with graph.inserting_before(node):
            product = graph.create_node("get_attr", f"product_{number}")
        node.target, node.args = operator.call, (product, node.args[0])
    graph.eliminate_dead_code()
    for node in graph.nodes:
        _hasten(node)
    graph.lint()
    module.recompile()
    return _without_graph(module)


def _without_graph(module: GraphModule) -> Callable[..., Any]:
    """What `module` computes, which holds its constants alone; nodes of a graph refer to each other.

    So what it computes with is freed when this is let go of, without the garbage collector.
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
    """Raise `NotRecorded` for an operation of which Python has seen what the inputs are."""
    given: set[Node] = set()
    for node in graph.nodes:
        depends = node.op == "placeholder" or any(one in given for one in node.all_input_nodes)
        # Counters of a cache are no inputs, but another number at each call.
        if depends or not all(map(memory.is_constant, node.all_input_nodes)):
            given.add(node)
            tags = set(getattr(node.target, "tags", ()))
            if tags & _DEPENDENT:
                raise NotRecorded(f"Python decides by numbers of {node.target} what runs")


def _share_constants(module: GraphModule) -> None:
    """One node for all constants that are one tensor, or hold the same numbers and nobody writes them."""
    held = {id(tensor) for tensor in held_by(module)}
    found: dict[Any, Node] = {}
    for node in list(module.graph.find_nodes(op="get_attr")):
        tensor = getattr(module, str(node.target))
        key: Any = id(tensor)
        if key in held:
            key = (tensor.dtype, tensor.shape, tensor.stride(), tuple(tensor.flatten().tolist()))
        first = found.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)


def _run_once(graph: Graph, memory: Memory) -> None:
    """Have what several nodes compute of the same tensors computed by the first of them alone."""
    written = frozenset().union(*map(memory.written, graph.nodes))
    found: dict[Any, Node] = {}
    for node in list(graph.nodes):
        operation = node.target
        if not isinstance(operation, torch._ops.OpOverload) or operation is OPERATOR:
            continue
        if torch.Tag.nondeterministic_seeded in operation.tags or META not in node.meta:
            continue
        if written & (memory.of(node) | memory.read(node) | memory.written(node)):
            continue
        key = repr((operation, node.args, sorted(node.kwargs.items())))
        first = found.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _product(module: GraphModule, node: Node) -> Callable[[torch.Tensor], torch.Tensor]:
    """What `OPERATOR` computes in `node` of x alone: the kernel for so many rows, with its weight."""
    arguments: Any = map_arg(node.args[1:], lambda one: getattr(module, str(one.target)))
    parts, layout, bias, token, rows, name = arguments
    x, shape = node.args[0].meta[META], node.meta[META].shape  # type: ignore[union-attr]
    columns, scheme = x.shape[-1], parse_token(token)
    problem = Problem.on(torch.device("cpu"), x.numel() // columns, rows, columns, scheme, x.dtype, name)
    chosen = choose(problem)
    log_choice(problem, chosen)
    # Of joined weights there is nothing but the layout.
    weight = (
        PackedTensor(tuple(parts), scheme, (rows, columns)) if parts else Outline(scheme, (rows, columns))
    )
    given = tuple(layout) if chosen.kernel.layout is not None else ()
    scale = weight.part("column_scale") if isinstance(weight, PackedTensor) else None
    scale = None if scale is None else scale.to(x.dtype)
    launch, flat_shape = chosen.launch, (problem.m, columns)

    def product(x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(flat_shape).contiguous()
        return launch(flat if scale is None else flat * scale, weight, given, bias).view(shape)

    def plain_product(x: torch.Tensor) -> torch.Tensor:
        return launch(x.view(flat_shape), weight, given, bias).view(shape)

    return plain_product if scale is None and x.is_contiguous() else product


def _hasten(node: Node) -> None:
    """Call what computes the same in less time, if something does."""
    if node.op != "call_function":
        return
    if node.target is aten._to_copy.default and node.kwargs.keys() == {"dtype"}:
        source = node.args[0]
        # It gives the tensor itself where that has the dtype.
        if isinstance(source, Node) and source.meta[META].dtype != node.kwargs["dtype"]:
            node.target, node.args, node.kwargs = torch.Tensor.to, (source, node.kwargs["dtype"]), {}
    else:
        node.target = FASTER.get(node.target, node.target)
