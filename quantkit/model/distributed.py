"""Coordinate the ranks of a calibration or training: processes started by torchrun, one per GPU.

Ranks share samples and linears. All run the same code and make the same collective calls in the same
order. They exchange records of tensors and JSON; nothing is pickled. A single process is a `Ranks` of size 1,
which communicates with none.

A failing rank sends its error instead of joining the next collective call. All others then raise
`OtherRankFailed`, so the error appears once: on the first rank that failed.

    rank 0   all_gather | error -> sends it to all, raises it
    rank 1   all_gather |          receives it, raises OtherRankFailed
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quantkit.checkpoint.dtypes import SAFETENSORS_DTYPES, TORCH_DTYPES
from quantkit.errors import EnvironmentProblem, OtherRankFailed, QuantkitError, UsageError

#: Variables that torchrun sets for each process.
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Timeout of a collective call: another rank may be writing the whole checkpoint.
TIMEOUT = timedelta(days=1)
#: Timeout of a failed rank for sending its error.
ERROR_TIMEOUT = timedelta(minutes=1)


@dataclass(frozen=True, eq=False)
class Record:
    """Message between ranks: tensors by name, and JSON values."""

    tensors: Mapping[str, torch.Tensor]
    facts: Any = None


class Ranks:
    """Group of `size` processes; this one has the rank `number`. `on_host` ranks share this host.

    The `first` rank writes files and logs. This class is a single process; `_Joined` connects several.
    """

    number = 0
    size = 1
    on_host = 1

    @property
    def first(self) -> bool:
        return self.number == 0

    def share(self, count: int) -> range:
        """Return the indexes of this rank's share of `count` items; rank 0 has one or more if `count` > 0."""
        start, stop = (-(-edge * count // self.size) for edge in (self.number, self.number + 1))
        return range(start, stop)

    def device(self, kind: torch.device) -> torch.device:
        """Return the device of this rank: `kind`, or one GPU for each rank of a host if `kind` is CUDA.

        Raises `UsageError` if the host has fewer GPUs than ranks. A single process gets `kind`.
        """
        return kind

    def all_gather(self, facts: Any) -> list[Any]:
        """Return the JSON values `facts` of all ranks, in rank order."""
        return [facts]

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """Call `make` on rank 0 and return its JSON value on all ranks."""
        return self.all_gather(make() if self.first else None)[0]

    def gather_records(self, records: Sequence[Record], device: torch.device) -> Iterator[Record]:
        """Yield the records of all ranks in rank order, with tensors on `device`."""
        own = [
            Record({name: tensor.to(device) for name, tensor in record.tensors.items()}, record.facts)
            for record in records
        ]
        for rank, headers in enumerate(self.all_gather([_header(record) for record in own])):
            for at, header in enumerate(headers):
                record = own[at] if rank == self.number else _blank(header, device)
                # A failure between two records is received here.
                self.all_gather(None)
                for tensor in record.tensors.values():
                    self._broadcast_tensor(tensor, rank)
                yield record

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite each of `tensors`, any shape, with its sum over ranks, the same bits on all ranks.

        All ranks must call this, with the same shapes, one dtype and one device. Sums are in rank order and
        in float32.
        """

    def _broadcast_tensor(self, tensor: torch.Tensor, rank: int) -> None:
        """Overwrite `tensor`, any shape, on all ranks with its numbers on rank `rank`."""


def _header(record: Record) -> list[Any]:
    shapes = {
        name: [SAFETENSORS_DTYPES[tensor.dtype], list(tensor.shape)]
        for name, tensor in record.tensors.items()
    }
    return [shapes, record.facts]


def _blank(header: Sequence[Any], device: torch.device) -> Record:
    shapes, facts = header
    tensors = {
        name: torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device)
        for name, (dtype, shape) in shapes.items()
    }
    return Record(tensors, facts)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, uint8 [n], because not every backend supports every dtype."""
    return tensor.view(-1).view(torch.uint8)


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Join the ranks that torchrun started with this process; yields a single rank without torchrun.

    Waits for all ranks at the end. Raises `OtherRankFailed` if another rank failed, and `EnvironmentProblem`
    if they cannot connect.
    """
    values = {name: os.environ.get(name, "") for name in ENVIRONMENT}
    if not all(values.values()) or int(values["WORLD_SIZE"]) == 1:
        yield Ranks()
        return
    # Import it now: a module that torch imports while a process group exists keeps the group alive past its
    # end. Threads of gloo then abort the process at exit.
    import torch.distributed.fsdp

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise EnvironmentProblem(
            f"rank {values['RANK']} cannot join the {values['WORLD_SIZE']} processes of torchrun at "
            f"{values['MASTER_ADDR']}:{values['MASTER_PORT']}: {error}. Start them again, or "
            "quantkit without torchrun."
        ) from error
    ranks = _Joined(int(values["LOCAL_RANK"]), int(values["LOCAL_WORLD_SIZE"]))
    try:
        yield ranks
        ranks.all_gather(None)
    except BaseException as error:
        ranks.send_error(error)
        raise
    finally:
        dist.destroy_process_group()


class _Joined(Ranks):
    """Ranks connected through torch.distributed: gloo on the host, NCCL between GPUs."""

    def __init__(self, on_this_host: int, on_host: int) -> None:
        self.number, self.size = dist.get_rank(), dist.get_world_size()
        self.on_host = on_host
        self._on_this_host = on_this_host
        self._ended = False

    def device(self, kind: torch.device) -> torch.device:
        if kind.type != "cuda":
            return kind
        if self._on_this_host >= torch.cuda.device_count():
            raise UsageError(
                f"rank {self.number} has no GPU: torchrun started {self.on_host} processes on a host with "
                f"{torch.cuda.device_count()}. Start one for each GPU with --nproc-per-node, or use "
                "--device cpu."
            )
        return torch.device("cuda", self._on_this_host)

    def all_gather(self, facts: Any) -> list[Any]:
        return self._exchange({"facts": facts}, TIMEOUT)

    def send_error(self, error: BaseException) -> None:
        """Send an error that ends this rank to the others.

        Raises `OtherRankFailed` if a rank with a lower number failed too.
        """
        if self._ended:
            return
        code = error.exit_code if isinstance(error, QuantkitError) else 1
        # Unreachable ranks will notice the loss; the error of this rank matters more.
        with suppress(EnvironmentProblem):
            self._exchange({"error": f"{type(error).__name__}: {error}", "exit_code": code}, ERROR_TIMEOUT)

    def _exchange(self, message: Mapping[str, Any], limit: timedelta) -> list[Any]:
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(sizes, torch.tensor([len(data)]), async_op=True), limit)
        longest = int(max(sizes))
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.nn.functional.pad(data, (0, longest - len(data)))
        self._wait(lambda: dist.all_gather(texts, padded, async_op=True), limit)
        messages = [
            json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(texts, sizes, strict=True)
        ]
        failed = next((rank for rank, one in enumerate(messages) if "error" in one), None)
        if failed is not None:
            self._ended = True
            if failed != self.number:
                one = messages[failed]
                raise OtherRankFailed(f"rank {failed} has failed: {one['error']}", one["exit_code"])
        return [one.get("facts") for one in messages]

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        if not tensors:
            return
        # Each rank adds up a part, so the order of the sum does not depend on the backend:
        #
        #     rank 0   a0 b0   a0 a1   a = a0 + a1   a b
        #     rank 1   a1 b1   b0 b1   b = b0 + b1   a b
        sizes = [one.numel() for one in tensors]
        padding = tensors[0].new_zeros(-sum(sizes) % self.size)
        whole = torch.cat([*(one.reshape(-1) for one in tensors), padding])
        received = torch.empty_like(whole)
        # A failure before the exchange is received here.
        self.all_gather(None)
        # Without a limit the host does not wait for a GPU, and meets the others again meanwhile.
        self._wait(lambda: dist.all_to_all_single(_as_bytes(received), _as_bytes(whole), async_op=True))
        first, *others = received.chunk(self.size)
        total = first.to(torch.float32, copy=True)
        for other in others:
            total += other
        summed = total.to(whole.dtype)
        parts = list(_as_bytes(whole).chunk(self.size))
        self._wait(lambda: dist.all_gather(parts, _as_bytes(summed), async_op=True))
        sums = torch.split(whole[: sum(sizes)], sizes)
        for one, found in zip(tensors, sums, strict=True):
            one.copy_(found.view(one.shape))

    def _broadcast_tensor(self, tensor: torch.Tensor, rank: int) -> None:
        flat = _as_bytes(tensor.contiguous())
        self._wait(lambda: dist.broadcast(flat, src=rank, async_op=True), TIMEOUT)

    def _wait(self, start: Callable[[], Any], limit: timedelta | None = None) -> None:
        try:
            start().wait(*([] if limit is None else [limit]))
        except RuntimeError as error:
            self._ended = True
            raise EnvironmentProblem(
                f"rank {self.number} has lost another one, which ended without a word or does not answer: "
                f"{error}. Look for what it said last, then continue with --resume."
            ) from error
