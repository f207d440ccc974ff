"""Metrics of accuracy loss per token and text: negative log likelihood, KL divergence, same top-1.

All logarithms are natural; arithmetic on logits is float64. A loss of 8-bit weights is about 1e-3 nats a
token, and a float32 log-softmax over a large vocabulary is only accurate to about 1e-6.

The metrics are those of llama.cpp's `perplexity --kl-divergence`. Standard errors treat a window as one
sample (clustered standard errors, Miller 2024, arXiv 2411.00640), because the tokens of a window are far from
independent. The excess is a paired difference, which is much tighter than two separate errors. The error of a
quantile is the error of the share of tokens below it, converted by the values there (Woodruff 1952,
doi:10.1080/01621459.1952.10483443).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from quantkit.errors import FormatError

# Logits converted to float64 at a time; a few temporaries of this size exist at once.
_CHUNK_ELEMENTS = 1 << 22

#: Bin edges of `TextMetrics.kl_histogram`, nats: four per decade.
KL_EDGES: tuple[float, ...] = tuple(10 ** (i / 4) for i in range(-32, 9))


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Scores of every predicted token, [windows, positions] each, on the CPU.

    nll            float64   -ln q(token), nats
    reference_nll  float64   -ln p(token), nats; None without a reference, like the next two
    kl             float64   KL(p || q) over the vocabulary, nats
    same_top1      bool      True if p and q have the same most likely token
    """

    nll: torch.Tensor
    reference_nll: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    same_top1: torch.Tensor | None = None


