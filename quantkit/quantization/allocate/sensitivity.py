"""Measure sensitivity: how far predictions move if a linear is stored in a scheme.

If stored weights W - E replace W, the outputs of a linear change by E x. To second order, the KL divergence
of the model's predictions is then half the mean square of g E x. Here g is the gradient of the log
probability of tokens drawn from the model itself. Its squares are the Fisher information (Martens, "New
insights and perspectives on the natural gradient method", arXiv 1412.1193). Three independences are assumed:
between outputs, between tokens, and between the size of a token's gradient and its spread over outputs. Then
the divergence is, in nats per token,

    1/2 sum_n f_n (E H E^T)_nn,    f_n = mean of g_n^2,    H = mean of |g|^2 x x^T over the mean of |g|^2.

Inputs that a scheme rounds to x - d change all outputs by W d, with d in common. So half the mean of
(g W d)^2 is added, of every token as it is. One forward and one backward pass serve every scheme of every
linear. E is the error of the method on a sample of rows of each weight. Divergences of several linears are
added up; docs/accuracy.md shows how well that predicts.

An expert is a linear for the tokens that chose it; the gradients include the router's weights. Tokens that
would choose it only after rounding of earlier layers are not counted.

Blocks are in memory one at a time, as in calibration, with the hidden states before each of them.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quantkit.calibrate.data.samples import micro_batch
from quantkit.calibrate.hessian import Hessian
from quantkit.calibrate.linear_stats import LinearStats
from quantkit.calibrate.methods import Method
from quantkit.errors import UsageError
from quantkit.memory import trim_cache
from quantkit.model.blocks import Block, Decoder, Logits
from quantkit.model.experts import chosen_rows
from quantkit.model.forward.model_pass import ModelPass
from quantkit.model.forward.trees import mapped
from quantkit.model.hidden_states import Home
from quantkit.packing.activations import ActivationScheme
from quantkit.packing.schemes import Scheme
from quantkit.progress import Progress, counting
from quantkit.quantization.allocate.block_schemes import BlockSchemes
from quantkit.quantization.allocate.fisher import ExpertCall, RoutedGradients, Seen, roundings
from quantkit.quantization.allocate.gradients import Step
from quantkit.quantization.allocate.trials import CALIBRATED_ROWS, ROWS, Run, Sample, Trial, trials_of
from quantkit.quantization.blockwise.block_tasks import weight_of
from quantkit.quantization.blockwise.input_groups import stages_of
from quantkit.quantization.blockwise.input_ranges import Expert, Largest, seeing
from quantkit.workers import working

#: Tokens to measure on, rounded to whole samples. Their hidden states before every block are in memory.
TOKENS = 8192
#: Samples per micro-batch, and logits computed at a time.
BATCH = 4
LOGITS = 1 << 24
#: Fewest rows of each expert's matrix; `ROWS` is divided among the experts.
EXPERT_ROWS = 8
#: Operations of a forward pass in a unit of progress, the time of a quick trial of one linear, by device.
UNIT_OPERATIONS = {"cpu": 3e8, "cuda": 1e11}

Losses = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Sensitivities:
    """Measured losses of linears, and token counts of experts.

    losses         by linear, the loss of each of its schemes: KL divergence of the whole model in nats per
                   token, with all other linears dense
    expert_tokens  by module of fused experts, the number of tokens that chose each
    """

    losses: Losses
    expert_tokens: Mapping[str, tuple[int, ...]]


def measure(
    decoder: Decoder,
    schemes: Mapping[str, Sequence[Scheme]],
    method: Method,
    tokens: torch.Tensor,
    lanes: int,
    report: Progress | None = None,
) -> Sensitivities:
    """Measure the loss of each scheme for each linear or fused parameter of experts, by its name.

    `tokens` are int64 [samples, length]. The result does not depend on `lanes`, the number of single-thread
    workers. Raises `CheckpointError` for a model without blocks, or whose linears do not run exactly once.
    Raises `FormatError` for weights or inputs that are not finite.
    """
    with working(lanes, "sensitivity") as workers:
        return _Measurement(decoder, method, workers, lanes, report).run(schemes, tokens)


class _Measurement:
    """Model, samples and progress of a measurement of sensitivities."""

    def __init__(
        self,
        decoder: Decoder,
        method: Method,
        workers: ThreadPoolExecutor,
        lanes: int,
        report: Progress | None,
    ) -> None:
        self._decoder, self._method, self._workers, self._lanes = decoder, method, workers, lanes
        self._report, self._largest = report, Largest[str | Expert]()
        assert decoder.head_name is not None, "its predictions are needed"
        self._head = decoder.head_name

    def run(self, schemes: Mapping[str, Sequence[Scheme]], tokens: torch.Tensor) -> Sensitivities:
        batches = list(torch.split(tokens, micro_batch(len(tokens), BATCH)))
        # Units of progress: a backward pass takes about as long as two forward.
        blocks = [self._decoder.block(name) for name in self._decoder.block_names]
        block_schemes = {block.name: BlockSchemes.within(block, schemes, self._work) for block in blocks}
        self._units = {
            one.name: self._units_of(one, batches[0].numel())
            for one in (*blocks, self._decoder.block(self._head))
        }
        work = sum(one.work for one in block_schemes.values())
        steps = 3 * len(batches) * sum(self._units.values()) + work
        self._step = counting(steps, self._report)
        self._decoder.check_runs(tokens[:1])
        home, losses, counts = Home(torch.device("cpu")), dict[str, tuple[float, ...]](), {}
        with self._decoder.passes() as start:
            passes = list(self._workers.map(lambda one: start(one, home, grad=True), batches))
            waiting: list[tuple[str, list[Step]]] = []
            while (name := passes[0].block) is not None and name != self._head:
                block = self._decoder.block(name)
                with self._decoder.loaded(block), seeing(block, block_schemes[name].static, self._largest):
                    taken = self._workers.map(lambda one, block=block: self._forward(block, one), passes)
                    waiting.append((name, list(taken)))
            self._predict(waiting, batches)
            while waiting:
                name, steps_of = waiting.pop()
                block = self._decoder.block(name)
                earlier = [
                    [leaf for _, of in waiting for leaf in of[at].leaves] for at in range(len(batches))
                ]
                trim_cache(self._decoder.device)
                with self._decoder.loaded(block):
                    block_sums, routed = self._backward(block, steps_of, earlier, block_schemes[name])
                    for stage, sums in block_sums.items():
                        _add(losses, self._linears(block, stage, sums, block_schemes[name], tokens.numel()))
                    for module, calls in routed.items():
                        experts: Any = block.module.get_submodule(module)
                        found = RoutedGradients.of(experts, block.full(module), calls)
                        _add(losses, self._experts(module, found, block_schemes[name], tokens.numel()))
                        counts[found.name] = found.counts
        for name in schemes:
            if name not in losses:
                raise UsageError(_not_run(name))
        return Sensitivities({name: losses[name] for name in schemes}, dict(sorted(counts.items())))

    def _forward(self, block: Block, one: ModelPass) -> Step:
        found = Step.take(block, one)
        self._step(self._units[block.name], block.name)
        return found

    def _predict(self, steps: Sequence[tuple[str, Sequence[Step]]], batches: Sequence[torch.Tensor]) -> None:
        """Compute the gradients of the hidden states after the last block, and store them as their `grad`.

        `steps` are the forward passes of each block, one per micro-batch, `batches` the tokens of these.
        """
        listed = [(name, of) for name, of in steps if not self._decoder.block(name).is_linear]
        outputs = {name: of[0].output for name, of in listed}
        _, last = listed[-1]

        def gradients(at: int) -> None:
            last[at].hidden.grad = self._drawn(logits, last[at].hidden, batches[at].shape, at)

        with self._decoder.head(outputs) as logits:
            # The random numbers of a micro-batch do not depend on the worker that runs it.
            list(self._workers.map(gradients, range(len(batches))))

    def _drawn(self, logits: Logits, hidden: torch.Tensor, shape: Sequence[int], seed: int) -> torch.Tensor:
        """Return the float32 gradients of the log probability of drawn tokens, at the last hidden states.

        The tokens are drawn from the model. `shape` is [B, T], two axes of `hidden`, the hidden states after
        the last block.
        """
        generator = torch.Generator().manual_seed(seed)
        axis = next(at for at in range(hidden.dim()) if tuple(hidden.shape[at : at + 2]) == tuple(shape))
        flat = hidden.detach().flatten(axis, axis + 1).unsqueeze(axis)
        gradient = torch.empty_like(flat)
        start, step, count = 0, 1, flat.shape[axis + 1]
        while start < count:
            step = min(step, count - start)
            part = flat.narrow(axis + 1, start, step).to(self._decoder.device).requires_grad_()
            with torch.enable_grad():
                scores = logits(part, (1, step))[0].float().log_softmax(-1)
                bounds = scores.detach().exp().cumsum(-1)
                draws = torch.rand(len(scores), 1, generator=generator).to(bounds.device)
                drawn = torch.searchsorted(bounds, draws * bounds[:, -1:]).clamp_max_(bounds.shape[-1] - 1)
                (found,) = torch.autograd.grad(scores.gather(-1, drawn).sum(), part)
            gradient.narrow(axis + 1, start, step).copy_(found)
            # The logits of the first token show the size of the vocabulary.
            start, step = start + step, max(1, LOGITS // bounds.shape[-1])
        self._step(3 * self._units[self._head], "predictions")
        return gradient.view_as(hidden)

    def _backward(
        self,
        block: Block,
        steps: Sequence[Step],
        earlier: Sequence[Sequence[torch.Tensor]],
        schemes: BlockSchemes,
    ) -> tuple[dict[tuple[str, ...], Seen], dict[str, list[ExpertCall]]]:
        """Backpropagate all micro-batches through a block; return sums by group of linears, and expert calls.

        Names are relative to the block. Adds gradients to the leaves in `earlier`.
        """
        modules = (*schemes.linears, *schemes.experts)
        call = mapped(steps[0].call, lambda tensor: tensor.detach().to(self._decoder.device))
        stages, repeated, idle = (
            stages_of(block, call, modules, alone=schemes.experts) if modules else ([], [], [])
        )
        if repeated:
            raise UsageError(_not_once(block.full(repeated[0])))
        if idle:
            raise UsageError(_not_run(block.full(idle[0])))
        sums: dict[tuple[str, ...], Seen] = {}
        routed: dict[str, list[ExpertCall]] = {name: [] for name in schemes.experts}

        def one(at: int) -> tuple[dict[tuple[str, ...], Seen], dict[str, ExpertCall]]:
            return self._pass(block, steps[at], earlier[at], stages, schemes)

        # At most one pass per worker at a time, because the results of a pass are large.
        for at in range(0, len(steps), self._lanes):
            for parts, calls in self._workers.map(one, range(at, min(at + self._lanes, len(steps)))):
                sums = {stage: sums[stage].plus(part) if sums else part for stage, part in parts.items()}
                for name, call_of in calls.items():
                    routed[name].append(call_of)
        return sums, routed

    def _linears(
        self, block: Block, stage: tuple[str, ...], sums: Seen, schemes: BlockSchemes, tokens: int
    ) -> dict[str, tuple[float, ...]]:
        """Return the losses of linears that share an input, by name, one per scheme."""
        stats = None
        if sums.inputs is not None:
            of_inputs = Hessian(sums.inputs.div_(tokens), tokens)
            stats = self._workers.submit(LinearStats.prepare, of_inputs, self._method.needs).result()
        hessian, losses = sums.weighted_hessian(), {}
        alike: dict[tuple[Scheme, ...], list[str]] = {}
        for name in stage:
            alike.setdefault(tuple(schemes.linears[name]), []).append(name)
        for row, names in alike.items():
            weights = {block.full(name): block.module.get_parameter(weight_of(name)) for name in names}
            importance = {block.full(name): sums.squares[name] / tokens for name in names}
            sample = Sample.of(weights, importance, hessian, self._rows)
            found = self._losses(sample, row, stats, self._workers.map)
            for name in names:
                inputs = _of_inputs(sums.rounded[name], row, tokens)
                tried = found[block.full(name)]
                losses[block.full(name)] = tuple(map(sum, zip(tried, inputs, strict=True)))
        return losses

    def _experts(
        self, module: str, routed: RoutedGradients, block_schemes: BlockSchemes, tokens: int
    ) -> dict[str, tuple[float, ...]]:
        """Return the losses of fused experts, by parameter one per scheme, summed over experts.
        `routed` are the calls of `module` with gradients, over `tokens` tokens. Workers share the experts.
        """
        schemes = block_schemes.experts[module]
        rounds = {
            leaf: roundings(row, self._largest_of(f"{routed.name}.{leaf}")) for leaf, row in schemes.items()
        }
        everyone = routed.everyone() if self._method.needs_data else None
        count = len(routed.experts.down_proj)
        rows = max(EXPERT_ROWS, self._rows // count)

        def one(expert: int) -> dict[str, list[float]]:
            losses = {}
            for leaf, sums in routed.seen(expert, rounds).items():
                if leaf not in schemes:
                    continue
                stats = None
                if everyone is not None:
                    stats = LinearStats.prepare(routed.hessian(expert, leaf, everyone), self._method.needs)
                name = f"{routed.name}.{expert}.{leaf}"
                weights, importance = {name: routed.weight(expert, leaf)}, {name: sums.squares[leaf] / tokens}
                inputs = _of_inputs(sums.rounded[leaf], schemes[leaf], tokens)
                sample = Sample.of(weights, importance, sums.weighted_hessian(), rows)
                (tried,) = self._losses(sample, schemes[leaf], stats, map).values()
                losses[leaf] = list(map(sum, zip(tried, inputs, strict=True)))
            return losses

        found = list(self._workers.map(one, range(count)))
        return {
            f"{routed.name}.{leaf}": tuple(map(sum, zip(*(losses[leaf] for losses in found), strict=True)))
            for leaf in schemes
        }

    def _units_of(self, block: Block, tokens: int) -> int:
        """Return the units of progress of a forward pass of `tokens` through a block."""
        weights = sum(one.numel() for one in block.module.parameters())
        return max(1, round(2 * tokens * weights / UNIT_OPERATIONS[self._decoder.device.type]))

    def _work(self, schemes: Sequence[Scheme]) -> int:
        return sum(trial.units for trial in trials_of(schemes, self._method))

    @property
    def _rows(self) -> int:
        return CALIBRATED_ROWS if self._method.needs_data else ROWS

    def _losses(
        self, sample: Sample, schemes: Sequence[Scheme], stats: LinearStats | None, run: Run
    ) -> dict[str, tuple[float, ...]]:
        """Return the losses of each linear of a sample, one per scheme; `run` runs the trials."""

        def stepping(one: Callable[[Trial], tuple[float, ...]], trials: Iterable[Trial]) -> Any:
            def step(trial: Trial) -> tuple[float, ...]:
                found = one(trial)
                self._step(trial.units * len(sample.names), sample.names[0])
                return found

            return run(step, trials)

        return sample.losses(schemes, self._method, stats, stepping)

    def _pass(
        self,
        block: Block,
        step: Step,
        earlier: Sequence[torch.Tensor],
        stages: Sequence[tuple[str, ...]],
        schemes: BlockSchemes,
    ) -> tuple[dict[tuple[str, ...], Seen], dict[str, ExpertCall]]:
        """Run one micro-batch, `step`, forward and backward through a block.

        `earlier` are outputs of earlier blocks that it reads. `stages` are the names of linears that share an
        input, or of experts, and `schemes` those to price. Returns the sums of linears that share an input,
        by group, and the calls of fused experts with the gradients at their outputs, by module.
        """
        inputs: dict[str, tuple[torch.Tensor, ...]] = {}
        outputs: dict[str, torch.Tensor] = {}
        thread = threading.get_ident()

        def keep(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
            def hook(_: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
                # Other workers run the same modules.
                if threading.get_ident() == thread:
                    inputs[name], outputs[name] = given, output

            return hook

        with ExitStack() as stack:
            for name in (name for stage in stages for name in stage):
                handle = block.module.get_submodule(name).register_forward_hook(keep(name))
                stack.callback(handle.remove)
            slopes = step.backward(block, outputs, earlier, self._decoder.device)
        sums = {
            stage: Seen.of(
                block.full(stage[0]),
                inputs[stage[0]][0].detach(),
                {name: slopes[name] for name in stage},
                {name: block.module.get_parameter(weight_of(name)).detach() for name in stage},
                roundings(schemes.of(stage), self._largest_of(block.full(stage[0]))),
                unweighted=self._method.needs_data,
            )
            for stage in stages
            if stage[0] in schemes.linears
        }
        calls = {}
        for name in schemes.experts:
            call, rows = chosen_rows(block.module.get_submodule(name), inputs[name])
            calls[name] = ExpertCall.of(call, slopes[name][rows], block.full(name))
        self._step(2 * self._units[block.name], block.name)
        return sums, calls

    def _largest_of(self, name: str) -> float:
        """Return the largest input of a linear, or of all experts in a fused parameter; 0 if not measured.

        All experts of a layer round by the largest.
        """
        found = self._largest.found.items()
        return max(
            (one for key, one in found if name == (key if isinstance(key, str) else key[0])), default=0.0
        )


def _of_inputs(
    rounded: Mapping[ActivationScheme, float], schemes: Sequence[Scheme], tokens: int
) -> list[float]:
    """Return the loss of the rounded inputs of each scheme, from sums over `tokens`; 0 where they are not."""
    return [0.0 if one.activations is None else 0.5 * rounded[one.activations] / tokens for one in schemes]


def _add(losses: dict[str, tuple[float, ...]], more: Losses) -> None:
    """Add losses of linears; a block that runs several times adds to the same linears."""
    for name, row in more.items():
        before = losses.get(name, (0.0,) * len(row))
        losses[name] = tuple(a + b for a, b in zip(before, row, strict=True))


def _not_once(name: str) -> str:
    return (
        f"{name} runs several times in a pass; sensitivities are measured of linears that run once. Decide "
        f"on it with a rule, such as --rule '{name}=int8'."
    )


def _not_run(name: str) -> str:
    return (
        f"{name} has no sensitivity: it does not run when the model predicts tokens. Decide on it with a "
        f"rule, such as --rule '{name}=int8'."
    )
