"""Measure the machine: memory in use, read bandwidth, energy, names."""

import platform
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from quantkit import __version__
from quantkit.bench.figures import Machine

#: Bytes read to measure the bandwidth, several times the largest caches.
_READ_BYTES = 512 << 20


def machine(device: torch.device) -> Machine:
    """Return the machine, with the measured read bandwidth of `device`."""
    gpu = device.type == "cuda"
    return Machine(
        device=device.type,
        name=torch.cuda.get_device_name(device) if gpu else cpu_name(),
        threads=torch.get_num_threads(),
        read_bandwidth=_gpu_bandwidth() if gpu else _cpu_bandwidth(),
        quantkit=__version__,
        torch=str(torch.__version__),
        transformers=version("transformers"),
    )


def cpu_name() -> str:
    """Return the name of the CPU, or its architecture if no file has the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu_bandwidth() -> float:
    from quantkit.kernels.tuning.timing import read_time

    return _READ_BYTES / read_time(_READ_BYTES) * 1e6


def _cpu_bandwidth() -> float:
    """Measure the read bandwidth, bytes per second: the fastest of 5 float32 sums with torch's threads."""
    data = torch.ones(_READ_BYTES // 4)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - started)
    return _READ_BYTES / min(times)


def used_bytes(device: torch.device) -> int:
    """Return the bytes in use: resident memory for a CPU, allocated by torch for a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def peak_bytes(device: torch.device) -> int:
    """Return the peak since the process began: resident bytes for a CPU, torch's allocated ones for a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # In kilobytes, except on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class EnergyMeter:
    """Energy used by a GPU, by NVML's counter; nothing on a CPU or without `pynvml`."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            # By UUID: torch may list other GPUs, in another order.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except pynvml.NVMLError:
            return
        self._nvml = pynvml

    def joules(self) -> float | None:
        """Return joules since the driver was loaded; None without a counter."""
        if self._nvml is None:
            return None
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
