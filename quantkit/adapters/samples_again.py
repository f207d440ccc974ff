"""Read again the calibration samples that a manifest records, or others in their place."""

from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.calibrate.data.datasets import PREFIX
from quantkit.calibrate.data.samples import Described, Samples
from quantkit.calibrate.data.texts import BUNDLED, BUNDLED_NAME, GIVEN_NAME, Texts, parse_sources
from quantkit.checkpoint.model_record import ModelRecord
from quantkit.checkpoint.relative_paths import place_of
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.quantization.blockwise.calibration_data import read_samples

#: Most tokens of samples that a manifest may have read again: 2048 times those of a calibration by default.
MOST_TOKENS = 1 << 27


@dataclass(frozen=True, eq=False)
class SamplesAgain:
    """Samples and the options that drew them; without samples, the reason.

    samples   the samples; None if they cannot be had
    options   the options
    why_not   reason that there are none, as the end of "whose data ..."
    """

    samples: Samples | None
    options: CalibrationOptions
    why_not: str = ""


def read_again(
    checkpoint: Checkpoint, record: ModelRecord, packed: Path, given: str | Texts | None, vocabulary: int
) -> SamplesAgain:
    """Read the samples of the record of the directory `packed` again.

    They are for the model `checkpoint`, whose embedding has `vocabulary` rows.

    `given`, `NAME[:SAMPLES],...`, are other texts; number, length and seed are then those of the record, but
    for numbers in `given`. Data sets of the hub are read only if given. Recorded samples whose hash differs
    from that of the record are not used. Raises `QuantkitError` for texts of `given` that cannot be used.
    """
    found = Described.read(record.calibration)
    seed, length = record.seed or 0, None if found is None else found.length
    if given is not None:
        numbered = parse_sources(given)[0].share is not None
        count = None if numbered or found is None else found.count
        options = CalibrationOptions(given, count, length, seed)
        return SamplesAgain(read_samples(checkpoint, options, vocabulary), options)
    if found is None:
        return SamplesAgain(None, CalibrationOptions(), "the manifest does not name")
    if (why := _why_unasked(found)) is not None:
        return SamplesAgain(None, CalibrationOptions(), why)
    try:
        options = CalibrationOptions(_sources(found, record, packed), None, length, seed)
        samples = read_samples(checkpoint, options, vocabulary)
    except QuantkitError as error:
        why = f"cannot be read again ({str(error).removesuffix('.')})"
        return SamplesAgain(None, CalibrationOptions(), why)
    if samples.digest != found.digest:
        return SamplesAgain(None, options, f"({found.origin}) is no longer the same")
    # The same name as before, wherever it was found.
    return SamplesAgain(replace(samples, origin=found.origin), options)


def _sources(found: Described, record: ModelRecord, packed: Path) -> str:
    """Return the sources of described samples as `parse_sources` takes them, where they are now."""

    def place(name: str) -> Path:
        return BUNDLED if name == BUNDLED_NAME else place_of(name, record.relative_paths, packed)

    return ",".join(f"{place(name)}:{count}" for name, count in found.sources) or found.origin


def _why_unasked(found: Described) -> str | None:
    """Return why samples that a manifest names are not read unless the user does; None if they are."""
    if any(name.startswith(PREFIX) for name, _ in found.sources):
        return f"({found.origin}) is on the hub, and was not asked for"
    given = next((one for name, _ in found.sources if (one := GIVEN_NAME.fullmatch(name))), None)
    if given is not None:
        return f"was {given[1]}, and no file has them: give them again, as merge(calibration=TEXTS)"
    if found.count * found.length > MOST_TOKENS:
        return f"is more than {MOST_TOKENS} tokens by the manifest"
    return None
