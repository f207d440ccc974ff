"""Quantizing linears whose inputs are known: on some workers, whose results are put together in one order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from quantkit.calibrate.calibrated import CalibratedRows, Inputs, chunk_rows, quantize_calibrated_rows
from quantkit.calibrate.methods import Method, packed_rows, quantize_rows
from quantkit.calibrate.moments import Moments, check_finite, drift, gram
from quantkit.calibrate.parameters import TensorParameters, fit_parameters
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import FormatError
from quantkit.model.folding import Factors
from quantkit.model.plan import Task
from quantkit.packing.tensor import PackedTensor

#: Reads inputs [T, K] of a linear, and those of the original model for methods that correct for drift.
ReadInputs = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, eq=False)
class PartialMoments:
    """Sums over some of the inputs of the linear `name`: X^T X, and (F - X)^T X where F is known."""

    name: str
    tokens: int
    second: torch.Tensor
    shift: torch.Tensor | None

    @classmethod
    def of(cls, name: str, inputs: torch.Tensor, original: torch.Tensor | None = None) -> "PartialMoments":
        """`FormatError` if one of the inputs [T, K] is NaN or infinite."""
        check_finite(inputs, name)
        shift = None if original is None else drift(original, inputs)
        return cls(name, len(inputs), gram(inputs), shift)


@dataclass(frozen=True, eq=False)
class Solver:
    """What quantizing takes; `read` gives a stored tensor on `device`, `lanes` is the number of `workers`.

    `factors` are what weights are multiplied by first, by their stored name: those of the block in work.
    """

    read: Callable[[str], torch.Tensor]
    device: torch.device
    workers: ThreadPoolExecutor
    lanes: int
    factors: dict[str, Factors] = field(default_factory=dict)

    def moments(self, jobs: Iterable[tuple[str, ReadInputs]]) -> dict[str, Moments]:
        """The moments of the inputs of each linear, by name, summed in the order of `jobs`."""

        def one(job: tuple[str, ReadInputs]) -> list[PartialMoments]:
            name, read = job
            return [PartialMoments.of(name, *read())]

        return self.summed(one, list(jobs))

    def summed(
        self, function: Callable[[Any], list["PartialMoments"]], items: Sequence[Any]
    ) -> dict[str, Moments]:
        """The moments by name of what `function` gives for the items, in their order."""
        tokens: dict[str, int] = {}
        seconds: dict[str, torch.Tensor] = {}
        shifts: dict[str, torch.Tensor] = {}
        for parts in self.in_order(function, items):
            for part in parts:
                tokens[part.name] = tokens.get(part.name, 0) + part.tokens
                for sums, tensor in ((seconds, part.second), (shifts, part.shift)):
                    if tensor is not None:
                        sums[part.name] = sums[part.name].add_(tensor) if part.name in sums else tensor
        return {
            name: Moments(
                second.div_(tokens[name]),
                tokens[name],
                shifts[name].div_(tokens[name]) if name in shifts else None,
            )
            for name, second in seconds.items()
        }

    def in_order(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """The results of `function` for all items, as many of them in memory at a time as there are lanes."""
        running = deque(self.workers.submit(function, item) for item in items[: self.lanes])
        for item in items[self.lanes :]:
            yield running.popleft().result()
            running.append(self.workers.submit(function, item))
        while running:
            yield running.popleft().result()

    def prepare(
        self, moments: Mapping[str, Moments], methods: Mapping[str, Sequence[Method]]
    ) -> dict[str, Inputs]:
        """What the `methods` of the linears that have these moments, by the same names, make of them."""
        found = self.workers.map(lambda name: Inputs.prepare(moments[name], methods[name]), moments)
        return dict(zip(moments, found, strict=True))

    def solve(self, tasks: Mapping[str, Task], inputs: Mapping[str, Inputs]) -> "dict[str, Quantized]":
        """Quantize some linears with what is known of their inputs, nothing for methods without data."""
        weights = {name: self.weight(task.source.name) for name, task in tasks.items()}
        fits = {
            name: self.workers.submit(self.fit, task, weights[name], inputs.get(name))
            for name, task in tasks.items()
        }
        parameters = {name: fit.result() for name, fit in fits.items()}
        chunks = {
            name: [
                self.workers.submit(_rows, rows, task, parameters[name], inputs.get(name))
                for rows in self._chunks(weights[name])
            ]
            for name, task in tasks.items()
        }
        return {
            name: Quantized.of(
                [chunk.result() for chunk in chunks[name]], parameters[name], task, inputs.get(name)
            )
            for name, task in tasks.items()
        }

    def solve_alike(
        self, name: str, tasks: Mapping[str, Task], read: Sequence[ReadInputs]
    ) -> "dict[str, Quantized]":
        """Quantize linears with one input, read in pieces, whose name is for errors."""
        moments = self.moments([(name, one) for one in read])
        methods = [task.method for task in tasks.values() if task.method is not None]
        inputs = self.prepare(moments, {name: methods})[name]
        del moments
        return self.solve(tasks, dict.fromkeys(tasks, inputs))

    def weight(self, name: str) -> torch.Tensor:
        """A weight as it is quantized: as stored, or with the scales of its features and rows."""
        weight = self.read(name)
        return self.factors[name].apply(weight) if name in self.factors else weight

    def _chunks(self, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(weight, chunk_rows(weight.shape[1], self.device))

    def fit(self, task: Task, weight: torch.Tensor, inputs: Inputs | None) -> TensorParameters:
        """What the rows of a weight share."""
        assert task.scheme is not None and task.method is not None
        method = task.method

        def target(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
            for rows in self._chunks(tensor):
                yield rows if inputs is None else inputs.target(rows.to(torch.float32), method)

        def beside() -> Iterator[torch.Tensor]:
            for other in task.beside:
                yield from target(self.weight(other.name))

        try:
            rows, columns = weight.shape
            return fit_parameters(
                lambda: target(weight), (rows, columns), task.scheme, method.fit, method.fit_tensor, beside
            )
        except FormatError as error:
            raise FormatError(f"{task.source.name!r}: {error}") from error


def _rows(
    rows: torch.Tensor, task: Task, parameters: TensorParameters, inputs: Inputs | None
) -> CalibratedRows:
    assert task.scheme is not None and task.method is not None
    try:
        if inputs is None:
            return CalibratedRows(quantize_rows(rows, task.scheme, task.method, parameters), 0.0, 0.0)
        return quantize_calibrated_rows(rows, task.scheme, task.method, parameters, inputs)
    except FormatError as error:
        raise FormatError(f"{task.source.name!r}: {error}") from error


@dataclass(frozen=True, eq=False)
class Quantized:
    """A finished linear: its parts, and what the manifest says of it."""

    packed: PackedTensor
    detail: dict[str, Any]

    @classmethod
    def of(
        cls,
        chunks: Sequence[CalibratedRows],
        parameters: TensorParameters,
        task: Task,
        inputs: Inputs | None,
    ) -> "Quantized":
        assert task.scheme is not None and task.method is not None
        rows = [chunk.rows for chunk in chunks]
        shape = (task.source.shape[0], task.source.shape[1])
        detail: dict[str, Any] = {
            "squared": [sum(row.squared_error for row in rows), sum(row.squared_norm for row in rows)]
        }
        if inputs is not None:
            detail["output"] = [
                sum(chunk.output_error for chunk in chunks),
                sum(chunk.output_energy for chunk in chunks),
            ]
            detail["damping"] = None if inputs.factor is None else inputs.factor.damping
            detail["note"] = inputs.note(task.method)
        return cls(packed_rows(rows, parameters, task.scheme, shape), detail)

    def part(self, name: str, task: Task) -> torch.Tensor:
        """The stored part called `name`, the logical shape included."""
        if name == "shape":
            return torch.tensor(task.source.shape)
        found = self.packed.part(name)
        assert found is not None
        return found

    def line(self, module: str) -> str:
        """For the progress line: the relative error of the outputs, and the damping."""
        if "output" not in self.detail:
            return module
        error, energy = self.detail["output"]
        damping = self.detail["damping"]
        factored = "" if damping is None else f", damping {damping:g}"
        return f"{module} (error {error / energy if energy else 0:.1e}{factored})"


def packed_of(files: Checkpoint, task: Task) -> PackedTensor:
    """The packed tensor that a work file holds for a task."""
    assert task.scheme is not None
    shape = (task.source.shape[0], task.source.shape[1])
    stored = task.scheme.storage_shapes(shape)
    parts = {
        part: files.read(spec.name).view(stored[part][0]).reshape(stored[part][1])
        for part, spec in task.parts
        if part != "shape"
    }
    return PackedTensor.from_parts(parts, task.scheme, shape)


def merged(
    matrices: Mapping[str, Mapping[str, Any]], notes: Sequence[str], tokens: Sequence[int] | None
) -> dict[str, Any]:
    """The details of the matrices of one module as one, with `notes` on all, and the tokens of experts."""
    details = list(matrices.values())
    found: dict[str, Any] = {
        "squared": [sum(pair) for pair in zip(*(one["squared"] for one in details), strict=True)]
    }
    if "output" not in details[0]:
        return found
    own: dict[str, list[str]] = {}
    for name, detail in matrices.items():
        if detail["note"] is not None:
            own.setdefault(detail["note"], []).append(name)
    texts = [text if len(matrices) == 1 else f"{_shown(names)}: {text}" for text, names in own.items()]
    found["output"] = [sum(pair) for pair in zip(*(one["output"] for one in details), strict=True)]
    dampings = [one["damping"] for one in details if one["damping"] is not None]
    found["damping"] = max(dampings, default=None)
    found["note"] = "; ".join([*texts, *notes]) or None
    if tokens is not None:
        found["expert_tokens"] = list(tokens)
    return found


def _shown(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
