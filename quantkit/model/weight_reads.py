"""Find linears whose weight the code of a model reads itself; a packed linear has no such weight.

The source of the model's classes is searched: `self.dt_proj.weight` reads the weight of `dt_proj`. Code for
training or initialization does not count.
"""

import ast
import inspect
import operator
import re
import textwrap
from collections.abc import Iterator
from functools import cache, reduce
from typing import Any

from torch import nn

#: Prefixes of methods that build or initialize a model or tie weights: they do not run at inference.
_SETUP = ("__init__", "_init", "init_", "reset_", "_reset", "tie_", "_tie", "get_", "set_", "resize_")

_COMPARISONS: dict[type[ast.cmpop], Any] = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
}


def linears_that_are_read(model: nn.Module) -> frozenset[str]:
    """Return the names of the modules in `model` whose `weight` is read by the code of a class."""
    modules = dict(model.named_modules())
    found = set()
    for owner, module in modules.items():
        kind: Any = type(module)
        for chain, conditions in _reads(kind):
            if any(_truth(test, module) is (not wanted) for test, wanted in conditions):
                continue
            path = ".".join(chain[1:])
            inside = f"{owner}." if owner else ""
            if chain[0] == "self":
                found |= {f"{inside}{path}"} & modules.keys()
            else:
                # In some block or layer of the module, under a name local to the method.
                found |= {one for one in modules if one.startswith(inside) and one.endswith(f".{path}")}
    return frozenset(found)


def reads_weight(function: Any, leaf: str, parameter: str = "weight") -> bool:
    """Return True if the source of `function` reads `parameter` of a module called `leaf`."""
    return f".{leaf.rpartition('.')[2]}.{parameter}" in _source(function)


#: Condition of a branch, and the value with which the branch runs.
_Conditions = tuple[tuple[ast.expr, bool], ...]
_Read = tuple[tuple[str, ...], _Conditions]


def passes_on(function: Any, leaf: str) -> bool:
    """Return True if the source of `function` passes a module called `leaf` to another function."""
    name = re.escape(leaf.rpartition(".")[2])
    return re.search(rf"\(\s*\w+\.{name}\s*[,)]", _source(function)) is not None


@cache
def _reads(kind: type) -> tuple[_Read, ...]:
    """Return the names before `.weight` in methods of a class, such as ("self", "dt_proj"), and when read."""
    found: list[_Read] = []
    for base in kind.__mro__:
        # Other classes of torch, and classes that all models share, read no linear by its name.
        if ".models." not in base.__module__ and base is not nn.MultiheadAttention:
            continue
        for method in vars(base).values():
            function = inspect.unwrap(method) if callable(method) else None
            if inspect.isfunction(function) and not function.__name__.startswith(_SETUP):
                found += _reads_in(_tree(function), ())
    return tuple(found)


def _reads_in(node: ast.AST, conditions: _Conditions) -> Iterator[_Read]:
    if isinstance(node, ast.If):
        yield from _reads_in(node.test, conditions)
        for branch, wanted in ((node.body, True), (node.orelse, False)):
            for one in branch:
                yield from _reads_in(one, (*conditions, (node.test, wanted)))
        return
    if isinstance(node, ast.Attribute) and node.attr == "weight":
        chain = _chain(node.value)
        if len(chain) > 1:
            yield chain, conditions
    for child in ast.iter_child_nodes(node):
        yield from _reads_in(child, conditions)


def _truth(test: ast.expr, module: nn.Module) -> bool | None:
    """Evaluate a condition on attributes of `module`; None if it depends on more."""
    if isinstance(test, ast.BoolOp):
        values = [_truth(one, module) for one in test.values]
        decisive = isinstance(test.op, ast.Or)
        if decisive in values or None not in values:
            return decisive if decisive in values else not decisive
        return None
    try:
        return bool(_value(test, module))
    except Exception:  # Attributes and comparisons may raise anything.
        return None


def _value(node: ast.expr, module: nn.Module) -> Any:
    """Evaluate an expression of attributes of `module`; raise `LookupError` for any other."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _value(node.operand, module)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        compare = _COMPARISONS[type(node.ops[0])]
        return compare(_value(node.left, module), _value(node.comparators[0], module))
    root, *names = _chain(node) or ("",)
    if root != "self":
        raise LookupError
    # The class is analysed as at inference.
    return False if names == ["training"] else reduce(getattr, names, module)


def _chain(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Attribute):
        before = _chain(node.value)
        return (*before, node.attr) if before else ()
    return (node.id,) if isinstance(node, ast.Name) else ()


def _tree(function: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(_source(function)))
    except SyntaxError:
        return ast.Module([], [])


@cache
def _source(function: Any) -> str:
    """Return the source of a function, "" if there is none.

    Cached, because Python scans the file each time.
    """
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""
