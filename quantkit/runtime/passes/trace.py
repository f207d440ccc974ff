"""Trace the operations that a function runs in torch into a torch.fx graph, to be rewritten and run again."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from quantkit.runtime.cuda_graphs import refusals
from quantkit.runtime.cuda_graphs.capture import NotCaptured

#: Key of a node's meta: a meta tensor with shape, strides and dtype of the result.
META = "val"
#: Key of the storage offset of the result.
OFFSET = "offset"
#: Key of the arguments whose memory contains the result.
_WITHIN = "within"
_READ = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
_UPLOAD = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


def trace(step: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> GraphModule:
    """Trace `step` for `inputs` into a module that takes such tensors and returns what `step` returns.

    Tensors not among `inputs` become constants of the module, without copies. Raises `NotCaptured` if the
    host reads a number from a GPU or sends a number there, which a replay would not repeat.
    """
    recorder = _Recorder(inputs)
    with recorder:
        results = step(*inputs)
    recorder.graph.output(pytree.tree_map_only(torch.Tensor, recorder.node, results))
    return GraphModule(recorder.constants, recorder.graph)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode of torch that appends each operation that runs to `graph`, a torch.fx graph."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self.constants = torch.nn.Module()
        # By identity: the Python object of a tensor lives as long as the tensor.
        self._nodes: Any = WeakTensorKeyDictionary()
        for number, tensor in enumerate(inputs):
            self._keep(tensor, self.graph.placeholder(f"input_{number}"))

    def node(self, tensor: torch.Tensor) -> Node:
        """Return the node that computed `tensor`; a new constant node if no traced operation computed it."""
        node: Node | None = self._nodes.get(tensor)
        if node is None:
            name = f"constant_{len(self.constants.__dict__)}"
            # Neither a parameter nor a buffer of the module.
            self.constants.__dict__[name] = tensor
            node = self._keep(tensor, self.graph.get_attr(name))
        return node

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        options = options or {}
        # In inference mode it would be a clone; else torch returns its argument.
        if operation is torch.ops.aten.dropout.default and not arguments[2]:
            return arguments[0]
        # In inference mode, composite operations arrive undecomposed.
        if _is_composite(operation):
            with self:
                return operation.decompose(*arguments, **options)
        if operation in _READ and arguments[0].device.type != "cpu":
            raise NotCaptured(refusals.READS_NUMBER.because())
        if operation in _UPLOAD and arguments[0].device.type != "cpu":
            raise NotCaptured(refusals.SENDS_NUMBER.because())
        result = operation(*arguments, **options)
        args, kwargs = self._nodes_of(arguments), {name: self._nodes_of(options[name]) for name in options}
        node = self.graph.call_function(operation, args, kwargs)
        tensors = [one for one in pytree.tree_leaves((arguments, options)) if torch.is_tensor(one)]
        self._keep_result(result, node, [(_storage(one), self.node(one)) for one in tensors])
        return result

    def _keep_result(self, result: Any, node: Node, arguments: Sequence[tuple[int, Node]]) -> None:
        """Record the result of `node`, a tensor or a sequence of tensors.

        `arguments` are argument nodes of `node`, each with its storage: results that share one of these
        storages are views.
        """
        tensors = [one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        storages = {_storage(one) for one in tensors}
        # With several results only if all are parts of arguments, because readers treat the node as a view.
        if storages <= {storage for storage, _ in arguments}:
            node.meta[_WITHIN] = [one for storage, one in arguments if storage in storages]
        if isinstance(result, torch.Tensor):
            self._keep(result, node)
        elif isinstance(result, list | tuple):
            for number, one in enumerate(result):
                if isinstance(one, torch.Tensor | list | tuple):
                    self._keep_result(one, self.graph.call_function(part, (node, number)), arguments)

    def _nodes_of(self, value: Any) -> Any:
        """Return `value`, an argument of an operation, with each tensor in it replaced by its node."""
        if isinstance(value, torch.Tensor):
            return self.node(value)
        return type(value)(map(self._nodes_of, value)) if type(value) in (list, tuple) else value

    def _keep(self, tensor: torch.Tensor, node: Node) -> Node:
        node.meta[META] = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        node.meta[OFFSET] = tensor.storage_offset()
        self._nodes[tensor] = node
        return node


@lru_cache(maxsize=4096)
def _is_composite(operation: Any) -> bool:
    """Return True if torch implements `operation` by other operations; these are traced instead."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in operation.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(
        operation.name(), key
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def part(results: Sequence[Any], number: int) -> Any:
    """Return `results[number]`; nodes that select one result of an operation with several call this."""
    return results[number]


