"""Other layouts do not say that inputs are rounded, so such linears are not exported."""

from pathlib import Path

import pytest

from quantkit.errors import CheckpointError
from quantkit.exporting import export
from quantkit.quantizing import quantize
from quantkit.targets.table import TARGETS

SOURCE = Path(__file__).parents[2] / "examples" / "stories260K"


@pytest.mark.parametrize("target", TARGETS)
def test_no_target_takes_them(tmp_path, target):
    quantize(SOURCE, tmp_path / "packed", format="int4", group_size=32, activations="int8")
    with pytest.raises(CheckpointError, match="its inputs are rounded, which that layout does not say"):
        export(tmp_path / "packed", tmp_path / "out", target)
    assert not (tmp_path / "out").exists()
