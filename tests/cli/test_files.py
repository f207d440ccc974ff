"""Files that commands write: in one step, and what says that they cannot be."""

import os
from pathlib import Path

import pytest

from quantkit.cli.files import check_writable, make_directory, write_file
from quantkit.errors import OutputError


def test_a_file_is_replaced_or_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "eval.json"
    write_file(path, "grün\n")
    assert path.read_bytes() == "grün\n".encode()
    write_file(path, b"\x89PNG")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match=r"cannot write .*eval.json: No space left on device\. Choose a"):
        write_file(path, "new")
    assert path.read_bytes() == b"\x89PNG" and list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, "figures")
    assert os.read(reader, 100) == b"figures" and pipe.is_fifo()
    os.close(reader)


def test_places_that_cannot_be_written_are_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OutputError, match=r"cannot create the directory .*file/report: Not a directory"):
        make_directory(tmp_path / "file" / "report")
    with pytest.raises(OutputError, match=r"cannot write .*absent/a.json: No such file or directory"):
        check_writable(tmp_path / "absent" / "a.json")
    with pytest.raises(OutputError, match="Is a directory"):
        write_file(tmp_path, "x")
    check_writable(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    check_writable(tmp_path / "new")
    assert not (tmp_path / "new").exists(), "whoever is interrupted leaves no empty file"
    (tmp_path / "link").symlink_to(tmp_path / "new")
    check_writable(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "new").exists()
