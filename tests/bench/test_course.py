"""The time that a benchmark takes is told from its first generations."""

import pytest

from quantkit.bench.bench_options import Grid
from quantkit.bench.course import Course, Times

#: Seconds per token of a prompt and per step, as a machine of the same speed at all sizes takes.
TOKEN, STEP = 0.01, 0.5


def times(batch: int, prompt: int, tokens: int) -> Times:
    return Times(batch * prompt * TOKEN, [STEP * batch**0.5] * (tokens - 1), 0.0)


@pytest.mark.parametrize("new_tokens", [2, 8])
def test_the_estimate_is_what_the_generations_take(new_tokens: int) -> None:
    """Both at the first generation that counts and at each later one, where the machine keeps its speed."""
    grid = Grid((1, 4), (10, 30), new_tokens, ("eager", "flat"), repeats=2)
    told: list[tuple[int, int, str]] = []
    estimates: list[tuple[float, int]] = []
    course = Course(
        grid,
        {"flat": 3},
        lambda *line: told.append(line),
        lambda seconds: estimates.append((seconds, len(told))),
    )
    spent, left = 0.0, []
    for batch, prompt, mode in grid.settings:
        course.begin(f"batch {batch}")
        for tokens in [min(new_tokens, 4)] * (3 if mode == "flat" else 1) + [new_tokens] * 2:
            one = times(batch, prompt, tokens)
            spent += one.first + sum(one.between)
            course.generated(one)
            left.append((spent, course.left()))
    assert all(before + after == pytest.approx(spent) for before, after in left)
    # The start of the first setting, and its warm-up, were told of before.
    assert estimates == [(pytest.approx(spent), 2)]
    total = 4 * (1 + 2) + 4 * (3 + 2)
    assert [done for done, *_ in told] == list(range(total)) and {of for _, of, _ in told} == {total}
    assert told[0][2] == "batch 1" and all(label.endswith(" left") for *_, label in told[1:])


def test_the_pace_of_a_mode_is_its_own() -> None:
    course = Course(Grid((1,), (10, 20), 2, ("eager", "flat"), repeats=1), {}, None, None)
    course.begin("eager")
    for _ in range(2):
        course.generated(Times(1.0, [10.0], 0.0))
    course.begin("flat")
    for _ in range(2):
        course.generated(Times(0.5, [3.0], 0.0))
    # Of the second prompt, twice as long: two generations in each mode.
    assert course.left() == pytest.approx(2 * (2.0 + 10.0) + 2 * (1.0 + 3.0))
