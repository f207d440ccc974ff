"""One tensor of a plan: its source and its outputs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from quantkit.calibrate.linear_stats import OF_MODEL, Need
from quantkit.calibrate.methods import Method
from quantkit.calibrate.parameters import TensorParameters
from quantkit.checkpoint.tensors import StoredTensor, TensorSpec
from quantkit.packing.names import KV_PARTS
from quantkit.packing.schemes import Scheme


@dataclass(frozen=True)
class Task:
    """One source tensor and its outputs.

    source   tensor that is read
    outputs  tensors that are written
    module   name of the linear; None for a tensor of no linear
    scheme   scheme of the packed tensor; None copies the tensor
    method   method of quantization; None keeps the codes and scales of the source
    parts    pairs of a part's name (packed, scale, zero_point, shape and others) and its output tensor
    beside   other source tensors that share the global or single scale
    kv_part  "k_scale" or "v_scale" for a matrix stored with a scale of keys or values, else None
    kv_scale value of that scale; None until it is measured
    own_inputs  number that is stored for the static scales of an expert's inputs; None for that of `scheme`,
             which rounds the inputs of all experts of the layer
    shared   parameters of all rows, in place of fitted ones
    reach    largest weight that `shared` can represent; larger ones are clipped
    """

    source: StoredTensor
    outputs: tuple[TensorSpec, ...]
    module: str | None = None
    scheme: Scheme | None = None
    method: Method | None = None
    parts: tuple[tuple[str, TensorSpec], ...] = ()
    beside: tuple[StoredTensor, ...] = ()
    kv_part: str | None = None
    kv_scale: float | None = None
    own_inputs: float | None = None
    shared: TensorParameters | None = None
    reach: float = math.inf

    @property
    def is_static(self) -> bool:
        """Return True if the inputs of the linear have static scales."""
        return (
            self.scheme is not None and self.scheme.activations is not None and self.scheme.activations.static
        )

    @property
    def is_measured(self) -> bool:
        """Return True if a scale of inputs, keys or values is stored with the weights."""
        return self.is_static or self.kv_part is not None

    @property
    def known(self) -> dict[str, torch.Tensor]:
        """Return the parts that need no weights: logical shape, and static scales of inputs, keys and values.

        Call it once these scales are measured.
        """
        inputs = None if self.scheme is None else self.scheme.activations
        parts = {"shape": torch.tensor(self.source.shape)}
        if inputs is not None and inputs.part is not None:
            assert inputs.stored is not None, f"the inputs of {self.module} were not measured"
            own = inputs.stored if self.own_inputs is None else self.own_inputs
            parts[inputs.part] = torch.tensor([own])
        if self.kv_part is not None:
            assert self.kv_scale is not None, f"the keys or values of {self.module} were not measured"
            parts[self.kv_part] = torch.tensor([self.kv_scale])
        return parts

    @property
    def nbytes(self) -> int:
        """Return the bytes of all outputs."""
        return sum(spec.nbytes for spec in self.outputs)

    @property
    def needs(self) -> frozenset[Need]:
        """Return the statistics of calibration data that the method needs."""
        return frozenset() if self.method is None else self.method.needs

    @property
    def needs_inputs(self) -> frozenset[Need]:
        """Return the statistics of the inputs of the linear that the method needs."""
        return self.needs - OF_MODEL


def with_kv_scale(task: Task, stored: str) -> Task:
    """Return the task of matrix `stored`, with an output for the KV scale if it is a k_proj or v_proj."""
    parent, _, leaf = stored.rpartition(".")
    part = KV_PARTS.get(leaf)
    if part is None:
        return task
    spec = TensorSpec(f"{parent}.{part}", "F32", (1,))
    return replace(task, outputs=(*task.outputs, spec), parts=(*task.parts, (part, spec)), kv_part=part)


def needs_of(tasks: Iterable[Task]) -> frozenset[Need]:
    """Return the statistics of calibration data that the methods of `tasks` need."""
    return frozenset(need for task in tasks for need in task.needs)
