"""Layouts that are being built: all are waited for and checked together.

A GPU works while the host prepares the next weight. To ask it whether a weight was sound, or whether it is
done, stops both; so that is asked once, when the outermost block of `building` ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from quantkit.errors import FormatError
from quantkit.kernels.jit.compile_pool import nothing_left_out


@dataclass
class _Pending:
    """What is still to be asked of devices: flags with what they mean, and devices to wait for."""

    faults: list[tuple[torch.Tensor, str]] = field(default_factory=list)
    devices: set[torch.device] = field(default_factory=set)

    def settle(self) -> None:
        for device in self.devices:
            torch.cuda.current_stream(device).synchronize()
        for device in {flag.device for flag, _ in self.faults}:
            here = [(flag, message) for flag, message in self.faults if flag.device == device]
            found = torch.stack([flag.reshape(()) != 0 for flag, _ in here]).tolist()
            for bad, (_, message) in zip(found, here, strict=True):
                if bad:
                    raise FormatError(message)


_pending: ContextVar[_Pending | None] = ContextVar("pending", default=None)


@contextmanager
def building() -> Iterator[None]:
    """A block in which layouts are built. They may be used once it ended, of nested ones the outermost.

    Transforms of `torch.func` do not see it: what is made within one has no memory that a kernel could write.
    Raises `FormatError` then for the first weight of which `refuse_if` says so.
    """
    # A layout outlives the run that it is built in, which may leave out launches.
    with nothing_left_out():
        if _pending.get() is not None:
            yield
            return
        pending = _Pending()
        token = _pending.set(pending)
        try:
            with torch._C._DisableFuncTorch():
                yield
        finally:
            _pending.reset(token)
        pending.settle()


def wait_for(device: torch.device) -> None:
    """Have the block end no earlier than what its GPU was given to do here.

    Kernels that overlap the one before them read weights before they wait for it.
    """
    if device.type == "cuda":
        _ask(_Pending(devices={device}))


def refuse_if(flag: torch.Tensor, message: str) -> None:
    """Have the block raise `FormatError(message)` if `flag`, of one element, is not zero."""
    _ask(_Pending(faults=[(flag, message)]))


def _ask(asked: _Pending) -> None:
    pending = _pending.get()
    if pending is None:
        asked.settle()
        return
    pending.faults += asked.faults
    pending.devices |= asked.devices
