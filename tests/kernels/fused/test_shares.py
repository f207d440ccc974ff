"""The tiles that programs of `hopper` share out: who has which steps, who writes them, who waits for whom."""

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from quantkit.kernels.fused.launch import LEAST_SHARE, launch_token, shares

SIZES = given(st.integers(1, 500), st.integers(1, 230), st.integers(1, 150))


def jobs(program: int, programs: int, tiles: int, steps: int) -> list[tuple[int, int, int]]:
    """What a program does, as the kernel has it: each tile, its first step, and the one after its last."""
    full, share, width = shares(tiles, steps, programs)
    whole = [(tile, 0, steps) for tile in range(program, full, programs)]
    others = tiles - full
    begin = min(program * share, others * width)
    end = min(begin + share, others * width)
    parts = [
        (full + other, max(begin - other * width, 0), min(end - other * width, steps))
        for other in range(begin // width, -(-end // width) if begin < end else 0)
    ]
    # What another program waits for is first, the end of a tile last.
    if len(parts) == 2 or (parts and parts[0][2] < steps):
        return [parts[-1], *whole, *parts[:-1]]
    return whole + parts


def before(program: int, tile: int, programs: int, tiles: int, steps: int) -> range:
    """The programs whose sums the one that writes a tile adds up, as the kernel has it."""
    full, share, width = shares(tiles, steps, programs)
    return range((tile - full) * width // max(share, 1), program)


@SIZES
@example(16, 56, 132)
@example(96, 16, 132)
@example(131, 1, 132)
def test_every_step_is_done_once_and_added_up_by_who_writes_the_tile(
    tiles: int, steps: int, programs: int
) -> None:
    done: Counter[tuple[int, int]] = Counter()
    left: dict[int, int] = {}
    writers: dict[int, int] = {}
    for program in range(programs):
        for tile, first, last in jobs(program, programs, tiles, steps):
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
        mine = next(job for job in jobs(program, programs, tiles, steps) if job[0] == tile)
        added = list(before(program, tile, programs, tiles, steps)) if mine[1] > 0 else []
        assert added == [other for other, found in sorted(left.items()) if found == tile]


@SIZES
@example(96, 16, 132)
@example(100, 7, 132)
def test_programs_end_whatever_part_of_them_runs_at_a_time(tiles: int, steps: int, programs: int) -> None:
    """They begin in order, and wait for programs that began before, which wait for none that began after."""
    left: set[int] = set()
    for program in range(programs):
        for tile, first, last in jobs(program, programs, tiles, steps):
            if last < steps:
                left.add(program)
            elif first > 0:
                # All before have ended: what this one waits for is there even if one runs at a time.
                assert left.issuperset(before(program, tile, programs, tiles, steps))


@SIZES
def test_no_program_takes_much_longer_than_its_part(tiles: int, steps: int, programs: int) -> None:
    full, share, _ = shares(tiles, steps, programs)
    assert full % programs == 0 or full == tiles
    even = -(-(tiles - full) * steps // programs)
    assert share <= max(even, LEAST_SHARE) + 2 and (tiles - full) < programs


def test_every_launch_has_a_token_of_its_own() -> None:
    tokens = [launch_token() for _ in range(10_000)]
    assert len(set(tokens)) == len(tokens)
    # They fit an int64, and are neither what memory begins with nor what a reader takes them back with.
    assert all(1 << 62 <= token < 1 << 63 for token in tokens)
