"""The search for the fastest row and tile of a problem: what to measure next, and what won.

Each row that can run the problem begins with the tile that rules, or the table so far, give it. Rows that are
hopelessly slower, or not `searched`, are left there. The others try all tiles that differ from their best in
one field, pass by pass. Every candidate is timed with few replays, the best of them again with many. Only
those whose result is right may win.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from quantkit.kernels.problem import Gpu, KernelRow, Problem, tile_text
from quantkit.kernels.registry import ROWS, choose_by_rules, row_named
from quantkit.kernels.tuning.tile_table import Entry, Key
from quantkit.packing.schemes import Scheme

#: Replays of a first timing, and of one that counts.
COARSE, FINE = 3, 15
#: Candidates of a pass that are timed again.
FINALISTS = 3
#: A row that begins so many times slower than the best keeps the tile it began with.
HOPELESS = 3.0
#: What beats the choice of the rules must take less than this part of its time: noise is no reason to differ.
MARGIN = 0.98
#: Largest error of an output y, a sum of terms t, as part of |y| + sqrt(sum t^2). Weights and y are rounded
#: to the dtype of x, by 2^-9 or 2^-12 at most, and no sum of a billion errs by six standard deviations.
LIMITS = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
#: The same where steps are summed in float16: each of 256 additions rounds by 2^-11 of the sum so far.
HALF_LIMIT = 2.0**-5


class Unfit(Exception):
    """A candidate that this GPU cannot run; the message says what it lacks."""


@dataclass(frozen=True)
class Weight:
    """A weight [n, k] in `scheme`, for activations of `dtype` whose sums may be float16 with `half_sums`."""

    scheme: Scheme
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    half_sums: bool = False

    def __str__(self) -> str:
        return f"{self.scheme} {self.n}x{self.k}"

    def problem(self, m: int, gpu: Gpu, features: frozenset[str]) -> Problem:
        """Its product with m rows of x, with codes as kernels see them."""
        problem = Problem(
            m, self.n, self.k, self.scheme, self.dtype, "cuda", features, None, gpu, self.half_sums
        )
        return replace(problem, scheme=Key.of(problem).scheme)


@dataclass(frozen=True)
class Candidate:
    """A row with a tile, None for a row without."""

    row: str
    tile: Any = None

    def __str__(self) -> str:
        return self.row if self.tile is None else f"{self.row} {tile_text(self.tile)}"


class Bench(Protocol):
    """A weight under measurement."""

    def error(self, candidate: Candidate, m: int) -> float:
        """The largest error of its result, as in `LIMITS`; NaN for NaN. `Unfit` if it cannot run."""

    def time(self, candidate: Candidate, m: int, replays: int) -> float:
        """Microseconds of one product with m rows of x. `Unfit` if it cannot run."""


class Compiler(Protocol):
    """Compiles candidates ahead, at the same time as others are measured."""

    def submit(self, problem: Problem, candidate: Candidate) -> Callable[[], str | None]:
        """Begin; what is returned waits for the end, and says why it failed, or None."""


@dataclass
class Search:
    """What is known of one problem."""

    problem: Problem
    #: What the rules choose.
    rules: Candidate
    #: What a table has so far.
    before: Entry | None = None
    #: Rows that try more tiles than they begin with; None for all.
    searched: frozenset[str] | None = None
    coarse: dict[Candidate, float] = field(default_factory=dict)
    fine: dict[Candidate, float] = field(default_factory=dict)
    #: Candidates that cannot win, and why: those that do not fit, and those whose results are wrong.
    rejected: dict[Candidate, str] = field(default_factory=dict)
    wrong: set[Candidate] = field(default_factory=set)

    @classmethod
    def of(
        cls, problem: Problem, before: Entry | None = None, searched: frozenset[str] | None = None
    ) -> "Search":
        chosen = choose_by_rules(problem)
        return cls(problem, Candidate(chosen.row.name, chosen.tile), before, searched)

    def candidates(self) -> list[Candidate]:
        """What to measure in the next pass: nothing where all is known."""
        if not self.coarse and not self.rejected:
            found = [one for row in tunable_rows(self.problem) for one in self._starts(row)]
        else:
            found = [
                one for row in self._hopeful() for one in neighbours(self.problem, row, self._best(row).tile)
            ]
        return [one for one in dict.fromkeys(found) if one not in self.coarse and one not in self.rejected]

    def _starts(self, row: KernelRow) -> Iterator[Candidate]:
        yield Candidate(row.name, None if row.tiling is None else row.tiling.rule(self.problem))
        if self.before is not None and self.before.row == row.name:
            yield Candidate(row.name, self.before.tile)

    def _hopeful(self) -> list[KernelRow]:
        best = min(self.coarse.values(), default=0.0)
        rows = [row_named(name) for name in dict.fromkeys(one.row for one in self.coarse)]
        return [
            row
            for row in rows
            if row.tiling is not None
            and (self.searched is None or row.name in self.searched)
            and self.coarse[self._best(row)] <= HOPELESS * best
        ]

    def _best(self, row: KernelRow) -> Candidate:
        mine = {one: us for one, us in self.coarse.items() if one.row == row.name}
        return min(mine, key=lambda one: self.fine.get(one, mine[one]))

    def measure(self, bench: Bench, candidate: Candidate, failure: str | None) -> None:
        """Try a candidate, unless compiling it ended with `failure`."""
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
        """Time the best candidates of the pass, and the rules' choice, with many replays."""
        best = sorted(self.coarse, key=lambda one: self.coarse[one])[:FINALISTS]
        for candidate in dict.fromkeys([*best, self.rules]):
            if candidate in self.coarse and candidate not in self.fine:
                self.fine[candidate] = bench.time(candidate, self.problem.m, FINE)

    def entry(self) -> Entry | None:
        """What won, for a tile table; None where nothing ran."""
        if not self.fine:
            return None
        best = min(self.fine, key=lambda one: self.fine[one])
        ruled = self.fine.get(self.rules)
        if ruled is not None and self.fine[best] > MARGIN * ruled:
            best = self.rules
        others: dict[str, float] = {}
        for row in ROWS[: [row.name for row in ROWS].index(best.row)]:
            times = [self.fine.get(one, us) for one, us in self.coarse.items() if one.row == row.name]
            if times:
                others[row.name] = min(times)
        return Entry(self.fine[best], best.row, best.tile, others)

    @property
    def gain(self) -> float | None:
        """How many times as fast as the rules' choice the winner is; None if one of them did not run."""
        entry, ruled = self.entry(), self.fine.get(self.rules)
        return None if entry is None or ruled is None else ruled / entry.us


