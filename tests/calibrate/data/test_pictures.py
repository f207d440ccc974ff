"""Rows that name images: what a few bytes may cost, and names and messages that are none."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quantkit.calibrate.data import pictures
from quantkit.calibrate.data.pictures import read_pictured
from quantkit.errors import UsageError


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Image.new("RGB", (10, 10)).save(folder / "a.png")
    return path


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [], "images": ["a.png"]}, "line 1 names images and has no messages; expected a place"),
        ({"images": ["\ud800.png"]}, r"image '\\ud800\.png' is not there \(UnicodeEncodeError\)"),
    ],
)
def test_rows_that_name_images_badly(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_pictured(written(tmp_path, row))


@pytest.mark.parametrize(("bound", "rows"), [("MAX_ROW_PIXELS", 1), ("MAX_ALL_PIXELS", 2)])
def test_pixels_are_bounded_in_a_row_and_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, rows: int
) -> None:
    """The same image counts each time, as it is decoded each time."""
    monkeypatch.setattr(pictures, "MAX_GROWTH", 0)
    path = written(tmp_path, *([{"images": ["a.png"] * 3}] * rows))
    monkeypatch.setattr(pictures, bound, 300 * rows)
    assert len(read_pictured(path)) == rows
    monkeypatch.setattr(pictures, bound, 300 * rows - 1)
    with pytest.raises(UsageError, match=r"the row with a\.png has images of 300 pixels; expected at most"):
        read_pictured(path)


def test_a_jpeg_of_thousands_of_scans_is_refused(tmp_path: Path) -> None:
    """Each takes some bytes, and a pass over all pixels."""
    kept = io.BytesIO()
    Image.new("L", (8, 8)).save(kept, "JPEG", progressive=True)
    data = kept.getvalue()
    at = data.rindex(b"\xff\xda")
    path = written(tmp_path, {"images": ["a.jpg"]})
    (tmp_path / "a.jpg").write_bytes(data)
    assert len(read_pictured(path)) == 1
    (tmp_path / "a.jpg").write_bytes(data[:at] + data[at:-2] * pictures.MAX_SCANS + data[-2:])
    with pytest.raises(UsageError, match=r"a\.jpg is not a readable .* \(ValueError: 'more than 64 scans'\)"):
        read_pictured(path)
