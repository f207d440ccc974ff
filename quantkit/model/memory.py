"""Memory that is free."""

import torch


def free_memory(device: torch.device) -> int:
    """Bytes free on the GPU, what torch holds there for reuse included, or on the host for a CPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return int(psutil.virtual_memory().available)
