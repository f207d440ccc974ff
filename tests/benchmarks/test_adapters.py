"""The benchmark of adapters, on the bundled model."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
TEXT = Path(__file__).parents[2] / "examples" / "stories.txt"


def test_both_adapters_are_trained_and_one_is_merged(benchmark, stories, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "LENGTH", 32)
    monkeypatch.setattr(benchmark, "HELD_OUT", 4)
    out = tmp_path / "adapters.json"
    benchmark.main(
        [str(stories), str(TEXT), "--work", str(tmp_path / "work"), "--steps", "3", "--json", str(out)]
    )
    found = json.loads(out.read_text())
    assert found["steps"] == 3 and "torch" in found["machine"] and found["tokens_per_step"] == 128
    losses = {name: one["losses"] for name, one in found["trained"].items()}
    # A packed model is worse before; both learn.
    assert losses["dense"][0] < losses["packed"][0]
    assert all(after < before for before, after in losses.values())
    assert found["merged_from"].keys() == {"original", "packed"}
    assert all(one["kl_mean"] > 0 for one in found["merged_from"].values())


def test_the_text_is_divided_without_overlap(benchmark):
    text = "".join(f"{number:05d}\n" for number in range(10_000))
    steps = 2
    needed = (steps * benchmark.BATCH + benchmark.HELD_OUT) * benchmark.LENGTH
    rows, after = benchmark.divided(text, torch.arange(10_000), steps)
    assert rows.shape == (needed // benchmark.LENGTH, benchmark.LENGTH)
    assert int(rows[-1, -1]) + 1_000 == pytest.approx(int(after[6:11]), abs=2)


def test_a_text_that_is_too_short_is_refused(benchmark):
    with pytest.raises(SystemExit, match=r"the text has 100 tokens, and 40 steps take .* Give a longer text"):
        benchmark.divided("a" * 100, torch.zeros(100, dtype=torch.long), 40)
