"""Train a student by steps of Adam, and store the state that a resumed run goes on from.

Each rank has a student of its own, and computes the gradients of its share of a batch. All ranks add these up
in rank order and make the same step, so that their students stay the same.

    rank 0   sequences 0 to 31    gradients g0   g0 + g1   step
    rank 1   sequences 32 to 63   gradients g1   g0 + g1   step
"""

import logging
import math
import time
import warnings
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from quantkit.errors import EnvironmentProblem
from quantkit.model.distributed import Ranks
from quantkit.quantization.distill.adam import Adam
from quantkit.quantization.distill.compiled_blocks import compiled, is_worth_compiling
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantization.distill.loss import divergence
from quantkit.quantization.distill.pool import Pool
from quantkit.quantization.distill.student import Student
from quantkit.quantization.distill.training_memory import BATCH, CHUNK_WEIGHTS

logger = logging.getLogger("quantkit.model")

#: Most steps in which learning rates rise to their first value.
WARM_UP = 20
#: Steps after which the time of a step is known; the first ones, which are slower, do not count.
MEASURED, COLD = 10, 3
#: Steps between readings of the loss, which wait for a GPU.
READ_EVERY = 10
#: Weight of a step in the mean of the loss.
LATELY = 0.05
#: Field of `DistillOptions` with the learning rate of each kind of number.
RATES = {
    "codes": "code_rate",
    "scale": "scale_rate",
    "zero_point": "scale_rate",
    "column_scale": "scale_rate",
    "norm": "norm_rate",
}


@dataclass
class Reached:
    """Point that a training has reached.

    total     number of all steps; None until the time of a step is known
    loss      mean divergence per token of the last steps, in nats
    seconds   time of a step
    compiled  True if blocks run compiled; None before the first step
    """

    step: int = 0
    total: int | None = None
    loss: float = math.nan
    seconds: float = 0.0
    compiled: bool | None = None

    @property
    def seconds_left(self) -> float:
        """Return the time of the steps to come."""
        return 0.0 if self.total is None else (self.total - self.step) * self.seconds


