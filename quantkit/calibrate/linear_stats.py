"""Statistics of a linear's inputs that the steps of its method need.

Linears with the same input share one `LinearStats`.
"""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Literal

import torch

from quantkit.calibrate.hessian import (
    DAMPINGS,
    CholeskyFactor,
    DampedHessian,
    Hessian,
    correction_,
    factorize,
)

#: What a step of a method may need:
#:
#: hessian         H = X^T X / T of the linear's inputs X [T, K]
#: cholesky        H factored, `LinearStats.factor`
#: damped_hessian  columns of H as it was factored, `LinearStats.damped`
#: input_error     D = (F - X)^T X / T with the original model's inputs F, as `LinearStats.correction`
#: largest_input   the largest magnitude of each input feature, `Hessian.largest`
#: block_output    the hidden states after the original block, on its own inputs
#: logits          those of the original model, after all linears have codes
Need = Literal[
    "hessian", "cholesky", "damped_hessian", "input_error", "largest_input", "block_output", "logits"
]

#: Needs of steps that come when all linears have codes.
OF_MODEL = frozenset[Need]({"logits"})

#: Needs for which the original model runs besides the quantized one.
OF_ORIGINAL = frozenset[Need]({"input_error", "block_output"})


@dataclass(eq=False)
class LinearStats:
    """Hessian of an input that linears share, with the correction and the factor computed from it.

    A GPU cannot hold correction and factor at once. `corrected` computes the correction first. After the
    targets of all weights are computed, `factorize` replaces the correction by the factor.

    needs            statistics that the steps of all methods need
    has_input_error  True if the input error was known; it is not kept
    corrects         True if weights are corrected for it
    correction       P of `hessian.correction_`, float32 [K, K], until `factorize`
    factor           H factored; None unless a step needs it, or if H is singular with all of `DAMPINGS`
    """

    hessian: Hessian
    needs: Set[Need] = frozenset()
    has_input_error: bool = False
    corrects: bool = False
    correction: torch.Tensor | None = None
    factor: CholeskyFactor | None = None

    @classmethod
    def prepare(cls, hessian: Hessian, needs: Set[Need]) -> "LinearStats":
        """Compute correction and factor from `hessian` as `needs` requires; consumes the input error."""
        found = cls.corrected(hessian, needs)
        if "cholesky" in needs:
            found.factor = factorize(hessian.matrix)
        return found

    @classmethod
    def corrected(cls, hessian: Hessian, needs: Set[Need]) -> "LinearStats":
        """Compute the correction from `hessian`, for targets; consumes the input error."""
        found = correction_(hessian) if "input_error" in needs else None
        return cls(
            replace(hessian, input_error=None),
            needs,
            hessian.input_error is not None,
            found is not None,
            found,
        )

    def factorize(self) -> None:
        """Free the correction and compute the factor that rounding needs."""
        self.correction = None
        if "cholesky" in self.needs:
            self.factor = factorize(self.hessian.matrix)

    @property
    def damped(self) -> DampedHessian:
        """Return H with the damping that its factor needed, or the least damping without a factor."""
        return DampedHessian.of(
            self.hessian.matrix, DAMPINGS[0] if self.factor is None else self.factor.damping
        )
