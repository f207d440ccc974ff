"""What is refused of calibration texts before any work."""

from pathlib import Path

import pytest

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.quantization.blockwise.calibration_data import read_samples

STORIES = Path(__file__).parents[3] / "examples" / "stories260K"


def test_half_characters_are_no_fault_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"text": "one"}' "\n" r'{"text": "before \ud83d after"}' "\n")
    with pytest.raises(UsageError) as caught:
        read_samples(Checkpoint.open(STORIES), CalibrationOptions(str(path)), 512)
    assert str(caught.value) == (
        f"{path} has the half character '\\ud83d' in 'before \\ud83d after'; expected text that UTF-8 has "
        "bytes for. Mend its row or leave it out."
    )
