"""Triton 3.6's interpreter with loops that numpy takes, and without what it does for nothing.

Most of its time goes to the types of tensors, made anew for each operation though there are few of them, and
to finding out for each operation what its types become, though that depends on nothing else.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
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
    _patch_once(monkeypatch, tl, interpreter)
    monkeypatch.setattr(
        interpreter.InterpretedFunction,
        "__call__",
        lambda function, *args, **options: function.rewrite()(*args, **options),
    )
    # Whether integers overflow would be computed for every operation, and asserted only where `debug` is set.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    for owner, name, function in (*_remembered_types(), *_short_cuts()):
        monkeypatch.setattr(owner, name, function)


def number(bound: Any) -> Any:
    """A bound of a loop, which would be `int` of an array, as numpy refuses."""
    return bound.handle.data.item() if hasattr(bound, "handle") else bound


def _patch_once(monkeypatch: pytest.MonkeyPatch, tl: Any, interpreter: Any) -> None:
    """A launch patches all of the language, and each call of a function within a kernel would do it again.

    Here the first launch does, until `monkeypatch` is undone.
    """
    patch_lang, both = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    checked = tl.core.builtin(len).__code__

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """Without the check that it is called as it is here."""
        semantic = interpreter.TritonSemantic(builder)
        function = member.__wrapped__ if getattr(member, "__code__", None) is checked else member

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(owner, name, call)

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        def set_attr(self, owner: Any, name: str, value: Any) -> None:
            monkeypatch.setattr(owner, name, value, raising=False)

        def restore(self) -> None:
            """That is left to `monkeypatch`."""

    done: list[Scope] = []

    def patch_first(_: Any) -> Scope:
        if not done:
            done.append(patch_lang(both))
        return done[0]

    monkeypatch.setattr(interpreter, "_LangPatchScope", Scope)
    monkeypatch.setattr(interpreter, "_patch_attr", patch_attribute)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_first)


@cache
def _remembered_types() -> list[tuple[Any, str, Callable[..., Any]]]:
    """What takes the place of functions that make types."""
    from triton.language import core
    from triton.runtime import interpreter

    make_block, numpy_type, unwrap = (
        core.block_type.__init__,
        interpreter._get_np_dtype,
        core._unwrap_if_constexpr,
    )
    blocks: dict[Any, dict[str, Any]] = {}
    with_elements: dict[Any, Any] = {}
    numpy_types: dict[str, Any] = {}
    #: What is nothing else within.
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.pointer_type, core.block_type}

    def init_block(block: Any, element: Any, shape: Any) -> None:
        sizes = tuple([size if type(size) is int else getattr(size, "value", size) for size in shape])
        key = element.name, sizes
        if key in blocks:
            block.__dict__.update(blocks[key], element_ty=element)
        else:
            make_block(block, element, shape)
            # What Python compares at once.
            block.sizes = sizes
            blocks[key] = dict(block.__dict__)

    def with_element(block: Any, element: Any) -> Any:
        key = element.name, block.sizes
        found = with_elements.get(key)
        if found is None or found.element_ty is not element:
            found = with_elements[key] = core.block_type(element, block.shape)
        return found

    @cache
    def constants(*shape: int) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    def init_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.numel, tensor.shape = constants(*(kind.sizes if kind.is_block() else ()))

    def numpy_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(kind)
        return numpy_types[name]

    def unwrapped(value: Any) -> Any:
        if type(value) is core.constexpr:
            return value.value
        return value if type(value) in plain else unwrap(value)

    def equal(one: Any, other: Any) -> Any:
        return core.constexpr(
            one.values == (other.values if type(other) is core.tuple else list(unwrap(other)))
        )

    return [
        (core.block_type, "__init__", init_block),
        (core.block_type, "with_element_ty", with_element),
        (core.tensor, "__init__", init_tensor),
        (interpreter, "_get_np_dtype", numpy_of),
        (core, "_unwrap_if_constexpr", unwrapped),
        (core.tuple, "__eq__", equal),
        # The types of tuples, such as each shape, are for compilers.
        (core, "_type_for_tuple_values", lambda _, fields=None: core.tuple_type((), fields)),
    ]


@cache
def _short_cuts() -> list[tuple[Any, str, Callable[..., Any]]]:
    """What takes the place of functions that are called for each operation."""
    from triton.language import core
    from triton.runtime import interpreter

    semantics, tensor = interpreter.TritonSemantic, core.tensor
    check, equal = semantics.binary_op_type_checking_impl, core.dtype.__eq__
    most_bytes: dict[str, float] = {}
    shapes: dict[Any, tuple[int, ...]] = {}
    becomes: dict[Any, tuple[Any, Any]] = {}

    def init_handle(handle: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        handle.data, handle.dtype, handle.attr = data, dtype, {} if attr is None else attr
        name = dtype.name
        if name not in most_bytes:
            is_pointer = isinstance(dtype, core.pointer_type)
            most_bytes[name] = math.inf if is_pointer else max(dtype.primitive_bitwidth // 8, 1)
        if data.itemsize > most_bytes[name]:
            raise ValueError(f"{data.dtype} is larger than {name}")

    def broadcast(_: Any, one: Any, other: Any) -> tuple[Any, Any]:
        """Both in the shape of both, as numpy has it."""
        left, right = (getattr(each.type, "sizes", ()) for each in (one, other))
        if left == right:
            return one, other
        if (left, right) not in shapes:
            shapes[left, right] = np.broadcast_shapes(left, right)
        sizes = shapes[left, right]
        return (
            one if left == sizes else widened(one, left, sizes),
            other if right == sizes else widened(other, right, sizes),
        )

    def widened(one: Any, sizes: tuple[int, ...], to: tuple[int, ...]) -> Any:
        data, dtype = one.handle.data, one.handle.dtype.scalar
        if sizes:
            wide = np.broadcast_to(data, to)
        else:
            wide = np.empty(to, interpreter._get_np_dtype(dtype))
            wide[...] = data
        return tensor(interpreter.TensorHandle(wide, dtype), core.block_type(one.dtype, list(to)))

    def kind_of(value: Any) -> Any:
        """What decides what an operand and the other one become; None where that is less simple."""
        if type(value) is tensor:
            return value.dtype.name
        if type(value) is int and -(2**31) <= value < 2**31:
            return value < 0, -128 <= value < 128
        if type(value) is float and (value == 0 or 1e-30 < abs(value) < 1e30):
            return float
        return None

    def checked(semantic: Any, one: Any, other: Any, *options: bool) -> tuple[Any, Any]:
        kinds = kind_of(one), kind_of(other)
        key = *kinds, *options
        if key in becomes:
            left, right = becomes[key]
            return broadcast(
                semantic, converted(semantic, one, left, other), converted(semantic, other, right, one)
            )
        found = check(semantic, one, other, *options)
        left, right = (each.dtype for each in found)
        # Of larger numbers only types of 32 bits have all.
        small = all(type(kind) is not tuple or kind[1] for kind in kinds)
        if None not in kinds and (small or min(bits_of(left), bits_of(right)) >= 32):
            becomes[key] = left, right
        return found

    def bits_of(dtype: Any) -> int:
        return 64 if isinstance(dtype, core.pointer_type) else int(dtype.primitive_bitwidth)

    def converted(semantic: Any, value: Any, dtype: Any, beside: Any) -> Any:
        if type(value) is tensor:
            return value if value.dtype.name == dtype.name else semantic.cast(value, dtype)
        if type(beside) is not tensor or not beside.type.is_block() or dtype.name == "bf16":
            return semantic.scalar_constant(value, dtype)
        # As many as there are beside it.
        data = np.full(beside.type.sizes, value, interpreter._get_np_dtype(dtype))
        return tensor(interpreter.TensorHandle(data, dtype), beside.type.with_element_ty(dtype))

    def same(one: Any, other: Any) -> bool:
        return one.name == other.name if isinstance(other, core.dtype) else bool(equal(one, other))

    def expanded(_: Any, handle: Any, axis: int) -> Any:
        shape = handle.data.shape
        data = handle.data.reshape(*shape[:axis], 1, *shape[axis:])
        return interpreter.TensorHandle(data, handle.dtype.scalar)

    return [
        (interpreter.TensorHandle, "__init__", init_handle),
        (core.dtype, "__eq__", same),
        (semantics, "broadcast_impl_value", broadcast),
        (semantics, "binary_op_type_checking_impl", checked),
        (interpreter.InterpreterBuilder, "create_expand_dims", expanded),
    ]