@dataclass(frozen=True)
class TextMetrics:
    """Metrics of one model on one text, in nats; comparing fields are None without a reference.

    perplexity     exp of the mean `nll`, None if that overflows a float64
    excess         ln(perplexity / reference_perplexity)
    ..._se         standard error clustered by window, None for a single window
    same_top1      fraction of `tokens`, the predicted tokens
    rms_dp         root mean squared difference of both models' probabilities of the text's tokens
    kl_histogram   tokens by divergence: below `KL_EDGES[0]`, between successive edges, above the last
    """

    perplexity: float | None
    reference_perplexity: float | None
    excess: float | None
    kl_mean: float | None
    kl_p99: float | None
    same_top1: float | None
    tokens: int
    windows: int
    nll: float
    reference_nll: float | None
    excess_se: float | None
    kl_mean_se: float | None
    kl_median: float | None
    kl_median_se: float | None
    kl_p95: float | None
    kl_p95_se: float | None
    kl_p99_se: float | None
    kl_max: float | None
    rms_dp: float | None
    rms_dp_se: float | None
    kl_histogram: tuple[int, ...] | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def score(logits: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor | None = None) -> TokenScores:
    """Score `logits` (finite, [B, P, V]) against the `targets` (int64 [B, P]) that they predict.

    `reference` are the logits of the reference model for the same positions. Rounding leaves KL divergences
    down to about -1e-16, which become zero; identical logits have exactly zero. Among equal largest logits
    the top-1 is the first. Raises `FormatError` if the shapes do not agree.
    """
    if logits.shape[:2] != targets.shape or (reference is not None and reference.shape != logits.shape):
        found = "" if reference is None else f", reference logits {tuple(reference.shape)}"
        raise FormatError(
            f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}{found} do not agree; expected "
            "[B, P, V], [B, P] and [B, P, V]. Compare models that share a tokenizer and vocabulary."
        )
    vocabulary = logits.shape[-1]
    rows = logits.reshape(-1, vocabulary)
    reference_rows = None if reference is None else reference.reshape(-1, vocabulary)
    expected = targets.reshape(-1)
    step = max(1, _CHUNK_ELEMENTS // vocabulary)
    parts = []
    for start in range(0, len(rows), step):
        rest = None if reference_rows is None else reference_rows[start : start + step]
        parts.append(_score_rows(rows[start : start + step], expected[start : start + step], rest))
    columns = [torch.cat(column).view(targets.shape).cpu() for column in zip(*parts, strict=True)]
    return TokenScores(*columns)


def _score_rows(
    logits: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    log_q = logits.double().log_softmax(-1)
    nll = -log_q.gather(-1, targets[:, None])[:, 0]
    if reference is None:
        return (nll,)
    log_p = reference.double().log_softmax(-1)
    reference_nll = -log_p.gather(-1, targets[:, None])[:, 0]
    kl = log_q.neg_().add_(log_p).mul_(log_p.exp_()).sum(-1).clamp_min_(0.0)
    return nll, reference_nll, kl, logits.argmax(-1) == reference.argmax(-1)


def merge(scores: Sequence[TokenScores]) -> TokenScores:
    """Concatenate `scores` along windows, in order; all have the same number of positions."""

    def joined(name: str) -> torch.Tensor | None:
        values = [getattr(part, name) for part in scores]
        return None if values[0] is None else torch.cat(values)

    nll = joined("nll")
    assert nll is not None
    return TokenScores(nll, joined("reference_nll"), joined("kl"), joined("same_top1"))


def summarize(scores: TokenScores) -> TextMetrics:
    """Summarize one text. Quantiles interpolate linearly between the two nearest tokens."""
    windows, positions = scores.nll.shape
    nll = float(scores.nll.mean())
    common = {"nll": nll, "perplexity": perplexity(nll), "tokens": windows * positions, "windows": windows}
    if scores.reference_nll is None or scores.kl is None or scores.same_top1 is None:
        compared = {field.name for field in fields(TextMetrics)} - set(common)
        return TextMetrics(**common, **dict.fromkeys(compared))  # type: ignore[arg-type]
    reference_nll = float(scores.reference_nll.mean())
    ordered = scores.kl.flatten().sort().values
    squares = (scores.nll.neg().exp() - scores.reference_nll.neg().exp()).square()
    rms_dp = math.sqrt(float(squares.mean()))
    squares_se = clustered_error(squares)
    edges = torch.tensor(KL_EDGES, dtype=torch.float64)
    bins = torch.bucketize(ordered, edges, right=True)
    return TextMetrics(
        **common,  # type: ignore[arg-type]
        reference_perplexity=perplexity(reference_nll),
        # The mean of differences, not the difference of means: exactly zero for identical models.
        excess=float((scores.nll - scores.reference_nll).mean()),
        kl_mean=float(scores.kl.mean()),
        kl_p99=quantile(ordered, 0.99),
        same_top1=float(scores.same_top1.double().mean()),
        reference_nll=reference_nll,
        excess_se=clustered_error(scores.nll - scores.reference_nll),
        kl_mean_se=clustered_error(scores.kl),
        kl_median=quantile(ordered, 0.5),
        kl_median_se=quantile_error(scores.kl, ordered, 0.5),
        kl_p95=quantile(ordered, 0.95),
        kl_p95_se=quantile_error(scores.kl, ordered, 0.95),
        kl_p99_se=quantile_error(scores.kl, ordered, 0.99),
        kl_max=float(ordered[-1]),
        rms_dp=rms_dp,
        # Error propagation through the square root; at zero all differences are zero.
        rms_dp_se=None if squares_se is None else squares_se / (2 * rms_dp) if rms_dp else 0.0,
        kl_histogram=tuple(bins.bincount(minlength=len(KL_EDGES) + 1).tolist()),
    )


def perplexity(nll: float) -> float | None:
    """Return exp of a mean negative log likelihood in nats; None if that overflows a float64."""
    try:
        return math.exp(nll)
    except OverflowError:
        return None


def quantile(ordered: torch.Tensor, q: float) -> float:
    """Return the `q` quantile of a vector [n] in ascending order, n of any size, by linear interpolation."""
    at = q * (len(ordered) - 1)
    below = math.floor(at)
    low, high = float(ordered[below]), float(ordered[math.ceil(at)])
    return low + (at - below) * (high - low)


def quantile_error(values: torch.Tensor, ordered: torch.Tensor, q: float) -> float | None:
    """Return the standard error of the `q` quantile of `values` ([windows, positions]).

    `ordered` are the sorted values. The share of values below the quantile has a standard error, clustered by
    window. The result is half the distance of the quantiles one such error below and above. None for one
    window.
    """
    share = clustered_error((values <= quantile(ordered, q)).double())
    if share is None:
        return None
    return (quantile(ordered, min(1.0, q + share)) - quantile(ordered, max(0.0, q - share))) / 2


def clustered_error(values: torch.Tensor) -> float | None:
    """Return the standard error of the mean of `values` [windows, positions]: each window is one sample.

    Windows have the same length, so the mean is the mean of the window means. None for a single window.
    """
    means = values.mean(dim=1)
    return None if len(means) < 2 else float(means.std() / math.sqrt(len(means)))
