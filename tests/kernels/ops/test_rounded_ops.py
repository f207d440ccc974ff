"""Norms and gates that round their results: bit for bit the norm or gate, then the rounding or quantizing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from quantkit.kernels.ops import activation, quantize_x
from quantkit.kernels.ops.norm import NORMS, add_rms_norm, norm_codes, rms_norm
from quantkit.kernels.ops.quantize_x import CodeOrder, round_inputs
from quantkit.packing.activations import activations_named
from quantkit.packing.schemes import scheme

from ...support.compare import assert_close, assert_equal
from .test_ops import DEVICE, laid_out, numbers

pytest.importorskip("triton")

DTYPES = (torch.float16,) if DEVICE == "cpu" else (torch.float16, torch.bfloat16)
#: Names of activation schemes, and the sizes of rows that they take here.
SCHEMES = {
    "fp8": (1, 20, 200, 1024, 2500),
    "int8": (1, 100, 4096),
    "fp8-g128": (128, 1408),
    "fp8-static": (20, 1030, 2048),
    "int8-static": (20, 2048),
}


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a CPU `round_x` is torch's: there the kernel is asked for as on a GPU.
    monkeypatch.setattr(quantize_x, "is_on_gpu", lambda x: True)


def token_of(name: str) -> str:
    """The token of an int4 scheme with the activations `name`."""
    found = activations_named(name)
    assert found is not None
    return replace(scheme("int4"), activations=found if found.part is None else found.bind(0.01)).token


def cases(least: int = 1) -> list[Any]:
    """All schemes with the sizes of rows from `least` on."""
    every = [(name, size) for name, sizes in SCHEMES.items() for size in sizes if size >= least]
    return [pytest.param(*one, id="{} {}".format(*one)) for one in every]


def hard(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers of which one row has NaN, one infinity, one the largest number, and one zeros alone."""
    x = numbers(*shape, dtype=dtype, seed=seed) * 30
    x[0, 1, 0], x[0, 2, -1], x[1, 0] = torch.nan, torch.inf, 0.0
    x[1, 1, 0] = torch.finfo(dtype).max
    return x


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.isnan().equal(expected.isnan())
    assert_equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0))


@pytest.mark.parametrize(("name", "size"), cases())
def test_norms_round_their_results(poisoned: None, name: str, size: int) -> None:
    token = token_of(name)
    for dtype in DTYPES:
        x, other = hard(2, 3, size, dtype=dtype), numbers(2, 3, size, dtype=dtype, seed=1)
        weight = numbers(size, dtype=dtype, seed=2)
        for kind in NORMS:
            expected = round_inputs(rms_norm(x, weight, 1e-3, kind), token)
            same(rms_norm(x, weight, 1e-3, kind, rounding=token), expected)
            total, y = add_rms_norm(x, other, weight, 1e-3, kind)
            sums, found = add_rms_norm(x, other, weight, 1e-3, kind, rounding=token)
            same(sums, total)
            same(found, round_inputs(y, token))
            assert size == 1 or not found.equal(y)


@pytest.mark.parametrize(("name", "size"), cases(quantize_x.BLOCK))
def test_norms_and_gates_write_codes(poisoned: None, name: str, size: int) -> None:
    token, dtype = token_of(name), DTYPES[-1]
    x, other = hard(2, 3, size, dtype=dtype), numbers(2, 3, size, dtype=dtype, seed=1)
    weight, up = numbers(size, dtype=dtype, seed=2), laid_out(other, "part")
    for order in (CodeOrder(32, False), CodeOrder(64, True), CodeOrder(128, True)):
        how = (token, order.span, order.sums)
        total, normed = add_rms_norm(x, other, weight, 1e-3, "llama")
        sums, *found = norm_codes(x, other, weight, 1e-3, "llama", *how)
        same(sums, total)
        same_codes(found, normed, token, order)
        first, *found = norm_codes(x, None, weight, 1e-3, "gemma", *how)
        assert first is x
        same_codes(found, rms_norm(x, weight, 1e-3, "gemma"), token, order)
        same_codes(activation.gate_codes(x, up, "silu", *how), activation.gate(x, up, "silu"), token, order)


def same_codes(found: Sequence[torch.Tensor], x: torch.Tensor, token: str, order: CodeOrder) -> None:
    """Compare codes, scales and sums with those of `quantize_x` of `x` [..., K]."""
    flat = x.view(-1, x.shape[-1])
    expected, m = quantize_x.quantize_x(flat, quantize_x.rounding_of(token), order), len(flat)
    codes, scales, sums = found
    assert_equal(codes.view(torch.uint8), expected.codes.view(torch.uint8))
    same(scales[..., :m], expected.scales[..., :m])
    assert sums.shape == expected.sums.shape
    assert_close(sums[:, :m], expected.sums[:, :m], rtol=1e-6, atol=1e-3)
