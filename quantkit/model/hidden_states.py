"""Hidden states between two blocks: where they stay, and their work file, from which a run goes on."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quantkit.checkpoint.output.atomic_write import disk_memory
from quantkit.checkpoint.output.work_files import WorkFiles
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.files import size_text
from quantkit.memory import free_share
from quantkit.model.distributed import Ranks, Record

logger = logging.getLogger("quantkit.memory")

#: Hidden states stay on a GPU where they take at most so many bytes with one matrix of K x K in float32, K
#: the most columns of a linear, as quantizing takes some of those, and alone this part of its free memory.
#: Otherwise they are on the host, from where every pass copies them.
HIDDEN_BYTES = 3 << 30
HIDDEN_MEMORY = 0.25
#: And where they take more than this part of the free memory there, on the disk.
HOST_MEMORY = 0.5


@dataclass(frozen=True)
class Home:
    """Where hidden states stay between blocks: on `device`, on a host page-locked if a GPU copies them, or in
    files in a `directory`.
    """

    device: torch.device
    locked: bool = False
    directory: Path | None = None

    def hold(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` there, in memory of its own if that is page-locked or a file's."""
        if self.directory is not None:
            memory = disk_memory(self.directory, hidden.nbytes)
            return torch.frombuffer(memory, dtype=hidden.dtype).view(hidden.shape).copy_(hidden)
        if not self.locked:
            return hidden.to(self.device)
        return torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True).copy_(hidden)


def choose_home(needed: int, columns: int, device: torch.device, ranks: Ranks, directory: Path) -> Home:
    """Where `needed` bytes of hidden states stay between blocks that compute on `device`, the same on all
    ranks, if linears have at most so many `columns`.
    """
    host = torch.device("cpu")
    room = min(HIDDEN_BYTES - 4 * columns**2, HIDDEN_MEMORY * free_share(device, ranks.on_host))
    on_gpu = device != host and needed <= room
    free = free_share(host, ranks.on_host)
    fits = [all(of_one) for of_one in zip(*ranks.meet((on_gpu, needed <= HOST_MEMORY * free)), strict=True)]
    if fits[0]:
        return Home(device)
    if fits[1]:
        return Home(host, locked=device != host)
    logger.warning(
        "%s of hidden states stay in %s, as the host has %s of free memory: every pass waits for that disk. "
        "Fewer or shorter samples take less (--calibration-samples, --calibration-length).",
        size_text(needed),
        directory,
        size_text(free),
    )
    return Home(host, directory=directory)


@dataclass(frozen=True, eq=False)
class States:
    """Hidden states [B, T, d], at `home`, of this rank's micro-batches, and the `runs` that these are in.

    And those of the original where a method asks for the input error.
    """

    runs: tuple[int, ...]
    home: Home
    hidden: list[torch.Tensor]
    exact: list[torch.Tensor] | None

    @classmethod
    def of(cls, runs: tuple[int, ...], home: Home, hidden: list[torch.Tensor], original: bool) -> "States":
        """The states before the first block; if `original`, a copy of them as the original model's."""
        return cls(runs, home, hidden, [home.hold(one.clone()) for one in hidden] if original else None)

    def after(self, hidden: list[torch.Tensor], exact: list[torch.Tensor] | None) -> "States":
        """Those after a block."""
        return replace(self, hidden=hidden, exact=exact)

    def write(self, output: WorkFiles, filename: str, count: int, ranks: Ranks) -> None:
        """Store those of all ranks, `count` micro-batches, as a work file."""
        named = {"hidden": self.hidden, **({} if self.exact is None else {"exact": self.exact})}
        dtypes = {torch.float32: "F32", torch.bfloat16: "BF16"}
        # A rank without samples is not the first, and writes nothing.
        first = self.hidden[0] if self.hidden else torch.empty(1, 0)
        specs = [
            TensorSpec(name, dtypes[first.dtype], (count * len(first), *first.shape[1:])) for name in named
        ]
        with output.shard(filename, specs, {"format": "pt"}) as file:
            for name, of in named.items():
                for at, record in enumerate(
                    ranks.each([Record({name: one}) for one in of], self.home.device)
                ):
                    tensor = record.tensors[name]
                    file.write(name, tensor, offset=at * tensor.numel())

    @classmethod
    def read(
        cls,
        output: WorkFiles,
        filename: str,
        share: Sequence[int],
        runs: tuple[int, ...],
        size: int,
        home: Home,
    ) -> "States":
        """A share of those of a work file, which are micro-batches of `size`."""
        files = Checkpoint.of_files([output.path / filename])
        found = {
            name: [home.hold(files.read(name, at * size, (at + 1) * size)) for at in share]
            for name in files.tensors
        }
        return cls(runs, home, found["hidden"], found.get("exact"))
