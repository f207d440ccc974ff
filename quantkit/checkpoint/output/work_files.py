"""Protocols of the work files of a calibration, for ranks that write work files and ranks that do not."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from quantkit.checkpoint.tensors import TensorSpec


class WorkFile(Protocol):
    """Work file to fill tensor by tensor, as `checkpoint.output.shard_file.ShardFile` does.

    `detail` are JSON values that the file keeps. `write` writes elements of tensor `name` from `offset` on.
    """

    detail: dict[str, Any]

    def write(self, name: str, tensor: torch.Tensor, offset: int = 0) -> None: ...


class WorkFiles(Protocol):
    """Work files of a run in the directory `path`, as `checkpoint.output.directory.OutputDirectory` has them.

    `is_done` asks if a file is complete, `discard` deletes one, `shard` begins one with tensors `specs`.
    """

    path: Path

    def is_done(self, filename: str) -> bool: ...

    def discard(self, filename: str) -> None: ...

    def shard(
        self, filename: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str]
    ) -> AbstractContextManager[WorkFile]: ...


class Followed:
    """Work files in `path`, for a rank that does not write them.

    `done` are the names of the files that existed when the run began. Writes of this rank are ignored.
    """

    def __init__(self, path: Path, done: Collection[str]) -> None:
        self.path = path
        self._done = frozenset(done)

    def is_done(self, filename: str) -> bool:
        """Return True if the file existed when the run began."""
        return filename in self._done

    def discard(self, filename: str) -> None:
        """Do nothing: the writing rank deletes it."""

    @contextmanager
    def shard(
        self, filename: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str]
    ) -> Iterator[WorkFile]:
        """Context manager: yield a file that ignores all writes."""
        yield _Nowhere()


class _Nowhere:
    def __init__(self) -> None:
        self.detail: dict[str, Any] = {}

    def write(self, name: str, tensor: torch.Tensor, offset: int = 0) -> None:
        pass
