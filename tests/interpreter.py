"""Triton 3.6's interpreter with loops that numpy takes, and without what it does for nothing.

Most of its time goes to the types of tensors, made anew for each operation though there are few of them, and
to finding out for each operation what its types become and what is to be done, though that depends on nothing
else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

#: Types that are converted to each other by numpy.
INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
#: All of a dimension.
WHOLE = slice(None)
#: Methods of tensors that are operations of two.
OPERATORS = {
    f"__{reflected}{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
    for reflected in ("", "r")
} | {f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne")}


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
    semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """Without the check that it is called as it is here."""
        function = member.__wrapped__ if getattr(member, "__code__", None) is checked else member

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(owner, name, remembered(name, call, semantic) if name in OPERATORS else call)

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


def kind_of(value: Any, tensor: type) -> Any:
    """What decides what an operand and the other one become; None where that is less simple."""
    if type(value) is tensor:
        return value.dtype.name
    if type(value) is int and -(2**31) <= value < 2**31:
        return value < 0, -128 <= value < 128
    if type(value) is float and (value == 0 or 1e-30 < abs(value) < 1e30):
        return float
    return None


def decide(kinds: tuple[Any, Any], become: tuple[Any, ...]) -> bool:
    """Whether operands of these kinds always become what they did."""
    numbers = [kind for kind in kinds if type(kind) is tuple]
    # Of larger numbers only types of 32 bits have all, and of negative ones those with signs.
    small, negative = all(is_small for _, is_small in numbers), any(minus for minus, _ in numbers)
    bits = (64 if dtype.is_ptr() else int(dtype.primitive_bitwidth) for dtype in become)
    signed = not any(dtype.is_int_unsigned() for dtype in become)
    return None not in kinds and (small or min(bits) >= 32) and (signed or not negative)


@dataclass(frozen=True)
class Operation:
    """What an operator comes to: what both operands become, what is done to them, and the type of that."""

    left: Any
    right: Any
    compute: Callable[[Any, Any], Any]
    dtype: Any


def remembered(name: str, ask: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    """An operator that asks Triton once for each two types what it does; numpy makes one shape of two."""
    from triton.language import core
    from triton.runtime.interpreter import _get_np_dtype as numpy_type

    known, constants, types = _operations(name)
    constexpr, tensor, builder = core.constexpr, core.tensor, semantic.builder
    reflected = name.startswith("__r") and name != "__rshift__"

    def operate(one: Any, other: Any) -> Any:
        if type(other) is constexpr:
            other = other.value
        key = one.dtype.name, kind_of(other, tensor)
        if key not in known:
            known[key], found = learned(key, one, other)
            return found
        operation = known[key]
        return ask(one, other) if operation is None else done(operation, one, other)

    def learned(kinds: Any, one: Any, other: Any) -> tuple[Operation | None, Any]:
        """What it does if that is all that was done and gives the same, else None; and its result."""
        semantic.builder = watch = _watch()(builder)
        try:
            found = ask(one, other)
        finally:
            semantic.builder = builder
        # What is added to pointers comes second, wherever it was.
        if len(watch.noted) == 1 and not is_pointer(one if reflected else other):
            ((compute, left, right, handle),) = watch.noted
            operation = Operation(left.dtype.scalar, right.dtype.scalar, compute, found.dtype)
            # What compares says that its result is of the type of what was compared.
            typed = all(each.data.dtype == numpy_type(each.dtype) for each in (left, right))
            if (
                typed
                and handle is found.handle
                and decide(kinds, (operation.left, operation.right, one.dtype))
            ):
                again = done(operation, one, other)
                if again.type == found.type and again.handle.data.tobytes() == handle.data.tobytes():
                    return operation, found
        return None, found

    def is_pointer(value: Any) -> bool:
        return type(value) is tensor and bool(value.dtype.is_ptr())

    def done(operation: Operation, one: Any, other: Any) -> Any:
        left, right = (other, one) if reflected else (one, other)
        handle = operation.compute(handle_of(left, operation.left), handle_of(right, operation.right))
        sizes = getattr(one.type, "sizes", ())
        if type(other) is tensor and (others := getattr(other.type, "sizes", ())) != sizes:
            sizes = _widest(sizes, others)
        # Of pointers, that which there is.
        dtype = one.dtype if one.dtype.name == operation.dtype.name else operation.dtype
        return tensor(handle, block(dtype, sizes) if sizes else dtype)

    def handle_of(value: Any, dtype: Any) -> Any:
        if type(value) is tensor:
            return value.handle if value.dtype.name == dtype.name else semantic.cast(value, dtype).handle
        # 0.0 and -0.0 are equal.
        key = repr(value), dtype.name
        if key not in constants:
            constants[key] = semantic.scalar_constant(value, dtype).handle
        return constants[key]

    def block(dtype: Any, sizes: tuple[int, ...]) -> Any:
        key = dtype.name, sizes
        found = types.get(key)
        if found is None or found.element_ty is not dtype:
            found = types[key] = core.block_type(dtype, list(sizes))
        return found

    return operate


@cache
def _watch() -> type:
    """Builders that note what is computed of two."""
    from triton.runtime import interpreter

    class Watch(interpreter.InterpreterBuilder):  # type: ignore[misc]
        def __init__(self, builder: Any) -> None:
            super().__init__()
            self._builder, self.options = builder, builder.options
            self.noted: list[tuple[Any, ...]] = []

        def _note(self, compute: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
            found = compute(left, right)
            self.noted.append((compute, left, right, found))
            return found

        def binary_op(self, left: Any, right: Any, op: Any) -> Any:
            def compute(one: Any, other: Any) -> Any:
                return interpreter.TensorHandle(op(one.data, other.data), one.dtype.scalar)

            def as_the_builder_does(one: Any, other: Any) -> Any:
                return self._builder.binary_op(one, other, op)

            # Its numbers are bits.
            is_bfloat16 = left.dtype.scalar.name == "bf16"
            return self._note(as_the_builder_does if is_bfloat16 else compute, left, right)

        def create_ashr(self, left: Any, right: Any) -> Any:
            # It changes operands without signs, which so are not noted.
            unsigned = any(one.dtype.scalar.is_int_unsigned() for one in (left, right))
            return self._builder.create_ashr(left, right) if unsigned else super().create_ashr(left, right)

        def create_idiv(self, left: Any, right: Any) -> Any:
            return self._note(self._builder.create_idiv, left, right)

        def create_addptr(self, left: Any, right: Any) -> Any:
            return self._note(self._builder.create_addptr, left, right)

    return Watch


#: The shape that numpy makes of two.
_widest = cache(np.broadcast_shapes)


@cache
def _operations(name: str) -> tuple[dict[Any, Operation | None], dict[Any, Any], dict[Any, Any]]:
    """What is known of an operator: what it does, None where it has to be asked; constants, and types."""
    return {}, {}, {}


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
    as_tensor, convert, get_item = semantics.to_tensor, semantics.cast, tensor.__getitem__
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
            wide = np.empty(to, data.dtype)
            wide[...] = data
        return tensor(interpreter.TensorHandle(wide, dtype), core.block_type(one.dtype, list(to)))

    def checked(semantic: Any, one: Any, other: Any, *options: bool) -> tuple[Any, Any]:
        kinds = kind_of(one, tensor), kind_of(other, tensor)
        key = *kinds, *options
        if key in becomes:
            left, right = becomes[key]
            return broadcast(
                semantic, converted(semantic, one, left, other), converted(semantic, other, right, one)
            )
        found = check(semantic, one, other, *options)
        left, right = (each.dtype for each in found)
        if decide(kinds, (left, right)):
            becomes[key] = left, right
        return found

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

    def to_tensor(semantic: Any, value: Any, check_type: bool = True) -> Any:
        return value if type(value) is tensor else as_tensor(semantic, value, check_type)

    def cast(semantic: Any, value: Any, dtype: Any, rounding: Any = None) -> Any:
        to = dtype.scalar
        if value.dtype.name not in INTEGERS or to.name not in INTEGERS:
            return convert(semantic, value, dtype, rounding)
        if value.dtype.name == to.name:
            return value
        handle = semantic.builder.cast_impl(value.handle, to)
        return tensor(handle, value.type.with_element_ty(to) if value.type.is_block() else to)

    def item(one: Any, slices: Any, **options: Any) -> Any:
        """With more dimensions, as numpy has it."""
        at = slices if type(slices) is tuple else (slices,)
        if at.count(None) + at.count(WHOLE) != len(at) or at.count(WHOLE) != len(
            getattr(one.type, "sizes", ())
        ):
            return get_item(one, slices, **options)
        data = one.handle.data[at]
        return tensor(interpreter.TensorHandle(data, one.dtype), core.block_type(one.dtype, list(data.shape)))

    def expanded(_: Any, handle: Any, axis: int) -> Any:
        shape = handle.data.shape
        data = handle.data.reshape(*shape[:axis], 1, *shape[axis:])
        return interpreter.TensorHandle(data, handle.dtype.scalar)

    return [
        (interpreter.TensorHandle, "__init__", init_handle),
        (core.dtype, "__eq__", same),
        (semantics, "broadcast_impl_value", broadcast),
        (semantics, "binary_op_type_checking_impl", checked),
        (semantics, "to_tensor", to_tensor),
        (semantics, "cast", cast),
        (tensor, "__getitem__", core.builtin(item)),
        (interpreter.InterpreterBuilder, "create_expand_dims", expanded),
    ]
