"""Rate a model: a verdict on its loss, with the limits of each verdict."""

import math
from dataclasses import dataclass

from quantkit.eval.results import EvalReport


@dataclass(frozen=True)
class Verdict:
    """Rating of a loss of accuracy; it applies if no text has a larger figure.

    word      the rating
    kl_mean   largest mean KL divergence, nats per token
    excess    largest ln(perplexity / reference perplexity), nats per token
    meaning   what the rating says
    """

    word: str
    kl_mean: float
    excess: float
    meaning: str


#: From best to worst; the first that applies counts. For scale, by llama.cpp's measurements of an 8B model:
#: 8-bit weights have a KL of 0.001, 6-bit 0.006, 4-bit 0.03, and 2-bit another top token at three positions
#: in ten.
VERDICTS: tuple[Verdict, ...] = (
    Verdict("indistinguishable", 0.003, 0.003, "users cannot tell it from the original"),
    Verdict("close", 0.05, 0.05, "small losses that benchmarks show and users rarely notice"),
    Verdict("degraded", 0.5, 0.5, "clearly worse; use it only where nothing larger fits"),
    Verdict("unusable", math.inf, math.inf, "another model, in effect; do not use it"),
)


def verdict(report: EvalReport) -> Verdict | None:
    """Return the first of `VERDICTS` whose limits no text of `report` exceeds; None without a reference."""
    compared = [(m.kl_mean, m.excess) for m in report.texts.values()]
    kl = max((k for k, _ in compared if k is not None), default=None)
    excess = max((e for _, e in compared if e is not None), default=None)
    if kl is None or excess is None:
        return None
    return next(v for v in VERDICTS if kl <= v.kl_mean and excess <= v.excess)


def verdict_line(report: EvalReport) -> str:
    """Return one sentence that rates the loss of accuracy in `report`."""
    found = verdict(report)
    if found is None:
        return f"{report.label}: not compared with a reference; perplexity alone says nothing of the loss."
    agreement = min(m.same_top1 for m in report.texts.values() if m.same_top1 is not None)
    excess = max(m.excess for m in report.texts.values() if m.excess is not None)
    # From 99.5 % on, two digits of a percentage would need an exponent.
    change = f"{100 * math.expm1(excess):+.2g} %" if excess < math.log(1.99) else f"x{_power(excess)}"
    return (
        f"{report.label}: {found.word} ({found.meaning}). On its worst text it picks the original's next "
        f"token at {100 * agreement:.1f} % of positions, and perplexity changes by {change}."
    )


def _power(nats: float) -> str:
    return f"{math.exp(nats):.3g}" if nats < 700 else f"e^{nats:.3g}"
