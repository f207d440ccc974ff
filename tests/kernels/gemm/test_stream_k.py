"""Stream-K of `wgmma_gemm`: which program has which steps, writes partial sums, and waits."""

from collections import Counter
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from quantkit.kernels.gemm.wgmma.wgmma_launch import launch_token
from quantkit.kernels.gemm.wgmma.wgmma_tiles import fixups_per_tile, splits_single_tiles, stream_k_schedule
from quantkit.kernels.gluon import stream_k as kernel

#: Tiles, their steps, programs, and how many steps a part takes to be added.
SIZES = given(
    st.integers(1, 500), st.integers(1, 230), st.integers(1, 300), st.sampled_from([0.0, 0.4, 1.0, 2.5])
)


def in_python(function: Any, program: int, programs: int) -> Callable[..., Any]:
    """A function of the kernel, as one program of so many would run it."""
    gl = SimpleNamespace(
        program_id=lambda axis: program,
        num_programs=lambda axis: programs,
        cdiv=lambda a, b: -(-a // b),
        minimum=min,
        maximum=max,
        where=lambda condition, a, b: a if condition else b,
    )
    return FunctionType(function.fn.__code__, {"gl": gl})


def jobs(
    program: int, programs: int, given: tuple[int, int, int], tiles: int, steps: int
) -> list[tuple[int, int, int]]:
    """What a program does, by the kernel's code: each tile, its first step, and the one after its last."""
    full, share, width = given
    whole, count, begin, end, left = in_python(kernel.work_range, program, programs)(
        tiles, 1, full, share, width, steps, BN=1, BM=1
    )
    job = in_python(kernel.work_tile, program, programs)
    return [job(number, whole, begin, end, left, full, width, steps) for number in range(count)]


def before(program: int, tile: int, programs: int, given: tuple[int, int, int]) -> range:
    """The programs whose sums the one that writes a tile adds up, by the kernel's code."""
    first = in_python(kernel.first_contributor, program, programs)(tile, *given)
    return range(first, program)


@settings(deadline=None)
@SIZES
@example(16, 56, 132, 1.0)
@example(96, 16, 132, 1.0)
@example(131, 1, 132, 1.0)
@example(224, 16, 264, 0.0)
@example(1, 100, 132, 0.0)
def test_every_step_is_done_once_and_added_up_by_who_writes_the_tile(
    tiles: int, steps: int, programs: int, part_steps: float
) -> None:
    given = stream_k_schedule(tiles, steps, programs, part_steps)
    done: Counter[tuple[int, int]] = Counter()
    left: dict[int, int] = {}
    writers: dict[int, int] = {}
    done_by = [jobs(program, programs, given, tiles, steps) for program in range(programs)]
    for program, mine in enumerate(done_by):
        for tile, first, last in mine:
            assert first < last
            done.update((tile, step) for step in range(first, last))
            if last == steps:
                assert tile not in writers
                writers[tile] = program
            else:
                # There is room for one part of each program.
                assert program not in left
                left[program] = tile
    assert done == Counter((tile, step) for tile in range(tiles) for step in range(steps))
    for tile in range(tiles):
        program = writers[tile]
        first = next(first for found, first, _ in done_by[program] if found == tile)
        added = list(before(program, tile, programs, given)) if first > 0 else []
        assert added == [other for other, found in sorted(left.items()) if found == tile]
        if tile >= given[0]:
            mean, more = fixups_per_tile(steps, *given[1:]), 0.0 if splits_single_tiles(*given[1:]) else 0.5
            assert abs(len(added) - mean) == more


@settings(deadline=None)
@SIZES
@example(96, 16, 132, 1.0)
@example(100, 7, 132, 0.0)
def test_what_is_waited_for_comes_before_all_else(
    tiles: int, steps: int, programs: int, part_steps: float
) -> None:
    """So a program waits for programs with smaller numbers only while these do what it waits for."""
    given = stream_k_schedule(tiles, steps, programs, part_steps)
    for program in range(programs):
        mine = jobs(program, programs, given, tiles, steps)
        is_left = [last < steps for _, _, last in mine]
        waits = [last == steps and first > 0 for _, first, last in mine]
        assert is_left == sorted(is_left, reverse=True) and sum(is_left) <= 1
        assert waits == sorted(waits) and sum(waits) <= 1


@settings(deadline=None)
@SIZES
@example(36, 14, 132, 1.0)
@example(8, 32, 132, 1.0)
def test_no_other_shares_are_sooner(tiles: int, steps: int, programs: int, part_steps: float) -> None:
    def length(share: int, width: int) -> float:
        return share + part_steps * fixups_per_tile(steps, share, width)

    full, share, width = stream_k_schedule(tiles, steps, programs, part_steps)
    others = tiles % programs
    assert full == (tiles - others if share else tiles)
    if others == 0:
        assert share == 0
        return
    mine = length(share, width) if share else steps
    assert mine <= length(-(-others * steps // programs), steps)
    for count in range(1, programs // others + 1):
        each = -(-steps // count)
        assert mine <= length(each, -(-steps // each) * each)


def test_every_launch_has_a_token_of_its_own() -> None:
    tokens = [launch_token() for _ in range(10_000)]
    assert len(set(tokens)) == len(tokens)
    # They fit an int64, and are neither what memory begins with nor what a reader takes them back with. They
    # are of one kind, by which launches are looked up.
    assert all(1 << 62 <= token < 1 << 63 and token % 2 for token in tokens)
