"""Some hundred mutations of every kind of input, the same in every run; `make fuzz` has many more.

Beside them every finding of earlier runs again, from `corpus`.
"""

from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .campaign import PIECE, pieces
from .runner import Place, corpus, run_case
from .targets import TARGETS

#: Cases of each target, in proportion to their shares of a long run.
CASES = 2500
KEPT = [(name, path) for name in TARGETS for path in corpus(name)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    # Wide tensors start threads, whose stacks count as memory.
    torch.ones(1 << 20).sum()
    return Place(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", TARGETS)
def test_what_nobody_changed_is_valid(name: str, place: Place) -> None:
    for seed in TARGETS[name].seeds():
        assert run_case(TARGETS[name], seed, place) == "valid"


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.sampled(2)
def test_whatever_is_changed_is_valid_or_refused_in_words(name: str, place: Place) -> None:
    target = TARGETS[name]
    outcomes = set()

    @settings(
        max_examples=max(50, round(CASES * target.share)),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(range(len(target.seeds()))), st.integers(0, 2**64 - 1))
    def fuzz(seed: int, number: int) -> None:
        outcomes.add(run_case(target, target.mutate(target.seeds()[seed], Random(number)), place))

    fuzz()
    assert len(outcomes) > 1, "mutations that are all refused, or none, test nothing"


@pytest.mark.parametrize(("name", "path"), KEPT, ids=[f"{name}/{path.name}" for name, path in KEPT])
def test_what_was_found_stays_found(name: str, path: Path, place: Place) -> None:
    run_case(TARGETS[name], path.read_bytes(), place)


def test_pieces_of_a_long_run_have_each_case_once_and_all_targets_in_turns() -> None:
    counts = {"json": 2 * PIECE + 1, "load": 7, "gguf": PIECE}
    found = pieces(counts, jobs=1)
    for name, count in counts.items():
        mine = [number for one in found if one.name == name for number in range(one.first, one.end)]
        assert mine == list(range(count))
    assert [one.name for one in found] == ["json", "load", "gguf", "json", "json"]
