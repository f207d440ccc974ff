"""Copies of small tensors on the host, for which no running step is waited for."""

from functools import lru_cache
from typing import Any

import torch


@lru_cache(maxsize=64)
def _copies_of(device: torch.device) -> Any:
    """The stream of `device` on which numbers are copied to the host, beside what computes.

    Of high priority, as torch has a few streams of each, handed out in turn: no graph is recorded on it.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class HostCopy:
    """A copy of `tensor` on the host: asked for now, waited for later.

    The host waits for what was launched before this, not for what is launched after, which does not wait for
    the copy. So nothing may write to `tensor` before `get`. Not for what is recorded as a CUDA graph.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if not tensor.is_cuda:
            self._copy.copy_(tensor)
            return
        side = _copies_of(tensor.device)
        # Not the current stream, which is one of the current device.
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            self._copy.copy_(tensor, non_blocking=True)
        # Whoever frees its memory does not know of the copy.
        tensor.record_stream(side)
        self._event = side.record_event()

    def get(self) -> torch.Tensor:
        """The copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
