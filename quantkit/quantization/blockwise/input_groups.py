"""The stages of a block: the modules that have one input together, in the order they run.

Forward passes stop before each, so that its weights can be replaced before they are used.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import nn

from quantkit.errors import CheckpointError
from quantkit.model.blocks import Block, Stopped


def stages_of(
    block: Block, hidden: torch.Tensor, wanted: Sequence[str], alone: Collection[str] = ()
) -> list[tuple[str, ...]]:
    """The modules `wanted`, by name inside the block, in the order they run, those with one input together.

    Except those in `alone`. `CheckpointError` if one does not run exactly once.
    """
    calls: list[tuple[str, torch.Tensor]] = []
    hooks = [
        block.module.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, name=name: calls.append((name, inputs[0]))
        )
        for name in wanted
    ]
    try:
        block.run(hidden)
    finally:
        for hook in hooks:
            hook.remove()
    for name in wanted:
        count = sum(name == called for called, _ in calls)
        if count != 1:
            raise CheckpointError(
                f"{block.name}.{name} runs {count} times in a forward pass; quantkit calibrates linears that "
                "run once. Keep it dense with a rule, or take a method without data, such as --method mse."
            )
    stages: list[list[str]] = []
    previous: torch.Tensor | None = None
    for name, inputs in calls:
        if inputs is previous and name not in alone:
            stages[-1].append(name)
        else:
            stages.append([name])
        previous = None if name in alone else inputs
    return [tuple(stage) for stage in stages]


class Forwards:
    """The forward passes of a block on all micro-batches, each stopping before every stage.

    While all are stopped the weights of the stage that comes next may be replaced. With `suspend` each pass
    has a thread, which waits where it stopped, so every operation runs once and all that a block makes
    between two stages is in memory. Without, a pass starts anew for each stage. The numbers are the same.
    """

    def __init__(
        self,
        block: Block,
        hidden: Sequence[torch.Tensor],
        stops: Sequence[str],
        device: torch.device,
        suspend: bool,
    ) -> None:
        self._block, self._hidden, self._stops, self._device = block, hidden, stops, device
        self._suspend = suspend
        self._here = threading.local()
        self._lanes: list[_Lane | None] = [None] * len(hidden)
        self._reached = [0] * len(hidden)
        self._closed = False
        self._mutex = threading.Lock()
        self._hooks = [
            block.module.get_submodule(name).register_forward_pre_hook(self._hook(at))
            for at, name in enumerate(stops)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Workers may still be in a step when another one has failed.
        with self._mutex:
            self._closed = True
        for lane in self._lanes:
            if lane is not None:
                lane.abandon()
        for hook in self._hooks:
            hook.remove()

    def step(self, lane: int) -> tuple[torch.Tensor, ...]:
        """Run micro-batch `lane` to its next stage; what that is called with: [tokens, any] each."""
        stop = self._reached[lane]
        self._reached[lane] += 1
        found: tuple[torch.Tensor, ...] | None = None
        if self._suspend:
            found = self._lane(lane).resume()
        else:
            found = self._run_to(lane, lambda at, inputs: _stop_if(at == stop, inputs))
        assert found is not None
        return tuple(one.reshape(-1, one.shape[-1]) for one in found)

    def visit(self, lane: int, see: Callable[[str, torch.Tensor], None]) -> None:
        """Run micro-batch `lane` through all stages; `see(stage, its inputs [tokens, any])`.

        These are copies: the block may change its own once the stage has read them.
        """
        seen = 0

        def stop(at: int, inputs: tuple[torch.Tensor, ...]) -> None:
            nonlocal seen
            seen += 1
            see(self._stops[at], inputs[0].reshape(-1, inputs[0].shape[-1]).clone())
            if seen == len(self._stops):
                raise Stopped(inputs)

        stopped = self._run_to(lane, stop)
        # To its end a pass has replaced the hidden states.
        assert stopped is not None, f"{self._block.name} does not come to all of its stages"

    def finish(self, lane: int) -> torch.Tensor:
        """Run micro-batch `lane` to the end: the hidden states [B, T, d] after the block, in place of those
        before.
        """
        if not self._suspend:
            return self._run(lane)
        running = self._lane(lane)
        assert running.resume() is None, f"{self._block.name} stops more often than it has stages"
        assert running.output is not None
        return running.output

    def _lane(self, lane: int) -> "_Lane":
        with self._mutex:
            if self._closed:
                raise _Abandoned
            found = self._lanes[lane]
            if found is None:
                found = self._lanes[lane] = _Lane(lambda: self._run_in(lane))
            return found

    def _run_in(self, lane: int) -> torch.Tensor:
        self._here.lane = self._lanes[lane]
        return self._run(lane)

    def _run(self, lane: int) -> torch.Tensor:
        before = self._hidden[lane]
        with torch.no_grad():
            # In place, so that a GPU has room for all of them.
            return before.copy_(self._block.run(before.to(self._device, non_blocking=True)))

    def _run_to(
        self, lane: int, stop: Callable[[int, tuple[torch.Tensor, ...]], None]
    ) -> tuple[torch.Tensor, ...] | None:
        """Run a pass that `stop` ends before a stage by raising `Stopped`: what that is called with."""
        self._here.stop = stop
        try:
            self._run(lane)
        except Stopped as stopped:
            return stopped.inputs
        finally:
            self._here.stop = None
        return None

    def _hook(self, at: int) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def stop(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            lane = getattr(self._here, "lane", None)
            ends = getattr(self._here, "stop", None)
            if lane is not None:
                lane.pause(inputs)
            elif ends is not None:
                ends(at, inputs)

        return stop


def _stop_if(reached: bool, inputs: tuple[torch.Tensor, ...]) -> None:
    if reached:
        raise Stopped(inputs)


class _Abandoned(BaseException):
    """Unwinds a suspended pass that nobody will resume."""


class _Lane:
    """A function in a thread of its own, which runs only while someone waits for it in `resume`."""

    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self.output: torch.Tensor | None = None
        self._function = function
        self._inputs: tuple[torch.Tensor, ...] | None = None
        self._error: BaseException | None = None
        self._abandoned = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, name="quantkit-forward", daemon=True)
        self._thread.start()

    def resume(self) -> tuple[torch.Tensor, ...] | None:
        """Run up to the next pause and return what it was given; None at the end."""
        if self._abandoned:
            raise _Abandoned
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error
        found, self._inputs = self._inputs, None
        return found

    def pause(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Give `inputs` to who resumed, and wait to be resumed."""
        self._inputs = inputs
        self._stopped.release()
        self._wait()

    def abandon(self) -> None:
        """End the thread where it next stops; whoever waits for it gets an exception."""
        self._abandoned = True
        self._go.release()
        self._thread.join()

    def _wait(self) -> None:
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned

    def _main(self) -> None:
        try:
            self._wait()
            self.output = self._function()
        except BaseException as error:
            self._error = error
        self._stopped.release()
