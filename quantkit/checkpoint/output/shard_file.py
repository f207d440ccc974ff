"""Write a safetensors file in pieces, from any thread, and hash it as it grows."""

import bisect
import hashlib
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.output.atomic_write import BLOCK_BYTES, FileRecord, writing
from quantkit.checkpoint.safetensors_header import encode_header
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import OutputError
from quantkit.files import TempFile, write_all


class Coverage:
    """Covered bytes of a file, as sorted disjoint ranges; neighbours are merged."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> bool:
        """Cover `[start, end)`; return False, without change, if any byte is covered already."""
        at = bisect.bisect_right(self._starts, start)
        if at > 0 and self._ends[at - 1] > start:
            return False
        if at < len(self._starts) and self._starts[at] < end:
            return False
        joins_left = at > 0 and self._ends[at - 1] == start
        joins_right = at < len(self._starts) and self._starts[at] == end
        first, last = at - joins_left, at + joins_right
        merged_start = self._starts[first] if joins_left else start
        merged_end = self._ends[last - 1] if joins_right else end
        self._starts[first:last] = [merged_start]
        self._ends[first:last] = [merged_end]
        return True

    @property
    def prefix(self) -> int:
        """Return the number of covered bytes from the start up to the first hole."""
        return self._ends[0] if self._starts and self._starts[0] == 0 else 0


class PrefixHasher:
    """Hashes a growing file in a thread of its own, up to the last byte known to be written.

    Bytes are read back, mostly from the page cache. So chunks may be written in any order, and no tensor
    is kept in memory for hashing.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._digest = hashlib.sha256()
        self._hashed = 0
        self._cancelled = False
        self._error: OSError | None = None
        # A queue, because a condition is unusable after a signal handler raised inside it.
        self._prefixes: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quantkit-hash", daemon=True)

    def start(self) -> None:
        """Start hashing. Separate from the constructor, as a signal may interrupt the start of the thread."""
        self._thread.start()

    def advance(self, available: int) -> None:
        """Announce that bytes up to `available` are written and final."""
        self._prefixes.put(available)

    def finish(self) -> str:
        """Return the hex hash of all announced bytes; raise `OSError` if they could not be read."""
        self._stop()
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()

    def cancel(self) -> None:
        """Stop the thread; the file may be closed afterwards."""
        self._cancelled = True
        self._stop()

    def _stop(self) -> None:
        self._prefixes.put(None)
        # A thread that has not started yet finds nothing to do.
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while (available := self._prefixes.get()) is not None:
                while (count := min(available - self._hashed, BLOCK_BYTES)) > 0 and not self._cancelled:
                    block = os.pread(self._fd, count, self._hashed)
                    if not block:
                        raise OSError("the file is shorter than what was written to it")
                    self._digest.update(block)
                    self._hashed += len(block)
        except OSError as error:
            self._error = error


@dataclass(frozen=True)
class OtherHeader:
    """The first bytes of a file that is no safetensors file; tensors begin at multiples of `alignment`."""

    data: bytes
    alignment: int


class ShardFile:
    """Safetensors file under its temporary name, open for writing; or a file with another `header`.

    `detail` are JSON values stored in the journal with the file; `OutputDirectory.details` returns them after
    a resume.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        specs: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        header: OtherHeader | None = None,
    ) -> None:
        """Write the header of a file with the tensors `specs`, in this order, and no data yet."""
        self.path = directory / name
        self.detail: dict[str, Any] = {}
        alignment, data = (header.alignment, header.data) if header else (1, encode_header(specs, metadata))
        self._specs = {spec.name: spec for spec in specs}
        self._offsets: dict[str, int] = {}
        self.size = len(data)
        gaps: list[tuple[int, int]] = []
        for spec in specs:
            self._offsets[spec.name] = self.size
            end = self.size + spec.nbytes
            self.size = -(-end // alignment) * alignment
            gaps.append((end, self.size - end))
        self._mutex = threading.Lock()
        self._reserved = Coverage()
        self._written = Coverage()
        self._failed = False
        with writing(self.path):
            self._file = TempFile(directory, name)
            self._hasher = PrefixHasher(self._file.fd)
            try:
                self._hasher.start()
                self._put(data, 0)
                for start, count in gaps:
                    self._put(bytes(count), start)
            except BaseException:
                self.discard()
                raise

    def write(self, name: str, tensor: torch.Tensor, offset: int = 0) -> None:
        """Write `tensor` in row-major order to the tensor `name`, from its element `offset` on.

        `tensor` has the dtype of the spec and any shape, strides and device. Threads may call this
        concurrently, with chunks in any order. Raises `OutputError` for an unknown name or another dtype, for
        elements outside the tensor or already written, and for disk failures.
        """
        spec = self._spec(name, tensor, offset)
        if tensor.numel() == 0:
            return
        data = _bytes_of(tensor)
        start = self._offsets[name] + offset * spec.torch_dtype.itemsize
        with self._mutex:
            fresh = self._reserved.add(start, start + len(data))
        if not fresh:
            raise OutputError(
                f"{self.path}: elements {offset} to {offset + tensor.numel() - 1} of tensor "
                f"{name!r} overlap elements written before. Write every element exactly once."
            )
        with writing(self.path):
            self._put(data, start)

    def commit(self) -> FileRecord:
        """Check that every byte was written, then sync and rename; raise `OutputError` on failure."""
        with self._mutex:
            complete = self._written.prefix == self.size and not self._failed
        if not complete:
            raise OutputError(
                f"{self.path} is incomplete: {self._first_gap()}. Write every element exactly once."
            )
        with writing(self.path):
            self._file.sync()
            digest = self._hasher.finish()
            self._file.publish()
        return FileRecord(self.path.name, digest, self.size)

    def discard(self) -> None:
        """Remove the temporary file."""
        self._hasher.cancel()
        self._file.discard()

    def _spec(self, name: str, tensor: torch.Tensor, offset: int) -> TensorSpec:
        spec = self._specs.get(name)
        if spec is None:
            raise OutputError(
                f"{self.path}: tensor {name!r} is not in the header of this file. "
                "List it among the shard's tensors."
            )
        if tensor.dtype != spec.torch_dtype:
            raise OutputError(
                f"{self.path}: tensor {name!r} is {spec.torch_dtype} in the header, but the chunk "
                f"is {tensor.dtype}. Convert the chunk."
            )
        if offset < 0 or offset + tensor.numel() > spec.elements:
            raise OutputError(
                f"{self.path}: {tensor.numel()} elements from element {offset} on do not fit into "
                f"tensor {name!r} with {spec.elements} elements. Correct the offset or the chunk."
            )
        return spec

    def _put(self, data: bytes | memoryview, start: int) -> None:
        try:
            write_all(self._file.fd, data, start)
        except BaseException:
            self._failed = True
            raise
        with self._mutex:
            self._written.add(start, start + len(data))
            self._hasher.advance(self._written.prefix)

    def _first_gap(self) -> str:
        at = self._written.prefix
        for spec in self._specs.values():
            missing = self._offsets[spec.name] + spec.nbytes - at
            if missing > 0:
                element = (spec.nbytes - missing) // spec.torch_dtype.itemsize
                return f"tensor {spec.name!r} was not written from element {element} on"
        return "a write to it failed"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1).cpu()
    return flat.view(torch.uint8).numpy().data
