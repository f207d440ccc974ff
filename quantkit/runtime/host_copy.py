"""Copy small tensors to the host without waiting for the running step."""

from functools import lru_cache
from typing import Any

import torch


@lru_cache(maxsize=64)
def _copies_of(device: torch.device) -> Any:
    """Return the CUDA stream of `device` for copies to the host, which kernels do not use.

    Its priority is high: torch reuses a few streams per priority, and graphs are captured on streams of
    normal priority.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class HostCopy:
    """Copy of `tensor` [...] to the host: started at creation, waited for in `get`.

    `get` waits for kernels launched before the creation, not for later ones. These may run before the copy
    has ended, so none of them may write to `tensor` before `get`. Not usable inside a CUDA graph.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if not tensor.is_cuda:
            self._copy.copy_(tensor)
            return
        side = _copies_of(tensor.device)
        # Pass the device: without it, torch takes the stream of the current device.
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            self._copy.copy_(tensor, non_blocking=True)
        # The allocator must not reuse this memory before the copy has ended.
        tensor.record_stream(side)
        self._event = side.record_event()

    def get(self) -> torch.Tensor:
        """Return the copy on the host, of the shape and dtype of `tensor`."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
