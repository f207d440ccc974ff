"""Samples: windows of whole documents, in rounds, the same for a seed."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from quantkit.calibrate.data.samples import Described, Samples, draw, merge, micro_batch
from quantkit.errors import UsageError

from ...support.compare import assert_equal


def documents(*lengths: int) -> list[torch.Tensor]:
    """Documents whose tokens say where they are from: 1000 times the document plus the position."""
    return [torch.arange(length) + 1000 * (i + 1) for i, length in enumerate(lengths)]


def test_windows_are_cut_at_multiples_and_drawn_in_rounds() -> None:
    found = draw(documents(100, 25, 31), 6, 10, 0, None, "x").tokens
    assert found.shape == (6, 10)
    owners = (found[:, 0] // 1000).tolist()
    assert sorted(owners[:3]) == [1, 2, 3] and sorted(owners[3:]) == [1, 2, 3]
    assert (found[:, 0] % 10 == 0).all() and (found.diff(dim=1) == 1).all()
    assert len({tuple(row) for row in found.tolist()}) == 6


def test_short_documents_are_joined_with_the_separator() -> None:
    found = draw(documents(4, 4, 4), 9, 5, 0, 7, "x")
    rows = sorted(found.tokens.tolist())
    assert rows == [[1000, 1001, 1002, 1003, 7], [2000, 2001, 2002, 2003, 7], [3000, 3001, 3002, 3003, 7]]
    assert found.notes == ("x: 3 calibration samples of 5 tokens, as there is no text for 9",)
    joined = draw(documents(3, 3), 1, 6, 0, None, "x").tokens
    assert joined.tolist() == [[1000, 1001, 1002, 2000, 2001, 2002]]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    count=st.integers(1, 12),
    length=st.integers(2, 12),
    seed=st.integers(0, 5),
)
def test_any_documents_give_full_windows_or_an_error(
    lengths: list[int], count: int, length: int, seed: int
) -> None:
    available = sum(n // length for n in lengths) + sum(n for n in lengths if n < length) // length
    if not available:
        with pytest.raises(UsageError, match=f"{sum(lengths)} tokens are less than one .* of {length}"):
            draw(documents(*lengths), count, length, seed, None, "x")
        return
    found = draw(documents(*lengths), count, length, seed, None, "x")
    assert found.tokens.shape == (min(count, available), length)
    assert bool(found.notes) == (available < count)
    again = draw(documents(*lengths), count, length, seed, None, "x")
    assert_equal(found.tokens, again.tokens)
    assert found.digest == again.digest


def test_seeds_draw_other_windows() -> None:
    found = {draw(documents(1000), 5, 10, seed, None, "x").digest for seed in range(4)}
    assert len(found) == 4


def test_the_digest_knows_the_shape() -> None:
    tokens = torch.arange(12)
    assert Samples(tokens.view(3, 4), "x").digest != Samples(tokens.view(4, 3), "x").digest


def test_sources_are_merged_in_order() -> None:
    one, two = Samples(torch.zeros(2, 3), "a", ("n",)), Samples(torch.ones(1, 3), "b", ("m",))
    both = merge([one, two])
    assert both.tokens[:, 0].tolist() == [0, 0, 1] and both.origin == "a:2, b:1" and both.notes == ("n", "m")


@pytest.mark.parametrize(
    ("samples", "most", "expected"), [(128, 8, 8), (12, 8, 6), (13, 8, 1), (3, 8, 3), (1, 4, 1)]
)
def test_micro_batches_divide_the_samples(samples: int, most: int, expected: int) -> None:
    assert micro_batch(samples, most) == expected


def test_the_sources_are_read_from_the_description() -> None:
    names = ["data/a, b:3.txt", "hf:allenai/c4/en", "x.jsonl"]
    made = merge([Samples(torch.zeros(count, 8).long(), name) for count, name in enumerate(names, 1)])
    assert made.description.startswith("6 samples of 8 tokens from data/a, b:3.txt:1, hf:")
    found = Described.read(made.description)
    assert found is not None and [name for name, _ in found.sources] == names
    assert (found.count, found.length, found.digest) == (*made.tokens.shape, made.digest)
    assert all(Described.read(other) is None for other in ("", None, "6 samples of 8 tokens from x:1"))
