"""Select the torch device that a name means."""

import torch

from quantkit.errors import UsageError, unknown_name

#: Kinds of devices with kernels.
KINDS = ("cpu", "cuda")


def pick_device(device: str | torch.device) -> torch.device:
    """Return the torch device for "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1".

    Raises `UsageError` for any other name, and for a GPU that does not exist.
    """
    picked = named_device(device)
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"device {str(device)!r} is not available: this torch sees no GPU. Install a CUDA build of "
            "torch, or use --device cpu."
        )
    if picked.type == "cuda" and picked.index is not None and picked.index >= torch.cuda.device_count():
        raise UsageError(
            f"device {str(device)!r} is not available: this torch sees {torch.cuda.device_count()} GPUs, the "
            "first of which is cuda:0. Name one of them, or use auto."
        )
    return picked


def named_device(device: str | torch.device) -> torch.device:
    """Return the torch device of a name, even if this machine lacks that GPU.

    Raises `UsageError` for any other name.
    """
    if str(device) == "auto":
        return best_device()
    try:
        picked = torch.device(device)
    except RuntimeError:
        picked = None
    if picked is None or picked.type not in KINDS:
        raise unknown_name("device", str(device), ("auto", *KINDS))
    return picked


def best_device() -> torch.device:
    """Return the device for "auto": the first GPU, or the CPU without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize(device: torch.device) -> None:
    """Wait for all work of a GPU; does nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
