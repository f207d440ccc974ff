"""Norms that a product begins and the next one ends: what is said of them is what a norm by itself has."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from quantkit.kernels import linear, linear_fused
from quantkit.kernels.gemm.decode import decode_launch
from quantkit.kernels.gemm.decode.decode_config import Norm
from quantkit.kernels.gemm.decode.decode_tiles import DecodeTile, decode_config
from quantkit.kernels.gemm.operands import GemmSpec, Operands
from quantkit.kernels.gemm.small_m import small_m_launch
from quantkit.kernels.gemm.small_m.small_m_tiles import SmallMTile
from quantkit.kernels.layouts.int8_codes import as_bytes
from quantkit.kernels.layouts.shared_memory import USUAL_SHARED, shared_bytes
from quantkit.kernels.ops.norm import (
    NORM_REFERENCES,
    NORMS,
    rms_norm_reference,
)
from quantkit.kernels.problem import Normed, Problem
from quantkit.kernels.registry import Chosen, kernel_named
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor

from ...support.compare import assert_close, assert_equal
from .test_fused import DEVICE, LIMIT, RUNS, assert_product, is_gated, operands
from .test_small_m import H200, problem

EPS = 1e-2
#: Rows of a weight: more row tiles than there are warps of all programs, which are few in the interpreter.
LONG = 1000 if DEVICE == "cuda" else 424
Run = Callable[[Operands], torch.Tensor]


def ending(op: Operands, features: frozenset[str]) -> Iterator[Run]:
    """The kernels that end norms, in some tiles."""
    if {"gluon", "ptx"} <= features:
        for narrow_tile in (SmallMTile(8, 2), SmallMTile(16, 1)):
            yield partial(small_m_launch.run, tile=narrow_tile, features=features)
        yield from streams(op, features)


def beginning(op: Operands, features: frozenset[str]) -> Iterator[Run]:
    """The kernels that begin norms, in some tiles."""
    if {"gluon", "ptx"} <= features:
        yield partial(small_m_launch.run, tile=SmallMTile(8, 4), features=features)
        yield from streams(op, features)


def streams(op: Operands, features: frozenset[str]) -> Iterator[Run]:
    tiles = [DecodeTile(8, 2, 1, 2), DecodeTile(4, 1, 2, 1)]
    integers = len(op.x) <= 4 and not op.scheme.has_zero_point and as_bytes(op.scheme.format) is not None
    for tile in tiles + ([replace(tile, int8_mma=True) for tile in tiles] if integers else []):
        yield partial(decode_launch.run, tile=tile, features=features)


def sums_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Those of each 16 columns."""
    return torch.stack([part.sum(1) for part in (x**2).split(16, 1)], 1)


