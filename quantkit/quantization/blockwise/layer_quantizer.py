"""Quantize linears with the Hessians of their inputs, on several workers, in a reproducible order."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from quantkit.calibrate.hessian import Hessian, HessianSum, Piece, RunSum, check_finite, run_of
from quantkit.calibrate.linear_stats import LinearStats, Need
from quantkit.calibrate.methods import packed_rows, quantize_rows
from quantkit.calibrate.parameters import TensorParameters, fit_parameters
from quantkit.calibrate.quantize_with_hessian import (
    CalibratedRows,
    chunk_rows,
    quantize_calibrated_rows,
)
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import first_of, naming
from quantkit.memory import in_pieces, trim_cache
from quantkit.model.distributed import Ranks, Record
from quantkit.packing.tensor import PackedTensor
from quantkit.quantization.blockwise.fold_scales import Factors
from quantkit.quantization.task import Task, needs_of

#: Reads inputs [T, K] of a linear, and the same of the original model if a method needs the input error.
ReadInputs = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]


#: Name of a linear, and a piece of its inputs.
Named = tuple[str, Piece]


@dataclass(frozen=True, eq=False)
class Solver:
    """Quantizer for the linears of blocks.

    read      function that returns a stored tensor on `device`
    lanes     number of `workers`
    ranks     processes that share the work
    factors   multipliers of weights by stored name, for the current block
    seen      Hessians of the inputs of linears with learned rounding, by stored name
    """

    read: Callable[[str], torch.Tensor]
    device: torch.device
    workers: ThreadPoolExecutor
    lanes: int
    ranks: Ranks
    factors: dict[str, Factors] = field(default_factory=dict)
    seen: dict[str, Hessian] = field(default_factory=dict)

    def hessians(self, pieces: Mapping[str, Sequence[ReadInputs]]) -> dict[str, Hessian]:
        """Compute the Hessians of the inputs of linears, by name; linears without inputs are left out."""
        jobs = [
            (name, run_of(at, len(reads)), read)
            for name, reads in pieces.items()
            for at, read in enumerate(reads)
        ]
        return {name: found.hessian() for name, found in self._sums(_read_piece, jobs).items()}

    def hessians_of_all(
        self, function: Callable[[Any], Sequence[Named]], items: Sequence[Any]
    ) -> dict[str, Hessian]:
        """Compute Hessians by name from the results of `function` for the `items` of all ranks.

        Each rank passes its own items.
        """
        sums = self._sums_of_all(self._sums(function, items))
        return {name: found.hessian() for name, found in sums.items()}

    def _sums_of_all(self, own_sums: Mapping[str, RunSum]) -> dict[str, RunSum]:
        """Return the sums of all ranks; reuses the memory of `own_sums`."""
        records = [_record(name, part) for name, found in own_sums.items() for part in found.parts]
        sums: dict[str, RunSum] = {}
        for record in self.ranks.gather_records(records, self.device):
            name, first, last, tokens, columns = record.facts
            sums.setdefault(name, RunSum()).add(HessianSum(first, last, tokens, columns, **record.tensors))
        return sums

    def _sums(self, function: Callable[[Any], Sequence[Named]], items: Sequence[Any]) -> dict[str, RunSum]:
        sums: dict[str, RunSum] = {}

        def add(parts: Sequence[tuple[str, HessianSum | Piece]]) -> None:
            for name, part in parts:
                sums.setdefault(name, RunSum()).add(part)

        # A single worker returns results in order and needs no extra memory. Several workers multiply at
        # once.
        if self.lanes == 1:
            added = self.in_order(lambda item: add(function(item)), items)
        else:
            found = self.in_order(
                lambda item: [(name, HessianSum.of(piece)) for name, piece in function(item)], items
            )
            # `map` frees each result when it has been added; a loop would keep one sum more in memory.
            added = map(add, found)
        for _ in added:
            pass
        return sums

    def in_order(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """Yield the results of `function` for all items in order; at most `lanes` results are in memory."""
        running = deque(self.workers.submit(function, item) for item in items[: self.lanes])
        for item in items[self.lanes :]:
            yield running.popleft().result()
            running.append(self.workers.submit(function, item))
        while running:
            yield running.popleft().result()

    def prepare(
        self, hessians: Mapping[str, Hessian], needs: Mapping[str, Set[Need]]
    ) -> dict[str, LinearStats]:
        """Compute statistics for `solve`, which makes the factors later, by the names of `hessians`.

        `needs` has each of these names. Overwrites the input errors in `hessians` where they are needed.
        """
        found = self.workers.map(lambda name: LinearStats.corrected(hessians[name], needs[name]), hessians)
        return dict(zip(hessians, found, strict=True))

    def solve(self, tasks: Mapping[str, Task], stats: Mapping[str, LinearStats]) -> "dict[str, Quantized]":
        """Quantize linears with the statistics of their inputs; methods without data have none."""
        # Cached memory from Hessian sums, and later from factors, fits few of the tensors allocated next.
        trim_cache(self.device)
        weights = {name: self.weight(task.source.name) for name, task in tasks.items()}
        fits = {
            name: self.workers.submit(self.fit, task, weights[name], stats.get(name))
            for name, task in tasks.items()
        }
        parameters = {name: fit.result() for name, fit in fits.items()}
        pieces = {name: self._pieces(weights[name], task, stats.get(name)) for name, task in tasks.items()}
        # Factorize once for all linears with the same input.
        list(self.workers.map(LinearStats.factorize, dict.fromkeys(stats.values())))
        trim_cache(self.device)
        chunks = {
            name: [
                self.workers.submit(
                    in_pieces,
                    partial(_rows, task=task, parameters=parameters[name], stats=stats.get(name)),
                    rows,
                    repr(task.source.name),
                )
                for rows in pieces[name]
            ]
            for name, task in tasks.items()
        }
        return {
            name: Quantized.of(
                [rows for chunk in chunks[name] for rows in chunk.result()],
                parameters[name],
                task,
                stats.get(name),
            )
            for name, task in tasks.items()
        }

    def _pieces(
        self, weight: torch.Tensor, task: Task, stats: LinearStats | None
    ) -> list[tuple[torch.Tensor, ...]]:
        """Split a weight [N, K] into rows quantized at a time, with their targets if these differ."""
        method, chunks = task.method, self._chunks(weight)
        assert method is not None
        clips = math.isfinite(task.reach)
        if stats is None:
            return [(rows.clamp(-task.reach, task.reach) if clips else rows,) for rows in chunks]
        if not clips and not method.changes_target(stats):
            return [(rows,) for rows in chunks]

        def with_target(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            target = method.target(rows.to(torch.float32), stats)
            return rows, target.clamp(-task.reach, task.reach) if clips else target

        what = repr(task.source.name)
        found = self.workers.map(lambda rows: in_pieces(with_target, [rows], what), chunks)
        return [piece for pieces in found for piece in pieces]

    def solve_alike(
        self, name: str, tasks: Mapping[str, Task], share: Sequence[tuple[int, ReadInputs]]
    ) -> "dict[str, Quantized]":
        """Quantize linears that share an input; `share` are functions that read this rank's part of it.

        With each comes the number of its run, the inputs whose Hessian is summed separately.
        `name` names the input in errors.
        """
        jobs = [(name, run, read) for run, read in share]
        hessians = self.hessians_of_all(_read_piece, jobs)

        learning = [task for task in tasks.values() if task.method is not None and task.method.refine]
        self.seen.update({task.source.name: replace(hessians[name], input_error=None) for task in learning})

        def solve(own_tasks: Mapping[str, Task]) -> dict[str, Quantized]:
            stats = self.prepare(hessians, {name: needs_of(own_tasks.values())})[name]
            hessians.clear()
            return self.solve(own_tasks, dict.fromkeys(own_tasks, stats))

        return self.divide(tasks, solve)

    def divide(
        self, tasks: Mapping[str, Task], solve: "Callable[[Mapping[str, Task]], dict[str, Quantized]]"
    ) -> "dict[str, Quantized]":
        """Let each rank `solve` its share of `tasks`; return the results of all ranks."""
        names = list(tasks)
        own_tasks = {names[at]: tasks[names[at]] for at in self.ranks.share(len(names))}
        return self.exchange(tasks, solve(own_tasks) if own_tasks else {})

    def exchange(
        self, tasks: Mapping[str, Task], results: "Mapping[str, Quantized]"
    ) -> "dict[str, Quantized]":
        """Return the results of all ranks for `tasks`; `results` are those of this rank."""
        records = [
            Record(dict(one.packed.parts()), {"name": name, "detail": one.detail})
            for name, one in results.items()
        ]
        found: dict[str, Quantized] = {}
        for record in self.ranks.gather_records(records, self.device):
            task = tasks[record.facts["name"]]
            assert task.scheme is not None
            shape = (task.source.shape[0], task.source.shape[1])
            packed = PackedTensor.from_parts(record.tensors, task.scheme, shape)
            found[record.facts["name"]] = Quantized(packed, record.facts["detail"])
        return found

    def weight(self, name: str) -> torch.Tensor:
        """Return the weight to quantize: as stored, with the scales of features and rows applied."""
        weight = self.read(name)
        return self.factors[name].apply(weight) if name in self.factors else weight

    def _chunks(self, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(weight, chunk_rows(weight.shape[1], self.device))

    def fit(self, task: Task, weight: torch.Tensor, stats: LinearStats | None) -> TensorParameters:
        """Fit the parameters that all rows of a weight share, such as a code book."""
        assert task.scheme is not None and task.method is not None
        if task.shared is not None:
            return task.shared
        method, search = task.method, task.method.scale_search

        def target(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
            for rows in self._chunks(tensor):
                yield rows if stats is None else method.target(rows.to(torch.float32), stats)

        def beside() -> Iterator[torch.Tensor]:
            for other in task.beside:
                yield from target(self.weight(other.name))

        rows, columns = weight.shape
        with naming(repr(task.source.name)):
            return fit_parameters(
                lambda: target(weight), (rows, columns), task.scheme, search.fit, search.fit_tensor, beside
            )


def named_piece(
    name: str,
    run: int,
    inputs: torch.Tensor,
    original: torch.Tensor | None = None,
    *,
    find_largest: bool = False,
) -> Named:
    """Make a `Piece` of inputs [T, K], any float dtype, of the linear `name`.

    `run` is the number of its run, inputs whose Hessian is summed separately. `original` [T, K] are the
    original's inputs. Raises `FormatError` for NaN or infinity.
    `find_largest` also computes the largest magnitudes, which only scalings need.
    """
    check_finite(inputs, name)
    return name, Piece(run, inputs, original, find_largest)


def _read_piece(job: tuple[str, int, ReadInputs]) -> list[Named]:
    name, run, read = job
    return [named_piece(name, run, *read())]


def _record(name: str, part: HessianSum) -> Record:
    tensors = {"strips": part.strips, "largest": part.largest, "input_error": part.input_error}
    present = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    return Record(present, [name, part.first, part.last, part.tokens, part.columns])


def _rows(
    rows: torch.Tensor,
    target: torch.Tensor | None = None,
    *,
    task: Task,
    parameters: TensorParameters,
    stats: LinearStats | None,
) -> CalibratedRows:
    assert task.scheme is not None and task.method is not None
    with naming(repr(task.source.name)):
        if stats is None:
            return CalibratedRows(quantize_rows(rows, task.scheme, task.method, parameters), 0.0, 0.0)
        return quantize_calibrated_rows(rows, task.scheme, task.method, parameters, stats, target)


@dataclass(frozen=True, eq=False)
class Quantized:
    """Quantized linear: the packed parts, and the manifest entry."""

    packed: PackedTensor
    detail: dict[str, Any]

    @classmethod
    def of(
        cls,
        chunks: Sequence[CalibratedRows],
        parameters: TensorParameters,
        task: Task,
        stats: LinearStats | None,
    ) -> "Quantized":
        assert task.scheme is not None and task.method is not None
        rows = [chunk.rows for chunk in chunks]
        shape = (task.source.shape[0], task.source.shape[1])
        detail: dict[str, Any] = {
            "squared": [sum(row.squared_error for row in rows), sum(row.squared_norm for row in rows)]
        }
        if stats is not None:
            detail["output"] = [
                sum(chunk.output_error for chunk in chunks),
                sum(chunk.output_energy for chunk in chunks),
            ]
            detail["damping"] = None if stats.factor is None else stats.factor.damping
            detail["note"] = task.method.note(stats)
        return cls(packed_rows(rows, parameters, task.scheme, shape), detail)

    def part(self, name: str, task: Task) -> torch.Tensor:
        """Return the part `name` to store, packed or from `task.known`."""
        if name in task.known:
            return task.known[name]
        found = self.packed.part(name)
        assert found is not None
        return found

    def learned(
        self, packed: PackedTensor, weight: torch.Tensor, inputs: Hessian, block_error: Sequence[float]
    ) -> "Quantized":
        """Return this linear with learned codes.

        `weight` is the weight that was quantized, `inputs` the Hessian of its inputs.
        """
        errors = weight.float() - packed.dequantize()
        detail = {
            **self.detail,
            "squared": [float(errors.double().square().sum()), self.detail["squared"][1]],
            "output": [inputs.output_energy(errors), self.detail["output"][1]],
            "block_error": list(block_error),
        }
        return Quantized(packed, detail)

    def line(self, module: str) -> str:
        """Return text for the progress line: the name `module`, and the relative error of its outputs.

        Also the damping, if the Hessian was factored with one. Only the name if no error was measured.
        """
        if "output" not in self.detail:
            return module
        error, energy = self.detail["output"]
        damping = self.detail["damping"]
        factored = "" if damping is None else f", damping {damping:g}"
        return f"{module} (error {error / energy if energy else 0:.1e}{factored})"


def packed_of(files: Checkpoint, task: Task) -> PackedTensor:
    """Return the packed tensor of a task from its work file."""
    assert task.scheme is not None
    shape = (task.source.shape[0], task.source.shape[1])
    stored = task.scheme.storage_shapes(shape)
    parts = {
        part: files.read(spec.name).view(stored[part][0]).reshape(stored[part][1])
        for part, spec in task.parts
        if part in task.scheme.part_names
    }
    return PackedTensor.from_parts(parts, task.scheme, shape)


def merged(
    matrices: Mapping[str, Mapping[str, Any]], notes: Sequence[str], tokens: Sequence[int] | None
) -> dict[str, Any]:
    """Merge the details of all matrices of a module; add `notes` and the token counts of experts."""
    details = list(matrices.values())
    found: dict[str, Any] = {
        "squared": [sum(pair) for pair in zip(*(one["squared"] for one in details), strict=True)]
    }
    own: dict[str, list[str]] = {}
    for name, detail in matrices.items():
        if detail.get("note") is not None:
            own.setdefault(detail["note"], []).append(name)
    texts = [text if len(matrices) == 1 else f"{first_of(names)}: {text}" for text, names in own.items()]
    found["note"] = "; ".join([*texts, *notes]) or None
    if "output" not in details[0]:
        return found
    found["output"] = [sum(pair) for pair in zip(*(one["output"] for one in details), strict=True)]
    # A linear with learned rounding is the only matrix of its module.
    found["block_error"] = details[0].get("block_error")
    dampings = [one["damping"] for one in details if one["damping"] is not None]
    found["damping"] = max(dampings, default=None)
    if tokens is not None:
        found["expert_tokens"] = list(tokens)
    return found
