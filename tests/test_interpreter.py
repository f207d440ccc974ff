"""The interpreter as tests have it beside Triton's own: operators of tensors, asked about only once."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from .interpreter import OPERATORS, teach

tl = pytest.importorskip("triton.language")

DTYPES = [
    (tl.int1, np.bool_),
    *((getattr(tl, name), name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint32")),
    *((tl.float16, np.float16), (tl.float32, np.float32), (tl.pointer_type(tl.float32), np.uint64)),
]


def operands(turn: int) -> list[Any]:
    """Numbers that differ from turn to turn, in types and shapes."""
    from triton.runtime.interpreter import TensorHandle

    found: list[Any] = [turn + 1, -turn - 1, 200 + turn, 70_000 + turn, turn + 0.5, 0.0, -0.0, True]
    for dtype, kind in DTYPES:
        for shape in ((2,), (), *([(4, 1), (1, 2)] if dtype is tl.int32 else [])):
            data = np.arange(1, 1 + int(np.prod(shape))).reshape(shape or 1) + turn
            handle = TensorHandle(data.astype(kind), dtype)
            found.append(tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype))
    return found


def outcome(name: str, one: Any, other: Any) -> tuple[Any, ...] | None:
    """What an operator gives; None where types do not go together."""
    # Triton's shifts of numbers of which some have signs change those.
    one, other = (
        tl.tensor(each.handle.clone(), each.type) if isinstance(each, tl.tensor) else each
        for each in (one, other)
    )
    with suppress(Exception), np.errstate(all="ignore"):
        found = getattr(one, name)(other)
        data = found.handle.data
        shape = [size.value if hasattr(size, "value") else size for size in found.shape]
        return found.dtype.name, shape, data.dtype, np.broadcast_to(data, shape or data.shape).tobytes()
    return None


def outcomes(name: str, turn: int) -> list[tuple[Any, ...] | None]:
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        some = operands(turn)
        return [outcome(name, one, other) for one in some if isinstance(one, tl.tensor) for other in some]
    finally:
        scope.restore()


@pytest.mark.parametrize("name", sorted(OPERATORS))
@pytest.mark.sampled(2)
def test_operators_do_what_those_of_triton_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    expected = [outcomes(name, turn) for turn in range(2)]
    assert any(one is not None for one in expected[0])
    teach(monkeypatch)
    # The first time they may be asked, then they are remembered.
    assert [outcomes(name, turn) for turn in range(2)] == expected