@pytest.mark.parametrize(("n", "k", "m"), [(96, 640, 1), (40, 1400, 3), (LONG, 264, 8), (16, 512, 13)])
@pytest.mark.sampled(2)
def test_norms_are_begun(
    make_packed: Callable[..., PackedTensor], poisoned: None, n: int, k: int, m: int
) -> None:
    for dtype, features in RUNS:
        op, _ = operands(make_packed, "int4", n, k, m, dtype)
        other = torch.randn(m, n).to(DEVICE, dtype)
        weight = torch.randn(n).to(DEVICE, dtype)
        for run in beginning(op, features):
            added = run(op) + other
            found = sums_of_squares(added.double())
            for kind in NORM_REFERENCES:
                total = torch.full((m, n), float("nan"), dtype=dtype, device=DEVICE)
                squares = torch.full((m, -(-n // 16)), float("nan"), device=DEVICE)
                y = run(replace(op, normed=Normed("begin", kind, EPS, weight, other, total, squares)))
                assert_equal(total, added, (run, kind))
                wide = weight.float() + NORMS[kind][1]
                assert_equal(y, (added.float() * wide).to(dtype), (run, kind))
                assert_close(squares.double(), found, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "n", "k", "m"),
    [
        ("int4", 96, 640, 1),
        ("nf4", 40, 1400, 2),
        ("int4 integer", 40, 1400, 3),
        ("fp6", 100, 264, 8),
        ("int4", 160, 512, 13),
    ],
)
def test_norms_are_ended(
    make_packed: Callable[..., PackedTensor], poisoned: None, name: str, n: int, k: int, m: int
) -> None:
    for dtype, features in RUNS:
        op, packed = operands(make_packed, name, n, k, m, dtype)
        total, weight = op.x * 3, torch.randn(k).to(DEVICE, dtype)
        x = total * weight
        squares = sums_of_squares(total.float())
        expected = x.double() * torch.rsqrt(total.double().pow(2).mean(1, keepdim=True) + EPS)
        ended = Normed("end", eps=EPS, squares=squares)
        for run in ending(op, features):
            y = run(replace(op, x=x, normed=ended))
            assert_product(y, expected, packed, op.bias, LIMIT[dtype], run)
            if DEVICE == "cuda":
                assert_equal(y, run(replace(op, x=x, normed=ended)), run)


@pytest.mark.parametrize("m", [2, 11])
def test_gates_are_of_ended_norms(make_packed: Callable[..., PackedTensor], poisoned: None, m: int) -> None:
    for dtype, features in RUNS:
        op, _ = operands(make_packed, "int4", 160, 640, m, dtype)
        ended = replace(op, normed=Normed("end", eps=EPS, squares=sums_of_squares(op.x.float())))
        runs = [
            partial(small_m_launch.run, tile=SmallMTile(16, 1), features=features),
            *streams(op, features),
        ]
        for run in runs if {"gluon", "ptx"} <= features else []:
            assert is_gated(run, ended, "silu"), run


@pytest.mark.parametrize("m", [1, 11])
def test_a_norm_between_two_products(
    make_packed: Callable[..., PackedTensor], poisoned: None, monkeypatch: pytest.MonkeyPatch, m: int
) -> None:
    """As steps call them, by the kernels that begin and end."""
    dtype, features = RUNS[-1] if DEVICE == "cpu" else RUNS[0]
    first, _ = operands(make_packed, "int4", 256, 640, m, dtype)
    second, packed = operands(make_packed, "int4", 96, 256, m, dtype)
    row = kernel_named("fused-gemv" if m == 1 else "fused-small-m")
    tile: Any = DecodeTile(4, 1, 1, 2) if m == 1 else SmallMTile(8, 2)

    def launch(x: Any, weight: Any, layout: Any, bias: Any, **normed: Any) -> torch.Tensor:
        op = Operands(x, layout, bias, weight.scheme, weight.shape[0], **normed)
        return (decode_launch if m == 1 else small_m_launch).run(op, tile, features)

    monkeypatch.setattr(linear, "choose", lambda _: Chosen(row, tile, None, launch))
    of = [([], list(op.layout), op.bias, op.scheme.token, op.n, "fragments") for op in (first, second)]
    other, weight = (torch.randn(*size).to(DEVICE, dtype) for size in ((m, 1, 256), (256,)))
    x = first.x.view(m, 1, 640)
    total, begun, squares = linear_fused.linear_then_norm(x, other, weight, "llama", *of[0])
    y = linear_fused.linear_of_begun(begun, squares, EPS, *of[1])
    added = linear_fused.run_linear(x, *of[0]) + other
    assert_equal(total, added)
    expected = rms_norm_reference(added.double(), weight.double(), EPS).view(m, 256)
    assert_product(y.view(m, 96), expected, packed, second.bias, 2 * LIMIT[dtype])


@pytest.mark.parametrize("m", [1, 8, 16])
def test_roots_that_are_powers_of_two_change_no_digit(
    make_packed: Callable[..., PackedTensor], poisoned: None, m: int
) -> None:
    for dtype, features in RUNS:
        op, _ = operands(make_packed, "int4", 64, 512, m, dtype)
        op = replace(op, bias=None)
        # The mean of x^2 is 4^(row % 4), and eps nothing.
        row = torch.arange(m, device=DEVICE)[:, None] % 4
        squares = torch.full((m, 32), 16.0, device=DEVICE) * 4.0**row
        for run in ending(op, features):
            expected = run(op).double() / 2.0**row
            assert_equal(run(replace(op, normed=Normed("end", squares=squares))), expected.to(dtype), run)


def test_what_does_not_begin_or_end_norms_says_why() -> None:
    shared, few = kernel_named("fused-small-m"), kernel_named("fused-gemv")
    full = replace(problem(16), gpu=replace(H200, name="smaller", shared_memory=128 << 10))
    assert shared.tile_space is not None and shared.tile_space.why_invalid(full, SmallMTile(16, 1)) is None
    assert shared.why_no_norm(problem(16), SmallMTile(8, 8), "begin") is None
    assert shared.why_no_norm(problem(16), SmallMTile(16, 1), "end") is None
    for text, reason in {
        "without split-K it writes y": shared.why_no_norm(problem(16), SmallMTile(16, 1), "begin"),
        "it copies x as it is": shared.why_no_norm(problem(16), SmallMTile(16, 1), "whole"),
        "x takes 131136 bytes": shared.why_no_norm(full, SmallMTile(16, 1), "end"),
        "as fast from M=3 on": few.why_no_norm(problem(3), DecodeTile(16, 1), "end"),
        "gives y, as it is": kernel_named("fused-portable-gemv").why_no_norm(problem(8), None, "begin"),
    }.items():
        assert reason is not None and text in reason, reason
    assert few.why_no_norm(problem(2), DecodeTile(), "end") is None
    assert few.why_no_norm(problem(8), DecodeTile(16, 1), "begin") is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_bfloat16_has_room_for_what_has_no_root_yet(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    row = kernel_named("fused-small-m")
    chosen = Chosen(row, SmallMTile(8, 8), None, row.launch)
    monkeypatch.setattr(linear_fused, "choose", lambda _: chosen)
    monkeypatch.setattr(Problem, "on", lambda device, *of: problem())
    token = scheme("int4").token
    for part in ("begin", "end"):
        found = linear_fused.does_norm(part, 1, 4096, dtype, torch.device("cpu"), token, 4096, "")
        assert found == (dtype == torch.bfloat16)


def test_roots_count_where_a_table_needs_room_that_is_asked_for() -> None:
    """x, sums and the table of nf4 take all that a program has undeclared_bytes."""
    spec = GemmSpec(1, 65536, 4096, scheme("nf4").for_columns(4096), torch.bfloat16)
    of = (spec, DecodeTile(8, 2), True, 132)
    assert decode_config(*of).shared_memory == USUAL_SHARED
    ended = decode_config(*of, Norm("end", False, EPS, True, 0.0))
    assert ended.declared_bytes > USUAL_SHARED and ended.shared_memory >= USUAL_SHARED + shared_bytes()
