"""Train a student by steps of Adam, and store the state that a resumed run goes on from."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantization.distill.loss import divergence
from quantkit.quantization.distill.pool import Pool
from quantkit.quantization.distill.student import Student

#: Sequences of a step, by device.
BATCH = {"cpu": 4, "cuda": 64}
#: Most logits of a micro-batch, by device: each takes about 16 bytes.
MOST_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 28}
#: Most steps in which learning rates rise to their first value.
WARM_UP = 20
#: Steps after which the time of a step is known; the first ones, which are slower, do not count.
MEASURED, COLD = 10, 3
#: Steps between readings of the loss, which wait for a GPU.
READ_EVERY = 10
#: Adam's decay of the means of gradients and their squares, and its epsilon: gradients of codes are small.
BETAS, EPSILON = (0.9, 0.98), 1e-15
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

    total    number of all steps; None until the time of a step is known
    loss     mean divergence per token of the last steps, in nats
    seconds  time of a step
    """

    step: int = 0
    total: int | None = None
    loss: float = math.nan
    seconds: float = 0.0

    @property
    def seconds_left(self) -> float:
        """Return the time of the steps to come."""
        return 0.0 if self.total is None else (self.total - self.step) * self.seconds


class Training:
    """Training of a student on a pool; `state` and `at` are all that another process needs to go on."""

    def __init__(self, student: Student, pool: Pool, options: DistillOptions, vocabulary: int) -> None:
        self.at = Reached(total=options.steps)
        self.batch = options.batch or BATCH[student.device.type]
        self._student, self._pool, self._own = student, pool, options.own
        self._micro = max(1, MOST_LOGITS[student.device.type] // (vocabulary * pool.held_out.shape[1]))
        self._loss = torch.full((1,), math.nan, device=student.device)
        self._numbers: dict[str, torch.nn.Parameter] = {}
        by_rate: dict[float, list[torch.nn.Parameter]] = {}
        for name, tensor in student.numbers.items():
            parameter, _, kind = name.rpartition(".")
            rate = getattr(options, RATES[kind]) * student.trained[parameter].steps[kind]
            if rate:
                self._numbers[name] = torch.nn.Parameter(tensor, requires_grad=False)
                by_rate.setdefault(rate, []).append(self._numbers[name])
        fused = student.device.type == "cuda" or None
        groups = [{"params": numbers, "lr": 0.0, "first": rate} for rate, numbers in by_rate.items()]
        # Adam refuses to have nothing.
        groups = groups or [{"params": [torch.zeros(1)], "lr": 0.0, "first": 0.0}]
        self._optimizer = torch.optim.Adam(groups, betas=BETAS, eps=EPSILON, fused=fused)

    def run(self, seconds_left: Callable[[], float], on_step: Callable[[Reached], None]) -> None:
        """Train to the end, and call `on_step` after each step.

        Without a number of steps it is as many as `seconds_left` has room for, once a step is measured.
        """
        at, first, started = self.at, self.at.step, time.monotonic()
        with _deterministic(self._student.device):
            while at.total is None or at.step < at.total:
                self._step()
                at.step += 1
                if at.step % READ_EVERY == 0 or at.step == at.total:
                    at.loss = float(self._loss)
                if at.step - first == COLD:
                    started = time.monotonic()
                elif at.step - first > COLD:
                    at.seconds = (time.monotonic() - started) / (at.step - first - COLD)
                if at.total is None and at.step == MEASURED:
                    at.total = at.step + max(1, int(seconds_left() / at.seconds))
                on_step(at)

    def _step(self) -> None:
        tokens = self._pool.batch(self.at.step, self.batch, self._own).to(self._student.device)
        loss, gradients = self._gradients(tokens)
        for name, number in self._numbers.items():
            number.grad = gradients.get(name)
        factor = rate_at(self.at.step, self.at.total)
        for group in self._optimizer.param_groups:
            group["lr"] = group["first"] * factor
        self._optimizer.step()
        for one in self._student.trained.values():
            one.clamp()
        self._loss = loss if self.at.step == 0 else self._loss.lerp(loss, LATELY)

    def _gradients(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean divergence on `tokens`, [1], and the gradients of all numbers."""
        student = self._student
        weights = student.weights()
        total, sums = torch.zeros(1, device=student.device), dict[str, torch.Tensor]()
        for part in torch.split(tokens, self._micro):
            target = student.target(part)
            with torch.enable_grad():
                loss = divergence(student.logits(part, weights), target) / tokens.numel()
            # A part of the model that text does not reach has none.
            found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            for name, gradient in zip(weights, found, strict=True):
                if gradient is not None:
                    sums[name] = sums[name] + gradient.float() if name in sums else gradient
            total += loss.detach()
        return total, student.gradients(sums)

    @torch.no_grad()
    def measure(self) -> float:
        """Return the mean divergence per token on what is held out, in nats."""
        student, held_out = self._student, self._pool.held_out
        weights, total = student.weights(), 0.0
        for part in torch.split(held_out.to(student.device), self._micro):
            total += float(divergence(student.logits(part, weights), student.target(part)))
        return total / held_out.numel()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the numbers, Adam's means of them, and the mean loss, by name."""
        found = {"loss": self._loss}
        for name, number in self._numbers.items():
            found[name] = number.detach()
            kept = self._optimizer.state.get(number, {})
            found |= {f"{name}.{key}": kept[key] for key in ("exp_avg", "exp_avg_sq") if key in kept}
        return found

    def restore(self, state: Mapping[str, torch.Tensor], at: Reached) -> None:
        """Go on from a state that was stored at `at`."""
        self.at, self._loss = at, state["loss"].to(self._student.device)
        for name, number in self._numbers.items():
            number.copy_(state[name])
            if f"{name}.exp_avg" in state:
                # Adam counts on the device only if its steps are fused.
                counter = number.device if number.device.type == "cuda" else torch.device("cpu")
                self._optimizer.state[number] = {
                    "step": torch.tensor(float(at.step), device=counter),
                    **{key: state[f"{name}.{key}"].to(number.device) for key in ("exp_avg", "exp_avg_sq")},
                }


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
