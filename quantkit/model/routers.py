"""Find routers: linears whose outputs choose experts for a token, or tokens for an indexer.

Each distinct module runs once on the meta device. A dataflow trace follows the output of every linear: if it
reaches a selection, such as top-k, before another matrix product, the linear is a router. If all linears of a
selecting module lead to its selection, all of them are. Names, shapes and classes do not matter.
"""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operations whose result depends on which inputs are largest.
SELECTIONS = ("topk", "sort", "argsort", "argmax")
#: Operations that combine linears: their result counts for neither.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product", "_grouped_mm")
#: Tokens of a run: enough for any top-k of a model.
TOKENS = 96

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def choosing_linears(model: nn.Module) -> frozenset[str]:
    """Return the names of the linears of `model` whose outputs decide a selection.

    `model` is on the meta device. Only modules inside numbered blocks are run. A module that does not run on
    hidden states alone is replaced by its parts.
    """
    modules = dict(model.named_modules())
    kinds = {name: (_NUMBER.sub("*", f"{name}."), type(module)) for name, module in modules.items()}
    found: dict[tuple[str, type], set[str]] = {}
    with _quietly():
        for name, kind in kinds.items():
            if kind not in found and "*" in kind[0] and type(modules[name]) is not nn.Linear:
                found[kind] = _choosing(modules[name])
    return frozenset(
        f"{name}.{linear}".strip(".") for name, kind in kinds.items() for linear in found.get(kind, ())
    )


def _choosing(module: nn.Module) -> set[str]:
    """Run `module`; return the relative names of linears that are routers; "" is `module` itself."""
    linears = {name: one for name, one in module.named_modules() if isinstance(one, nn.Linear)}
    if not linears or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return set()
    width = next(iter(linears.values())).in_features
    for shape in ((1, TOKENS, width), (TOKENS, width)):
        trace = _Trace(linears)
        try:
            with trace, trace.following(module):
                module(torch.empty(shape))
        except Exception:  # Another module's code, called with guessed arguments, may fail in any way.
            if not trace.chose():
                continue
        return trace.chose()
    return set()


@dataclass(frozen=True)
class _Of:
    """Linears behind a tensor, by name.

    weight   linears whose weight it is
    output   linears whose output it is
    before   all linears it was computed from
    number   True if it is an index of a largest value
    """

    weight: frozenset[str] = frozenset()
    output: frozenset[str] = frozenset()
    before: frozenset[str] = frozenset()
    #: True if it is an index of a largest value.
    number: bool = False


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that traces weights of linears to products, and products to selections."""

    def __init__(self, linears: dict[str, nn.Linear]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._chose: set[str] = set()
        #: Linears that lead to a selection, by name of the innermost module that makes it.
        self._led: dict[str, set[str]] = {}
        self._running: list[str] = []
        self._linears = linears
        self._of = {id(one.weight): _Of(weight=frozenset([name])) for name, one in linears.items()}
        #: Keep the tensors that have an entry, so that their ids are not reused.
        self._kept: list[torch.Tensor] = []

    def chose(self) -> set[str]:
        """Return the linears that chose, plus all linears of a module whose selection uses all of its own."""
        whole = (led for name, led in self._led.items() if led == self._inside(name))
        return self._chose.union(*whole)

    def _inside(self, module: str) -> set[str]:
        return {name for name in self._linears if not module or name.startswith(f"{module}.")}

    @contextmanager
    def following(self, module: nn.Module) -> Iterator[None]:
        """Context manager: track the innermost running module inside `module`."""
        with ExitStack() as stack:
            for name, one in module.named_modules():
                begin = one.register_forward_pre_hook(lambda *_, name=name: self._running.append(name))
                end = one.register_forward_hook(lambda *_: self._end(), always_call=True)
                stack.callback(begin.remove)
                stack.callback(end.remove)
            yield

    def _end(self) -> None:
        self._running.pop()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = str(function).removeprefix("aten.")
        inputs = [self._of[id(one)] for one in _tensors((args, kwargs)) if id(one) in self._of]
        of = _Of(
            frozenset().union(*(one.weight for one in inputs)),
            frozenset().union(*(one.output for one in inputs)),
            frozenset().union(*(one.before | one.weight for one in inputs)),
        )
        if name.startswith(SELECTIONS) or any(one.number for one in inputs):
            self._chose |= of.output
            owner = self._running[-1] if self._running else ""
            self._led.setdefault(owner, set()).update(of.before & self._inside(owner))
        if name.startswith(PRODUCTS):
            of = replace(of, weight=frozenset(), output=of.weight)
        for one in _tensors(result):
            # The value of a maximum only bounds others; its index selects, if it is used.
            number = name.startswith("max.dim") and not one.is_floating_point()
            self._of[id(one)] = replace(of, number=number)
            self._kept.append(one)
        return result


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (one for one in tree_leaves(values) if isinstance(one, torch.Tensor))


@contextmanager
def _quietly() -> Iterator[None]:
    """Context manager: run on the meta device, without gradients, compilation, warnings and log lines."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            torch.device("meta"),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