def _limit(problem: Problem, candidate: Candidate) -> float:
    return HALF_LIMIT if getattr(candidate.tile, "half_sums", False) else LIMITS[problem.dtype]


def tunable_rows(problem: Problem) -> list[KernelRow]:
    """The rows that a tile table may choose between: those with a layout of their own that can run it."""
    return [
        row
        for row in ROWS
        if problem.device in row.devices and row.layout is not None and row.supports(problem) is None
    ]


def neighbours(problem: Problem, row: KernelRow, tile: Any) -> Iterator[Candidate]:
    """The row with the tiles that differ from `tile` in one field and are worth measuring."""
    assert row.tiling is not None
    for name, values in row.tiling.values.items():
        for value in values:
            other = replace(tile, **{name: value})
            able = row.tiling.why_not(problem, other) is None and row.tiling.loses(problem, other) is None
            if other != tile and able:
                yield Candidate(row.name, other)


@dataclass(frozen=True)
class Setting:
    """What a search runs with: the GPU, its bench for a weight, the compiler, passes after the first.

    `report(pass, done, total, label)` is called for every candidate. Only rows that are `searched` try more
    tiles than they begin with; None is all.
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
    """Search the best for each weight and M, beginning with what is `known`.

    Yields the searches of a weight once per pass: what they found by then may be stored, and the rest be
    interrupted.
    """
    searches: dict[Weight, list[Search]] = {}
    for weight in weights:
        problems = [weight.problem(m, setting.gpu, setting.features) for m in ms]
        searches[weight] = [
            Search.of(problem, known.get(Key.of(problem)), setting.searched)
            for problem in problems
            if tunable_rows(problem)
        ]
    for number in range(setting.passes + 1):
        waiting = {
            weight: [
                (one, [(c, setting.compiler.submit(one.problem, c)) for c in one.candidates()])
                for one in mine
            ]
            for weight, mine in searches.items()
        }
        total = sum(len(jobs) for mine in waiting.values() for _, jobs in mine)
        done = 0
        for weight, mine in waiting.items():
            if not any(jobs for _, jobs in mine):
                continue
            with setting.bench(weight) as bench:
                for one, jobs in mine:
                    for candidate, wait in jobs:
                        setting.report(number, done, total, f"{weight} M={one.problem.m}")
                        one.measure(bench, candidate, wait())
                        done += 1
                    one.measure_best(bench)
            yield searches[weight]
        setting.report(number, total, total, "")
