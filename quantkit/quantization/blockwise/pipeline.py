"""Quantize with calibration data, block by block: each on the outputs of the quantized blocks before it.

The linears of a block are quantized in the order they run; linears with one input together. In memory are the
weights of one block, twice if a step needs the original, and the hidden states of all samples. A finished
block goes to a work file in the output directory, from which the shards copy it at the end.

An interrupted run resumes after its last finished block. Hidden states are stored from time to time. Later
finished blocks run again with their stored weights, which gives the same bits.

On a CPU, arithmetic is in float32, in workers of one thread each. Results are combined in a fixed order, so
the stored bytes depend neither on the number of workers nor on interruptions.

Several ranks (`model/distributed.py`) each run their share of the samples and quantize their share of the
linears. Hessians are summed as in one process, and all ranks see the same quantized weights. So the stored
bytes do not depend on the number of ranks.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quantkit.calibrate.data.samples import Samples, micro_batch
from quantkit.calibrate.hessian import run_of
from quantkit.calibrate.linear_stats import OF_ORIGINAL
from quantkit.checkpoint.output.work_files import WorkFiles
from quantkit.checkpoint.source import Checkpoint
from quantkit.memory import free_share, trim_cache
from quantkit.model.blocks import Block, Decoder, set_weight
from quantkit.model.distributed import Ranks, Record
from quantkit.model.forward.model_pass import ModelPass
from quantkit.model.hidden_states import choose_home
from quantkit.progress import Advance
from quantkit.quantization.blockwise.awq import scale_features
from quantkit.quantization.blockwise.block_output import BlockOutput, Coverage
from quantkit.quantization.blockwise.block_tasks import BlockTasks, weight_of
from quantkit.quantization.blockwise.input_groups import Forwards, Stages, inputs_of_calls, stages_of
from quantkit.quantization.blockwise.layer_quantizer import Quantized, ReadInputs, Solver, packed_of
from quantkit.quantization.blockwise.moe_calibration import Routed, call_tensors, coverage, quantize_experts
from quantkit.quantization.blockwise.refine_block import learn_rounding
from quantkit.quantization.blockwise.rounded_inputs import rounded_inputs
from quantkit.quantization.blockwise.states import States
from quantkit.quantization.task import Task, needs_of

#: Limits of a micro-batch: samples by device, tokens, and tokens times the features of the widest linear, as
#: an MLP holds several such tensors.
BATCH = {"cpu": 4, "cuda": 8}
BATCH_TOKENS = 8192
BATCH_FEATURES = 1 << 27
#: Samples per micro-batch while rounding is learned: each core of a CPU runs one micro-batch per step.
LEARNING_BATCH = {"cpu": 1, "cuda": 8}
#: Seconds between storing hidden states, which are gigabytes. After an interruption, blocks finished since
#: then only run again, which takes a fraction of that time.
HIDDEN_SECONDS = 120.0
#: Passes are suspended between stages if their tensors take at most this part of the free memory. A GPU runs
#: them again faster than it could hold them.
SUSPENDED_MEMORY = {"cpu": 0.5, "cuda": 0.0}
#: Part of the free memory for experts in progress.
EXPERTS_MEMORY = 0.25
#: Linears without data that are quantized together.
FREE = 16
#: True to read the weights of the next block while one is in progress: a GPU leaves the host time for it.
READS_AHEAD = {"cpu": False, "cuda": True}


def compute_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Return the dtype of activations: float32, or bfloat16 on a GPU for a model stored in bfloat16."""
    stored = {tensor.dtype for tensor in checkpoint.tensors.values()}
    return torch.bfloat16 if device.type == "cuda" and stored <= {"BF16"} else torch.float32


