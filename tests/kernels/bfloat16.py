"""Arithmetic of bfloat16 in Triton's interpreter, which takes its bits for integers.

Operations are those of float32, rounded to the nearest bfloat16, to even ones in between.
"""

from typing import Any

import numpy as np
import pytest


def wide(bits: np.ndarray) -> np.ndarray:
    """The float32 of bits of bfloat16, uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16, uint16, of float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    # What is added to the bits of NaN could make them those of something else.
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def teach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter know it."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    binary, unary = InterpreterBuilder.binary_op, InterpreterBuilder.unary_op
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def is_bfloat16(dtype: Any) -> bool:
        # Of every operation, so by what a comparison of types comes down to.
        return bool(dtype.scalar.name == "bf16")

    def widened(handle: Any) -> Any:
        return TensorHandle(wide(handle.data), tl.float32) if is_bfloat16(handle.dtype) else handle

    def narrowed(handle: Any) -> Any:
        data = handle.data if handle.data.dtype == np.bool_ else narrow(handle.data)
        return TensorHandle(data, tl.bfloat16)

    def binary_op(builder: Any, one: Any, other: Any, op: Any) -> Any:
        found = binary(builder, widened(one), widened(other), op)
        return narrowed(found) if is_bfloat16(one.dtype) else found

    def unary_op(builder: Any, one: Any, op: Any) -> Any:
        found = unary(builder, widened(one), op)
        return narrowed(found) if is_bfloat16(one.dtype) else found

    def create_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(builder, widened(a), widened(b), *others)

    def cast_impl(builder: Any, one: Any, dtype: Any) -> Any:
        if is_bfloat16(dtype):
            return narrowed(cast(builder, widened(one), tl.float32))
        return cast(builder, widened(one), dtype)

    def get_bf16(builder: Any, value: float) -> Any:
        return TensorHandle(narrow(np.array([value], np.float32)), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "get_bf16", get_bf16, raising=False)
    changed = {"binary_op": binary_op, "unary_op": unary_op, "create_dot": create_dot, "cast_impl": cast_impl}
    for name, function in changed.items():
        monkeypatch.setattr(InterpreterBuilder, name, function)
