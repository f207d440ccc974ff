"""Hessians of a run, as they are before anything is fitted to them."""

from typing import Any

import pytest

from quantkit.calibrate.hessian import Hessian
from quantkit.quantization.blockwise import pipeline
from quantkit.quantization.blockwise.layer_quantizer import Solver


@pytest.fixture
def hessians(monkeypatch: pytest.MonkeyPatch) -> dict[str, Hessian]:
    """What every linear that is calibrated sees, by module.

    Weights stay what they were, so that it is what the linear sees in the original.
    """
    found: dict[str, Hessian] = {}
    solve_alike, hessians_of_all = Solver.solve_alike, Solver.hessians_of_all
    names: list[str] = []

    def solving(self: Solver, name: str, tasks: Any, share: Any) -> Any:
        names[:] = [task.module for task in tasks.values()]
        return solve_alike(self, name, tasks, share)

    def gathering(self: Solver, function: Any, items: Any) -> dict[str, Hessian]:
        result = hessians_of_all(self, function, items)
        found.update({name: hessian for name in names for hessian in result.values()})
        return {name: Hessian(one.matrix.clone(), one.tokens) for name, one in result.items()}

    monkeypatch.setattr(Solver, "solve_alike", solving)
    monkeypatch.setattr(Solver, "hessians_of_all", gathering)
    monkeypatch.setattr(pipeline._Worker, "_set", lambda *_: None)
    return found
