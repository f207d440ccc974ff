"""Text of the original's own: the counts, and both models on the same beginnings."""

from pathlib import Path

import pytest
import torch

from quantkit.errors import UsageError
from quantkit.eval.eval_options import EvalOptions
from quantkit.eval.evaluate import evaluate, evaluate_many
from quantkit.eval.own_text import BEGINNING, NAME, Continuations, beginnings
from quantkit.quantizing import quantize

STORIES = Path(__file__).parents[2] / "examples" / "stories260K"


def test_counts_are_those_of_hand() -> None:
    written = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5], [1, 2, 0, 3, 4, 5, 6, 7, 8]])
    # The first has six runs of four, of which "5 6 7 8" and "6 7 8 5" come twice; the second ends early.
    assert Continuations.of(written, {0}) == Continuations((9 + 2) / 2, 1 / 2, 2 / 6)
    assert Continuations.of(written[1:], {0}) == Continuations(2.0, 1.0, 0.0)


def test_the_original_and_a_worse_model_go_on_from_the_same_beginnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.eval.own_text.MOST", 48)
    quantize(STORIES, tmp_path / "int2", format="int2", group_size=32, device="cpu")
    options = EvalOptions(against=STORIES, own_text=6, device="cpu")
    same, worse = evaluate_many([STORIES, tmp_path / "int2"], options)
    assert same.texts[NAME].tokens == worse.texts[NAME].tokens == 6 * 48
    assert same.texts[NAME].kl_mean == 0 and same.texts[NAME].same_top1 == 1
    assert (worse.texts[NAME].kl_mean or 0) > 0.5
    assert same.continuations == same.reference_continuations == worse.reference_continuations
    assert worse.continuations is not None
    figures = worse.to_dict()["continuations"]
    assert figures.keys() == {"tokens", "ended", "repeated"} and 0 < figures["tokens"] <= 48


def test_beginnings_are_of_the_text_that_comes_with_quantkit() -> None:
    starts = beginnings(STORIES, 5)
    assert starts.shape == (5, BEGINNING)
    assert torch.equal(starts, beginnings(STORIES, 5))


def test_without_an_original_there_is_no_text_of_its_own() -> None:
    with pytest.raises(UsageError, match="3 texts of the original's own were asked for"):
        evaluate(STORIES, own_text=3, device="cpu")
