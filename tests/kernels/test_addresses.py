"""Elements beyond 2^31 of every operand give the bits that they give near the beginning of memory.

On a CPU the interpreter runs only the last programs of a launch. Most of the memory is never touched, so that
the system gives only addresses for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from quantkit.kernels.gemm.decode import decode_launch
from quantkit.kernels.gemm.decode.decode_tiles import DecodeTile
from quantkit.kernels.gemm.dequantize import dequantize_launch
from quantkit.kernels.gemm.operands import Grouping, Operands, RoutedTokens
from quantkit.kernels.gemm.portable import portable_gemm_launch, portable_gemv_launch
from quantkit.kernels.gemm.portable.portable_gemm_launch import PortableGemmTile
from quantkit.kernels.gemm.portable.portable_gemv_launch import PortableGemvTile
from quantkit.kernels.jit.launcher import Launch
from quantkit.kernels.layouts.fragment_layout import build, place_words, repack_codes_reference
from quantkit.kernels.layouts.geometry import ROWS, geometry
from quantkit.kernels.moe import permute
from quantkit.kernels.ops import activation, argmax, attention, kv_append, rope
from quantkit.kernels.ops.attention import decode_attention, rotated_attention
from quantkit.kernels.ops.norm import add_rms_norm, rms_norm
from quantkit.kernels.problem import GPU_FEATURES, device_features
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor

from ..support.compare import assert_equal

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: On a CPU the one that takes the least time.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
FEATURES = device_features("cuda") if DEVICE == "cuda" else frozenset[str]()
FAR = 2**31
#: Rows that a test computes, those of the last programs.
LAST = 64
#: Programs along the first axis of the grid that compute them, where they are not one.
PROGRAMS = {"combine_experts": 2}


@pytest.fixture
def last_programs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A block in which only the last programs of a launch run, on a CPU."""

    @contextmanager
    def block() -> Iterator[None]:
        if DEVICE == "cuda":
            yield
            return
        from triton.runtime import interpreter

        builder = interpreter.interpreter_builder
        index, dim = builder.set_grid_idx, builder.set_grid_dim

        def launched(self: Any, *arguments: Any) -> None:
            first, *others = self._grid
            few = min(first, PROGRAMS.get(self._kernel.fn.__name__, 1))
            with monkeypatch.context() as patch:
                patch.setattr(builder, "set_grid_dim", lambda *_: dim(*self._grid))
                patch.setattr(builder, "set_grid_idx", lambda x, y, z: index(first - few + x, y, z))
                # Which would copy every operand onto itself.
                patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
                self._kernel[(few, *others)](*arguments, **self._options)

        with monkeypatch.context() as patch:
            patch.setattr(Launch, "__call__", launched)
            yield

    return block


def empty(*size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=dtype, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"no addresses for {size} of {dtype}: {error}")


def far(part: torch.Tensor, length: int) -> torch.Tensor:
    """A tensor of so many of what `part` has at the end."""
    found = empty(length, *part.shape[1:], dtype=part.dtype)
    found[length - len(part) :] = part
    return found


def numbers(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(5)).to(DEVICE, DTYPE)


def with_many_rows(op: Operands, row_tiles: int) -> Operands:
    """`op` with a weight of so many row tiles, of which its own are the last."""
    codes, scale, zero, factor, values = op.layout
    layout = (far(codes, row_tiles), far(scale, row_tiles), zero, factor, values)
    return replace(op, layout=layout, n=ROWS * row_tiles)


def operands(make: Callable[..., PackedTensor], m: int, k: int, dtype: torch.dtype = DTYPE) -> Operands:
    """Of products that are exact: in the interpreter, the order of a sum depends on where its row is."""
    packed = make("int8", (LAST, k), group_size=128, exact=True).to(DEVICE)
    x = torch.randint(-8, 9, (m, k), generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)
    return Operands(x, build(packed, dtype), None, packed.scheme, LAST)


RUNS: dict[str, Callable[[Operands], torch.Tensor]] = {
    "portable-gemv": lambda op: portable_gemv_launch.run(op, PortableGemvTile(1, 128, 4), FEATURES),
    "portable-gemm": lambda op: portable_gemm_launch.run(op, PortableGemmTile(4, 64, stages=2), FEATURES),
    "decode": lambda op: decode_launch.run(
        op, DecodeTile(4, 1, prefetch=1), FEATURES or GPU_FEATURES - {"overlap"}
    ),
}


