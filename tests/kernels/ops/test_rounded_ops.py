"""Norms and gates that round their results: bit for bit the norm or gate, then the rounding."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quantkit.kernels.ops import activation, quantize_x
from quantkit.kernels.ops.norm import NORMS, add_rms_norm, rms_norm
from quantkit.kernels.ops.quantize_x import round_inputs
from quantkit.packing.activations import activations_named
from quantkit.packing.schemes import scheme

from ...support.compare import assert_equal
from .test_ops import DEVICE, GATES, laid_out, numbers

pytest.importorskip("triton")

DTYPES = (torch.float16,) if DEVICE == "cpu" else (torch.float16, torch.bfloat16)
#: Names of activation schemes, and the sizes of rows that they take here.
SCHEMES = {
    "fp8": (1, 20, 200, 1024, 2500),
    "int8": (1, 100, 4096),
    "fp8-g128": (128, 1408),
    "fp8-static": (20, 1030, 2048),
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


def cases() -> list[Any]:
    return [
        pytest.param(name, size, id=f"{name} {size}") for name, sizes in SCHEMES.items() for size in sizes
    ]


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


@pytest.mark.parametrize(("name", "size"), cases())
def test_gates_round_their_results(poisoned: None, name: str, size: int) -> None:
    token = token_of(name)
    for dtype in DTYPES:
        x, up = hard(2, 3, size, dtype=dtype), laid_out(numbers(2, 3, size, dtype=dtype, seed=1), "part")
        for kind in GATES:
            found = activation.gate(x, up, kind, token)
            same(found, round_inputs(activation.gate(x, up, kind), token))
