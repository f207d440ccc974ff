"""The tiles that programs of `hopper` share out: who has which steps, who writes them, who waits for whom."""

from collections import Counter
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from quantkit.kernels.fused import shares as kernel
from quantkit.kernels.fused.launch.hopper import launch_token, parts_added, shares

SIZES = given(st.integers(1, 500), st.integers(1, 230), st.integers(1, 300))


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


def jobs(program: int, programs: int, tiles: int, steps: int) -> list[tuple[int, int, int]]:
    """What a program does, by the kernel's code: each tile, its first step, and the one after its last."""
    full, share, width = shares(tiles, steps, programs)
    whole, count, begin, end, left = in_python(kernel.all_jobs, program, programs)(
        tiles, 1, full, share, width, steps, ROWS=1, BM=1
    )
    job = in_python(kernel.job_of, program, programs)
    return [job(number, whole, begin, end, left, full, width, steps) for number in range(count)]


def before(program: int, tile: int, programs: int, tiles: int, steps: int) -> range:
    """The programs whose sums the one that writes a tile adds up, by the kernel's code."""
    first = in_python(kernel.first_of, program, programs)(tile, *shares(tiles, steps, programs))
    return range(first, program)


@settings(deadline=None)
@SIZES
@example(16, 56, 132)
@example(96, 16, 132)
@example(131, 1, 132)
@example(224, 16, 264)
def test_every_step_is_done_once_and_added_up_by_who_writes_the_tile(
    tiles: int, steps: int, programs: int
) -> None:
    done: Counter[tuple[int, int]] = Counter()
    left: dict[int, int] = {}
    writers: dict[int, int] = {}
    done_by = [jobs(program, programs, tiles, steps) for program in range(programs)]
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
        added = list(before(program, tile, programs, tiles, steps)) if first > 0 else []
        assert added == [other for other, found in sorted(left.items()) if found == tile]


@settings(deadline=None)
@SIZES
@example(96, 16, 132)
@example(100, 7, 132)
def test_what_is_waited_for_comes_before_all_else(tiles: int, steps: int, programs: int) -> None:
    """So a program waits for programs with smaller numbers only while these do what it waits for."""
    for program in range(programs):
        mine = jobs(program, programs, tiles, steps)
        is_left = [last < steps for _, _, last in mine]
        waits = [last == steps and first > 0 for _, first, last in mine]
        assert is_left == sorted(is_left, reverse=True) and sum(is_left) <= 1
        assert waits == sorted(waits) and sum(waits) <= 1


@settings(deadline=None)
@SIZES
@example(36, 14, 132)
@example(8, 32, 132)
def test_no_other_shares_are_sooner(tiles: int, steps: int, programs: int) -> None:
    """As long as a part takes to be added as a step."""

    def length(share: int, width: int) -> int:
        return share + parts_added(steps, share, width)

    full, share, width = shares(tiles, steps, programs)
    others = tiles % programs
    assert full == (tiles - others if share else tiles)
    mine = length(share, width) if share else steps * (others > 0)
    for parts in range(1, programs // max(others, 1) + 1):
        each = -(-steps // parts)
        assert mine <= length(each, parts * each)
    even = -(-others * steps // programs)
    assert mine <= (length(even, steps) if others else 0)


@settings(deadline=None)
@SIZES
@example(80, 20, 132)
def test_as_many_parts_are_added_as_is_said(tiles: int, steps: int, programs: int) -> None:
    full, share, width = shares(tiles, steps, programs)
    if share:
        first = in_python(kernel.first_of, 0, programs)
        most = max(
            (full_end - 1) // share - first(tile, full, share, width)
            for tile in range(full, tiles)
            for full_end in [(tile - full) * width + steps]
        )
        assert most <= parts_added(steps, share, width)


def test_every_launch_has_a_token_of_its_own() -> None:
    tokens = [launch_token() for _ in range(10_000)]
    assert len(set(tokens)) == len(tokens)
    # They fit an int64, and are neither what memory begins with nor what a reader takes them back with. They
    # are of one kind, by which launches are looked up.
    assert all(1 << 62 <= token < 1 << 63 and token % 2 for token in tokens)
