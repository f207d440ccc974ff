"""Date and machine of a report."""

from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True)
class Made:
    """Date and machine of a report."""

    day: date
    machine: str

    @property
    def text(self) -> str:
        """Return the line below a title, such as "28 November 2026, NVIDIA H200"."""
        return f"{self.day.day} {self.day:%B %Y}, {self.machine}"


def made_here(device: str) -> Made:
    """Return the current date, and the hardware name of `device`, such as "cpu" or "cuda:0"."""
    import torch

    from quantkit.bench.machine import cpu_name

    gpu = torch.device(device).type == "cuda"
    return Made(date.today(), torch.cuda.get_device_name(device) if gpu else cpu_name())
