"""Text of the original's own: the counts, and both models on the same beginnings."""

from pathlib import Path

import pytest
import torch

from quantkit.cli.figures import _differing, print_reports
from quantkit.errors import UsageError
from quantkit.eval import own_text
from quantkit.eval.eval_options import EvalOptions
from quantkit.eval.evaluate import evaluate, evaluate_many
from quantkit.eval.own_text import (
    BEGINNING,
    NAME,
    Continuations,
    OwnText,
    alike_at_start,
    beginnings,
    compared,
)
from quantkit.eval.results import EvalReport
from quantkit.eval.text import TextWindows
from quantkit.model.forward.sampling import continued
from quantkit.model.tokenizer import tokenizer
from quantkit.quantizing import quantize
from quantkit.runtime.load import load_language_model

STORIES = Path(__file__).parents[2] / "examples" / "stories260K"


def test_counts_are_those_of_hand() -> None:
    written = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5], [1, 2, 0, 3, 4, 5, 6, 7, 8]])
    # The first has six runs of four, of which "5 6 7 8" and "6 7 8 5" come twice; the second ends early.
    assert Continuations.of(written, {0}) == Continuations((9 + 2) / 2, 1 / 2, 2 / 6)
    assert Continuations.of(written[1:], {0}) == Continuations(2.0, 1.0, 0.0)


def test_the_original_and_a_worse_model_go_on_from_the_same_beginnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quantkit.eval.own_text.MOST", 48)
    monkeypatch.setattr(own_text, "KEPT", 4)
    quantize(STORIES, tmp_path / "int2", format="int2", group_size=32, device="cpu")
    options = EvalOptions(against=STORIES, own_text=6, device="cpu")
    same, worse = evaluate_many([STORIES, tmp_path / "int2"], options)
    assert same.texts[NAME].tokens == worse.texts[NAME].tokens == 6 * 48
    assert same.texts[NAME].kl_mean == 0 and same.texts[NAME].same_top1 == 1
    assert (worse.texts[NAME].kl_mean or 0) > 0.5
    assert list(same.own_text) == list(worse.own_text) == ["sampled", "greedy"]
    words = tokenizer(STORIES)
    for way, written in same.own_text.items():
        other = worse.own_text[way]
        assert written.model == written.original == other.original
        figures = worse.to_dict()["own_text"][way]["model"]
        assert figures.keys() == {"tokens", "ended", "repeated"} and 0 < figures["tokens"] <= 48
        assert len(written.pairs) == len(other.pairs) == 4
        assert {(pair.alike, pair.original == pair.model) for pair in written.pairs} == {(None, True)}
        for pair, start in zip(other.pairs, beginnings(STORIES, 4).tolist(), strict=True):
            assert pair.beginning == words.decode(start) and pair.original
            assert pair.original != pair.model and pair.alike is not None and pair.alike < 48
        assert [pair.original for pair in other.pairs] == [pair.original for pair in written.pairs]
    assert same.own_text["sampled"] != same.own_text["greedy"]
    assert EvalReport.from_dict(worse.to_dict()).own_text == worse.own_text
    old = worse.to_dict()
    old["reference_sizes"]["file_bytes"] = old["reference_sizes"].pop("nbytes")
    assert EvalReport.from_dict(old).reference_sizes == worse.reference_sizes
    print_reports([worse])
    said = " ".join(capsys.readouterr().out.split())
    assert "sampled, int2 goes on for" in said and "greedy, int2 goes on for" in said


def test_greedy_text_is_of_the_likeliest_tokens() -> None:
    model = load_language_model(STORIES, device=torch.device("cpu"), dtype=torch.float32)
    starts = beginnings(STORIES, 2)
    tokens = continued(model, starts, BEGINNING + 8, None)
    assert torch.equal(tokens[:, :BEGINNING], starts)
    with torch.no_grad():
        likeliest = model(input_ids=tokens).logits.argmax(-1)
    assert torch.equal(tokens[:, BEGINNING:], likeliest[:, BEGINNING - 1 : -1])


def text_of(rows: list[list[int]], scored: int) -> OwnText:
    tokens = torch.tensor(rows)
    # Greedily it ends at once.
    return OwnText(TextWindows(NAME, tokens, scored), torch.full((len(rows), 1), 2), frozenset({2}))


def test_pairs_begin_where_the_beginning_ends_and_end_with_the_text() -> None:
    words = tokenizer(STORIES)
    start = words.encode("Once upon a", add_special_tokens=False)
    time, dog = (words.encode(text, add_special_tokens=False) for text in ("time there", "dog ran"))
    size = max(len(time), len(dog)) + 2
    # 2 ends a text; what comes after it is none of it.
    original, model = (
        text_of([start + [*tokens, 2, *time, *dog][:size] for tokens in rows], size)
        for rows in ((time, time, []), (dog, time, time))
    )
    written = compared(STORIES, original, model)
    assert {(pair.original, pair.model, pair.alike) for pair in written["greedy"].pairs} == {("", "", None)}
    first, second, third = written["sampled"].pairs
    assert (first.beginning, first.original, first.model) == ("Once upon a", " time there", " dog ran")
    assert first.alike == alike_at_start(time, dog) < len(time)
    assert second.original == second.model == " time there" and second.alike is None
    assert (third.original, third.model, third.alike) == ("", " time there", 0)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [("", "", 0), ("abc", "abd", 2), ("abc", "ab", 2), ("a", "a", 1), ("a", "b", 0)],
)
def test_alike_at_the_start(one: str, other: str, expected: int) -> None:
    assert alike_at_start(one, other) == alike_at_start(list(other), list(one)) == expected


@pytest.mark.parametrize(
    ("alike", "said"),
    [
        ([], ""),
        ([0, 9, 4], "; half of 3 texts differ within 5 tokens"),
        ([0], "; half of 1 texts differ within 1 token"),
        ([None, 3], "; half of 2 texts differ within 4 tokens"),
        ([None, None, 3], "; most of 3 texts are the same"),
    ],
)
def test_where_texts_differ_is_said_in_short(alike: list[int | None], said: str) -> None:
    assert _differing(alike) == said


def test_beginnings_are_of_the_text_that_comes_with_quantkit() -> None:
    starts = beginnings(STORIES, 5)
    assert starts.shape == (5, BEGINNING)
    assert torch.equal(starts, beginnings(STORIES, 5))


def test_without_an_original_there_is_no_text_of_its_own() -> None:
    with pytest.raises(UsageError, match="3 texts of the original's own were asked for"):
        evaluate(STORIES, own_text=3, device="cpu")
