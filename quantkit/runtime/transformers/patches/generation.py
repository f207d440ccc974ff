"""Give a model a subclass of its class, with the same name, that decodes with CUDA graphs.

Each call checks if the model can be captured, and otherwise goes to the original class. So a model may be
moved to a GPU later. Methods of a class, unlike attributes of the model, do not refer to the model: reference
counting frees it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any

import torch

from quantkit.runtime.decoding import GRAPHS_OF, graphs_of
from quantkit.runtime.packed_embedding import first_table


class DecodesByGraphs:
    """Mixin for the class of a model: its forward and `generate` use CUDA graphs.

    `class_before` is the class of the model before `apply`.
    """

    class_before: type

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of activations.

        transformers returns that of the first floating-point parameter, which may be scales.
        """
        table = first_table(self)  # type: ignore[arg-type]
        own: torch.dtype = super().dtype if table is None else table.dtype  # type: ignore[misc]
        return own

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """Call `generate` of transformers, which decodes with CUDA graphs where possible."""
        own = super().generate  # type: ignore[misc]
        return graphs_of(self).generate(own, *arguments, **options)  # type: ignore[union-attr]

    def get_compiled_call(self, compile_config: Any = None) -> Callable[..., Any]:
        """Return the forward for steps of `generate`: compiled if a config is given, else by CUDA graphs."""
        if compile_config is not None:
            compiled: Callable[..., Any] = super().get_compiled_call(compile_config)  # type: ignore[misc]
            return compiled
        return graphs_of(self).renew()  # type: ignore[union-attr]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Copies have their own graphs. pickle would look up the class by name and find the original.
        state = {name: value for name, value in vars(self).items() if name != GRAPHS_OF}
        return _blank, (self.class_before,), state


def apply(model: Any) -> None:
    """Make `model` decode with CUDA graphs while it is on one GPU; does nothing if already applied."""
    if not is_applied(model) and model.can_generate():
        original: Any = type(model)
        model.__class__ = _class_for(original)


def undo(model: Any) -> None:
    """Restore the original class of `model`."""
    if is_applied(model):
        vars(model).pop(GRAPHS_OF, None)
        model.__class__ = model.class_before


@contextmanager
def applied(model: Any) -> Iterator[None]:
    """Context manager: inside, `model` decodes with CUDA graphs if it is on a GPU."""
    if is_applied(model) or model.device.type != "cuda":
        yield
        return
    apply(model)
    try:
        yield
    finally:
        undo(model)


def is_applied(model: Any) -> bool:
    """Return True if `model` decodes with CUDA graphs."""
    return isinstance(model, DecodesByGraphs)


@lru_cache(maxsize=256)
def _class_for(original: Any) -> type:
    @wraps(original.forward)
    def forward(self: Any, *arguments: Any, **inputs: Any) -> Any:
        # torch.compile should trace the computation of the model.
        if torch.compiler.is_compiling():
            return original.forward(self, *arguments, **inputs)
        return graphs_of(self).forward(*arguments, **inputs)  # type: ignore[union-attr]

    names = ("__module__", "__qualname__", "__doc__")
    more = {name: getattr(original, name) for name in names}
    own = {"forward": forward, "class_before": original}
    return type(original.__name__, (DecodesByGraphs, original), {**more, **own})


def _blank(original: Any) -> Any:
    """Create a model without attributes, of the subclass of `original` that decodes with CUDA graphs."""
    cls: Any = _class_for(original)
    return cls.__new__(cls)
