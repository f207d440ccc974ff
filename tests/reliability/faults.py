"""What every test of a fault asserts: how the command ended, what it said, and what is on the disk.

A test carries the number of its row of `table.py`: `@pytest.mark.fault(12)`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.manifest import MANIFEST_NAME
from quantkit.checkpoint.output.journal import JOURNAL_NAME
from quantkit.cli.console import printable
from quantkit.errors import QuantkitError
from quantkit.files import TEMP_PREFIX

from ..conftest import Done, Run

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = EXAMPLES / "stories260K"
STORIES = EXAMPLES / "stories.txt"
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

#: A run of milliseconds: plain rounding, and the result is not run.
QUICK = ("-m", "rtn", "--no-check")


@dataclass(frozen=True)
class Message:
    """The four things that an error has to say, word for word."""

    names: object
    found: str
    expected: str
    remedy: str


def snapshot(directory: Path) -> dict[str, str]:
    """Everything under a directory: what each thing is, by its path."""

    def state(path: Path) -> str:
        if path.is_symlink():
            return f"link to {os.readlink(path)}"  # noqa: PTH115
        if path.is_dir():
            return "directory"
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "special"

    return {str(path.relative_to(directory)): state(path) for path in sorted(directory.rglob("*"))}


def check_message(done: Done, kind: type[QuantkitError], message: Message) -> None:
    """The class of the error is `kind`, its exit code is the command's, and it says all of `message`."""
    assert type(done.error) is kind, (done.error, done.err)
    assert done.code == kind.exit_code
    text = str(done.error)
    assert done.err.endswith(f"error: {printable(text)}\n")
    for part in map(str, astuple(message)):
        assert part and part in text, (part, text)


def refused(
    run: Run, arguments: Iterable[object], kind: type[QuantkitError], message: Message, unchanged: Path
) -> Done:
    """Run a command that has to be refused before any output: all that is in `unchanged` is as it was."""
    before = snapshot(unchanged)
    done = run(*arguments)
    check_message(done, kind, message)
    assert snapshot(unchanged) == before
    return done


def is_unfinished(out: Path) -> None:
    """Nothing in `out` passes for a checkpoint, and a run can go on there."""
    names = {path.name for path in out.iterdir()}
    assert not names & {CONFIG, MANIFEST_NAME}
    assert not [name for name in names if name.startswith(TEMP_PREFIX)]
    assert JOURNAL_NAME in names


def resumes(run: Run, arguments: Iterable[object], out: Path, whole: dict[str, str]) -> None:
    """The same command with --resume ends with what an uninterrupted run writes."""
    done = run(*arguments, "--resume")
    assert done.code == 0, done.err
    assert snapshot(out) == whole


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON object in a file."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors in a safetensors file."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of stories260K, with a tokenizer, to damage."""
    return Path(shutil.copytree(SOURCE, tmp_path / "source"))


@pytest.fixture
def sharded(source: Path) -> Path:
    """`source` in two shards with an index."""
    tensors = load_file(source / WEIGHTS)
    names = sorted(tensors)
    halves = {ONE: names[: len(names) // 2], TWO: names[len(names) // 2 :]}
    for shard, of in halves.items():
        save_file({name: tensors[name] for name in of}, source / shard, metadata={"format": "pt"})
    (source / WEIGHTS).unlink()
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: shard for shard, of in halves.items() for name in of},
    }
    (source / INDEX).write_text(json.dumps(index))
    return source


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where a command is to write; it is not there."""
    return tmp_path / "out"
