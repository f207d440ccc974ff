"""Tile search: find the fastest kernel and tile (launch configuration) of a problem.

Each kernel that supports the problem starts with the tile of its rule (`TileSpace.rule`), or of the table so
far. Kernels that are `HOPELESS` times slower, or not `searched`, stop there. Others try all tiles that differ
from their best in one field, pass by pass.

Every candidate is timed with `COARSE` replays, and the best again with `FINE`. Only correct ones may win.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from quantkit.kernels.problem import Gpu, Kernel, Problem, tile_text
from quantkit.kernels.registry import KERNELS, choose_by_rules, kernel_named
from quantkit.kernels.tuning.tile_table import Entry, Key
from quantkit.packing.schemes import Scheme

#: Replays of a first timing, and of a final one.
COARSE, FINE = 3, 15
#: Candidates per pass that are timed again.
FINALISTS = 3
#: A kernel whose first tile is this many times slower than the best keeps that tile.
HOPELESS = 3.0
#: Largest time of a winner relative to the rules' choice: smaller gains are noise.
MARGIN = 0.98
#: Largest error of an output y, a sum of terms t, relative to |y| + sqrt(sum t^2). Weights and y are rounded
#: to the dtype of x, by at most 2^-9 or 2^-12. One sum in 10^9 errs by 6 standard deviations.
LIMITS = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
#: The same for sums in float16: each of 256 additions rounds by 2^-11 of the sum so far.
HALF_LIMIT = 2.0**-5


class Unfit(Exception):
    """The GPU cannot run a candidate; the message names the resource that it lacks."""


@dataclass(frozen=True)
class Weight:
    """Weight [n, k] of `scheme` to search tiles for, with activations of `dtype`.

    `fp16_accumulation` allows sums in float16.
    """

    scheme: Scheme
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    fp16_accumulation: bool = False

    def __str__(self) -> str:
        return f"{self.scheme} {self.n}x{self.k}"

    def problem(self, m: int, gpu: Gpu, features: frozenset[str]) -> Problem:
        """Return the product of this weight with m rows of x as a problem for a GPU with `features`.

        Its scheme is `tile_table.as_computed`: properties on which no kernel with tiles depends are reset.
        """
        problem = Problem(
            m, self.n, self.k, self.scheme, self.dtype, "cuda", features, None, gpu, self.fp16_accumulation
        )
        return replace(problem, scheme=Key.of(problem).scheme)


@dataclass(frozen=True)
class Candidate:
    """Kernel, by name, with a tile (launch configuration), that may be the fastest for a problem.

    The tile is None for a kernel without tiles.
    """

    kernel: str
    tile: Any = None

    def __str__(self) -> str:
        return self.kernel if self.tile is None else f"{self.kernel} {tile_text(self.tile)}"


class Bench(Protocol):
    """Checks and times candidates (kernel and tile) for one weight: the protocol of `GpuBench`."""

    def error(self, candidate: Candidate, m: int) -> float:
        """Return the largest error of y, for m rows of x by a candidate; NaN if y has NaN.

        An error is relative to |y| + sqrt(sum of squares of the terms of y), as `LIMITS` is. Raises `Unfit`
        if the GPU cannot run the candidate.
        """

    def time(self, candidate: Candidate, m: int, replays: int) -> float:
        """Return microseconds of one product with m rows of x, from `replays` replays of a CUDA graph.

        Raises `Unfit` if the GPU cannot run the candidate.
        """


class Compiler(Protocol):
    """Compiles candidates while others are measured: the protocol of `CompilePool`."""

    def submit(self, problem: Problem, candidate: Candidate) -> Callable[[], str | None]:
        """Start compiling; return a function that waits, and returns why compiling failed, or None."""


@dataclass
class Search:
    """State of the search for the fastest candidate (kernel and tile) of one problem.

    rules      the candidate that would run without a tile table
    before     entry of a tile table from an earlier search; None for none
    searched   names of the kernels that try more tiles than their first; None for all
    coarse     microseconds of candidates, from few replays
    fine       microseconds of the best candidates, from more replays
    rejected   why candidates cannot win: they do not fit the GPU, or their results are wrong
    wrong      candidates with wrong results
    """

    problem: Problem
    rules: Candidate
    before: Entry | None = None
    searched: frozenset[str] | None = None
    coarse: dict[Candidate, float] = field(default_factory=dict)
    fine: dict[Candidate, float] = field(default_factory=dict)
    rejected: dict[Candidate, str] = field(default_factory=dict)
    wrong: set[Candidate] = field(default_factory=set)

    @classmethod
    def of(
        cls, problem: Problem, before: Entry | None = None, searched: frozenset[str] | None = None
    ) -> "Search":
        """Start the search of a problem from the candidate that would run without a tile table.

        `before` and `searched` are fields of the search.
        """
        chosen = choose_by_rules(problem)
        return cls(problem, Candidate(chosen.kernel.name, chosen.tile), before, searched)

    def candidates(self) -> list[Candidate]:
        """Return the candidates (kernel and tile) of the next pass; [] if the search is complete."""
        if not self.coarse and not self.rejected:
            found = [one for kernel in tunable_kernels(self.problem) for one in self._starts(kernel)]
        else:
            found = [
                one
                for kernel in self._hopeful()
                for one in neighbours(self.problem, kernel, self._best(kernel).tile)
            ]
        return [one for one in dict.fromkeys(found) if one not in self.coarse and one not in self.rejected]

    def _starts(self, kernel: Kernel) -> Iterator[Candidate]:
        """Yield the first candidates of a kernel: the tile of its rule, and that of the entry `before`."""
        yield Candidate(
            kernel.name, None if kernel.tile_space is None else kernel.tile_space.rule(self.problem)
        )
        if self.before is not None and self.before.kernel == kernel.name:
            yield Candidate(kernel.name, self.before.tile)

    def _hopeful(self) -> list[Kernel]:
        """Return the kernels that try more tiles, which differ from their best in one field.

        They have tiles, are `searched`, and take at most `HOPELESS` times as long as the fastest.
        """
        best = min(self.coarse.values(), default=0.0)
        kernels = [kernel_named(name) for name in dict.fromkeys(one.kernel for one in self.coarse)]
        return [
            kernel
            for kernel in kernels
            if kernel.tile_space is not None
            and (self.searched is None or kernel.name in self.searched)
            and self.coarse[self._best(kernel)] <= HOPELESS * best
        ]

    def _best(self, kernel: Kernel) -> Candidate:
        """Return the fastest of the candidates of `kernel` timed so far."""
        times = {one: us for one, us in self.coarse.items() if one.kernel == kernel.name}
        return min(times, key=lambda one: self.fine.get(one, times[one]))

    def measure(self, bench: Bench, candidate: Candidate, failure: str | None) -> None:
        """Check the result of a candidate and time it, with few replays; reject it if wrong or not runnable.

        `failure` is why it does not compile, or None.
        """
        try:
            if failure is not None:
                raise Unfit(failure)
            error, limit = bench.error(candidate, self.problem.m), _limit(self.problem, candidate)
            if not error <= limit:
                self.wrong.add(candidate)
                raise Unfit(f"its result is wrong by {error:.2g} of what it sums up, more than {limit:.2g}")
            self.coarse[candidate] = bench.time(candidate, self.problem.m, COARSE)
        except Unfit as reason:
            self.rejected[candidate] = str(reason)

    def measure_best(self, bench: Bench) -> None:
        """Time the fastest `FINALISTS` candidates so far, and the candidate `rules`, with more replays."""
        best = sorted(self.coarse, key=lambda one: self.coarse[one])[:FINALISTS]
        for candidate in dict.fromkeys([*best, self.rules]):
            if candidate in self.coarse and candidate not in self.fine:
                self.fine[candidate] = bench.time(candidate, self.problem.m, FINE)

    def entry(self) -> Entry | None:
        """Return the winner as an entry of a tile table; None if no candidate ran.

        The candidate `rules` wins unless another takes less than `MARGIN` of its time.
        """
        if not self.fine:
            return None
        best = min(self.fine, key=lambda one: self.fine[one])
        rules_us = self.fine.get(self.rules)
        if rules_us is not None and self.fine[best] > MARGIN * rules_us:
            best = self.rules
        other_times: dict[str, float] = {}
        for kernel in KERNELS[: [kernel.name for kernel in KERNELS].index(best.kernel)]:
            times = [self.fine.get(one, us) for one, us in self.coarse.items() if one.kernel == kernel.name]
            if times:
                other_times[kernel.name] = min(times)
        return Entry(self.fine[best], best.kernel, best.tile, other_times)

    @property
    def gain(self) -> float | None:
        """Return time of the candidate `rules` / time of the winner; None if either did not run."""
        entry, rules_us = self.entry(), self.fine.get(self.rules)
        return None if entry is None or rules_us is None else rules_us / entry.us


def _limit(problem: Problem, candidate: Candidate) -> float:
    """Return the largest relative error of y with which a candidate counts as correct."""
    return HALF_LIMIT if getattr(candidate.tile, "fp16_accumulation", False) else LIMITS[problem.dtype]


def tunable_kernels(problem: Problem) -> list[Kernel]:
    """Return the kernels that a tile table may name for a problem: those with a layout that support it."""
    return [
        kernel
        for kernel in KERNELS
        if problem.device in kernel.devices
        and kernel.layout is not None
        and kernel.why_unsupported(problem) is None
    ]


def neighbours(problem: Problem, kernel: Kernel, tile: Any) -> Iterator[Candidate]:
    """Yield the candidates of a kernel whose tile (launch configuration) differs from `tile` in one field.

    Tiles that cannot run, or are not worth measuring, are left out.
    """
    assert kernel.tile_space is not None
    for name, values in kernel.tile_space.values.items():
        for value in values:
            other = replace(tile, **{name: value})
            able = (
                kernel.tile_space.why_invalid(problem, other) is None
                and kernel.tile_space.why_pruned(problem, other) is None
            )
            if other != tile and able:
                yield Candidate(kernel.name, other)


@dataclass(frozen=True)
class Setting:
    """Environment of a search: what measures and compiles, and how much is tried.

    gpu        the GPU
    features   its features that kernels use (`device_features`)
    bench      returns a context manager that yields the `Bench` of a weight
    compiler   compiles candidates (kernel and tile) while others are measured
    passes     passes after the first one; each tries candidates that differ in one field from the best
    report     called as candidates are measured, as report(pass, number done, total number, label)
    searched   names of the kernels that try more tiles than their first; None for all
    """

    gpu: Gpu
    features: frozenset[str]
    bench: Callable[[Weight], AbstractContextManager[Bench]]
    compiler: Compiler
    passes: int = 1
    report: Callable[[int, int, int, str], None] = lambda *_: None
    searched: frozenset[str] | None = None


def search(
    weights: Iterable[Weight], ms: Sequence[int], known: Mapping[Key, Entry], setting: Setting
) -> Iterator[list[Search]]:
    """Time kernels and tiles for each weight and each M in `ms`; yield results of a weight after each pass.

    The results are one `Search` per M, so that callers can store them and interrupt the rest. Pass 0 times,
    per kernel, the tile of its rule and the tile in `known`, the entries of a tile table. Each of the
    `setting.passes` later passes varies one field of a kernel's best tile.
    """
    searches: dict[Weight, list[Search]] = {}
    for weight in weights:
        problems = [weight.problem(m, setting.gpu, setting.features) for m in ms]
        searches[weight] = [
            Search.of(problem, known.get(Key.of(problem)), setting.searched)
            for problem in problems
            if tunable_kernels(problem)
        ]
    for number in range(setting.passes + 1):
        waiting = {
            weight: [
                (one, [(c, setting.compiler.submit(one.problem, c)) for c in one.candidates()])
                for one in of_weight
            ]
            for weight, of_weight in searches.items()
        }
        total = sum(len(jobs) for of_weight in waiting.values() for _, jobs in of_weight)
        done = 0
        for weight, of_weight in waiting.items():
            if not any(jobs for _, jobs in of_weight):
                continue
            with setting.bench(weight) as bench:
                for one, jobs in of_weight:
                    for candidate, wait in jobs:
                        setting.report(number, done, total, f"{weight} M={one.problem.m}")
                        one.measure(bench, candidate, wait())
                        done += 1
                    one.measure_best(bench)
            yield searches[weight]
        setting.report(number, total, total, "")
