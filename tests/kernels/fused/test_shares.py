"""The tiles that programs of `hopper` share out: who has which steps, and where their sums lie."""

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from quantkit.kernels.fused.launch import LEAST_SHARE, shares


def jobs(program: int, programs: int, tiles: int, steps: int) -> list[tuple[int, int, int]]:
    """What a program does, as the kernel has it: each tile, its first step, and the one after its last."""
    full, share, width = shares(tiles, steps, programs)
    found = [(tile, 0, steps) for tile in range(program, full, programs)]
    others = tiles - full
    begin = min(program * share, others * width)
    end = min(begin + share, others * width)
    for other in range(begin // width, -(-end // width) if begin < end else 0):
        found.append((full + other, max(begin - other * width, 0), min(end - other * width, steps)))
    return found


@given(st.integers(1, 500), st.integers(1, 230), st.integers(1, 150))
@example(16, 56, 132)
@example(96, 16, 132)
@example(131, 1, 132)
def test_every_step_is_done_once_and_found_where_it_is_added_up(
    tiles: int, steps: int, programs: int
) -> None:
    full, share, width = shares(tiles, steps, programs)
    done: Counter[tuple[int, int]] = Counter()
    slots: dict[int, dict[int, int]] = {}
    for program in range(programs):
        mine = jobs(program, programs, tiles, steps)
        parts = [job for job in mine if job[0] >= full]
        # There are two slots for each program.
        assert len(parts) <= 2 and all(first < last for _, first, last in mine)
        for tile, first, last in mine:
            done.update((tile, step) for step in range(first, last))
        for number, (tile, first, last) in enumerate(parts):
            if last - first < steps:
                slots.setdefault(tile - full, {})[program] = 2 * program + number
    assert done == Counter((tile, step) for tile in range(tiles) for step in range(steps))
    for other in range(tiles - full):
        first, last = other * width // share, (other * width + steps - 1) // share
        expected = {p: 2 * p + other - p * share // width for p in range(first, last + 1)}
        assert slots.get(other, {}) == (expected if first < last else {})
        assert last - first + 1 <= max(2, (steps - 2) // share + 2)


@given(st.integers(1, 500), st.integers(1, 230), st.integers(1, 150))
def test_no_program_takes_much_longer_than_its_part(tiles: int, steps: int, programs: int) -> None:
    full, share, _ = shares(tiles, steps, programs)
    assert full % programs == 0 or full == tiles
    even = -(-(tiles - full) * steps // programs)
    assert share <= max(even, LEAST_SHARE) + 2 and (tiles - full) < programs
