"""Quantizing with calibration data: block by block, each with the inputs that the quantized blocks before it
make.

The linears of a block are quantized in the order they run, those with one input together. In memory are the
weights of one block, twice where a method corrects for drift, and the hidden states of all samples. A
finished block goes to a work file in the output directory, from which the shards take its bytes once all
blocks are done.

A run that was interrupted continues after its last finished block. Hidden states are stored from time to
time; blocks that were finished since are run again with their stored weights, which gives the same bits.

Arithmetic on a CPU is in float32, in workers of one thread each whose results are put together in one order:
what is stored depends neither on their number nor on where a run was interrupted.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from quantkit.calibrate.calibrated import (
    CHUNK_ROWS,
    CalibratedRows,
    Inputs,
    quantize_calibrated_rows,
    stored_nearest,
)
from quantkit.calibrate.methods import QuantizedRows, quantize_rows
from quantkit.calibrate.moments import Moments, check_finite, drift, gram
from quantkit.calibrate.parameters import TensorParameters, fit_parameters
from quantkit.calibrate.samples import Samples, micro_batch
from quantkit.calibrate.scaling import Consumer, candidates, output_error
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.checkpoint.writer import OutputDirectory
from quantkit.errors import FormatError, UsageError
from quantkit.model.blocks import Block, Decoder, Forwards, set_weight, stages_of
from quantkit.model.folding import FOLDABLE, FOLDS, Factors, Fold, fold_into, shared_rows
from quantkit.model.plan import Plan, Task
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor, store_zero_points

#: Workers by device: a CPU has one per core.
BATCH = {"cpu": 4, "cuda": 8}
#: Seconds after which hidden states are stored again: what an interrupted run has at most to compute anew.
HIDDEN_SECONDS = 30.0
#: Passes are suspended between stages where what they hold then takes at most this part of the free memory.
SUSPENDED_MEMORY = 0.5
#: Hidden states stay on a GPU where they take at most this part of its free memory, and on the host
#: otherwise.
HIDDEN_MEMORY = 0.25

#: Said of a linear whose method scales input features, where it does not.
NOT_SCALED = (
    "its input features are not scaled: quantkit knows no operation of this model that only feeds linears "
    "of this "
    "method and could take the scales"
)

Report = Callable[[int, str], None]


@dataclass(frozen=True)
class BlockTasks:
    """The linears of one block that are quantized with it, by their name inside the block.

    `folds` are where scales of input features go, and `changed` the dense tensors that they change, by
    parameter.
    """

    name: str
    tasks: Mapping[str, Task]
    folds: tuple[Fold, ...] = ()
    changed: Mapping[str, Task] = field(default_factory=dict)

    @property
    def filename(self) -> str:
        """The work file of the block, where block names end in a number as those of a module list do."""
        return f"calibrated-{int(self.name.rpartition('.')[2]):05d}.safetensors"

    @property
    def hidden_filename(self) -> str:
        """The work file of the hidden states after the block."""
        return f"hidden-{int(self.name.rpartition('.')[2]):05d}.safetensors"

    @property
    def specs(self) -> list[TensorSpec]:
        every = (*self.tasks.values(), *self.changed.values())
        return [spec for task in every for spec in task.outputs]


def needs_data(planned: Plan) -> bool:
    """Whether a linear of the plan has a method that takes calibration data."""
    return any(task.method is not None and task.method.needs_data for task in _packing(planned))


def block_tasks(planned: Plan, decoder: Decoder, model_type: str) -> list[BlockTasks]:
    """What is to do in each block up to the last one with a method that takes data.

    `UsageError` where such a method is asked for outside of the blocks, or for experts.
    """
    experts = {layer.linear.module for layer in planned.layers if layer.linear.kind == "experts"}
    block_names = decoder.block_names
    found: list[dict[str, Task]] = [{} for _ in block_names]
    last = -1
    for task in _packing(planned):
        module = task.module
        assert module is not None and task.method is not None
        at = next((i for i, name in enumerate(block_names) if module.startswith(f"{name}.")), None)
        if task.method.needs_data:
            if at is None or module in experts:
                what = "experts" if module in experts else "a linear outside the decoder's blocks"
                raise UsageError(
                    f"{module} is {what}, for which method {task.method.name!r} has no inputs. Choose a "
                    f"method without data for it with a rule, such as --rule '{module}=int8::mse'."
                )
            last = max(last, at)
        if at is not None and module not in experts:
            found[at][module.removeprefix(f"{block_names[at]}.")] = task
    dense = {
        task.source.name: task for shard in planned.shards for task in shard.tasks if task.scheme is None
    }
    blocks = []
    for name, tasks in zip(block_names[: last + 1], found, strict=False):
        folds = _folds(tasks) if model_type in FOLDABLE else ()
        stored = {fold.changed: decoder.stored_name(f"{name}.{fold.changed}") for fold in folds}
        changed = {parameter: dense[one] for parameter, one in stored.items() if one is not None}
        blocks.append(BlockTasks(name, tasks, folds, changed))
    return blocks


def _folds(tasks: Mapping[str, Task]) -> tuple[Fold, ...]:
    """Where all linears that see the features are packed by methods that scale."""

    def scales(name: str) -> bool:
        return name in tasks and tasks[name].method is not None and tasks[name].method.scales  # type: ignore[union-attr]

    return tuple(
        fold
        for fold in FOLDS
        if all(map(scales, fold.consumers)) and (fold.is_norm or fold.producer in tasks)
    )


def work_bytes(blocks: Sequence[BlockTasks], samples: Samples, hidden_size: int) -> int:
    """Bytes of a run's work files, at most: the blocks, and hidden states twice while they are replaced."""
    hidden = samples.tokens.numel() * hidden_size * 4
    return sum(spec.nbytes for block in blocks for spec in block.specs) + 4 * hidden


