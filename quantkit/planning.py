"""Plan a quantization from Python, as `quantkit plan` does."""

from pathlib import Path
from typing import Unpack

from quantkit import quantizing
from quantkit.progress import Progress
from quantkit.progress_bar import reporting
from quantkit.quantization.keywords import QuantizeKeywords, options_of, with_keywords
from quantkit.quantization.plan import Plan


@with_keywords
def plan(
    source: str | Path, *, progress: Progress | bool | None = None, **given: Unpack[QuantizeKeywords]
) -> Plan:
    """Return the plan of `quantize` with the same options: sizes, and the fate of every linear.

    Reads headers only, of a model on the hub too, unless `bits_per_weight` or a `budget` has sensitivities
    measured; `progress(done, all, at work)` is called meanwhile. Raises `QuantkitError` for every refusal.
    """
    with reporting(progress, "measuring") as report:
        return quantizing.plan(source, options_of(given, "plan"), progress=report)[1]
