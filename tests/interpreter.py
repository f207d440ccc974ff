"""Triton 3.6's interpreter with loops that numpy takes, and without what it does for nothing.

Most of its time goes to the types of tensors, made anew for each operation though there are few of them.
"""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest


def teach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter be that, until `monkeypatch` is undone."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_core

    def patched(lang: Any, scope: Any) -> None:
        patch(lang, scope)
        interpreted = lang.range
        scope.set_attr(lang, "range", lambda *bounds, **options: interpreted(*map(number, bounds), **options))

    monkeypatch.setattr(interpreter, "_patch_lang_core", patched)
    # A launch patches all of the language. Each call of a function within a kernel would do it again.
    patch_lang, both = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    monkeypatch.setattr(interpreter, "_patch_lang", lambda _: patch_lang(both))
    monkeypatch.setattr(
        interpreter.InterpretedFunction,
        "__call__",
        lambda function, *args, **options: function.rewrite()(*args, **options),
    )
    # Whether integers overflow would be computed for every operation, and asserted only where `debug` is set.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    _remember_types(monkeypatch, tl.core, interpreter)


def number(bound: Any) -> Any:
    """A bound of a loop, which would be `int` of an array, as numpy refuses."""
    return bound.handle.data.item() if hasattr(bound, "handle") else bound


def _remember_types(monkeypatch: pytest.MonkeyPatch, core: Any, interpreter: Any) -> None:
    make_block, numpy_type, unwrap = (
        core.block_type.__init__,
        interpreter._get_np_dtype,
        core._unwrap_if_constexpr,
    )
    blocks: dict[Any, dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def init_block(block: Any, element: Any, shape: Any) -> None:
        key = element.name, *(getattr(size, "value", size) for size in shape)
        if key in blocks:
            block.__dict__.update(blocks[key], element_ty=element)
        else:
            make_block(block, element, shape)
            blocks[key] = dict(block.__dict__)

    @cache
    def constants(*shape: int) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    def init_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.numel, tensor.shape = constants(*(kind.shape.values if kind.is_block() else ()))

    def numpy_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(kind)
        return numpy_types[name]

    def unwrapped(value: Any) -> Any:
        if type(value) is core.constexpr:
            return value.value
        return value if type(value) in (int, core.tensor) else unwrap(value)

    def equal(one: Any, other: Any) -> Any:
        return core.constexpr(
            one.values == (other.values if type(other) is core.tuple else list(unwrap(other)))
        )

    monkeypatch.setattr(core.block_type, "__init__", init_block)
    monkeypatch.setattr(core.tensor, "__init__", init_tensor)
    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_of)
    monkeypatch.setattr(core, "_unwrap_if_constexpr", unwrapped)
    monkeypatch.setattr(core.tuple, "__eq__", equal)
    # The types of tuples, such as each shape, are for compilers.
    monkeypatch.setattr(core, "_type_for_tuple_values", lambda _, fields=None: core.tuple_type((), fields))
