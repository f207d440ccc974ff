"""Options of calibration data. Imports no torch, because the command line takes its defaults from here."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.calibrate.data.seeds import check_seed
from quantkit.errors import UsageError

if TYPE_CHECKING:
    from quantkit.calibrate.data.texts import Texts

#: Defaults if neither options nor sources give the number of samples, and the tokens per sample.
DEFAULT_SAMPLES = 128
DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class CalibrationOptions:
    """Sources of calibration texts, and the number and length of samples.

    A source is `NAME[:SAMPLES],...`, or texts in memory; None is the bundled text.
    """

    sources: "str | Texts | None" = None
    samples: int | None = None
    length: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("samples", self.samples, 1), ("length", self.length, 2)):
            if value is not None and value < least:
                raise UsageError(f"calibration {name} is {value}; use at least {least}.")
        check_seed(self.seed)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; texts in memory as their name, which has their hash."""
        sources = self.sources if self.sources is None else str(self.sources)
        return {**vars(self), "sources": sources}
