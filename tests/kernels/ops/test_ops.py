"""What is between linears against its twins in torch: in Triton's interpreter on a CPU, for real on a GPU."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quantkit.kernels.ops import activation, kv_append, rope
from quantkit.kernels.ops.embedding import embed, embed_reference, padded_embed_reference
from quantkit.kernels.ops.norm import (
    NORM_REFERENCES,
    HeadNorms,
    add_rms_norm,
    rms_norm,
    rms_norm_reference,
)

from ...support.compare import assert_close, assert_equal

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: A step of the dtype, as sums in another order are rounded to the other side now and then.
STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
GATES = activation.GATE_REFERENCES


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(found, expected, rtol=STEP[found.dtype], atol=1e-6)


def laid_out(x: torch.Tensor, how: str) -> torch.Tensor:
    """`x` [A, B, N] with other strides."""
    wide = torch.full((*x.shape[:-1], 3 * x.shape[-1]), math.nan, dtype=x.dtype, device=x.device)
    if how == "part":
        wide[..., x.shape[-1] : 2 * x.shape[-1]] = x
        return wide[..., x.shape[-1] : 2 * x.shape[-1]]
    if how == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "columns":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.expand(x.shape) if how == "whole" else x[:1].expand(x.shape)


@pytest.mark.parametrize(("rows", "columns"), [(5, 1), (90, 20), (7, 1024), (3, 2500)])
def test_embeddings_are_the_rows_of_the_ids(poisoned: None, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(rows, (3, 8), generator=generator).to(DEVICE)
    for dtype in DTYPES:
        weight = numbers(rows, columns, dtype=dtype)
        wide = torch.full((rows, 2 * columns), math.nan, dtype=dtype, device=DEVICE)
        wide[:, ::2] = weight
        for of in (ids, ids[0, :1], ids[0, 0], ids[:, ::3], ids.t(), ids[:1].expand(4, 8), ids.view(2, 2, 6)):
            for table in (weight, weight.t().contiguous().t(), wide[:, ::2]):
                found = embed(of, table)
                assert found.dtype == dtype and found.is_contiguous()
                assert_equal(found, embed_reference(of, weight))
        assert_equal(embed(ids, weight), padded_embed_reference(ids, weight, rows - 1))


def test_ids_of_no_row_read_nothing(poisoned: None) -> None:
    ids = torch.tensor([-1, 0, 5, 2**40, -(2**62), 6], device=DEVICE)
    for dtype in DTYPES:
        # The front of more memory.
        weight = numbers(10, 9, dtype=dtype)[:6]
        found = embed(ids, weight)
        assert_equal(found[1:3], weight[[0, 5]])
        assert found[[0, 3, 4, 5]].isnan().all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 64), (3, 2, 100), (1, 2, 4096), (1, 5, 257)], ids=str)
@pytest.mark.parametrize("kind", NORM_REFERENCES)
def test_norms_are_those_of_their_references(poisoned: None, kind: str, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        x, other = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, seed=1)
        weight = numbers(shape[-1], dtype=dtype, seed=2)
        close(rms_norm(x, weight, 1e-3, kind), NORM_REFERENCES[kind](x, weight, 1e-3))
        total, y = add_rms_norm(x, other, weight, 1e-3, kind)
        assert_equal(total, x + other)
        close(y, NORM_REFERENCES[kind](x + other, weight, 1e-3))
        assert_equal(y, add_rms_norm(x, other, weight, 1e-3, kind)[1])


@pytest.mark.parametrize("how", ["whole", "part", "transposed", "columns", "one for all"])
def test_norms_and_gates_take_any_strides(poisoned: None, how: str) -> None:
    whole, weight = numbers(3, 4, 20), numbers(20, seed=2)
    x, up = laid_out(whole, how), laid_out(numbers(3, 4, 20, seed=1), "part")
    close(rms_norm(x, weight, 1e-5, "llama"), rms_norm_reference(x, weight, 1e-5))
    for one, other in ((x, up), (up, x)):
        total, y = add_rms_norm(one, other, weight, 1e-5, "llama")
        assert_equal(total, one + other)
        close(y, rms_norm_reference(one + other, weight, 1e-5))
        close(activation.gate(one, other, "silu"), activation.silu_gate_reference(one, other))


def test_weights_of_other_strides(poisoned: None) -> None:
    x, wide = numbers(2, 3, 20), numbers(40, seed=2)
    for weight in (wide[::2], wide[:1].expand(20)):
        close(rms_norm(x, weight, 1e-5, "llama"), rms_norm_reference(x, weight, 1e-5))


def test_norms_of_heads_that_lie_within_rows(poisoned: None) -> None:
    joined, weight = numbers(2, 3, 50), numbers(8, seed=2)
    heads = joined[..., 5:37].view(2, 3, 4, 8)
    close(rms_norm(heads, weight, 1e-5, "llama"), rms_norm_reference(heads, weight, 1e-5))
    turned = heads.transpose(1, 2)
    close(rms_norm(turned, weight, 1e-5, "llama"), rms_norm_reference(turned, weight, 1e-5))


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 64), (1, 2, 2500)], ids=str)
def test_gates_are_those_of_their_references(poisoned: None, kind: str, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        # Far out, where exp is infinite, as well.
        x, up = 30 * numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, seed=1)
        close(activation.gate(x, up, kind), GATES[kind](x, up))


@pytest.mark.parametrize("kind", GATES)
def test_gates_of_what_is_no_number(kind: str) -> None:
    x = torch.tensor([[math.nan, math.inf, -1e30, 200.0]], device=DEVICE)
    up = torch.tensor([[1.0, 2.0, 2.0, math.inf]], device=DEVICE)
    assert_close(activation.gate(x, up, kind), GATES[kind](x, up), equal_nan=True)


def angles(batch: int, tokens: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    turn = 9 * numbers(batch, 1, tokens, size, seed=7)
    return turn.cos().to(dtype), turn.sin().to(dtype)


@pytest.mark.parametrize("twin", [rope.cos_sin_reference, rope.cos_sin_matmul_reference])
@pytest.mark.parametrize("half", [1, 5, 64, 96])
def test_angles_of_positions(poisoned: None, twin: Callable[..., Any], half: int) -> None:
    frequencies = 10000.0 ** -(torch.arange(half, device=DEVICE) / half)
    far = torch.tensor([[0, 1, 40], [100_000, 131_071, 7], [105_615, 2**24 + 1, 99_999]], device=DEVICE)
    wide = frequencies[:, None].expand(half, 2).contiguous()[:, 0]
    for positions in (far, far[:1], far[:, 1:2], far.t(), far[:1].expand(2, 3)):
        # Angles in float32, and their cosines in float64.
        angle = (positions[..., None].float() * frequencies).double().repeat(1, 1, 2)
        for dtype, scaling in ((dtype, scaling) for dtype in DTYPES for scaling in (1.0, 1.1861)):
            # Cosines and their products are both rounded in float32.
            step = torch.finfo(dtype).eps * (2 if dtype == torch.float32 else 1)
            expected = twin(frequencies, positions, scaling, dtype)
            for of in (frequencies, wide):
                found = rope.cos_sin(of, positions, scaling, dtype)
                for one, other, exact in zip(found, expected, (angle.cos(), angle.sin()), strict=True):
                    assert one.dtype == dtype and one.shape == other.shape and one.is_contiguous()
                    assert_close(one, other, rtol=step, atol=step / 8)
                    assert_close(one.double(), exact * scaling, rtol=step, atol=step / 8)


@pytest.mark.parametrize(("batch", "of"), [(1, 1), (3, 3), (3, 1)])
# Programs have up to 512 pairs: all heads, some of them, and at last one more than there are.
@pytest.mark.parametrize(("heads", "size"), [(3, 2), (3, 10), (3, 64), (1, 256), (11, 256)])
def test_rotated_heads_are_those_of_the_reference(
    poisoned: None, batch: int, of: int, heads: int, size: int
) -> None:
    for dtype in DTYPES:
        joined = numbers(batch, 5, heads + 2, size, dtype=dtype)
        cos, sin = angles(of, 5, size, dtype)
        part = joined[:, :, 1:-1].transpose(1, 2)
        for x in (part, part.contiguous(), part.transpose(1, 2).contiguous().transpose(1, 2)):
            found, expected = rope.rotate(x, cos, sin), rope.rotate_reference(x, cos, sin)
            assert_equal(found, expected)
            # Of one head any stride will do.
            assert found.squeeze(1).stride() == expected.squeeze(1).stride()


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(
    ("queries", "heads", "size", "width"), [(4, 2, 16, 16), (3, 1, 10, 24), (2, 2, 64, 5)]
)
def test_rotary_positions_and_the_cache(
    poisoned: None, queries: int, heads: int, size: int, width: int, tokens: int
) -> None:
    for dtype in DTYPES:
        joined = numbers(2, tokens, queries * size + heads * (size + width), dtype=dtype)
        parts = torch.split(joined, (queries * size, heads * size, heads * width), -1)
        q, k, v = (
            part.view(2, tokens, number, -1).transpose(1, 2)
            for part, number in zip(parts, (queries, heads, heads), strict=True)
        )
        cos, sin = angles(2, tokens, size, dtype)
        held = torch.tensor(7, device=DEVICE)
        caches = [
            (
                numbers(2, heads, 12, size, dtype=dtype, seed=3),
                numbers(2, heads, 12, width, dtype=dtype, seed=4),
            )
            for _ in range(2)
        ]
        found, *_ = rope.rotate_append(q, k, v, cos, sin, *caches[0], held)
        expected, *_ = rope.rotate_append_reference(q, k, v, cos, sin, *caches[1], held)
        for one, other in zip((found, *caches[0]), (expected, *caches[1]), strict=True):
            close(one, other)
        assert int(held) == 7


@pytest.mark.parametrize("kind", NORM_REFERENCES)
def test_norms_of_heads_before_rotary_positions(poisoned: None, kind: str) -> None:
    """Of whole numbers, whose squares are summed exactly in any order: to the bit as by three launches."""
    for dtype in DTYPES:
        q, k, v = (numbers(2, heads, 3, 20, dtype=dtype, seed=heads).mul(4).round() for heads in (4, 2, 2))
        weights = [numbers(20, dtype=dtype, seed=seed) for seed in (5, 6)]
        cos, sin = angles(2, 3, 20, dtype)
        held = torch.tensor(2, device=DEVICE)
        caches = [[numbers(2, 2, 12, 20, dtype=dtype, seed=seed) for seed in (3, 4)] for _ in range(2)]
        norms = HeadNorms(*weights, 1e-3, kind)
        found, *_ = rope.rotate_append(q, k, v, cos, sin, *caches[0], held, norms)
        q, k = (rms_norm(one, weight, 1e-3, kind) for one, weight in zip((q, k), weights, strict=True))
        expected, *_ = rope.rotate_append(q, k, v, cos, sin, *caches[1], held)
        for one, other in zip((found, *caches[0]), (expected, *caches[1]), strict=True):
            # Of float32, GPUs round means otherwise where products are not rounded before they are added.
            assert torch.equal(one, other) if dtype != torch.float32 else close(one, other) is None


def test_a_token_without_room_is_not_written_and_is_seen(poisoned: None) -> None:
    q, k, v = numbers(1, 2, 2, 8), numbers(1, 1, 2, 8, seed=1), numbers(1, 1, 2, 8, seed=2)
    cos, sin = angles(1, 2, 8, torch.float32)
    # The cache is the front of more memory.
    keys, values = numbers(1, 1, 9, 8, seed=3), numbers(1, 1, 9, 8, seed=4)
    before = keys.clone(), values.clone()
    held = torch.tensor(3, device=DEVICE)
    found, *_ = rope.rotate_append(q, k, v, cos, sin, keys[:, :, :4], values[:, :, :4], held)
    assert_equal(keys[:, :, 4:], before[0][:, :, 4:])
    assert_equal(values[:, :, 4:], before[1][:, :, 4:])
    assert_equal(values[:, :, 3], v[:, :, 0])
    assert found[:, :, 0].isfinite().all() and found[:, :, 1].isnan().all()
    kv_append.append(keys[:, :, :4], values[:, :, :4], held, k, v)
    assert keys[:, :, 3].isnan().all()
    assert_equal(values[:, :, 3], v[:, :, 0])
    assert_equal(keys[:, :, :3], before[0][:, :, :3])
    assert_equal(keys[:, :, 4:], before[0][:, :, 4:])
    assert_equal(values[:, :, 4:], before[1][:, :, 4:])
