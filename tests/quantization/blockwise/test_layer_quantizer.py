"""Linears whose inputs are known: what quantizing them holds at a time."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantkit.calibrate import hessian, scale_search
from quantkit.calibrate.methods import METHODS, Method
from quantkit.model.distributed import Ranks
from quantkit.packing.schemes import scheme
from quantkit.quantization.blockwise.layer_quantizer import Solver

from ...support.compare import assert_equal
from ...support.live_bytes import AtOnce, LiveBytes

ROWS, COLUMNS, PIECES = 8, 512, 24


@pytest.mark.parametrize(("method", "least", "most"), [("gptq", 2.5, 2.8), ("best", 3.0, 3.4)])
def test_a_linear_holds_few_matrices_of_its_inputs(monkeypatch, method, least, most):
    """GPTQ H and, while it is factored, the lower triangle in float64 as float32 and the factor. With input
    error two sums of it and two halves of H, or H, the input error and the triangle in float64.
    """
    monkeypatch.setitem(hessian.TILE, "cpu", 16)
    monkeypatch.setitem(scale_search.HISTOGRAM_CELLS, "cpu", 1 << 12)
    for name in ("CHOLESKY_COLUMNS", "CORRECTION_ROWS", "INPUT_ERROR_ROWS"):
        monkeypatch.setattr(hessian, name, 16)
    generator = torch.Generator().manual_seed(0)
    weight, *pieces = (torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(1 + PIECES))
    solver = Solver(lambda _: weight, torch.device("cpu"), AtOnce(), 1, Ranks())
    task = SimpleNamespace(
        source=SimpleNamespace(name="down", shape=(ROWS, COLUMNS)),
        scheme=scheme("int4", group_size=32),
        method=METHODS[method],
        needs=METHODS[method].needs,
        beside=(),
        shared=None,
        reach=math.inf,
    )

    def read(at: int) -> Any:
        return pieces[at], 1.1 * pieces[at] if "input_error" in METHODS[method].needs else None

    share = [(hessian.run_of(at, PIECES), lambda at=at: read(at)) for at in range(PIECES)]
    with LiveBytes() as live:
        found = solver.solve_alike("down", {"down": task}, share)
    assert found["down"].detail["output"][0] < 0.1 * found["down"].detail["output"][1]
    assert least < live.most / (4 * COLUMNS**2) < most


def test_targets_take_as_many_rows_at_a_time_as_there_is_memory_for(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weight, *pieces = (torch.randn(64, 64, generator=generator) for _ in range(5))
    solver = Solver(lambda _: weight, torch.device("cpu"), AtOnce(), 1, Ranks())
    task = SimpleNamespace(
        source=SimpleNamespace(name="down", shape=(64, 64)),
        scheme=scheme("int4", group_size=32),
        method=METHODS["best"],
        needs=METHODS["best"].needs,
        beside=(),
        shared=None,
        reach=math.inf,
    )
    share = [(0, lambda at=at: (pieces[at], 1.1 * pieces[at])) for at in range(4)]
    expected = solver.solve_alike("down", {"down": task}, share)["down"].packed
    target = Method.target

    def of_few(method: Method, rows: torch.Tensor, stats: Any) -> torch.Tensor:
        if len(rows) > 32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return target(method, rows, stats)

    monkeypatch.setattr(Method, "target", of_few)
    found = solver.solve_alike("down", {"down": task}, share)["down"].packed
    assert_equal(found.dequantize(), expected.dequantize())
