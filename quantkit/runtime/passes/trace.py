"""The operations that torch runs as a graph of torch.fx, which can be changed and run again."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from quantkit.runtime.cuda_graphs.capture import NotRecorded

#: Where a node has a tensor without numbers, of the shape, strides and dtype of its result.
META = "val"
#: Where it has how far that begins into the memory that it is in.
OFFSET = "offset"
#: Where a node has those arguments that its result lies in the memory of.
_WITHIN = "within"
_READ = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
_MADE = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


def trace(step: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> GraphModule:
    """What `step` runs now for `inputs`, as a module that takes them and returns the same tensors.

    Tensors that are not among `inputs` are constants of the module: the very tensors, not copies. Raises
    `NotRecorded` if the host reads a number from a GPU or gives it one, which it would do again at each call.
    """
    recorder = _Recorder(inputs)
    with recorder:
        results = step(*inputs)
    recorder.graph.output(pytree.tree_map_only(torch.Tensor, recorder.node, results))
    return GraphModule(recorder.constants, recorder.graph)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations go to `graph` as they run."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self.constants = torch.nn.Module()
        # By identity: the Python object of a tensor lives as long as the tensor does.
        self._nodes: Any = WeakTensorKeyDictionary()
        for number, tensor in enumerate(inputs):
            self._keep(tensor, self.graph.placeholder(f"input_{number}"))

    def node(self, tensor: torch.Tensor) -> Node:
        """The node that made `tensor`; of one that was there before, a constant."""
        found: Node | None = self._nodes.get(tensor)
        if found is None:
            name = f"constant_{len(self.constants.__dict__)}"
            # Not a parameter of the module, nor a buffer.
            self.constants.__dict__[name] = tensor
            found = self._keep(tensor, self.graph.get_attr(name))
        return found

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        options = options or {}
        # In inference mode operations that are made of others come as they were called.
        if _is_composite(operation):
            with self:
                return operation.decompose(*arguments, **options)
        if operation in _READ and arguments[0].device.type != "cpu":
            raise NotRecorded("the model asks the GPU for a number")
        if operation in _MADE and arguments[0].device.type != "cpu":
            raise NotRecorded("the model gives the GPU a number of the host")
        result = operation(*arguments, **options)
        given, named = self._nodes_of(arguments), {name: self._nodes_of(options[name]) for name in options}
        node = self.graph.call_function(operation, given, named)
        tensors = [one for one in pytree.tree_leaves((arguments, options)) if torch.is_tensor(one)]
        self._keep_result(result, node, [(_storage(one), self.node(one)) for one in tensors])
        return result

    def _keep_result(self, result: Any, node: Node, given: Sequence[tuple[int, Node]]) -> None:
        """Take what `node` returned of arguments `given`, each with its storage."""
        tensors = [one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        storages = {_storage(one) for one in tensors}
        # Of several results only if all are parts of arguments: who looks through it takes them for views.
        if storages <= {storage for storage, _ in given}:
            node.meta[_WITHIN] = [one for storage, one in given if storage in storages]
        if isinstance(result, torch.Tensor):
            self._keep(result, node)
        elif isinstance(result, list | tuple):
            for number, one in enumerate(result):
                if isinstance(one, torch.Tensor | list | tuple):
                    self._keep_result(one, self.graph.call_function(part, (node, number)), given)

    def _nodes_of(self, value: Any) -> Any:
        """`value` with nodes for tensors."""
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
    """Whether an operation is made of others."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in operation.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(
        operation.name(), key
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def part(results: Sequence[Any], number: int) -> Any:
    """One of several results of an operation."""
    return results[number]


def between(first: Node, last: Node) -> Iterator[Node]:
    """The nodes after `first` and before `last`."""
    while (first := first.next) is not last:
        yield first


class Memory:
    """Which memory the operations of a traced module have in common: its roots are whatever says so."""

    def __init__(self, module: GraphModule) -> None:
        self._of: dict[Node, frozenset[Any]] = {}
        self._written: dict[Node, frozenset[Any]] = {}
        for node in module.graph.nodes:
            if node.op == "get_attr":
                tensor = getattr(module, str(node.target))
                self.enter(node, of=frozenset({tensor.untyped_storage().data_ptr()}))
            else:
                # Seen rather than asked of the operation, which may say nothing of what it returns.
                self.enter(node, of=self._roots(node.meta.get(_WITHIN, [])) or frozenset({node}))
                self._written[node] = self._roots(_changed(node))

    def enter(
        self, node: Node, of: frozenset[Any] | None = None, written: frozenset[Any] = frozenset()
    ) -> None:
        """Take a new node: what its result lies in, by default memory of its own, and what it writes."""
        self._of[node] = frozenset({node}) if of is None else of
        self._written[node] = written

    def replace(self, old: Node, new: Node, takes: Callable[[Node], bool] = lambda user: True) -> None:
        """Have `new` in place of `old` for those users of it that `takes` names.

        The result of `new` lies where that of `old` does, for all that read and write that.
        """
        new.meta = dict(old.meta)
        self._of[new] = self._of[old]
        self._written.setdefault(new, frozenset())
        old.replace_all_uses_with(new, delete_user_cb=takes)

    def of(self, node: Any) -> frozenset[Any]:
        """The memory of a result."""
        return self._of[node]

    def read(self, node: Node) -> frozenset[Any]:
        """The memory that a node reads, writes or hands on."""
        return self._roots(node.all_input_nodes)

    def written(self, node: Node) -> frozenset[Any]:
        """The memory that a node writes."""
        return self._written[node]

    def is_constant(self, node: Node) -> bool:
        """Whether what a result lies in is there before the module runs, and not written by it."""
        roots = self._of[node]
        return not any(roots & written for written in self._written.values()) and not any(
            isinstance(root, Node) and root.op != "placeholder" for root in roots
        )

    def is_view(self, node: Node) -> bool:
        """Whether a node only hands memory on."""
        return node.target is part or (self.of(node) <= self.read(node) and not self.written(node))

    def source(self, node: Node) -> Node:
        """The operation that made what `node` may be only a view of."""
        while node.op == "call_function" and self.is_view(node):
            node = node.all_input_nodes[0]
        return node

    def _roots(self, nodes: Sequence[Node]) -> frozenset[Any]:
        return frozenset(root for node in nodes for root in self._of[node])


def _changed(node: Node) -> list[Node]:
    """The arguments that a node writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found: list[Node] = []
    for number, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
            found += [one for one in pytree.tree_leaves(value) if isinstance(one, Node)]
    return found
