"""One tensor of a plan: its source and its outputs."""

from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.calibrate.linear_stats import OF_MODEL, Need
from quantkit.calibrate.methods import Method
from quantkit.checkpoint.tensors import StoredTensor, TensorSpec
from quantkit.packing.schemes import Scheme


@dataclass(frozen=True)
class Task:
    """One source tensor and its outputs.

    scheme   None copies the tensor
    parts    packed, scale, zero_point and shape to the output tensors
    module   the linear it belongs to
    method   None keeps the codes and scales of the source
    beside   other sources that share its global scale, or its only scale
    """

    source: StoredTensor
    outputs: tuple[TensorSpec, ...]
    module: str | None = None
    scheme: Scheme | None = None
    method: Method | None = None
    parts: tuple[tuple[str, TensorSpec], ...] = ()
    beside: tuple[StoredTensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Return the bytes written."""
        return sum(spec.nbytes for spec in self.outputs)

    @property
    def needs(self) -> frozenset[Need]:
        """Return what its method needs of calibration data."""
        return frozenset() if self.method is None else self.method.needs

    @property
    def needs_inputs(self) -> frozenset[Need]:
        """Return what its method needs of the inputs of the linear."""
        return self.needs - OF_MODEL


def needs_of(tasks: Iterable[Task]) -> frozenset[Need]:
    """Return what the methods of `tasks` need of calibration data."""
    return frozenset(need for task in tasks for need in task.needs)
