"""Which device a name stands for."""

import torch

from quantkit.errors import UsageError

#: The kinds of devices that there are kernels for.
KINDS = ("cpu", "cuda")


def pick_device(device: str | torch.device) -> torch.device:
    """The torch device of "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1".

    `UsageError` for another name, and for a GPU that is not there.
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
    """The same for a GPU that need not be there; `UsageError` for another name."""
    if str(device) == "auto":
        return best_device()
    try:
        picked = torch.device(device)
    except RuntimeError:
        picked = None
    if picked is None or picked.type not in KINDS:
        raise UsageError(f"device {str(device)!r} is unknown; use auto, cpu or cuda.")
    return picked


def best_device() -> torch.device:
    """What "auto" stands for."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
