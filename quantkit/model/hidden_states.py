"""Store hidden states between two blocks, and in a work file from which a run resumes."""

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

#: Largest bytes for hidden states on a GPU, together with one K x K float32 matrix, for the largest K of a
#: linear: quantizing needs some of those. Also at most this part of the free GPU memory. Otherwise states are
#: on the host, and each pass copies them.
HIDDEN_BYTES = 3 << 30
HIDDEN_MEMORY = 0.25
#: Above this part of the free host memory, states go to the disk.
HOST_MEMORY = 0.5


@dataclass(frozen=True)
class Home:
    """Place of hidden states between blocks: a device, page-locked host memory, or files in `directory`."""

    device: torch.device
    locked: bool = False
    directory: Path | None = None

    def store(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `hidden` [B, T, d] at this place; page-locked memory and files are copies."""
        if self.directory is not None:
            memory = disk_memory(self.directory, hidden.nbytes)
            return torch.frombuffer(memory, dtype=hidden.dtype).view(hidden.shape).copy_(hidden)
        if not self.locked:
            return hidden.to(self.device)
        return torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True).copy_(hidden)


def choose_home(needed: int, columns: int, device: torch.device, ranks: Ranks, directory: Path) -> Home:
    """Choose the place for `needed` bytes of hidden states, the same on all ranks.

    Blocks compute on `device`, and their linears have at most `columns` columns.
    """
    host = torch.device("cpu")
    room = min(HIDDEN_BYTES - 4 * columns**2, HIDDEN_MEMORY * free_share(device, ranks.on_host))
    on_gpu = device != host and needed <= room
    free = free_share(host, ranks.on_host)
    fits = [
        all(rank_fits)
        for rank_fits in zip(*ranks.all_gather((on_gpu, needed <= HOST_MEMORY * free)), strict=True)
    ]
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
    """Hidden states [B, T, d] of the micro-batches of this rank, at `home`; `runs` lists their runs.

    `exact` are the states of the original model, for methods that need the input error; else None.
    """

    runs: tuple[int, ...]
    home: Home
    hidden: list[torch.Tensor]
    exact: list[torch.Tensor] | None

    @classmethod
    def of(cls, runs: tuple[int, ...], home: Home, hidden: list[torch.Tensor], original: bool) -> "States":
        """Create the states before the first block; with `original`, `exact` starts as a copy."""
        return cls(runs, home, hidden, [home.store(one.clone()) for one in hidden] if original else None)

    def after(self, hidden: list[torch.Tensor], exact: list[torch.Tensor] | None) -> "States":
        """Return the states after a block."""
        return replace(self, hidden=hidden, exact=exact)

    def write(self, output: WorkFiles, filename: str, count: int, ranks: Ranks) -> None:
        """Write the states of all ranks, `count` micro-batches, to a work file."""
        named = {"hidden": self.hidden, **({} if self.exact is None else {"exact": self.exact})}
        dtypes = {torch.float32: "F32", torch.bfloat16: "BF16"}
        # A rank without samples is not rank 0 and writes nothing.
        first = self.hidden[0] if self.hidden else torch.empty(1, 0)
        specs = [
            TensorSpec(name, dtypes[first.dtype], (count * len(first), *first.shape[1:])) for name in named
        ]
        with output.shard(filename, specs, {"format": "pt"}) as file:
            for name, batches in named.items():
                for at, record in enumerate(
                    ranks.gather_records([Record({name: one}) for one in batches], self.home.device)
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
        """Read the micro-batches `share`, of `size` samples each, from a work file."""
        files = Checkpoint.of_files([output.path / filename])
        states = {
            name: [home.store(files.read(name, at * size, (at + 1) * size)) for at in share]
            for name in files.tensors
        }
        return cls(runs, home, states["hidden"], states.get("exact"))