def compute_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """What activations are computed in: float32, or on a GPU bfloat16 for a model that is stored so."""
    stored = {tensor.dtype for tensor in checkpoint.tensors.values()}
    return torch.bfloat16 if device.type == "cuda" and stored <= {"BF16"} else torch.float32


def quantize_blocks(
    checkpoint: Checkpoint,
    blocks: Sequence[BlockTasks],
    decoder: Decoder,
    output: OutputDirectory,
    samples: Samples,
    workers: ThreadPoolExecutor,
    lanes: int,
    report: Report,
) -> None:
    """Fill the work files of all `blocks` that are not done; `lanes` is the number of `workers`."""
    unfinished = (i for i, block in enumerate(blocks) if block.tasks and not output.is_done(block.filename))
    done = next(unfinished, len(blocks))
    for block in blocks[:done]:
        report(sum(task.source.nbytes for task in block.tasks.values()), block.name)
    if done == len(blocks):
        return
    size = micro_batch(len(samples.tokens), BATCH[decoder.device.type])
    batches = list(torch.split(samples.tokens, size))
    methods = [task.method for block in blocks for task in block.tasks.values()]
    corrects = any(method is not None and method.corrects for method in methods)
    stored = next((i for i in reversed(range(done)) if output.is_done(blocks[i].hidden_filename)), None)
    home = _home(decoder, samples, 2 if corrects else 1)
    if stored is None:
        hidden, modules = decoder.embed(batches, home)
        states = States(hidden, list(hidden) if corrects else None)
    else:
        _, modules = decoder.embed(batches[:1], home)
        states = States.read(output, blocks[stored].hidden_filename, size, home)
    worker = _Worker(checkpoint, decoder, workers, lanes, {})
    for i in range(0 if stored is None else stored + 1, done):
        states = worker.replay(modules[i], blocks[i], states, output)
    kept = None if stored is None else blocks[stored].hidden_filename
    stored_at = time.monotonic()
    for block, module in zip(blocks[done:], modules[done : len(blocks)], strict=True):
        if not block.tasks:
            states = worker.replay(module, block, states, output)
            continue
        states = worker.quantize(module, block, states, output, report)
        if time.monotonic() - stored_at >= HIDDEN_SECONDS and block is not blocks[-1]:
            states.write(output, block.hidden_filename)
            if kept is not None:
                output.discard(kept)
            kept, stored_at = block.hidden_filename, time.monotonic()


def _home(decoder: Decoder, samples: Samples, copies: int) -> torch.device:
    """Where the hidden states stay between blocks. Those before and after a block are there at a time."""
    needed = 2 * copies * samples.tokens.numel() * decoder.hidden_size * decoder.dtype.itemsize
    fits = needed <= HIDDEN_MEMORY * free_memory(decoder.device)
    return decoder.device if fits else torch.device("cpu")