def quantize_blocks(
    blocks: Sequence[BlockTasks],
    decoder: Decoder,
    output: WorkFiles,
    samples: Samples,
    workers: ThreadPoolExecutor,
    lanes: int,
    ranks: Ranks,
    report: Advance,
) -> None:
    """Fill the work files of all unfinished `blocks`; `lanes` is the number of `workers`."""
    finished = [block for block in blocks if not block.tasks or output.is_done(block.filename)]
    for block in finished:
        report(sum(task.source.nbytes for task in block.tasks.values()), block.name)
    if len(finished) == len(blocks):
        return
    shapes = [task.source.shape for block in blocks if not block.is_head for task in block.tasks.values()]
    batches = _micro_batches(samples, blocks, max(map(max, shapes), default=1), decoder.device)
    runs_of_all = [run_of(at, len(batches)) for at in range(len(batches))]
    share = [at for at, run in enumerate(runs_of_all) if run in ranks.share(runs_of_all[-1] + 1)]
    runs = tuple(runs_of_all[at] for at in share)
    own_batches = [(batches[at], samples.beside[at] if samples.beside else None) for at in share]
    runs_original = bool(OF_ORIGINAL & needs_of(task for block in blocks for task in block.tasks.values()))
    stored = next((block for block in blocks if output.is_done(block.hidden_filename)), None)
    # For experts, every rank gets the calls of all samples.
    experts = samples.tokens.numel() if any(block.experts for block in blocks) else 0
    tokens = (len(own_batches) * batches[0].numel() + experts) * (2 if runs_original else 1)
    needed = tokens * decoder.hidden_size * decoder.dtype.itemsize
    columns = max((columns for _, columns in shapes), default=1)
    home = choose_home(needed, columns, decoder.device, ranks, output.path)
    worker = _Worker(decoder, Solver(decoder.read, decoder.device, workers, lanes, ranks), samples.digest)
    with decoder.passes() as start:
        states = States(
            runs,
            home,
            list(workers.map(lambda one: start(one[0], home, beside=one[1]), own_batches)),
            list(workers.map(lambda one: start(one[0], home, beside=one[1]), own_batches))
            if runs_original
            else None,
        )
        if stored is not None:
            states.read(output, stored.hidden_filename, share)
        worker.run(blocks, states, len(batches), output, report)


