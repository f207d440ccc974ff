"""What an error came of."""

from quantkit.errors import causes
from quantkit.files import disk_error


def test_causes_end_in_a_circle_too() -> None:
    disk, library, ours = OSError(5, "Input/output error"), OSError("no vocabulary"), ValueError("bad")
    ours.__cause__, library.__context__ = library, disk
    assert [*causes(ours)] == [ours, library, disk]
    assert disk_error(causes(ours)) is disk
    disk.__context__ = ours
    assert [*causes(ours)] == [ours, library, disk]
    assert disk_error(causes(None)) is None
