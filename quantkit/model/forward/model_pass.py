"""Run the forward of a model up to each of its blocks in turn; the caller computes the blocks.

The model's own forward prepares the arguments of each block and handles its output, so no calling convention
is assumed. Anything else that goes from block to block stays where the forward keeps it.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quantkit.errors import BlocksError
from quantkit.model.forward.suspended import Suspended
from quantkit.model.forward.trees import hidden_in, tensors_in
from quantkit.model.hidden_states import Home

_here = threading.local()


@dataclass(frozen=True, eq=False)
class Call:
    """Arguments of a block."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Call":
        """Return the call with None in place of each cache.

        A block runs several times on the same tokens; a cache would keep tokens of earlier runs.
        """
        from transformers import Cache

        def without(value: Any) -> Any:
            return None if isinstance(value, Cache) else value

        return cls(tuple(map(without, args)), {name: without(value) for name, value in kwargs.items()})

    @property
    def values(self) -> tuple[Any, ...]:
        """Return all arguments."""
        return (*self.args, *self.kwargs.values())

    @property
    def hidden(self) -> torch.Tensor:
        """Return the hidden states: the first tensor of the arguments."""
        found = hidden_in(self.values)
        assert found is not None
        return found


class ModelPass:
    """Forward pass of a model on one micro-batch of tokens int64 [B, T], which waits before each block.

    block     name of the block that the pass waits for; None at the end
    call      arguments of that block
    output    output of the model, at the end
    forward   runs the model; `waiting_at` makes it wait at blocks
    home      where hidden states are stored while the pass waits
    grad      True if computations between blocks have gradients
    last      name of the last block; an error after it is raised by `take_output` only
    """

    def __init__(
        self,
        forward: Callable[[torch.Tensor], Any],
        tokens: torch.Tensor,
        home: Home,
        device: torch.device,
        *,
        grad: bool = False,
        plain: bool = True,
        last: str | None = None,
    ) -> None:
        self.tokens = tokens
        self.block: str | None = None
        self.output: Any = None
        #: True if each block got only hidden states, the output of the block before.
        self.plain = plain
        #: For each block so far, the length of the tuple it returned; 0 for a tensor.
        self.lengths: list[int] = []
        self._home, self._device, self._grad, self._last = home, device, grad, last
        self._failed: BlocksError | None = None
        self._call: Call | None = None
        #: Tensors stored at `home`, with their stored form.
        self._stored: list[tuple[torch.Tensor, torch.Tensor]] = []

        def run(suspended: Suspended) -> Any:
            _here.suspended = suspended
            with torch.set_grad_enabled(grad):
                return forward(tokens)

        self._suspended = Suspended(run)
        self._proceed(None)

    @property
    def call(self) -> Call:
        """Return the arguments of the block; outside of `loaded` its hidden states are at `home`."""
        assert self._call is not None
        return self._call

    def advance(self, output: Any) -> torch.Tensor:
        """Continue with `output` of the block to the next block; return the hidden states in `output`."""
        hidden = hidden_in(output)
        assert hidden is not None
        before, self._stored = self._stored, []
        for tensor, stored in before:
            tensor.data = stored.to(self._device, non_blocking=True)
        # Also for a tuple with other tensors, although the pass is not plain then.
        self.lengths.append(len(output) if isinstance(output, tuple) else 0)
        is_plain = isinstance(output, tuple | torch.Tensor) and len(list(tensors_in(output))) == 1
        self._proceed(output)
        if self._grad:
            # With gradients, the caller keeps the arguments of blocks.
            for tensor, stored in before:
                tensor.data = stored
        if self._call is not None:
            self.plain = self.plain and is_plain and self._call.hidden is hidden and _is_plain(self._call)
            self._store(hidden)
        return hidden

    def take_output(self) -> Any:
        """Return the output of the model and drop it here; raise the error that ended the forward, if any."""
        if self._failed is not None:
            raise self._failed
        output, self.output, self._suspended.output = self.output, None, None
        return output

    def skip(self, lengths: Sequence[int], hidden: torch.Tensor) -> None:
        """Advance past blocks without running them, one for each of `lengths`; the pass must be `plain`.

        A length is the number of elements that the block returns, 0 for a tensor alone. `hidden` [B, T, d]
        are the states after the last of these blocks.
        """
        for at, length in enumerate(lengths, 1):
            states = hidden.to(self._device) if at == len(lengths) else self.call.hidden
            self.advance((states, *[None] * (length - 1)) if length else states)

    @contextmanager
    def loaded(self) -> Iterator[Call]:
        """Context manager: move the hidden states to the device, for the block to run."""
        for tensor, stored in self._stored:
            tensor.data = stored.to(self._device, non_blocking=True)
        try:
            yield self.call
        finally:
            for tensor, stored in self._stored:
                tensor.data = stored

    def abandon(self) -> None:
        """End the pass early: stop the model's forward, and free the arguments and stored hidden states."""
        self._suspended.abandon()
        self._call = None
        self._stored.clear()

    def _proceed(self, value: Any) -> None:
        self._call = None
        try:
            found = self._suspended.resume(value)
        except BlocksError as error:
            if self.block is None or self.block != self._last:
                raise
            self.block, self._failed = None, error
            return
        if self._suspended.ended:
            self.block, self.output = None, self._suspended.output
            return
        self.block, self._call = found
        self._store(self.call.hidden)

    def _store(self, tensor: torch.Tensor) -> None:
        at_home = self._home.directory is None and not self._home.locked
        if at_home and tensor.device == self._home.device:
            return
        if all(tensor is not one for one, _ in self._stored):
            stored = self._home.store(tensor.detach())
            self._stored.append((tensor, stored))
            tensor.data = stored


def _is_plain(call: Call) -> bool:
    """Return True if no argument is a mutable mapping, which a block could modify."""
    return all(map(_is_constant, call.values))


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_constant(one) for one in value)
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)


@contextmanager
def waiting_at(blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    """Context manager: make every `ModelPass` wait before `blocks`, by name; other threads run the blocks."""

    def waiting(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def pause(*args: Any, **kwargs: Any) -> Any:
            suspended = getattr(_here, "suspended", None)
            if suspended is None:
                return forward(*args, **kwargs)
            call = Call.of(args, kwargs)
            # Copying a meta tensor to another device would give uninitialised memory.
            if call.hidden.is_meta:
                raise RuntimeError("its hidden states depend on a weight that is not there yet")
            return suspended.pause((name, call))

        return pause

    with _forwards({block: waiting(name, block.forward) for name, block in blocks.items()}):
        yield


@contextmanager
def returning(blocks: Mapping[str, nn.Module], output: Callable[[str], Any]) -> Iterator[None]:
    """Context manager: `blocks`, by name, return `output(name)` for any arguments, without running."""

    def fixed(name: str) -> Callable[..., Any]:
        return lambda *_, **__: output(name)

    with _forwards({block: fixed(name) for name, block in blocks.items()}):
        yield


@contextmanager
def _forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Context manager: set the `forward` of each module to the given function, and restore it at the end."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, earlier in before.items():
            if earlier is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = earlier
