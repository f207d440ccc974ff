"""Build kernel layouts of weights without waiting for each: all are checked together at the end.

A GPU works while the host prepares the next weight. Waiting for the check of each weight, such as for NaN,
would stall both. So the host waits once, when the outermost `building` block ends.
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
    """Checks to do when a `building` block ends.

    faults    pairs (flag, message): the flag is a tensor [1], not zero for a damaged weight; the message is
              the text of the `FormatError`
    devices   devices whose current stream to wait for
    """

    faults: list[tuple[torch.Tensor, str]] = field(default_factory=list)
    devices: set[torch.device] = field(default_factory=set)

    def settle(self) -> None:
        """Wait for `devices`, then raise `FormatError` for the first of `faults` whose flag is not 0."""
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
    """Context manager: kernel layouts that are built inside are valid once the outermost such block ends.

    At the end the host waits for the devices of `wait_for`. `FormatError` is then raised for the first weight
    that `refuse_if` flagged. Transforms of `torch.func` are off inside, because tensors made within one have
    no memory that a kernel could write.
    """
    # A layout is kept after the run that builds it, so its launches must not be skipped.
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
    """Make the end of the open `building` block wait for the current stream of `device`.

    Without an open block, wait at once. The wait keeps a kernel with PDL from reading a weight before the
    kernel that builds it has ended.
    """
    if device.type == "cuda":
        _ask(_Pending(devices={device}))


def refuse_if(flag: torch.Tensor, message: str) -> None:
    """Make the end of the open `building` block raise `FormatError(message)` if `flag` is not zero.

    `flag` is bool or integer, [1], on any device. Without an open block the error is raised here.
    """
    _ask(_Pending(faults=[(flag, message)]))


def _ask(checks: _Pending) -> None:
    """Add `checks` to the open `building` block; without a block, do them at once."""
    pending = _pending.get()
    if pending is None:
        checks.settle()
        return
    pending.faults += checks.faults
    pending.devices |= checks.devices
