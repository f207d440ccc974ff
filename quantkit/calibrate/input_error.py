"""Transform that corrects weights for the input error (`calibrate/hessian.py`)."""

from collections.abc import Set
from dataclasses import dataclass

import torch

from quantkit.calibrate.linear_stats import LinearStats, Need
from quantkit.calibrate.steps import SINGULAR, Transform


@dataclass(frozen=True)
class InputErrorCorrection(Transform):
    """Replace W by W + W P, whose outputs on the quantized inputs are closest to the original's (QEP)."""

    name: str = "input error correction"

    @property
    def needs(self) -> Set[Need]:
        return frozenset({"hessian", "input_error"})

    def changes_target(self, stats: LinearStats) -> bool:
        return stats.corrects

    def target(self, rows: torch.Tensor, stats: LinearStats) -> torch.Tensor:
        if not stats.corrects:
            return rows
        assert stats.correction is not None, "targets come before the factor"
        return torch.addmm(rows, rows, stats.correction)

    def note(self, stats: LinearStats) -> str | None:
        if stats.has_input_error and not stats.corrects:
            return SINGULAR + "it is not corrected for drift"
        return None