@pytest.mark.fault(46)
@pytest.mark.parametrize(("name", "m"), [("portable-gemv", 32), ("portable-gemm", 40)])
def test_codes_and_outputs_may_lie_beyond_two_to_the_31(
    make_packed: Callable[..., PackedTensor], last_programs: Callable[[], Any], name: str, m: int
) -> None:
    op = operands(make_packed, m, 128)
    expected = RUNS[name](op)
    row_tiles = -(-FAR // (m * LAST)) * LAST // ROWS + LAST // ROWS
    large = with_many_rows(op, row_tiles)
    assert large.layout[0].numel() > FAR
    with last_programs():
        y = RUNS[name](large)
    assert y.numel() > FAR
    assert_equal(y[-1, -LAST:], expected[-1])


@pytest.mark.fault(46)
def test_x_may_have_more_than_two_to_the_31_elements(
    make_packed: Callable[..., PackedTensor], last_programs: Callable[[], Any]
) -> None:
    op = operands(make_packed, LAST, 256)
    expected = RUNS["portable-gemm"](op)
    x = far(op.x, FAR // 256 + LAST)
    assert x.numel() > FAR
    with last_programs():
        y = RUNS["portable-gemm"](replace(op, x=x))
    assert_equal(y[-LAST:], expected)


@pytest.mark.fault(46)
def test_dequantized_weights_may_lie_beyond_two_to_the_31(
    make_packed: Callable[..., PackedTensor], last_programs: Callable[[], Any]
) -> None:
    op = operands(make_packed, 1, 256)
    expected = dequantize_launch.dequantize(op, 256, 0, LAST, FEATURES)
    n = FAR // 128 + 4 * LAST
    large = with_many_rows(op, n // ROWS)
    assert large.layout[0].numel() > FAR
    with last_programs():
        assert_equal(dequantize_launch.dequantize(large, 256, n - LAST, n, FEATURES), expected)


@pytest.mark.fault(46)
def test_the_layout_builder(last_programs: Callable[[], Any]) -> None:
    number_format, k = scheme("int8").format, 256
    generator = torch.Generator().manual_seed(6)
    codes = torch.randint(0, 256, (ROWS, k), dtype=torch.uint8, generator=generator)
    small = geometry(ROWS, k, scheme("int8"), torch.bfloat16)
    expected = torch.empty(1, small.spans, small.registers, 256, dtype=torch.int16)
    repack_codes_reference(expected, 0, codes, number_format, small)
    n = FAR // (k // 2) + ROWS
    words = empty(n // ROWS, *expected.shape[1:], dtype=torch.int16)
    stored = far(scheme("int8").pack(codes).to(DEVICE), n)
    assert words.numel() > FAR and stored.nbytes > FAR
    with last_programs():
        place_words(words, 0, stored, number_format, geometry(n, k, scheme("int8"), torch.bfloat16))
    assert_equal(words[-1:].cpu(), expected)


@pytest.mark.fault(46)
@pytest.mark.parametrize(("name", "size"), [("portable-gemv", 8), ("portable-gemm", 64), ("decode", 1)])
def test_the_last_of_many_experts(
    make_packed: Callable[..., PackedTensor], last_programs: Callable[[], Any], name: str, size: int
) -> None:
    """Its weights lie beyond 2^31, and so do the outputs of the last pairs."""
    # `fused-gemv` takes no float32.
    op = operands(make_packed, size, 128, torch.bfloat16 if name == "decode" else DTYPE)
    expected = RUNS[name](op)
    experts = FAR // op.layout[0].numel() + 2
    pairs_ = FAR // (LAST * size) * size + size
    codes, scale, zero, _, values = op.layout
    layout = (
        far(codes[None], experts),
        far(scale[None], experts),
        zero,
        torch.empty(experts, 0, device=DEVICE),
        values,
    )
    order = far(torch.arange(pairs_ - size, pairs_, dtype=torch.int32, device=DEVICE), pairs_)
    grouping = Grouping(pairs_, 1, size, 1, pairs_ // size)
    expert_block = torch.tensor([[experts - 1, pairs_ - size, size]], dtype=torch.int32, device=DEVICE)
    expert_blocks = far(expert_block, grouping.expert_blocks)
    if DEVICE == "cuda":
        order[: pairs_ - size], expert_blocks[:-1] = 0, 0
    large = Operands(op.x, layout, None, op.scheme, LAST, RoutedTokens(order, expert_blocks, grouping))
    with last_programs():
        y = RUNS[name](large)
    assert codes.numel() * experts > FAR and y.numel() > FAR
    # Row p of y is that of pair p, which here has row `size * p // pairs_` of x: the last one.
    assert_equal(y[-size:], expected[-1:].expand(size, -1))


@pytest.mark.fault(46)
def test_the_last_of_many_pairs_are_added_up(last_programs: Callable[[], Any]) -> None:
    y, weights = numbers(2, 2048), numbers(2, 1)
    tokens = FAR // 2048 + 2
    index = torch.zeros(tokens, 1, dtype=torch.int64, device=DEVICE)
    expected = permute.combine_experts(y, index[:2], weights, 1, FEATURES)
    with last_programs():
        out = permute.combine_experts(far(y, tokens), index, far(weights, tokens), 1, FEATURES)
    assert_equal(out[-2:], expected)


@pytest.mark.fault(46)
@pytest.mark.parametrize("far_apart", ["heads", "keys", "sequences"])
def test_keys_of_a_cache_may_lie_beyond_two_to_the_31(
    monkeypatch: pytest.MonkeyPatch, far_apart: str
) -> None:
    """No two strides of a cache of 2^31 elements multiply to less than what lies between them."""
    if DEVICE == "cpu":
        monkeypatch.setattr(attention, "launch_features", lambda _: FEATURES)
    shape, apart = (2, 3, 70, 16), 2**30 + 64
    strides = {
        "heads": (70 * 16, apart, 16, 1),
        "keys": (16, 32, apart // 16, 1),
        "sequences": (FAR + 64, 70 * 16, 16, 1),
    }[far_apart]
    length = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    assert length > FAR
    cache = torch.as_strided(empty(length), shape, strides)
    key, value = numbers(*shape), numbers(*shape).flip(2)
    query = numbers(2, 6, 1, 16)
    expected = decode_attention(query, key, value, None, 0.25)
    cache.copy_(key)
    assert_equal(decode_attention(query, cache, value, None, 0.25), expected)
    cache.copy_(value)
    assert_equal(decode_attention(query, key, cache, None, 0.25), expected)


@pytest.mark.parametrize("far_apart", ["heads", "tokens", "sequences"])
def test_writes_to_a_cache_and_rotated_heads(far_apart: str) -> None:
    shape = (2, 3, 4, 16)
    strides = {
        "heads": (4 * 16, 2**30 + 64, 16, 1),
        "tokens": (16, 32, FAR // 3 + 64, 1),
        "sequences": (FAR + 64, 4 * 16, 16, 1),
    }[far_apart]
    length = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    assert length > FAR
    far = torch.as_strided(empty(length), shape, strides)
    cos, sin = numbers(2, 1, 1, 16), numbers(2, 1, 1, 16)
    new, held = numbers(2, 3, 1, 16), torch.tensor(3, device=DEVICE)
    near, others = numbers(*shape), numbers(*shape)
    far.copy_(near)
    rope.rotate_append(new, new, new, cos, sin, near, others, held)
    rope.rotate_append(new, new, new, cos, sin, far, others, held)
    assert_equal(far, near)
    rope.rotate_append(new, new, new, cos, sin, others, far, held)
    assert_equal(far[:, :, 3], new[:, :, 0])
    kv_append.append(others, near, held, new, new)
    kv_append.append(far, others, held, new, new)
    assert_equal(far[:, :, 3], new[:, :, 0])
    rotated = rope.rotate(far, cos.expand(2, 1, 4, 16), sin.expand(2, 1, 4, 16))
    assert_equal(rotated, rope.rotate(far.contiguous(), cos.expand(2, 1, 4, 16), sin.expand(2, 1, 4, 16)))
    for turn in (1, -1):
        # Far keys, and far values.
        near, other = numbers(*shape), numbers(*shape)
        far.copy_(near)
        caches = [near, other.clone()][::turn], [far, other][::turn]
        token = new, new, new, cos, sin
        expected = decode_attention(*rope.rotate_append(*token, *caches[0], held), None, 0.25)
        found = rotated_attention(*token, *caches[1], held, None, 0.25)
        assert_equal(found, expected)
        assert_equal(far, near)


def test_rows_of_norms_and_gates(last_programs: Callable[[], Any]) -> None:
    """Rows of parts of one tensor, and outputs, that lie beyond 2^31 elements."""
    rows, columns, stride = 2**18, 16, FAR // 2**18 + 64
    x = torch.as_strided(empty(rows * stride), (rows, columns), (stride, 1))
    last = numbers(1, columns)
    x[-1:] = last
    weight = numbers(columns)
    with last_programs():
        found = rms_norm(x, weight, 1e-5, "llama")[-1:]
        total, normed = add_rms_norm(x, x, weight, 1e-5, "llama")
        gated = activation.gate(x, x, "silu")[-1:]
    assert_equal(found, rms_norm(last, weight, 1e-5, "llama"))
    assert_equal(total[-1:], last + last)
    assert_equal(normed[-1:], rms_norm(last + last, weight, 1e-5, "llama"))
    assert_equal(gated, activation.gate(last, last, "silu"))


def test_logits_may_lie_beyond_two_to_the_31(last_programs: Callable[[], Any]) -> None:
    rows, columns = FAR // 4096 + 1, argmax.PART + 5
    x = torch.as_strided(empty(rows * 4096), (rows, columns), (4096, 1))
    x[-1:] = numbers(1, columns)
    with last_programs():
        found = argmax.argmax_two_stage(x)
    assert_equal(found[-1:], argmax.argmax_two_stage(x[-1:]))
