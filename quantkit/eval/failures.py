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
    """Reports and records the failure of one model, so that other models are still evaluated."""

    report: OnFailure | None
    failed: set[str] = field(default_factory=set)

    @contextmanager
    def of(self, model: str) -> Iterator[None]:
        """Context manager around work on `model`; errors name it and no other."""
        try:
            with enough_memory(model, _LESS), explained(model):
                yield
        except QuantkitError as error:
            if self.report is None:
                raise
            self.failed.add(model)
            self.report(model, error)
