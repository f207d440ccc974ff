"""Several processes that share one calibration, such as torchrun starts: one for each GPU.

All of them run the same code and meet in the same order. Each has a share of the samples and of the linears,
and tells the others what it made of it: records of tensors and JSON, nothing pickled. A process alone is a
`Ranks` of one, which meets nobody.

A rank that fails says so instead of going to the next meeting, and all others end there with
`OtherRankFailed`. So an error is raised as it is on one rank: the first of those that failed.
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

#: What torchrun sets for each process that it starts.
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: How long a rank waits for another one, which may be writing the whole checkpoint meanwhile.
PATIENCE = timedelta(days=1)
#: How long one that has failed waits for the others to hear of it.
FAREWELL = timedelta(minutes=1)


@dataclass(frozen=True, eq=False)
class Record:
    """What ranks tell each other: tensors by name, and JSON-able facts."""

    tensors: Mapping[str, torch.Tensor]
    facts: Any = None


class Ranks:
    """Processes that work together: this one's `number` of so many, and how many of them are `on_host`.

    `first` is the one that writes files and talks to the user. As it is, it is one process alone.
    """

    number = 0
    size = 1
    on_host = 1

    @property
    def first(self) -> bool:
        return self.number == 0

    def share(self, count: int) -> range:
        """Which of `count` items in a row are this rank's; the first has some if there are any."""
        start, stop = (-(-edge * count // self.size) for edge in (self.number, self.number + 1))
        return range(start, stop)

    def device(self, kind: torch.device) -> torch.device:
        """The device of this kind that is this rank's."""
        return kind

    def meet(self, facts: Any) -> list[Any]:
        """The JSON-able `facts` of all ranks, in order."""
        return [facts]

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What the first rank makes, JSON-able, on all of them."""
        return self.meet(make() if self.first else None)[0]

    def each(self, records: Sequence[Record], device: torch.device) -> Iterator[Record]:
        """The records of all ranks, one after the other, with tensors on `device`."""
        mine = [
            Record({name: tensor.to(device) for name, tensor in record.tensors.items()}, record.facts)
            for record in records
        ]
        for rank, headers in enumerate(self.meet([_header(record) for record in mine])):
            for at, header in enumerate(headers):
                record = mine[at] if rank == self.number else _blank(header, device)
                # What fails between two records is heard of here.
                self.meet(None)
                for tensor in record.tensors.values():
                    self._spread(tensor, rank)
                yield record

    def _spread(self, tensor: torch.Tensor, rank: int) -> None:
        """Fill `tensor` with that of `rank`."""


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


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun started with this process, or this process alone.

    Leaving the block waits for all. `OtherRankFailed` where another one has failed, and `EnvironmentProblem`
    if they cannot reach each other.
    """
    found = {name: os.environ.get(name, "") for name in ENVIRONMENT}
    if not all(found.values()) or int(found["WORLD_SIZE"]) == 1:
        yield Ranks()
        return
    # What torch first imports while there is a group keeps it beyond its end: threads of gloo that live on
    # then abort the process as it exits.
    import torch.distributed.fsdp

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise EnvironmentProblem(
            f"rank {found['RANK']} cannot join the {found['WORLD_SIZE']} processes of torchrun at "
            f"{found['MASTER_ADDR']}:{found['MASTER_PORT']}: {error}. Start them again, or "
            "quantkit without torchrun."
        ) from error
    ranks = _Joined(int(found["LOCAL_RANK"]), int(found["LOCAL_WORLD_SIZE"]))
    try:
        yield ranks
        ranks.meet(None)
    except BaseException as error:
        ranks.bid_farewell(error)
        raise
    finally:
        dist.destroy_process_group()


class _Joined(Ranks):
    """Ranks that meet through torch.distributed: gloo for what is on the host, nccl between GPUs."""

    def __init__(self, on_this_host: int, on_host: int) -> None:
        self.number, self.size = dist.get_rank(), dist.get_world_size()
        self.on_host = on_host
        self._on_this_host = on_this_host
        self._over = False

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

    def meet(self, facts: Any) -> list[Any]:
        return self._exchange({"facts": facts}, PATIENCE)

    def bid_farewell(self, error: BaseException) -> None:
        """Tell the others of an error that ends this rank; `OtherRankFailed` if an earlier one failed too."""
        if self._over:
            return
        code = error.exit_code if isinstance(error, QuantkitError) else 1
        # Who cannot be told will miss this rank; what went wrong here matters more.
        with suppress(EnvironmentProblem):
            self._exchange({"error": f"{type(error).__name__}: {error}", "exit_code": code}, FAREWELL)

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
            self._over = True
            if failed != self.number:
                one = messages[failed]
                raise OtherRankFailed(f"rank {failed} has failed: {one['error']}", one["exit_code"])
        return [one.get("facts") for one in messages]

    def _spread(self, tensor: torch.Tensor, rank: int) -> None:
        # As bytes: not every library knows every dtype.
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        self._wait(lambda: dist.broadcast(flat, src=rank, async_op=True), PATIENCE)

    def _wait(self, start: Callable[[], Any], limit: timedelta) -> None:
        try:
            start().wait(limit)
        except RuntimeError as error:
            self._over = True
            raise EnvironmentProblem(
                f"rank {self.number} has lost another one, which ended without a word or does not answer: "
                f"{error}. Look for what it said last, then continue with --resume."
            ) from error
