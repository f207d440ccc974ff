"""A model that decodes by graphs: its class is one that is made of the one it had, of the same name.

Where the model cannot be recorded, each method does what that of the class before does. Whether it can is
asked at each call, so it is the same for a model that is loaded on a GPU and one that is moved there.
These are no attributes of the model, which would hold it: it is freed when it is let go of.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch

from quantkit.runtime.decoding import GRAPHS_OF, graphs_of


class DecodesByGraphs:
    """What is put before the class of a model."""

    #: The class that the model had.
    class_before: type

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """`generate` of transformers, with steps as graphs where they can be."""
        own = super().generate  # type: ignore[misc]
        return graphs_of(self).generate(own, *arguments, **options)  # type: ignore[union-attr]

    def get_compiled_call(self, compile_config: Any = None) -> Callable[..., Any]:
        """What transformers calls for steps: graphs, or what torch.compile makes of its options."""
        if compile_config is not None:
            compiled: Callable[..., Any] = super().get_compiled_call(compile_config)  # type: ignore[misc]
            return compiled
        return graphs_of(self).renew()  # type: ignore[union-attr]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Copies have graphs of their own. By its name pickle would find the class before.
        state = {name: value for name, value in vars(self).items() if name != GRAPHS_OF}
        return _blank, (self.class_before,), state


def apply(model: Any) -> None:
    """Have `model` decode by graphs while all of it is on one GPU; does nothing if it does already."""
    if not is_applied(model) and model.can_generate():
        before: Any = type(model)
        model.__class__ = _class_for(before)


def undo(model: Any) -> None:
    """Give `model` back the class that it had."""
    if is_applied(model):
        vars(model).pop(GRAPHS_OF, None)
        model.__class__ = model.class_before


def is_applied(model: Any) -> bool:
    """Whether `model` decodes by graphs."""
    return isinstance(model, DecodesByGraphs)


@lru_cache(maxsize=256)
def _class_for(before: Any) -> type:
    @wraps(before.forward)
    def forward(self: Any, *arguments: Any, **inputs: Any) -> Any:
        # What torch.compile traces is what the model computes.
        if torch.compiler.is_compiling():
            return before.forward(self, *arguments, **inputs)
        return graphs_of(self).forward(*arguments, **inputs)  # type: ignore[union-attr]

    names = ("__module__", "__qualname__", "__doc__")
    more = {name: getattr(before, name) for name in names}
    own = {"forward": forward, "class_before": before}
    return type(before.__name__, (DecodesByGraphs, before), {**more, **own})


def _blank(before: Any) -> Any:
    """A model without state, whose class was `before`."""
    cls: Any = _class_for(before)
    return cls.__new__(cls)