def between(first: Node, last: Node) -> Iterator[Node]:
    """Yield the nodes of a graph after `first` and before `last`."""
    while (first := first.next) is not last:
        yield first


class Memory:
    """Alias analysis of a traced module: the memory of each node's result, as a set of roots.

    A root stands for one storage: the address of a constant, or else the node that computed the storage.
    """

    def __init__(self, module: GraphModule) -> None:
        self._of: dict[Node, frozenset[Any]] = {}
        self._written: dict[Node, frozenset[Any]] = {}
        for node in module.graph.nodes:
            if node.op == "get_attr":
                tensor = getattr(module, str(node.target))
                self.enter(node, of=frozenset({tensor.untyped_storage().data_ptr()}))
            else:
                # Observed when tracing, because schemas of operations may not tell that a result is a view.
                self.enter(node, of=self._roots(node.meta.get(_WITHIN, [])) or frozenset({node}))
                self._written[node] = self._roots(_written_arguments(node))

    def enter(
        self, node: Node, of: frozenset[Any] | None = None, written: frozenset[Any] = frozenset()
    ) -> None:
        """Enter a new node with the roots `of` its result (None: a new root) and those `written` by it."""
        self._of[node] = frozenset({node}) if of is None else of
        self._written[node] = written

    def replace(self, old: Node, new: Node, takes: Callable[[Node], bool] = lambda user: True) -> None:
        """Replace node `old` by `new` in each user of `old` for which `takes` returns True.

        The result of `new` counts as the same memory as that of `old`.
        """
        new.meta = dict(old.meta)
        self._of[new] = self._of[old]
        self._written.setdefault(new, frozenset())
        old.replace_all_uses_with(new, delete_user_cb=takes)

    def of(self, node: Any) -> frozenset[Any]:
        """Return the storages (roots) in which the result of `node` may lie."""
        return self._of[node]

    def read(self, node: Node) -> frozenset[Any]:
        """Return the storages (roots) of all arguments of `node`: what it may read."""
        return self._roots(node.all_input_nodes)

    def written(self, node: Node) -> frozenset[Any]:
        """Return the storages (roots) that `node` writes in place."""
        return self._written[node]

    def writes_between(self, first: Node, last: Node, roots: frozenset[Any]) -> bool:
        """Return True if a node after `first` and before `last` writes memory with one of these `roots`."""
        return any(self._written[node] & roots for node in between(first, last))

    def is_constant(self, node: Node) -> bool:
        """Return True if the result of `node` exists before the module runs, and no node writes it."""
        roots = self._of[node]
        return not any(roots & written for written in self._written.values()) and not any(
            isinstance(root, Node) and root.op != "placeholder" for root in roots
        )

    def is_view(self, node: Node) -> bool:
        """Return True if `node` only returns a view of an argument."""
        return node.target is part or (self.of(node) <= self.read(node) and not self.written(node))

    def source(self, node: Node) -> Node:
        """Return the operation that computed the memory of `node`: `node` itself unless it is a view."""
        while node.op == "call_function" and self.is_view(node):
            node = node.all_input_nodes[0]
        return node

    def _roots(self, nodes: Sequence[Node]) -> frozenset[Any]:
        return frozenset(root for node in nodes for root in self._of[node])


def _written_arguments(node: Node) -> list[Node]:
    """Return the argument nodes that `node` writes in place, by the schema of its operation."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    written: list[Node] = []
    for number, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
            written += [one for one in pytree.tree_leaves(value) if isinstance(one, Node)]
    return written
