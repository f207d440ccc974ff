"""Failures of some of several models that are evaluated together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from quantkit.errors import QuantkitError
from quantkit.memory import enough_memory
from quantkit.model.hf_files import explained

#: Called with a model, as it was given, and the error that it failed with.
OnFailure = Callable[[str, QuantkitError], None]
_LESS = "Use --device cpu, or a smaller batch or window."


@dataclass
class Guard:
    """Lets the evaluation of several models go on when one of them fails.

    report   called with the name and the error of a failed model; None to raise the error instead
    failed   names of the failed models
    """

    report: OnFailure | None
    failed: set[str] = field(default_factory=set)

    @contextmanager
    def of(self, model: str) -> Iterator[None]:
        """Context manager for work on the model called `model`: reports its `QuantkitError`, or raises it."""
        try:
            with enough_memory(model, _LESS), explained(model):
                yield
        except QuantkitError as error:
            if self.report is None:
                raise
            self.failed.add(model)
            self.report(model, error)
