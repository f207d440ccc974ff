"""Files that commands write: in one step, and what says that they cannot be."""

import os
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint.output.directory import Mode, OutputDirectory
from quantkit.checkpoint.output.lock import LOCK_NAME
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.cli.files import REPORT_FILES, check_writable, make_directory, write_file, write_files
from quantkit.errors import OutputError
from quantkit.report.document import Document, write


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
    with pytest.raises(OutputError, match=r"is a folder; expected a file or nothing there"):
        write_file(tmp_path, "x")
    check_writable(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    check_writable(tmp_path / "new")
    assert not (tmp_path / "new").exists(), "whoever is interrupted leaves no empty file"
    (tmp_path / "link").symlink_to(tmp_path / "new")
    check_writable(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name", ["report.md", "report.html", "loss.png", ".tmp-report.json", ".tmp-loss.png"]
)
def test_what_is_no_file_in_a_report_is_refused_before_the_work(tmp_path: Path, name: str) -> None:
    make_directory(tmp_path, REPORT_FILES)
    assert list(tmp_path.iterdir()) == [], "nothing is left by trying"
    (tmp_path / name).mkdir()
    (tmp_path / "notes").mkdir()
    with pytest.raises(OutputError) as raised:
        make_directory(tmp_path, REPORT_FILES)
    assert f"{tmp_path / name} is a folder; expected a file or nothing there. Move it" in str(raised.value)
    (tmp_path / name).rename(tmp_path / "other")
    make_directory(tmp_path, REPORT_FILES)


def test_what_is_no_file_under_a_temporary_name_is_refused_before_the_work(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".tmp-eval.json")
    for do in (check_writable, lambda path: write_file(path, "x")):
        with pytest.raises(
            OutputError, match=r"\.tmp-eval\.json is a pipe; expected .* or remove it, or choose"
        ):
            do(tmp_path / "eval.json")
    assert (tmp_path / ".tmp-eval.json").is_fifo()


def test_outputs_of_runs_are_written_to_under_their_lock(tmp_path: Path) -> None:
    out, source = tmp_path / "out", tmp_path / "source"
    source.mkdir()

    def refused(text: str) -> None:
        before = {path.name: path.read_bytes() for path in out.iterdir() if path.name != LOCK_NAME}
        for attempt in (
            lambda: write_files(out, {"README.md": "a card", "config.json": "{}"}),
            lambda: write_file(out / "config.json", "{}"),
            lambda: check_writable(out / "config.json"),
            lambda: write(out, "config", Document("figures", ()), {"config.json": "{}"}),
        ):
            with pytest.raises(OutputError, match=text):
                attempt()
        assert before == {path.name: path.read_bytes() for path in out.iterdir() if path.name != LOCK_NAME}

    with OutputDirectory.open(out, source, Mode.NEW, {}, 0) as output:
        refused("is LOCKED by process")
        with pytest.raises(OutputError, match="is LOCKED by process"):
            make_directory(out)
    refused(r"out holds an unfinished run, which writes there\. Choose another place")
    with OutputDirectory.open(out, source, Mode.RESUME, {}, 0) as output:
        with output.shard("model.safetensors", [TensorSpec.of("w", torch.ones(3))], {}) as file:
            file.write("w", torch.ones(3))
        output.finish({"w": "model.safetensors"}, 0, {}, [], {})
    refused(r"config\.json is a file of the checkpoint in .*out\. Choose another place")
    make_directory(out)
    write_files(out, {"README.md": "a card"})
    assert (out / "README.md").read_text() == "a card" and not (out / LOCK_NAME).exists()
