"""Options of a distillation. Imports no torch, because the command line takes its defaults from here."""

from dataclasses import dataclass

from quantkit.errors import UsageError

#: Default time: seconds per weight, and the least.
SECONDS_PER_WEIGHT, LEAST_SECONDS = 600 / 100e6, 600.0


@dataclass(frozen=True)
class DistillOptions:
    """Budget and settings of a distillation.

    steps       number of steps; None for as many as the time allows
    seconds     about how long sampling and training take together; None for a time by the size of the model
    batch       sequences per step; None for a number by device
    own         part of each batch that the original model wrote itself; the rest is calibration text
    own_most    most sequences that it writes
    code_rate   first learning rate of codes of two bits, in distances of neighbouring codes per step; codes
                with L values get 16 / L^2 of it (`LatentLinear.steps`)
    scale_rate  first learning rate of scales, relative, and of zero-points, in codes
    norm_rate   first learning rate of the weights of norms
    """

    steps: int | None = None
    seconds: float | None = None
    batch: int | None = None
    own: float = 0.75
    own_most: int = 65536
    code_rate: float = 4e-3
    scale_rate: float = 5e-4
    norm_rate: float = 5e-4

    def __post_init__(self) -> None:
        if self.steps is not None and self.seconds is not None:
            raise UsageError("a distillation has either a number of steps or a time; leave one out.")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"{self.steps} steps of distillation train nothing; use at least 1.")
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(
                f"a distillation of {self.seconds:g} s trains nothing; give a time such as 30m or 2h."
            )

    def check_used(self, trained: bool) -> None:
        """Raise `UsageError` if a setting differs from its default and nothing is `trained`."""
        if not trained and self != DistillOptions():
            raise UsageError(
                "a time or a number of steps was given, but no method of the recipe trains. Leave it out, or "
                "choose one that does: --method distill."
            )

    def seconds_of(self, weights: int) -> float:
        """Return about how long sampling and training take of a model with as many weights to train.

        Without a number of steps, that decides it.
        """
        return self.seconds or max(LEAST_SECONDS, SECONDS_PER_WEIGHT * weights)