@dataclass(frozen=True, eq=False)
class States:
    """Hidden states [B, T, d] of all micro-batches; those of the original where a method asks for drift."""

    hidden: list[torch.Tensor]
    exact: list[torch.Tensor] | None

    def write(self, output: OutputDirectory, filename: str) -> None:
        """Store them as a work file."""
        named = {"hidden": self.hidden, **({} if self.exact is None else {"exact": self.exact})}
        dtypes = {torch.float32: "F32", torch.bfloat16: "BF16"}
        specs = [
            TensorSpec(name, dtypes[of[0].dtype], (len(of) * len(of[0]), *of[0].shape[1:]))
            for name, of in named.items()
        ]
        with output.shard(filename, specs, {"format": "pt"}) as file:
            for name, of in named.items():
                for at, tensor in enumerate(of):
                    file.write(name, tensor, offset=at * tensor.numel())

    @classmethod
    def read(cls, output: OutputDirectory, filename: str, size: int, device: torch.device) -> "States":
        """Those of a work file, in micro-batches of `size`."""
        files = Checkpoint.of_files([output.path / filename])
        found = {
            name: [part.to(device) for part in torch.split(files.read(name), size)] for name in files.tensors
        }
        return cls(found["hidden"], found.get("exact"))


@dataclass(frozen=True, eq=False)
class _Worker:
    """What working on a block takes; `factors` are those of the block in work, by the stored name of a
    weight.
    """

    checkpoint: Checkpoint
    decoder: Decoder
    workers: ThreadPoolExecutor
    lanes: int
    factors: dict[str, Factors]

    def replay(self, block: Block, todo: BlockTasks, states: States, output: OutputDirectory) -> States:
        """The states after a block that is done or has nothing to do, by its stored weights."""
        given = {}
        if todo.tasks:
            files = Checkpoint.of_files([output.path / todo.filename])
            packed = {name: _packed_of(files, task) for name, task in todo.tasks.items()}
            given = {
                f"{name}.weight": one.to(self.decoder.device).dequantize(self.decoder.dtype)
                for name, one in packed.items()
            }
            for parameter, task in todo.changed.items():
                tensor = files.read(task.outputs[0].name)
                given[parameter] = tensor.to(self.decoder.device, self.decoder.dtype)
        exact = None
        if states.exact is not None:
            twin = self.decoder.twin(block)
            with self.decoder.loaded(twin):
                exact = self._finished(twin, states.exact)
        with self.decoder.loaded(block, given):
            return States(self._finished(block, states.hidden), exact)

    def _finished(self, block: Block, hidden: list[torch.Tensor]) -> list[torch.Tensor]:
        with Forwards(block, hidden, (), self.decoder.device, suspend=False) as forwards:
            return list(self.workers.map(forwards.finish, range(len(hidden))))

    def quantize(
        self, block: Block, todo: BlockTasks, states: States, output: OutputDirectory, report: Report
    ) -> States:
        """Quantize one block into its work file; the states after it."""
        with ExitStack() as stack:
            file = stack.enter_context(output.shard(todo.filename, todo.specs, {"format": "pt"}))
            stack.enter_context(self.decoder.loaded(block))
            calibrated = {n: t for n, t in todo.tasks.items() if t.method is not None and t.method.needs_data}
            details: dict[str, Any] = {}

            def store(finished: Mapping[str, _Quantized]) -> None:
                for name, one in finished.items():
                    task = todo.tasks[name]
                    set_weight(block.module, f"{name}.weight", one.packed.dequantize(self.decoder.dtype))
                    for part, spec in task.parts:
                        found = one.part(part, task)
                        file.write(spec.name, found.cpu().view(spec.torch_dtype))
                    assert task.module is not None
                    details[task.module] = one.detail
                    report(task.source.nbytes, one.line(task.module))

            exact: Forwards | None = None
            # The original's passes first: their block takes the weights before any is replaced.
            suspend = self._suspends(block, states)
            stages = stages_of(block, states.hidden[0].to(self.decoder.device), tuple(calibrated))
            stops = [stage[0] for stage in stages]
            if states.exact is not None:
                twin = self.decoder.twin(block)
                stack.enter_context(self.decoder.loaded(twin))
                exact = stack.enter_context(Forwards(twin, states.exact, stops, self.decoder.device, suspend))
            self.factors.clear()
            for parameter, tensor in self._fold(block, todo, states).items():
                set_weight(block.module, parameter, tensor.to(self.decoder.device, self.decoder.dtype))
                file.write(todo.changed[parameter].outputs[0].name, tensor.cpu())
            free = [name for name in todo.tasks if name not in calibrated]
            store(self._solve({name: todo.tasks[name] for name in free}, None))
            forwards = stack.enter_context(
                Forwards(block, states.hidden, stops, self.decoder.device, suspend)
            )
            for stage in stages:
                tasks = {name: calibrated[name] for name in stage}
                corrects = any(t.method is not None and t.method.corrects for t in tasks.values())
                moments = self._moments(
                    f"{block.name}.{stage[0]}", forwards, exact, len(states.hidden), corrects
                )
                methods = [task.method for task in tasks.values() if task.method is not None]
                inputs = self.workers.submit(Inputs.prepare, moments, methods).result()
                store(self._solve(tasks, inputs))
            scaled = {name for fold in todo.folds for name in fold.consumers}
            for name, task in calibrated.items():
                if task.method is not None and task.method.scales and name not in scaled:
                    assert task.module is not None
                    details[task.module]["note"] = details[task.module]["note"] or NOT_SCALED
            file.detail["layers"] = details
            indices = range(len(states.hidden))
            hidden = list(self.workers.map(forwards.finish, indices))
            return States(hidden, None if exact is None else list(self.workers.map(exact.finish, indices)))

    def _fold(self, block: Block, todo: BlockTasks, states: States) -> dict[str, torch.Tensor]:
        """Choose the scales of a block's input features, in `factors`; the dense tensors they change, by
        parameter.
        """
        changed: dict[str, torch.Tensor] = {}
        stops = [fold.consumers[0] for fold in todo.folds]
        with Forwards(
            block, states.hidden, stops, self.decoder.device, self._suspends(block, states)
        ) as forwards:
            for fold in todo.folds:
                name = f"{block.name}.{fold.consumers[0]}"
                moments = self._moments(name, forwards, None, len(states.hidden), False)
                scales, shared = self._scales(fold, todo, moments)
                if fold.changed in todo.changed:
                    stored = self.checkpoint.read(todo.changed[fold.changed].source.name)
                    changed[fold.changed], exact = fold_into(stored, scales.cpu())
                    # Of a bias only a part of the outputs comes through the rounded values.
                    scales = exact.to(scales.device) if fold.is_norm else scales
                for consumer in fold.consumers:
                    self._multiply(todo.tasks[consumer], Factors(columns=scales[shared]))
                if not fold.is_norm:
                    self._multiply(todo.tasks[fold.producer], Factors(rows=1 / scales))
        return changed

    def _multiply(self, task: Task, by: Factors) -> None:
        known = self.factors.get(task.source.name, Factors())
        self.factors[task.source.name] = Factors(
            known.columns if by.columns is None else by.columns, known.rows if by.rows is None else by.rows
        )

    def _scales(self, fold: Fold, todo: BlockTasks, moments: Moments) -> tuple[torch.Tensor, torch.Tensor]:
        """The best of the candidates, float32 [S], and which of them each input feature has."""
        consumers = []
        tasks = [todo.tasks[name] for name in fold.consumers]
        for task in tasks:
            assert task.scheme is not None and task.method is not None
            weight = self.checkpoint.read(task.source.name).to(self.decoder.device, torch.float32)
            scheme = task.scheme
            if scheme.is_fitted:
                # Fitted once: how weights are spread hardly changes.
                scheme = self._fit(task, weight, None).bind(scheme)
            consumers.append(Consumer(weight, scheme))
        columns = consumers[0].weight.shape[1]
        rows = columns if fold.is_norm else todo.tasks[fold.producer].source.shape[0]
        shared = shared_rows(fold, rows, columns, self.checkpoint.config).to(self.decoder.device)
        method = tasks[0].method
        assert method is not None

        def stored(weights: torch.Tensor, importance: torch.Tensor, scheme: Scheme) -> torch.Tensor:
            shape = (weights.shape[0], weights.shape[1])
            parameters = fit_parameters(lambda: iter([weights]), shape, scheme, method.fit)
            return stored_nearest(weights, importance, scheme, method, parameters)

        tried = candidates(consumers, moments, shared)
        errors = list(
            self.workers.map(lambda one: output_error(consumers, moments, one[shared], stored), tried)
        )
        return tried[errors.index(min(errors))], shared

    def _suspends(self, block: Block, states: States) -> bool:
        """Whether what suspended passes hold fits: hidden states twice, and twice the widest input."""
        shapes = [tuple(p.shape) for _, p in block.module.named_parameters() if p.dim() == 2]
        hidden = states.hidden[0]
        tokens = len(states.hidden) * hidden.shape[0] * hidden.shape[1]
        widest = max((max(shape) for shape in shapes), default=0)
        passes = 1 if states.exact is None else 2
        needed = passes * tokens * 2 * (hidden.shape[-1] + widest) * self.decoder.dtype.itemsize
        return needed <= SUSPENDED_MEMORY * free_memory(self.decoder.device)

    def _moments(
        self, name: str, forwards: Forwards, exact: Forwards | None, count: int, corrects: bool
    ) -> Moments:
        """Run all passes to their next stage; the moments of its inputs, summed in the order of samples."""

        def one(lane: int) -> tuple[int, torch.Tensor, torch.Tensor | None]:
            inputs = forwards.step(lane)
            original = None if exact is None else exact.step(lane)
            check_finite(inputs, name)
            second = gram(inputs)
            if original is None or not corrects:
                return len(inputs), second, None
            return len(inputs), second, drift(original, inputs)

        tokens = 0
        second: torch.Tensor | None = None
        shift: torch.Tensor | None = None
        for count_of, part, drift_part in _in_order(self.workers, one, count, self.lanes):
            tokens += count_of
            second = part if second is None else second.add_(part)
            if drift_part is not None:
                shift = drift_part if shift is None else shift.add_(drift_part)
        assert second is not None
        return Moments(second.div_(tokens), tokens, None if shift is None else shift.div_(tokens))

    def _solve(self, tasks: Mapping[str, Task], inputs: Inputs | None) -> "dict[str, _Quantized]":
        """Quantize some linears that share `inputs`; None for methods without data."""
        weights = {name: self._weight(task.source.name) for name, task in tasks.items()}
        fits = {
            name: self.workers.submit(self._fit, task, weights[name], inputs) for name, task in tasks.items()
        }
        parameters = {name: fit.result() for name, fit in fits.items()}
        chunks = {
            name: [
                self.workers.submit(_rows, rows, task, parameters[name], inputs)
                for rows in torch.split(weights[name], CHUNK_ROWS[self.decoder.device.type])
            ]
            for name, task in tasks.items()
        }
        return {
            name: _Quantized.of([chunk.result() for chunk in chunks[name]], parameters[name], task, inputs)
            for name, task in tasks.items()
        }

    def _weight(self, name: str) -> torch.Tensor:
        """A weight as it is quantized: as stored, or with the scales of its features and rows."""
        weight = self.checkpoint.read(name).to(self.decoder.device)
        return self.factors[name].apply(weight) if name in self.factors else weight

    def _fit(self, task: Task, weight: torch.Tensor, inputs: Inputs | None) -> TensorParameters:
        """What the rows of a weight share."""
        assert task.scheme is not None and task.method is not None
        method = task.method

        def target(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
            for rows in torch.split(tensor, CHUNK_ROWS[self.decoder.device.type]):
                yield rows if inputs is None else inputs.target(rows.to(torch.float32), method)

        def beside() -> Iterator[torch.Tensor]:
            for other in task.beside:
                yield from target(self._weight(other.name))

        try:
            rows, columns = weight.shape
            return fit_parameters(
                lambda: target(weight), (rows, columns), task.scheme, method.fit, method.fit_tensor, beside
            )
        except FormatError as error:
            raise FormatError(f"{task.source.name!r}: {error}") from error


def free_memory(device: torch.device) -> int:
    """Bytes free on a device, what torch holds for reuse included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return int(psutil.virtual_memory().available)


def _in_order(
    workers: ThreadPoolExecutor, function: Callable[[int], Any], count: int, lanes: int
) -> Iterable[Any]:
    """The results of `function(0)` to `function(count - 1)`, few of them in memory at a time."""
    for at in range(0, count, 2 * lanes):
        yield from workers.map(function, range(at, min(at + 2 * lanes, count)))


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
class _Quantized:
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
    ) -> "_Quantized":
        assert task.scheme is not None and task.method is not None
        rows: list[QuantizedRows] = [chunk.rows for chunk in chunks]
        scales = [row.scale for row in rows if row.scale is not None]
        zeros = [row.zero_point for row in rows if row.zero_point is not None]
        words = torch.cat([row.words for row in rows])
        shared = {name: part.to(words.device) for name, part in parameters.parts(task.scheme).items()}
        parts = {
            "packed": words,
            "scale": torch.cat(scales) if scales else None,
            "zero_point": store_zero_points(torch.cat(zeros), task.scheme) if zeros else None,
            **shared,
        }
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
        return cls(PackedTensor.from_parts(parts, task.scheme, shape), detail)

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


def _packed_of(files: Checkpoint, task: Task) -> PackedTensor:
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


def _packing(planned: Plan) -> Iterator[Task]:
    """The tasks that pack a linear."""
    for shard in planned.shards:
        yield from (task for task in shard.tasks if task.scheme is not None)
