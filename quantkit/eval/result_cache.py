"""Store the results of an evaluation so far, so that it can resume after an interruption.

Files hold the scores of every batch of windows and the answers to every task. Each is written in one step
with its hash, under a key of everything on which its figures depend. A damaged file is measured again. They
are deleted when the evaluation is done.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from quantkit.checkpoint.output.atomic_write import read_inside
from quantkit.errors import OutputError
from quantkit.eval.metrics import TokenScores
from quantkit.files import os_error_text, parse_json, replace_file

#: Folder of all files, deleted at the end, and its subfolder for the reference's logits.
_FOLDER = ".quantkit-eval"
_LOGITS = "reference"
MAX_BYTES = 1 << 30
_DIGEST = 32
_FIELDS = ("nll", "reference_nll", "kl", "same_top1")


def key_of(identity: Mapping[str, Any]) -> str:
    """Return the key of results that depend on `identity`, JSON values: 32 hex digits."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


class Partial:
    """Finished parts of evaluations, in a folder in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / _FOLDER

    @property
    def logits(self) -> Path:
        """Return the directory of the reference's logits."""
        return self.directory / _LOGITS

    def scores(self, key: str, name: str, shape: tuple[int, int]) -> TokenScores | None:
        """Return the scores of the batch `name`, [windows, positions] of `shape`; None if not stored."""
        data = self._read(self.directory / key / f"{name}.scores")
        if data is None:
            return None
        tensors = load(data)
        if tuple(tensors["nll"].shape) != shape:
            return None
        return TokenScores(*(tensors.get(field) for field in _FIELDS))

    def store_scores(self, key: str, name: str, scores: TokenScores) -> None:
        """Store the scores of the batch `name`; raise `OutputError` if they cannot be written."""
        tensors: dict[str, torch.Tensor] = {
            field: value.contiguous() for field in _FIELDS if (value := getattr(scores, field)) is not None
        }
        self._write(self.directory / key / f"{name}.scores", save(tensors))

    def json(self, key: str, name: str) -> dict[str, Any] | None:
        """Return the JSON object stored as `name`; None if not stored."""
        data = self._read(self.directory / key / f"{name}.json")
        return None if data is None else parse_json(data, name)

    def store_json(self, key: str, name: str, value: dict[str, Any]) -> None:
        """Store a JSON object; raise `OutputError` if it cannot be written."""
        self._write(self.directory / key / f"{name}.json", json.dumps(value).encode())

    def remove(self) -> str | None:
        """Delete all parts after the evaluation; return a text for the user if that fails, else None."""
        try:
            shutil.rmtree(self.directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"{self.directory} is not deleted: {os_error_text(error)}. It is no longer of any use."
        return None

    @staticmethod
    def _read(path: Path) -> bytes | None:
        """Return the stored bytes, None if missing or damaged."""
        try:
            data = read_inside(path, MAX_BYTES)
        except OSError:
            return None
        stored = data[_DIGEST:]
        return stored if data[:_DIGEST] == _digest(path, stored) else None

    def _write(self, path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, _digest(path, data) + data)
        except OSError as error:
            raise OutputError(
                f"cannot write partial results to {path}: {os_error_text(error)}. Free space there or name "
                "another directory."
            ) from error


def _digest(path: Path, data: bytes) -> bytes:
    """Hash stored data with its path, so that a renamed file does not count as another result."""
    return hashlib.sha256(f"{path.parent.name}/{path.name}\n".encode() + data).digest()