class Training:
    """Training of a student on a pool; `state` and `at` are all that another process needs to go on."""

    def __init__(
        self, student: Student, pool: Pool, options: DistillOptions, micro: int, ranks: Ranks
    ) -> None:
        """Prepare a training that `ranks` share; `micro` sequences of a batch run at a time on each."""
        self._ranks, self._steps = ranks, options.steps
        self.at = Reached(total=options.steps)
        self.batch = batch_of(options, student.device)
        self.student, self._pool, self._own, self.micro = student, pool, options.own, micro
        self._loss = torch.full((1,), math.nan, device=student.device)
        self._adam = Adam(student.residence)
        self._numbers, self._rates = dict[str, torch.Tensor](), dict[str, float]()
        for name, tensor in student.numbers.items():
            parameter, _, kind = name.rpartition(".")
            rate = getattr(options, RATES[kind]) * student.trained[parameter].steps[kind]
            if rate:
                self._numbers[name], self._rates[name] = tensor, rate
        elements = {name: one.elements for name, one in student.trained.items()}
        parameters = {name: [place.parameter for place in places] for name, places in student.places.items()}
        self._chunks = list(_chunks(elements, parameters))

    def run(self, seconds_left: Callable[[], float], on_step: Callable[[Reached], None]) -> None:
        """Train to the end, and call `on_step` after each step.

        Without a number of steps it is as many as `seconds_left` of rank 0 has room for, once a step is
        measured.
        """
        at, first, started = self.at, self.at.step, time.monotonic()
        with _deterministic(self.student.device), self._compiled() as is_compiled:
            self._record_compiled(is_compiled)
            while at.total is None or at.step < at.total:
                self._step()
                at.step += 1
                if at.step % READ_EVERY == 0 or at.step == at.total:
                    at.loss = float(self._loss)
                    self._check_alike()
                if at.step - first == COLD:
                    started = time.monotonic()
                elif at.step - first > COLD:
                    at.seconds = (time.monotonic() - started) / (at.step - first - COLD)
                if at.total is None and at.step == MEASURED:
                    fitting = self._ranks.broadcast(lambda: int(seconds_left() / at.seconds))
                    at.total = at.step + max(1, fitting)
                on_step(at)

    def _compiled(self) -> AbstractContextManager[bool]:
        """Return a context in which the blocks of both models run compiled, if that pays; it yields if so."""
        if not is_worth_compiling(self.student.device, self._steps):
            return nullcontext(False)
        return compiled(self.student.blocks, self._attempt)

    def _record_compiled(self, is_compiled: bool) -> None:
        """Store that steps run compiled; warn if those before an interruption did not, or the other way."""
        if self.at.compiled not in (None, is_compiled):
            logger.warning(
                "steps before the interruption ran %s torch.compile, those to come run %s: the result is as "
                "good, but not bit for bit that of a run without interruption",
                *(("without", "with") if is_compiled else ("with", "without")),
            )
        self.at.compiled = is_compiled

    def _attempt(self) -> None:
        """Compute the gradients of the step to come, and drop them, or those that a failure leaves."""
        try:
            self._gradients(self._tokens())
        finally:
            for parameter in self.student.weights.leaves:
                self.student.weights.let_go(parameter)

    def _tokens(self) -> torch.Tensor:
        """Return the sequences of the step to come, int64 [B, T]."""
        return self._pool.batch(self.at.step, self.batch, self._own).to(self.student.device)

    def _step(self) -> None:
        loss = self._gradients(self._tokens())
        self._ranks.add_up([loss])
        factor, weights = rate_at(self.at.step, self.at.total), self.student.weights
        # A part of the model that text does not reach has no gradient.
        unreached = set[str].intersection(*map(set, self._ranks.all_gather(weights.unreached())))
        for chunk, done in self._chunks:
            found = {name: weights.gradient(name) for name in chunk if name not in unreached}
            self._ranks.add_up(list(found.values()))
            self._move(found, factor)
            found.clear()
            for parameter in done:
                weights.let_go(parameter)
        self._loss = loss if self.at.step == 0 else self._loss.lerp(loss, LATELY)

    def _gradients(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the mean divergence on `tokens`, [1].

        The gradients of that part are left in the student's weights. They have the dtype of activations: in
        float32 they would take as much as the weights themselves.
        """
        student = self.student
        student.weights.collect()
        total = torch.zeros(1, device=student.device)
        for part in self._parts(tokens):
            target = student.target(part)
            with torch.enable_grad():
                loss = divergence(student.logits(part), target) / tokens.numel()
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _parts(self, tokens: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the micro-batches, int64 [n, T], of this rank's share of the sequences `tokens` [B, T]."""
        share = self._ranks.share(len(tokens))
        return torch.split(tokens[share.start : share.stop], self.micro) if share else ()

    def _check_alike(self) -> None:
        """Raise `EnvironmentProblem` if the students of ranks differ."""
        found = self._ranks.all_gather(self.student.weights.checksum() if self._ranks.size > 1 else 0)
        other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
        if other is not None:
            raise EnvironmentProblem(
                f"after step {self.at.step} ranks 0 and {other} hold different weights, though both made the "
                "same steps: their GPUs or libraries compute differently. Start all ranks on devices of one "
                "kind, with one installation, and start over."
            )

    def _move(self, of_weights: Mapping[str, torch.Tensor], factor: float) -> None:
        """Move the numbers of some linears and norms by Adam, at `factor` times their learning rates.

        `of_weights` are the gradients of their weights, by name.
        """
        with torch.no_grad(), self.student.at_work(of_weights) as trained:
            found = {
                f"{name}.{kind}": gradient
                for name, of_weight in of_weights.items()
                for kind, gradient in trained[name].gradients(of_weight).items()
            }
            moved = {name: gradient for name, gradient in found.items() if name in self._rates}
            numbers = {
                f"{name}.{kind}": tensor
                for name, one in trained.items()
                for kind, tensor in one.numbers.items()
            }
            rates = {name: factor * self._rates[name] for name in moved}
            self._adam.step(numbers, moved, rates, self.at.step + 1)
            for one in trained.values():
                one.clamp()

    @torch.no_grad()
    def measure(self) -> float:
        """Return the mean divergence per token on what is held out, in nats."""
        student, held_out = self.student, self._pool.held_out
        own = [
            float(divergence(student.logits(part), student.target(part)))
            for part in self._parts(held_out.to(student.device))
        ]
        total: float = sum(chain.from_iterable(self._ranks.all_gather(own)))
        return total / held_out.numel()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the numbers, Adam's means of them, and the mean loss, by name."""
        self.student.residence.wait()
        return {"loss": self._loss, **self._numbers, **self._adam.state()}

    def restore(self, read: Callable[[str], torch.Tensor], names: Container[str], at: Reached) -> None:
        """Go on from a state that was stored at `at`; `read` reads its tensors, one at a time, by `names`."""
        self.at, self._loss = at, read("loss").to(self.student.device)
        for name, number in self._numbers.items():
            number.copy_(read(name))
        self._adam.restore(read, [name for name in self._numbers if f"{name}.mean0" in names])
        self.student.update()


def batch_of(options: DistillOptions, device: torch.device) -> int:
    """Return the sequences of a step."""
    return options.batch or BATCH[device.type]


def _chunks(
    elements: Mapping[str, int], parameters: Mapping[str, Collection[str]]
) -> Iterator[tuple[list[str], list[str]]]:
    """Split names into lists of at most `CHUNK_WEIGHTS` numbers, or of one name; `elements` are of each.

    With each list come the parameters that no later one has a part of; `parameters` are those of the names.
    """
    chunks, count = [list[str]()], 0
    for name, size in elements.items():
        if chunks[-1] and count + size > CHUNK_WEIGHTS:
            chunks.append([])
            count = 0
        chunks[-1].append(name)
        count += size
    last = {one: at for at, chunk in enumerate(chunks) for name in chunk for one in parameters[name]}
    for at, chunk in enumerate(chunks):
        yield chunk, [parameter for parameter, place in last.items() if place == at]


def rate_at(step: int, total: int | None) -> float:
    """Return the learning rate of a step in units of the first: a linear rise, then half a cosine to 0."""
    warm = WARM_UP if total is None else max(1, min(WARM_UP, total // 10))
    if step < warm:
        return (step + 1) / warm
    assert total is not None, "the number of steps is known before the rise ends"
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Context manager: equal steps give equal bits on one GPU, where an operation has a way to."""
    if device.type == "cpu":
        yield
        return
    filling: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    filling.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        filling.fill_uninitialized_memory = before[1]