def _micro_batches(
    samples: Samples, blocks: Sequence[BlockTasks], widest: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Split the tokens into micro-batches, int64 [B, T]; `widest` is the most features of a linear."""
    if samples.beside:
        return torch.split(samples.tokens, 1)
    refines = any(block.refined for block in blocks)
    return torch.split(samples.tokens, batch_size(samples.tokens.shape, refines, widest, device.type))


def batch_size(shape: Sequence[int], refines: bool, widest: int, kind: str) -> int:
    """Return the samples per micro-batch, for samples of `shape` [count, length] on a kind of device."""
    count, length = shape
    tokens = min(BATCH_TOKENS, BATCH_FEATURES // widest)
    return micro_batch(count, max(1, min((LEARNING_BATCH if refines else BATCH)[kind], tokens // length)))


@dataclass(frozen=True, eq=False)
class _Worker:
    """Quantizer of decoder blocks: decoder, solver and seed."""

    decoder: Decoder
    solver: Solver
    #: Seed of all random numbers in a block.
    seed: str

    def run(
        self, blocks: Sequence[BlockTasks], states: States, count: int, output: WorkFiles, report: Advance
    ) -> None:
        """Fill the unfinished work files; `count` is the number of micro-batches of all ranks."""
        ranks, by_name = self.solver.ranks, {block.name: block for block in blocks}
        missing = {block.name for block in blocks if block.tasks and not output.is_done(block.filename)}
        kept = next((one.hidden_filename for one in blocks if output.is_done(one.hidden_filename)), None)
        stored_at = time.monotonic()
        while missing:
            name = ranks.broadcast(lambda: states.block)
            if name is None:
                for one in sorted(missing):
                    self.quantize_idle(by_name[one].without(by_name[one].tasks.keys()), output, report)
                return
            todo = by_name.get(name, BlockTasks(name, {}))
            block = self.decoder.block(name)
            if name not in missing:
                self.replay(block, todo, states, output)
                continue
            missing.remove(name)
            if todo.is_head:
                self.quantize_head(todo, states, output, report)
                continue
            if READS_AHEAD[self.decoder.device.type] and (following := _following(blocks, todo)):
                self.decoder.read_ahead(self.decoder.block(following))
            self.quantize(block, todo, states, output, report)
            trim_cache(self.decoder.device)
            late = time.monotonic() - stored_at >= HIDDEN_SECONDS
            plain = ranks.broadcast(lambda: states.are_plain)
            if any(ranks.all_gather(late)) and plain and missing:
                states.write(output, todo.hidden_filename, count, ranks)
                if kept is not None:
                    output.discard(kept)
                kept, stored_at = todo.hidden_filename, time.monotonic()

    def replay(self, block: Block, todo: BlockTasks, states: States, output: WorkFiles) -> None:
        """Run the passes through a block that is finished or has no tasks, with its stored weights."""
        weights = todo.kept_weights()
        if todo.tasks:
            files = Checkpoint.of_files([output.path / todo.filename])
            for parameter in {part.parameter for part in todo.parts.values()}:
                weights[parameter] = self.decoder.empty(f"{block.name}.{parameter}")
            for name, task in todo.tasks.items():
                weight = packed_of(files, task).to(self.decoder.device).dequantize(self.decoder.dtype)
                part = todo.parts.get(name)
                if part is None:
                    weights[weight_of(name)] = weight
                else:
                    part.of(weights[part.parameter]).copy_(weight)
            for parameter, task in todo.changed.items():
                tensor = files.read(task.outputs[0].name)
                weights[parameter] = tensor.to(self.decoder.device, self.decoder.dtype)
        if states.exact is not None:
            twin = self.decoder.duplicate(block)
            with self.decoder.loaded(twin):
                self._finish(twin, states.exact)
        with rounded_inputs(block, todo), self.decoder.loaded(block, weights):
            self._finish(block, states.passes)

    def _finish(self, block: Block, passes: Sequence[ModelPass]) -> None:
        with Forwards(block, passes, (), suspend=False) as forwards:
            list(self.solver.workers.map(forwards.finish, range(len(passes))))

    def quantize(
        self, block: Block, todo: BlockTasks, states: States, output: WorkFiles, report: Advance
    ) -> None:
        """Quantize a block to its work file; run `states.passes` through it, `exact` through the original."""
        device = self.decoder.device
        with ExitStack() as stack:
            file = stack.enter_context(output.shard(todo.filename, todo.specs, {"format": "pt"}))
            finished = BlockOutput(file, todo, report)
            # Duplicate the module before it has weights, which would be copied too.
            twin = None if states.exact is None else self.decoder.duplicate(block)
            stack.enter_context(rounded_inputs(block, todo))
            stack.enter_context(self.decoder.cached(block))
            stack.enter_context(self.decoder.loaded(block, todo.kept_weights()))

            # Linears with learned rounding are written after all of the block is quantized.
            learning: dict[str, Quantized] = {}

            def store(quantized: Mapping[str, Quantized]) -> None:
                for name, one in quantized.items():
                    self._set(block, todo, name, one.packed.dequantize(self.decoder.dtype))
                learning.update({name: quantized[name] for name in todo.refined if name in quantized})
                finished.write({name: one for name, one in quantized.items() if name not in learning})

            # The original's passes run first, because its block borrows the weights before any is replaced.
            suspend = self._suspends(block, states)
            stages, repeated, idle = self._stages(block, todo, states)
            todo = finished.todo = todo.without(idle)
            calibrated = todo.calibrated
            stops = [stage[0] for stage in stages]
            exact: Forwards | None = None
            if states.exact is not None and twin is not None:
                stack.enter_context(self.decoder.loaded(twin))
                exact = stack.enter_context(Forwards(twin, states.exact, stops, suspend))
            self.solver.factors.clear()
            for parameter, tensor in scale_features(
                block, todo, states, self.solver, self.decoder.config
            ).items():
                set_weight(block.module, parameter, tensor.to(device, self.decoder.dtype))
                file.write(todo.changed[parameter].outputs[0].name, tensor.cpu())
            self._without_data(todo, store)
            covered: dict[str, Coverage] = {}
            lanes, run = range(len(states.passes)), self.solver.workers.map
            for name in repeated:
                store(self._repeated(block, twin, name, calibrated[name], states))
            with Forwards(block, states.passes, stops, suspend) as forwards:
                for stage in stages:
                    if stage[0] in todo.experts:
                        covered |= self._experts(block, twin, stage[0], todo, forwards, exact, states, store)
                    else:
                        tasks = {name: calibrated[name] for name in stage}
                        share = _reading(forwards, exact, states.runs, tasks)
                        store(self.solver.solve_alike(f"{block.name}.{stage[0]}", tasks, share))
                if not learning:
                    list(run(forwards.finish, lanes))
            original = None if exact is None else list(run(exact.finish, lanes))
            if learning:
                assert original is not None, "refinements need the original's states"
                finished.write(self._learned(block, todo, learning, states.passes, original, report))
                self._finish(block, states.passes)
            finished.close(covered)

    def _stages(self, block: Block, todo: BlockTasks, states: States) -> Stages:
        """Return the stages of linears and experts with data, in the order in which rank 0 runs them."""
        experts = [module for module in todo.experts if todo.of_experts(module)]
        linears = [name for name in todo.calibrated if name not in todo.parts]

        def stages() -> Stages:
            with states.passes[0].loaded() as call:
                return stages_of(block, call, (*linears, *experts), alone=experts)

        found: Stages = self.solver.ranks.broadcast(stages)
        return found

    def _repeated(
        self, block: Block, twin: Block | None, name: str, task: Task, states: States
    ) -> dict[str, Quantized]:
        """Quantize a linear that runs several times in a pass, by the inputs of all its calls."""
        corrects = "input_error" in task.needs

        def read(lane: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            inputs = inputs_of_calls(block, states.passes[lane], name)
            if twin is None or states.exact is None or not corrects:
                return inputs, None
            return inputs, inputs_of_calls(twin, states.exact[lane], name)

        share = [(run, partial(read, lane)) for lane, run in enumerate(states.runs)]
        return self.solver.solve_alike(block.full(name), {name: task}, share)

    def _without_data(self, todo: BlockTasks, store: Callable[[Mapping[str, Quantized]], None]) -> None:
        """Quantize the linears whose methods take no data, or that do not run, a few at a time."""
        calibrated = todo.calibrated
        names = [name for name in todo.tasks if name not in calibrated]
        for at in range(0, len(names), FREE):
            tasks = {name: todo.tasks[name] for name in names[at : at + FREE]}
            store(self.solver.divide(tasks, lambda own_tasks: self.solver.solve(own_tasks, {})))

    def _learned(
        self,
        block: Block,
        todo: BlockTasks,
        found: Mapping[str, Quantized],
        inputs: Sequence[ModelPass],
        targets: Sequence[torch.Tensor],
        report: Advance,
    ) -> dict[str, Quantized]:
        """Learn the rounding of linears `found` for outputs `targets` of `inputs`; set it in the block."""
        weights = {name: self.solver.weight(todo.tasks[name].source.name) for name in found}
        learned = learn_rounding(
            block,
            {name: todo.refined[name].start(weights[name], one.packed) for name, one in found.items()},
            inputs,
            targets,
            self.solver,
            f"{self.seed} {block.name}",
            lambda step: report(0, f"{block.name}, {step}"),
        )
        errors = (learned.error_before, learned.error)
        hessians = {name: self.solver.seen.pop(todo.tasks[name].source.name) for name in found}
        return {
            name: one.learned(learned.packed[name], weights[name], hessians[name], errors)
            for name, one in found.items()
        }

    def quantize_idle(self, todo: BlockTasks, output: WorkFiles, report: Advance) -> None:
        """Quantize a block without data into its work file: it does not run on tokens, or needs none."""
        self.solver.factors.clear()
        with output.shard(todo.filename, todo.specs, {"format": "pt"}) as file:
            finished = BlockOutput(file, todo, report)
            self._without_data(todo, finished.write)
            finished.close({})

    def quantize_head(
        self,
        todo: BlockTasks,
        states: States,
        output: WorkFiles,
        report: Advance,
    ) -> None:
        """Quantize the lm_head into its work file, by its inputs in passes that wait before it."""
        if not todo.calibrated:
            return self.quantize_idle(todo, output, report)
        exact = states.exact
        (task,) = todo.tasks.values()
        assert task.method is not None
        corrects, device = "input_error" in task.needs, self.decoder.device
        rounds = None if task.scheme is None else task.scheme.activations

        def read(lane: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            hidden = states.passes[lane].call.hidden.to(device).flatten(0, -2)
            original = None if exact is None or not corrects else exact[lane].call.hidden.to(device)
            hidden = hidden if rounds is None else rounds.round(hidden)
            return hidden, None if original is None else original.flatten(0, -2)

        self.solver.factors.clear()
        with output.shard(todo.filename, todo.specs, {"format": "pt"}) as file:
            finished = BlockOutput(file, todo, report)
            share = [(run, partial(read, lane)) for lane, run in enumerate(states.runs)]
            finished.write(self.solver.solve_alike(todo.name, todo.tasks, share))
            finished.close({})

    def _experts(
        self,
        block: Block,
        twin: Block | None,
        name: str,
        todo: BlockTasks,
        forwards: Forwards,
        exact: Forwards | None,
        states: States,
        store: Callable[[Mapping[str, Quantized]], None],
    ) -> dict[str, Coverage]:
        """Quantize the experts in module `name`, `store` them; return token counts and notes, by module."""
        home, ranks = states.home.device, self.solver.ranks
        tasks = todo.of_experts(name)
        corrects = "input_error" in needs_of(tasks.values())
        experts: Any = block.module.get_submodule(name)

        def call(lane: int) -> Record:
            inputs = forwards.step(lane)
            original = None if exact is None else exact.step(lane)[0]
            found = call_tensors(experts, inputs, original if corrects else None)
            return Record({key: one.to(home) for key, one in found.items()})

        # An expert has few tokens on each rank, so all go to the rank that quantizes it.
        calls = list(self.solver.in_order(call, range(len(states.passes))))
        calls = [record.tensors for record in ranks.gather_records(calls, home)]
        full = f"{block.name}.{name}"
        routed = Routed.of(
            [tuple(one for key, one in found.items() if key != "original") for found in calls],
            [found["original"] for found in calls if "original" in found],
            full,
        )
        del calls
        originals: Any = None if twin is None else twin.module.get_submodule(name)
        free_bytes = int(EXPERTS_MEMORY * free_share(self.decoder.device, ranks.on_host))
        quantize_experts(self.solver, experts, originals, name, todo, routed, free_bytes, store)
        widths = {task.module: task.source.shape[1] for task in tasks.values() if task.module is not None}
        return {module: coverage(routed, todo.experts[name], width) for module, width in widths.items()}

    def _set(self, block: Block, todo: BlockTasks, name: str, weight: torch.Tensor) -> None:
        """Set `weight` as the weight of a linear, or of a matrix of experts."""
        part = todo.parts.get(name)
        if part is None:
            set_weight(block.module, weight_of(name), weight)
            self.decoder.drop(todo.tasks[name].source.name)
        else:
            part.of(block.module.get_parameter(part.parameter)).copy_(weight)

    def _suspends(self, block: Block, states: States) -> bool:
        """Return True if suspended passes fit in free memory: per token 2 * (hidden size + widest input)."""
        shapes = [tuple(p.shape) for _, p in block.module.named_parameters() if p.dim() == 2]
        tokens = states.tokens
        widest = max((max(shape) for shape in shapes), default=0)
        passes = 1 if states.exact is None else 2
        needed = passes * tokens * 2 * (self.decoder.hidden_size + widest) * self.decoder.dtype.itemsize
        device = self.decoder.device
        return needed <= SUSPENDED_MEMORY[device.type] * free_share(device, self.solver.ranks.on_host)


def _following(blocks: Sequence[BlockTasks], todo: BlockTasks) -> str | None:
    """Return the name of the block that probably runs after `todo`: the next of `blocks`, or None."""
    names = [block.name for block in blocks if not block.is_head]
    return next(iter(names[names.index(todo.name) + 1 :]), None)


def _reading(
    forwards: Forwards, exact: Forwards | None, runs: Sequence[int], tasks: Mapping[str, Task]
) -> list[tuple[int, ReadInputs]]:
    """Return the run number of each micro-batch, and a function that runs it to its next stage.

    The function returns the inputs of that stage, and its inputs in the original model.
    """
    corrects = "input_error" in needs_of(tasks.values())

    def read(lane: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = forwards.step(lane)[0]
        original = None if exact is None else exact.step(lane)[0]
        return inputs, original if corrects else None

    return [(run, partial(read, lane)) for lane, run in enumerate(runs)]
