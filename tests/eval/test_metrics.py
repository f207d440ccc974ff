"""Scores against the definitions written out with Python floats, closed forms, and their invariants."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import FormatError
from quantkit.eval import metrics
from quantkit.eval.metrics import (
    KL_EDGES,
    TokenScores,
    clustered_error,
    merge,
    quantile,
    quantile_error,
    score,
    summarize,
)

from ..support.compare import assert_close, assert_equal


def log_softmax_twin(row: list[float]) -> list[float]:
    top = max(row)
    total = math.log(math.fsum(math.exp(x - top) for x in row))
    return [x - top - total for x in row]


def score_twin(
    logits: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor
) -> tuple[list[list[float]], list[list[float]], list[list[float]], list[list[bool]]]:
    nll, reference_nll, kl, same = [], [], [], []
    for q_window, target_window, p_window in zip(
        logits.tolist(), targets.tolist(), reference.tolist(), strict=True
    ):
        for rows in (nll, reference_nll, kl, same):
            rows.append([])
        for q_row, target, p_row in zip(q_window, target_window, p_window, strict=True):
            q, p = log_softmax_twin(q_row), log_softmax_twin(p_row)
            nll[-1].append(-q[target])
            reference_nll[-1].append(-p[target])
            kl[-1].append(math.fsum(math.exp(b) * (b - a) for a, b in zip(q, p, strict=True)))
            same[-1].append(q_row.index(max(q_row)) == p_row.index(max(p_row)))
    return nll, reference_nll, kl, same


def example(seed: int, windows: int, positions: int, vocabulary: int, spread: float = 3.0):
    generator = torch.Generator().manual_seed(seed)
    reference = spread * torch.randn(windows, positions, vocabulary, generator=generator)
    logits = reference + 0.3 * torch.randn(windows, positions, vocabulary, generator=generator)
    targets = torch.randint(vocabulary, (windows, positions), generator=generator)
    return logits, targets, reference


def close(found: torch.Tensor | None, expected: list[list[float]]) -> None:
    assert found is not None and found.dtype == torch.float64
    assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("spread", [0.01, 3.0, 300.0])
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 5, 7), (2, 4, 61)])
def test_scores_are_the_definitions(shape, spread):
    logits, targets, reference = example(1, *shape, spread)
    nll, reference_nll, kl, same = score_twin(logits, targets, reference)
    found = score(logits, targets, reference)
    close(found.nll, nll)
    close(found.reference_nll, reference_nll)
    close(found.kl, kl)
    assert found.same_top1 is not None and found.same_top1.tolist() == same


def test_chunks_change_nothing(monkeypatch):
    logits, targets, reference = example(2, 3, 8, 11)
    whole = score(logits, targets, reference)
    monkeypatch.setattr(metrics, "_CHUNK_ELEMENTS", 5 * 11)
    chunked = score(logits, targets, reference)
    for name in ("nll", "reference_nll", "kl", "same_top1"):
        assert_equal(getattr(whole, name), getattr(chunked, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_identical_logits_have_no_divergence(dtype):
    logits, targets, _ = example(3, 2, 9, 1000)
    logits = logits.to(dtype)
    # The reference comes back from disk as float32, which holds every bfloat16 and float16 value.
    found = score(logits, targets, logits.float())
    assert found.kl is not None and found.same_top1 is not None
    assert found.kl.eq(0).all() and found.same_top1.all()
    summary = summarize(found)
    assert summary.kl_mean == summary.kl_p99 == summary.excess == 0.0
    assert summary.same_top1 == 1.0


def test_metrics_are_the_closed_forms_of_simple_distributions():
    vocabulary = 8
    uniform = torch.zeros(1, 1, vocabulary)
    # Half of the probability on token 0, the rest spread evenly over the other seven.
    half = torch.log(torch.tensor([0.5] + [0.5 / 7] * 7)).view(1, 1, -1)
    target = torch.zeros(1, 1, dtype=torch.int64)
    found = summarize(score(uniform, target, half))
    assert found.perplexity == pytest.approx(8)
    assert found.reference_perplexity == pytest.approx(2)
    assert found.excess == pytest.approx(math.log(4))
    entropy = 0.5 * math.log(2) + 0.5 * math.log(14)
    assert found.kl_mean == pytest.approx(math.log(8) - entropy)


def test_masked_entries_with_the_lowest_float_are_harmless():
    logits, targets, reference = example(4, 1, 3, 6)
    targets = targets % 5
    logits[..., 5] = reference[..., 5] = torch.finfo(torch.float32).min
    found = score(logits, targets, reference)
    expected = score(logits[..., :5], targets, reference[..., :5])
    assert_close(found.kl, expected.kl, rtol=1e-12, atol=1e-15)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.integers(2, 40),
    spread=st.floats(0, 50),
    shift=st.floats(-100, 100),
)
def test_divergence_is_never_negative_and_ignores_shifts(seed, vocabulary, spread, shift):
    logits, targets, reference = example(seed, 2, 3, vocabulary, spread)
    found = score(logits, targets, reference)
    assert found.kl is not None and bool((found.kl >= 0).all())
    moved = score(logits.double() + shift, targets, reference.double())
    assert_close(moved.kl, found.kl, rtol=1e-9, atol=1e-11)
    assert_close(moved.nll, found.nll, rtol=1e-9, atol=1e-11)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), cuts=st.lists(st.integers(0, 6), max_size=4))
def test_merging_windows_is_scoring_them_together(seed, cuts):
    logits, targets, reference = example(seed, 6, 3, 5)
    edges = sorted({0, 6, *cuts})
    parts = [score(logits[a:b], targets[a:b], reference[a:b]) for a, b in itertools.pairwise(edges)]
    assert summarize(merge(parts)) == summarize(score(logits, targets, reference))


def test_without_a_reference_there_is_only_perplexity():
    logits, targets, reference = example(5, 2, 3, 5)
    found = summarize(merge([score(logits, targets)]))
    full = summarize(score(logits, targets, reference))
    assert (found.perplexity, found.tokens, found.windows) == (full.perplexity, 6, 2)
    assert found.kl_mean is found.reference_perplexity is found.same_top1 is found.excess is None


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
    q=st.floats(0, 1),
)
def test_quantile_is_the_linear_one(values, q):
    ordered = torch.tensor(values, dtype=torch.float64).sort().values
    expected = float(torch.quantile(ordered, q))
    assert quantile(ordered, q) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_the_error_of_a_quantile_is_that_of_the_share_below_it():
    values = torch.tensor([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]], dtype=torch.float64)
    # The median is 3.5: all of the first window is below it, nothing of the second. The share has an error
    # of 0.5, so that the quantiles around the median are the smallest and the largest value.
    assert quantile_error(values, values.flatten(), 0.5) == 3.5
    assert quantile_error(values[:1], values[0], 0.5) is None
    # Windows that agree leave no error.
    assert quantile_error(values[:1].expand(3, 4), values[:1].expand(3, 4).flatten().sort().values, 0.5) == 0


def test_the_error_of_a_quantile_is_how_much_it_varies():
    """Over many draws of independent tokens, against their standard deviation."""
    draws = torch.rand(400, 8, 50, dtype=torch.float64).square()
    ordered = [draw.flatten().sort().values for draw in draws]
    values = torch.tensor([quantile(values, 0.9) for values in ordered])
    errors = torch.tensor([quantile_error(*pair, 0.9) for pair in zip(draws, ordered, strict=True)])
    assert float(errors.mean()) == pytest.approx(float(values.std()), rel=0.15)


def test_rms_of_the_difference_in_probability():
    logits, targets, reference = example(7, 4, 5, 9)
    found = summarize(score(logits, targets, reference))
    q, p = (
        x.double().softmax(-1).gather(-1, targets[..., None])[..., 0].tolist() for x in (logits, reference)
    )
    squares = [[(a - b) ** 2 for a, b in zip(*rows, strict=True)] for rows in zip(q, p, strict=True)]
    rms = math.sqrt(math.fsum(map(math.fsum, squares)) / 20)
    assert found.rms_dp == pytest.approx(rms, rel=1e-12)
    error = clustered_error(torch.tensor(squares, dtype=torch.float64))
    assert error is not None and found.rms_dp_se == pytest.approx(error / (2 * rms), rel=1e-9)


def test_the_histogram_counts_every_token():
    kl = torch.tensor([[0.0, 1e-9, KL_EDGES[0], 1.0, 1.1, 99.0, 100.0, 5000.0]], dtype=torch.float64)
    nll = torch.ones_like(kl)
    counts = summarize(TokenScores(nll, nll, kl, nll > 0)).kl_histogram
    assert counts is not None and sum(counts) == 8 and len(counts) == len(KL_EDGES) + 1
    bins = itertools.pairwise([0.0, *KL_EDGES, math.inf])
    assert list(counts) == [sum(a <= v < b for v in kl[0].tolist()) for a, b in bins]


def test_errors_are_clustered_by_window():
    # Four tokens a window that always agree: four windows say as much as sixteen tokens would.
    per_window = torch.tensor([1.0, 2.0, 4.0, 5.0], dtype=torch.float64)
    values = per_window[:, None].expand(4, 4)
    mean = 3.0
    expected = math.sqrt(sum((x - mean) ** 2 for x in (1, 2, 4, 5)) / 3) / 2
    assert clustered_error(values) == pytest.approx(expected)
    assert clustered_error(values[:1]) is None


def test_perplexity_beyond_a_float_is_none():
    nll = torch.full((1, 2), 1000.0, dtype=torch.float64)
    found = summarize(TokenScores(nll))
    assert found.perplexity is None and found.nll == 1000.0


def test_shapes_that_disagree_are_an_error():
    logits, targets, reference = example(6, 2, 3, 5)
    with pytest.raises(FormatError, match=r"\(2, 3, 5\).*\(2, 3, 4\)"):
        score(logits, targets, reference[..., :4])
    with pytest.raises(FormatError, match="do not agree"):
        score(logits, targets[:1])
