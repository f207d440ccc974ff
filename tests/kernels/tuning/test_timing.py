"""What comes before the replays of a graph that count, and which do. No GPU is asked."""

from collections.abc import Callable

import pytest

from quantkit.kernels.tuning import timing

#: A rest of so many seconds, or the number of a replay.
Events = list[float | int]
Replays = Callable[[float], Callable[[], float]]


@pytest.fixture
def events() -> Events:
    return []


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch, events: Events) -> Replays:
    """Replays of so many microseconds; only they and rests move the clock."""
    now = 0.0

    def rest(seconds: float) -> None:
        nonlocal now
        now += seconds
        if seconds:
            events.append(seconds)

    def of(us: float) -> Callable[[], float]:
        count = 0

        def replay() -> float:
            nonlocal now, count
            now += us * 1e-6
            count += 1
            events.append(count)
            # What it takes tells which one it was.
            return us + count * 1e-6

        return replay

    monkeypatch.setattr(timing.time, "sleep", rest)
    monkeypatch.setattr(timing.time, "monotonic", lambda: now)
    return of


def numbers(times: list[float], us: float) -> list[int]:
    return [round((time - us) * 1e6) for time in times]


@pytest.mark.parametrize("us", [100.0, 50_000.0])
def test_without_a_rest_all_count_but_the_first(replays: Replays, events: Events, us: float) -> None:
    found = timing._counted(replays(us), 15, 0.0, 0.0)
    assert events == list(range(1, 19))
    assert numbers(found, us) == list(range(4, 19))


@pytest.mark.parametrize(
    ("us", "asked", "counted"),
    [(100.0, 15, 15), (2_000.0, 15, 10), (3_500.0, 15, 6), (50_000.0, 15, 5), (50_000.0, 3, 3)],
)
def test_after_a_rest_those_count_that_fit_into_a_spell_but_some_at_least(
    replays: Replays, events: Events, us: float, asked: int, counted: int
) -> None:
    found = timing._counted(replays(us), asked, 0.5, 0.0)
    assert events == [0.5, *range(1, 4 + counted)]
    assert numbers(found, us) == list(range(4, 4 + counted))


def test_under_load_all_count_after_as_long_of_the_same(replays: Replays, events: Events) -> None:
    found = timing._counted(replays(4_000.0), 30, 0.5, 0.3)
    # 75 replays take 0.3 s.
    assert events == [0.5, *range(1, 109)]
    assert numbers(found, 4_000.0) == list(range(79, 109))


def test_products_that_draw_much_power_have_a_rest() -> None:
    assert [timing.rest_for(m) for m in (1, 127, 128, 4096)] == [0.0, 0.0, timing.REST, timing.REST]
