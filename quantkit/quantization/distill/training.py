"""Train a student: steps, learning rates, and the state that a resumed run goes on from."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantization.distill.loss import divergence
from quantkit.quantization.distill.student import Student

#: Sequences of a step, by device.
BATCH = {"cpu": 4, "cuda": 64}
#: Most logits of a micro-batch, by device: each takes about 16 bytes.
MOST_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 28}
#: Steps in which learning rates rise to their first value.
WARM_UP = 20
#: Steps after which the time of one is known, and steps before that, which are slower.
MEASURED, COLD = 10, 3
#: Decay of Adam's means of gradients and of their squares.
BETAS = (0.9, 0.98)
#: Adam's epsilon: gradients of single codes are small.
EPSILON = 1e-15
#: Learning rate by kind of number: a field of `DistillOptions`.
RATES = {
    "codes": "code_rate",
    "scale": "scale_rate",
    "zero_point": "scale_rate",
    "column_scale": "scale_rate",
    "norm": "norm_rate",
}


@dataclass(frozen=True, eq=False)
class Pool:
    """Sequences to train on: calibration text int64 [C, T], and the model's own [P, T].

    `held_out` are not trained on: the divergence before and after is measured on them.
    """

    text: torch.Tensor
    own: torch.Tensor
    held_out: torch.Tensor
    seed: int

    def batch(self, step: int, size: int, own: float) -> torch.Tensor:
        """Return the sequences of a step, [size, T]: of either kind, all once before any comes again."""
        count = round(size * own) if len(self.own) else 0
        count = size if not len(self.text) else count
        parts = [
            self._drawn("own", step * count, count),
            self._drawn("text", step * (size - count), size - count),
        ]
        return torch.cat([part for part in parts if len(part)])

    def _drawn(self, kind: str, first: int, count: int) -> torch.Tensor:
        rows: torch.Tensor = getattr(self, kind)
        if not count:
            return rows[:0]
        ids = [self._order(kind, at // len(rows))[at % len(rows)] for at in range(first, first + count)]
        return rows[torch.tensor(ids)]

    def _order(self, kind: str, turn: int) -> list[int]:
        key = (kind, turn)
        if key not in self._orders:
            for old in [one for one in self._orders if one[0] == kind and one[1] < turn - 1]:
                del self._orders[old]
            seed = self.seed * 1_000_003 + 2 * turn + (kind == "own")
            generator = torch.Generator().manual_seed(seed)
            self._orders[key] = torch.randperm(len(getattr(self, kind)), generator=generator).tolist()
        return self._orders[key]

    @cached_property
    def _orders(self) -> dict[tuple[str, int], list[int]]:
        return {}


@dataclass
class Progressed:
    """Point that a training has reached: steps done and of how many (None if unknown), mean loss lately."""

    step: int = 0
    total: int | None = None
    loss: float = math.nan


class Training:
    """Training of a student on a pool, whose state can be stored and restored."""

    def __init__(self, student: Student, pool: Pool, options: DistillOptions, vocabulary: int) -> None:
        self._student, self._pool, self._options = student, pool, options
        kind = student.device.type
        self.batch = options.batch or BATCH[kind]
        length = pool.held_out.shape[1]
        self._micro = max(1, MOST_LOGITS[kind] // (vocabulary * length))
        self.at = Progressed(total=options.steps)
        self._numbers = {
            name: torch.nn.Parameter(one, requires_grad=False) for name, one in student.numbers.items()
        }
        groups = []
        for name, one in self._numbers.items():
            parameter, _, number = name.rpartition(":")
            rate = getattr(options, RATES[number]) * student.trained[parameter].steps[number]
            groups.append({"params": [one], "lr": 0.0, "first": rate})
        self._optimizer = torch.optim.Adam(
            [group for group in groups if group["first"]],
            betas=BETAS,
            eps=EPSILON,
            fused=kind == "cuda" or None,
        )

    def run(
        self,
        deadline: Callable[[], float],
        on_step: Callable[[Progressed, float], None],
    ) -> None:
        """Train to the end. `deadline()` are the seconds left at the moment, if the time decides.

        `on_step` is called after each step, with the seconds that a step takes.
        """
        with deterministic(self._student.device):
            started, took = time.monotonic(), 0.0
            first = self.at.step
            while self.at.total is None or self.at.step < self.at.total:
                self._step()
                done = self.at.step - first
                if done == COLD:
                    started = time.monotonic()
                if done > COLD:
                    took = (time.monotonic() - started) / (done - COLD)
                if self.at.total is None and self.at.step >= MEASURED:
                    self.at.total = self.at.step + max(1, int(deadline() / took))
                on_step(self.at, took)

    def _step(self) -> None:
        tokens = self._pool.batch(self.at.step, self.batch, self._options.own).to(self._student.device)
        loss, gradients = self._gradients(tokens)
        for name, gradient in gradients.items():
            self._numbers[name].grad = gradient
        factor = _rate(self.at.step, self.at.total)
        for group in self._optimizer.param_groups:
            group["lr"] = group["first"] * factor
        self._optimizer.step()
        for one in self._student.trained.values():
            one.clamp()
        weight = 0.05 if self.at.step else 1.0
        # A tensor: reading it would wait for the GPU.
        self._loss = (
            loss
            if self.at.step == 0 or not hasattr(self, "_loss")
            else self._loss + weight * (loss - self._loss)
        )
        self.at.step += 1
        if self.at.step % 10 == 0 or self.at.step == self.at.total:
            self.at.loss = float(self._loss)

    def _gradients(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean divergence on `tokens`, and the gradients of all numbers."""
        student = self._student
        with torch.no_grad():
            weights = student.weights()
        total, sums = torch.zeros((), device=student.device), dict[str, torch.Tensor]()
        for part in torch.split(tokens, self._micro):
            target = student.target(part)
            with torch.enable_grad():
                loss = divergence(student.logits(part, weights), target) / tokens.numel()
            found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            for name, gradient in zip(weights, found, strict=True):
                if gradient is None:
                    continue
                sums[name] = sums[name].add_(gradient) if name in sums else gradient.float()
            total += loss.detach()
        return total, student.gradients(sums)

    @torch.no_grad()
    def measure(self) -> float:
        """Return the mean divergence per token on the sequences that are held out, in nats."""
        student, total = self._student, 0.0
        weights = student.weights()
        for part in torch.split(self._pool.held_out, self._micro):
            tokens = part.to(student.device)
            total += float(divergence(student.logits(tokens, weights), student.target(tokens)))
        return total / self._pool.held_out.numel()

    def state(self) -> dict[str, torch.Tensor]:
        """Return all numbers and Adam's means, by name; with `at` they are the state of the training."""
        found = {name: one.detach() for name, one in self._numbers.items()}
        for name, one in self._numbers.items():
            for key, value in self._optimizer.state.get(one, {}).items():
                if key != "step":
                    found[f"{name}:{key}"] = value
        found["loss"] = getattr(self, "_loss", torch.tensor(math.nan)).detach().reshape(1).float()
        return found

    def restore(self, state: Mapping[str, torch.Tensor], at: Progressed) -> None:
        """Go on from a state."""
        self.at = at
        for name, one in self._numbers.items():
            one.copy_(state[name])
            keys = [key for key in ("exp_avg", "exp_avg_sq") if f"{name}:{key}" in state]
            if keys:
                # As Adam keeps it: on a GPU beside the means, else on the host.
                device = one.device if one.device.type == "cuda" else torch.device("cpu")
                self._optimizer.state[one] = {
                    "step": torch.tensor(float(at.step), device=device),
                    **{key: state[f"{name}:{key}"].to(one.device) for key in keys},
                }
        self._loss = state["loss"][0].to(self._student.device)


def _rate(step: int, total: int | None) -> float:
    """Return the learning rate of a step relative to the first: a linear rise, then half a cosine."""
    warm = WARM_UP if total is None else max(1, min(WARM_UP, total // 10))
    if step < warm:
        return (step + 1) / warm
    assert total is not None
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Context manager: equal steps give equal bits on one GPU, where an operation has a way to."""
    if device.type == "cpu":
        yield
        return
    import warnings

    before: Any = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    filled, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory,
        False,
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
