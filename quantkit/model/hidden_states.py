"""Store hidden states between two blocks."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.checkpoint.output.atomic_write import disk_memory
from quantkit.files import size_text
from quantkit.memory import free_share
from quantkit.model.distributed import Ranks

logger = logging.getLogger("quantkit.memory")

#: Most bytes of hidden states on a GPU, including one K x K float32 matrix for the widest linear, as
#: quantizing needs some. At most this part of the free GPU memory as well. Otherwise states are on the host,
#: and each pass copies them.
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
        """Return `hidden` [B, T, d], any dtype, at this place; page-locked memory and files are copies."""
        if self.directory is not None:
            memory = disk_memory(self.directory, hidden.nbytes)
            return torch.frombuffer(memory, dtype=hidden.dtype).view(hidden.shape).copy_(hidden)
        if not self.locked:
            return hidden.to(self.device)
        return torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True).copy_(hidden)


def choose_home(needed: int, columns: int, device: torch.device, ranks: Ranks, directory: Path) -> Home:
    """Choose where `needed` bytes of hidden states go: the GPU `device`, else the host, else `directory`.

    The first with room on all ranks is chosen; all ranks must call this. Blocks compute on `device`, and
    their linears have at most `columns` columns. Files make every pass wait for the disk, which a warning
    says.
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
