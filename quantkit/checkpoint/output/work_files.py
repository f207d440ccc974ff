"""The files that a calibration fills, as those who write them and those who only follow see them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from quantkit.checkpoint.tensors import TensorSpec


class WorkFile(Protocol):
    """A file that is filled; see `checkpoint.output.shard_file.ShardFile`."""

    detail: dict[str, Any]

    def write(self, name: str, tensor: torch.Tensor, offset: int = 0) -> None: ...


class WorkFiles(Protocol):
    """The files of a run; see `checkpoint.output.directory.OutputDirectory`."""

    path: Path

    def is_done(self, filename: str) -> bool: ...

    def discard(self, filename: str) -> None: ...

    def shard(
        self, filename: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str]
    ) -> AbstractContextManager[WorkFile]: ...


class Followed:
    """The work files in `path` for a rank that does not write them.

    `done` are the names of those that were there when the run began. What this rank writes is ignored.
    """

    def __init__(self, path: Path, done: Collection[str]) -> None:
        self.path = path
        self._done = frozenset(done)

    def is_done(self, filename: str) -> bool:
        """Return True if the file was there when the run began."""
        return filename in self._done

    def discard(self, filename: str) -> None:
        """The other rank deletes it."""

    @contextmanager
    def shard(
        self, filename: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str]
    ) -> Iterator[WorkFile]:
        """A file that nothing is written to."""
        yield _Nowhere()


class _Nowhere:
    def __init__(self) -> None:
        self.detail: dict[str, Any] = {}

    def write(self, name: str, tensor: torch.Tensor, offset: int = 0) -> None:
        pass
