"""Keep the numbers of a training between steps: on the device that trains, or in the memory of the host.

In host memory they come to the device for a part of each step, some linears at a time, and go back. The bits
are the same both ways.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch


class Numbers(Protocol):
    """Trained numbers of a matrix or norm, by name, and tensors beside them that stay as they are."""

    numbers: dict[str, torch.Tensor]

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self: ...


N = TypeVar("N", bound=Numbers)


@dataclass(frozen=True)
class Residence:
    """Residence of the numbers that `device` trains."""

    device: torch.device
    on_host: bool = False

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the device where it stays between steps: itself, or a copy in host memory."""
        if not self.on_host:
            return tensor
        # A GPU copies to and from pinned memory by itself, in the order of its other work.
        pinned = self.device.type == "cuda"
        home = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return home.copy_(tensor)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a kept tensor on the device: itself if it is kept there, or else a copy."""
        return tensor.to(self.device, copy=True, non_blocking=True) if self.on_host else tensor

    def bring_back(self, kept: torch.Tensor, changed: torch.Tensor) -> None:
        """Store in `kept`, a tensor [...] between steps, what its fetched copy `changed` [...] became.

        `wait` before the host reads it. Does nothing if numbers stay on the device.
        """
        if self.on_host:
            kept.copy_(changed, non_blocking=True)

    def keep_all(self, made: N) -> N:
        """Return numbers of the device where they stay between steps."""
        return made.mapped(self.keep) if self.on_host else made

    def fetch_all(self, kept: N) -> N:
        """Return the trained numbers `kept` on the device: copies if they stay in host memory."""
        return kept.mapped(self.fetch) if self.on_host else kept

    def bring_all_back(self, kept: Numbers, changed: Numbers) -> None:
        """Store in `kept`, the numbers between steps, what those fetched became, `changed`."""
        for name, tensor in kept.numbers.items():
            self.bring_back(tensor, changed.numbers[name])

    def wait(self) -> None:
        """Wait until what was brought back is in host memory."""
        if self.on_host and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
