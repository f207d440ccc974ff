"""Options of `bench`, with defaults per device.

Imports no torch, because the command line shows the defaults.
"""

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from quantkit.calibrate.data.seeds import check_seed
from quantkit.errors import UsageError, unknown_name

if TYPE_CHECKING:
    import torch


class SpeedDefaults(NamedTuple):
    """Batch sizes, prompt tokens, generated tokens, and generations that count."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    new_tokens: int
    repeats: int = 5


class ServeDefaults(NamedTuple):
    """Default requests per second, and the shortest and longest prompt and answer in tokens."""

    rates: tuple[float, ...]
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]


#: Defaults by device.
SPEED_DEFAULTS = {
    "cpu": SpeedDefaults((1,), (32, 128), 32, 3),
    "cuda": SpeedDefaults((1, 8, 64), (128, 1024, 4096), 128),
}
#: More of a CPU, which a note of `bench` names. It takes 10 times as long or more.
MORE_ON_CPU = SpeedDefaults((1, 4), (32, 128, 512), 32)
SERVE_DEFAULTS = {
    "cpu": ServeDefaults((0.5, 1.0, 2.0), (16, 256), (8, 64)),
    "cuda": ServeDefaults((1.0, 4.0, 16.0), (64, 2048), (32, 512)),
}
#: Modes by device, those measured by default. `EAGER` runs the model's modules. `generate` runs steps as flat
#: lists on a CPU, and prompts and steps as CUDA graphs on a GPU.
EAGER, FLAT, GRAPH = "eager", "flat", "cuda-graph"
MODES = {"cpu": (EAGER, FLAT), "cuda": (EAGER, GRAPH)}


@dataclass(frozen=True)
class BenchOptions:
    """Sizes to time, and how; None is the default of the device. The command line shows these lines.

    batches      sequences at a time
    prompts      tokens of a prompt
    new_tokens   tokens that are generated
    repeats      generations that count
    text         UTF-8 file that prompts are taken from
    seed         of random prompts and arrivals
    modes        how it runs: eager, flat (on a CPU), cuda-graph (on a GPU)
    """

    device: str = "auto"
    dtype: str = "auto"
    batches: tuple[int, ...] | None = None
    prompts: tuple[int, ...] | None = None
    new_tokens: int | None = None
    repeats: int | None = None
    text: str | None = None
    seed: int = 0
    modes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        from quantkit.eval.models import dtype_named

        known = dict.fromkeys(mode for modes in MODES.values() for mode in modes)
        if self.modes == ():
            raise UsageError(f"modes are empty; name at least one of {', '.join(known)}.")
        for mode in self.modes or ():
            if mode not in known:
                raise unknown_name("mode", mode, known)
        repeats = 1 if self.repeats is None else self.repeats
        numbers = (*(self.batches or ()), *(self.prompts or ()), repeats)
        if min(numbers) < 1 or (self.new_tokens is not None and self.new_tokens < 2):
            raise UsageError(
                f"batches {self.batches}, prompts {self.prompts}, repeats {self.repeats}, new tokens "
                f"{self.new_tokens}: all are at least 1, and new tokens 2, between which there is a time."
            )
        check_seed(self.seed)
        if self.dtype != "auto":
            dtype_named(self.dtype)

    def on(self, device: "torch.device") -> "Grid":
        """Return these settings with the defaults of `device`."""
        batches, prompts, new_tokens, repeats = SPEED_DEFAULTS[device.type]
        modes = self.modes or MODES[device.type]
        if not set(modes) <= set(MODES[device.type]):
            lacking = ", ".join(mode for mode in modes if mode not in MODES[device.type])
            here = " and ".join(MODES[device.type])
            raise UsageError(f"a {device.type} has no {lacking}: it runs {here} only.")
        batches, prompts = self.batches or batches, self.prompts or prompts
        return Grid(batches, prompts, self.new_tokens or new_tokens, modes, self.repeats or repeats)


@dataclass(frozen=True)
class Grid:
    """All combinations of batch size, prompt length and mode, and the numbers of tokens and generations."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    new_tokens: int
    modes: tuple[str, ...]
    repeats: int = 5

    @property
    def settings(self) -> tuple[tuple[int, int, str], ...]:
        """Return batch size, prompt length and mode of each measurement, in order."""
        return tuple(product(self.batches, self.prompts, self.modes))

    def within(self, positions: int | None) -> tuple["Grid", tuple[str, ...]]:
        """Return the combinations that fit a model with `positions` positions, and notes on the others."""
        if positions is None:
            return self, ()
        fitting = tuple(prompt for prompt in self.prompts if prompt + self.new_tokens <= positions)
        if not fitting:
            raise UsageError(
                f"the model has {positions} positions, and the shortest prompt of {min(self.prompts)} with "
                f"{self.new_tokens} new tokens takes more. Give a smaller --prompt or --new-tokens."
            )
        notes = tuple(
            f"prompts of {prompt} tokens were left out: with {self.new_tokens} new ones they are more than "
            f"the {positions} positions of the model"
            for prompt in self.prompts
            if prompt not in fitting
        )
        return replace(self, prompts=fitting), notes


@dataclass(frozen=True)
class ServeOptions:
    """Load of requests that arrive at random; None is the default of the device.

    rates           requests per second
    requests        requests at each rate
    prompt_tokens   tokens of a prompt, the smallest and the largest number
    new_tokens      tokens of an answer, the smallest and the largest number
    """

    device: str = BenchOptions.device
    dtype: str = BenchOptions.dtype
    rates: tuple[float, ...] | None = None
    requests: int = 32
    prompt_tokens: tuple[int, int] | None = None
    new_tokens: tuple[int, int] | None = None
    seed: int = BenchOptions.seed

    def __post_init__(self) -> None:
        from quantkit.eval.models import dtype_named

        if self.requests < 1 or any(not 0 < rate < math.inf for rate in self.rates or ()):
            raise UsageError(
                f"{self.requests} requests at rates {self.rates}; use at least 1, and rates above 0 per "
                "second."
            )
        for what, lengths in (("prompts", self.prompt_tokens), ("answers", self.new_tokens)):
            if lengths is not None and not 1 <= lengths[0] <= lengths[1]:
                raise UsageError(
                    f"{what} of {lengths[0]} to {lengths[1]} tokens; use 1 or more, smaller first."
                )
        check_seed(self.seed)
        if self.dtype != "auto":
            dtype_named(self.dtype)
