"""Messages are safe to print, whatever a file says that they quote; what an error came of."""

import pickle

import pytest

from quantkit.errors import (
    MAX_MESSAGE,
    CheckpointError,
    FormatError,
    OtherRankFailed,
    causes,
    first_of,
    naming,
)
from quantkit.files import disk_error


def test_what_is_not_printable_is_shown_as_an_escape() -> None:
    error = CheckpointError(
        "tensor \x1b[31mred\x07 half \ud800 right-to-left \u202e name é日本\nremedy\there"
    )
    expected = r"tensor \x1b[31mred\x07 half \ud800 right-to-left \u202e name é日本" + "\nremedy\there"
    assert str(error) == expected
    assert str(error).encode()


def test_the_middle_of_a_long_message_is_left_out() -> None:
    text = str(CheckpointError(f"found {'x' * 10**6}. Download it again."))
    assert len(text) <= MAX_MESSAGE
    assert text.startswith("found xxx") and text.endswith("xxx. Download it again.")
    assert "characters left out" in text
    whole = "y" * MAX_MESSAGE
    assert str(CheckpointError(whole)) == whole


def test_errors_travel_between_processes() -> None:
    assert str(pickle.loads(pickle.dumps(CheckpointError("a\0b")))) == r"a\x00b"
    assert OtherRankFailed("x", 3).exit_code == 3


def test_causes_end_in_a_circle_too() -> None:
    disk, library, ours = OSError(5, "Input/output error"), OSError("no vocabulary"), ValueError("bad")
    ours.__cause__, library.__context__ = library, disk
    assert [*causes(ours)] == [ours, library, disk]
    assert disk_error(causes(ours)) is disk
    disk.__context__ = ours
    assert [*causes(ours)] == [ours, library, disk]
    assert disk_error(causes(None)) is None


def test_the_first_of_names_and_how_many_more() -> None:
    assert first_of(["a"]) == "a"
    assert first_of(iter(["a", "b"])) == "a and 1 more"
    assert first_of(["a", "b", "c"], 2) == "a, b and 1 more"
    assert first_of(["a", "b"], 2, kind="tensors") == "a, b"
    assert first_of(["a", "b", "c"], kind="tensors") == "a and 2 more tensors"


def test_a_format_error_begins_with_the_name_of_its_tensor() -> None:
    with pytest.raises(FormatError, match=r"^'a\.weight': one weight is NaN$"), naming("'a.weight'"):
        raise FormatError("one weight is NaN")
    with pytest.raises(CheckpointError, match=r"^no file$"), naming("'a.weight'"):
        raise CheckpointError("no file")
