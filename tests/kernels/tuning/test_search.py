"""The search: what it tries, what may win, and what it leaves behind when it is interrupted."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from quantkit.kernels.gemm.decode.decode_tiles import DecodeTile
from quantkit.kernels.gemm.portable.portable_gemm_launch import PortableGemmTile
from quantkit.kernels.gemm.portable.portable_gemv_launch import PortableGemvTile
from quantkit.kernels.problem import GPU_FEATURES, Gpu, Problem
from quantkit.kernels.registry import choose_by_rules, kernel_named
from quantkit.kernels.tuning.search import (
    COARSE,
    FINE,
    HOPELESS,
    LIMITS,
    Candidate,
    Search,
    Setting,
    Unfit,
    Weight,
    neighbours,
    search,
    tunable_kernels,
)
from quantkit.kernels.tuning.tile_table import Entry, Key
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import scheme

INT4 = Weight(scheme("int4"), 4096, 4096)


class FakeBench:
    """Times from a function; counts what it was asked."""

    def __init__(
        self, us: Callable[[Candidate, int], float], errors: Callable[[Candidate], float] = lambda _: 0.0
    ) -> None:
        self.us, self.errors = us, errors
        self.asked: list[tuple[Candidate, int, int]] = []
        self.opened: list[Weight] = []

    @contextmanager
    def open(self, weight: Weight) -> Iterator["FakeBench"]:
        self.opened.append(weight)
        yield self

    def error(self, candidate: Candidate, m: int) -> float:
        return self.errors(candidate)

    def time(self, candidate: Candidate, m: int, replays: int) -> float:
        self.asked.append((candidate, m, replays))
        return self.us(candidate, m)


class FakeCompiler:
    """Compiles nothing; some candidates fail."""

    def __init__(self, fails: Callable[[Candidate], str | None] = lambda _: None) -> None:
        self.fails = fails

    def submit(self, problem: Problem, candidate: Candidate) -> Callable[[], str | None]:
        return lambda: self.fails(candidate)


def run(
    gpu: Gpu,
    bench: FakeBench,
    *,
    weights: tuple[Weight, ...] = (INT4,),
    ms: tuple[int, ...] = (1,),
    known: Mapping[Key, Entry] | None = None,
    compiler: FakeCompiler | None = None,
    passes: int = 1,
    report: Callable[[int, int, int, str], None] = lambda *_: None,
) -> list[list[Search]]:
    setting = Setting(gpu, GPU_FEATURES, bench.open, compiler or FakeCompiler(), passes, report)
    return list(search(weights, ms, known or {}, setting))


def distance(tile: Any, best: Any) -> int:
    return sum(getattr(tile, name) != getattr(best, name) for name in tile.__dataclass_fields__)


def best_is(best: Candidate, us: float = 10.0) -> Callable[[Candidate, int], float]:
    """A tile takes longer by each field in which it differs from the best, and other rows twice as long."""
    return lambda one, m: (
        2 * us
        if one.kernel != best.kernel
        else us
        if one.tile is None
        else us * (1 + 0.2 * distance(one.tile, best.tile))
    )


@pytest.mark.parametrize("name", [name for name in PRESETS if scheme(name).planes == 1])
@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 14336), (57344, 8192), (33, 96)])
def test_candidates_are_legal_and_few(gpu: Gpu, name: str, shape: tuple[int, int]) -> None:
    for m in (1, 8, 16, 32, 64, 256, 1024):
        weight = Weight(scheme(name), *shape)
        one = Search.of(weight.problem(m, gpu, GPU_FEATURES))
        starts = one.candidates()
        assert [start.kernel for start in starts] == [row.name for row in tunable_kernels(one.problem)]
        assert one.rules in starts
        one.coarse = dict.fromkeys(starts, 1.0)
        found = one.candidates()
        assert len(found) <= 34
        assert not set(found) & set(starts)
        for candidate in [*starts, *found]:
            tile_space = kernel_named(candidate.kernel).tile_space
            if tile_space is not None:
                assert tile_space.why_invalid(one.problem, candidate.tile) is None
        for candidate in found:
            assert kernel_named(candidate.kernel).tile_space.why_pruned(one.problem, candidate.tile) is None


def test_neighbours_differ_in_one_field(gpu: Gpu) -> None:
    problem = INT4.problem(64, gpu, GPU_FEATURES)
    row = kernel_named("fused-portable")
    tile = row.tile_space.rule(problem)
    found = [one.tile for one in neighbours(problem, row, tile)]
    assert all(distance(one, tile) == 1 for one in found)
    assert {one.block_m for one in found} == {16, 32, 64, 128}
    assert {one.split_k for one in found} == {1, 2, 4, 8}


def test_the_best_is_found_pass_by_pass(gpu: Gpu) -> None:
    ruled = choose_by_rules(INT4.problem(1, gpu, GPU_FEATURES))
    assert ruled.tile == DecodeTile(8, 2, 1, 4, True)
    goal = Candidate("fused-gemv", DecodeTile(8, 2, 1, 2, False))
    for passes, far in ((0, 2), (1, 1), (2, 0), (9, 0)):
        *_, (one,) = run(gpu, FakeBench(best_is(goal)), passes=passes)
        assert distance(one.entry().tile, goal.tile) == far
    assert one.gain == pytest.approx(1.4)


def test_rows_that_are_not_searched_keep_their_tiles_and_may_win(gpu: Gpu) -> None:
    ruled = Candidate(
        "fused-portable", kernel_named("fused-portable").tile_space.rule(INT4.problem(64, gpu, GPU_FEATURES))
    )
    bench = FakeBench(best_is(ruled))
    setting = Setting(gpu, GPU_FEATURES, bench.open, FakeCompiler(), 2, searched=frozenset({"fused-wgmma"}))
    *_, (one,) = search((INT4,), (64,), {}, setting)
    tried = [candidate.kernel for candidate in one.coarse]
    assert tried.count("fused-portable") == 1 and tried.count("fused-wgmma") > 2
    assert (one.entry().kernel, one.entry().tile) == ("fused-portable", ruled.tile)


def test_a_search_begins_where_the_table_is(gpu: Gpu) -> None:
    goal = Candidate("fused-portable-gemv", PortableGemvTile(8, 256, 1, False))
    known = {Key.of(INT4.problem(1, gpu, GPU_FEATURES)): Entry(1.0, "fused-portable-gemv", goal.tile)}
    ((one,),) = run(gpu, FakeBench(best_is(goal)), known=known, passes=0)
    assert one.entry().tile == goal.tile
    assert one.entry().us == 10.0, "measured again, not believed"


def test_another_row_wins_with_the_times_of_those_before_it(gpu: Gpu) -> None:
    goal = Candidate("fused-portable", PortableGemmTile(4, 16, 4, 4, 2))
    *_, (one,) = run(gpu, FakeBench(best_is(goal, 7.0)), ms=(16,))
    entry = one.entry()
    assert (entry.kernel, entry.tile, entry.us) == ("fused-portable", goal.tile, 7.0)
    others = {"fused-gemv": 14.0, "fused-portable-gemv": 14.0, "fused-small-m": 14.0, "fused-wgmma": 14.0}
    assert entry.others == others, "no later row, and none of other devices"


def test_few_replays_first_and_many_for_the_best(gpu: Gpu) -> None:
    goal = Candidate("fused-portable-gemv", PortableGemvTile(4, 512, 1, False))
    bench = FakeBench(best_is(goal))
    *_, (one,) = run(gpu, bench)
    coarse = [candidate for candidate, _, replays in bench.asked if replays == COARSE]
    fine = [candidate for candidate, _, replays in bench.asked if replays == FINE]
    assert len(coarse) == len(set(coarse)) == len(one.coarse), "nothing is measured twice"
    assert len(fine) == len(set(fine)) <= 6
    assert goal in fine and one.rules in fine


def test_noise_is_no_reason_to_differ_from_the_rules(gpu: Gpu) -> None:
    ruled = choose_by_rules(INT4.problem(1, gpu, GPU_FEATURES))
    for best, wins in ((9.9, False), (9.7, True)):
        bench = FakeBench(lambda one, m, best=best: 10.0 if one.tile == ruled.tile else best)
        *_, (one,) = run(gpu, bench)
        assert (one.entry().tile != ruled.tile) is wins


def test_hopeless_rows_are_left_alone(gpu: Gpu) -> None:
    for slow, tried in ((HOPELESS * 10 - 1, True), (HOPELESS * 10 + 1, False)):
        bench = FakeBench(lambda one, m, slow=slow: slow if one.kernel == "fused-portable" else 10.0)
        *_, (one,) = run(gpu, bench, ms=(16,))
        assert (sum(c.kernel == "fused-portable" for c in one.coarse) > 1) is tried


@pytest.mark.parametrize("error", [0.1, float("nan"), float("inf")])
def test_what_computes_something_wrong_never_wins(gpu: Gpu, error: float) -> None:
    goal = Candidate("fused-portable-gemv", PortableGemvTile(4, 512, 1, False))
    bench = FakeBench(best_is(goal, 1.0), lambda one: error if one == goal else LIMITS[torch.bfloat16])
    *_, (one,) = run(gpu, bench)
    assert one.entry().tile != goal.tile
    assert one.wrong == {goal}
    assert "its result is wrong by" in one.rejected[goal]
    assert goal not in [candidate for candidate, _, _ in bench.asked], "wrong results are not timed"


def test_not_even_the_choice_of_the_rules_may_be_wrong(gpu: Gpu) -> None:
    ruled = choose_by_rules(INT4.problem(1, gpu, GPU_FEATURES))
    bench = FakeBench(lambda one, m: 1.0, lambda one: 1.0 if one.tile == ruled.tile else 0.0)
    *_, (one,) = run(gpu, bench)
    assert one.entry().tile != ruled.tile
    assert one.gain is None


def test_what_does_not_fit_or_compile_is_skipped(gpu: Gpu) -> None:
    def us(one: Candidate, m: int) -> float:
        if one.kernel == "fused-portable-gemv" and one.tile.columns == 256:
            raise Unfit("out of resource: registers")
        return 1.0

    compiler = FakeCompiler(lambda one: "the compiler crashed" if one.kernel == "fused-portable" else None)
    *_, (one,) = run(gpu, FakeBench(us), compiler=compiler)
    reasons = set(one.rejected.values())
    assert reasons == {"out of resource: registers", "the compiler crashed"}
    assert not one.wrong
    rows = {"fused-gemv", "fused-portable-gemv", "fused-small-m", "fused-wgmma", "dequantize"}
    assert {candidate.kernel for candidate in one.coarse} == rows


def test_where_nothing_runs_there_is_no_entry(gpu: Gpu) -> None:
    bench = FakeBench(lambda one, m: 1.0)
    found = run(gpu, bench, compiler=FakeCompiler(lambda _: "no"))
    (one,) = found[-1]
    assert one.entry() is None and one.gain is None
    assert len(found) == 1, "and no second pass"


def test_what_tiles_cannot_compute_is_left_out(gpu: Gpu) -> None:
    weights = (
        Weight(scheme("binary-residual"), 64, 256),
        Weight(scheme("int4", group_size=48), 64, 960),
        INT4,
    )
    bench = FakeBench(lambda one, m: 1.0)
    run(gpu, bench, weights=weights, passes=0)
    assert bench.opened == [INT4]


def test_each_pass_yields_each_weight_so_that_it_can_be_stored(gpu: Gpu) -> None:
    weights = (INT4, Weight(scheme("int8"), 4096, 4096))
    bench = FakeBench(best_is(Candidate("fused-portable-gemv", PortableGemvTile(8, 256, 1, False))))
    calls: list[tuple[int, int, int]] = []
    found = run(
        gpu,
        bench,
        weights=weights,
        ms=(1, 16),
        report=lambda p, done, total, _: calls.append((p, done, total)),
    )
    assert [one[0].problem.scheme for one in found] == [scheme("int4"), scheme("int8")] * 2
    assert all(one.entry() is not None for one in found[0]), "also after the first pass"
    for number in (0, 1):
        mine = [(done, total) for p, done, total in calls if p == number]
        total = mine[0][1]
        assert mine == [(done, total) for done in range(total + 1)]


def test_a_search_with_nothing_new_opens_no_bench(gpu: Gpu) -> None:
    bench = FakeBench(lambda one, m: 1.0)
    run(gpu, bench, passes=50)
    assert len(bench.opened) < 10


def test_codes_and_factors_are_as_kernels_see_them(gpu: Gpu) -> None:
    problem = Weight(scheme("ternary", packing="radix"), 64, 256).problem(1, gpu, GPU_FEATURES)
    assert problem.scheme == replace(scheme("ternary"), packing="bits")
