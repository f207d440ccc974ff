"""Find the stages of a block: modules with the same input, in the order they run.

Forward passes stop before each stage, so that its weights can be replaced before they are used.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from quantkit.errors import CheckpointError
from quantkit.model.blocks import Block, Stopped
from quantkit.model.forward.model_pass import Call, ModelPass
from quantkit.model.forward.suspended import Abandoned, Suspended

#: Stages in the order they run, the linears that run several times, and the modules that do not run.
Stages = tuple[list[tuple[str, ...]], list[str], list[str]]


def stages_of(block: Block, call: Call, wanted: Sequence[str], alone: Collection[str] = ()) -> Stages:
    """Group the modules named in `wanted`, relative to the block, into stages with one input each.

    Modules in `alone` get a stage each. Raises `CheckpointError` if one of these runs several times in
    `call`.
    """
    calls: list[tuple[str, torch.Tensor]] = []
    hooks = [
        block.module.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, name=name: calls.append((name, inputs[0]))
        )
        for name in wanted
    ]
    try:
        with torch.no_grad():
            block.run(call)
    finally:
        for hook in hooks:
            hook.remove()
    counts = Counter(name for name, _ in calls)
    for name in wanted:
        if counts[name] > 1 and name in alone:
            raise CheckpointError(
                f"{block.full(name)} runs {counts[name]} times in a forward pass; quantkit calibrates "
                f"experts that run once. Choose a method without data for them, such as --rule "
                f"'{block.full(name)}.*=int8::mse', or keep them dense."
            )
    stages: list[list[str]] = []
    previous: torch.Tensor | None = None
    for name, inputs in calls:
        if counts[name] > 1:
            continue
        if inputs is previous and name not in alone:
            stages[-1].append(name)
        else:
            stages.append([name])
        previous = None if name in alone else inputs
    repeated = [name for name, count in counts.items() if count > 1]
    return [tuple(stage) for stage in stages], repeated, [name for name in wanted if name not in counts]


def inputs_of_calls(block: Block, one: ModelPass, name: str) -> torch.Tensor:
    """Run `block` for a pass; return the inputs [tokens, K] of all calls of its linear `name`."""
    found: list[torch.Tensor] = []
    thread = threading.get_ident()

    def see(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        # Other workers run the same modules.
        if threading.get_ident() == thread:
            found.append(inputs[0].reshape(-1, inputs[0].shape[-1]).clone())

    hook = block.module.get_submodule(name).register_forward_pre_hook(see)
    try:
        with torch.no_grad(), one.loaded() as call:
            block.run(call)
    finally:
        hook.remove()
    return torch.cat(found)


class Forwards:
    """Forward passes of a block on all micro-batches, each stopping before every stage.

    While all are stopped, the weights of the next stage may be replaced. With `suspend`, each pass waits in a
    thread of its own: every operation runs once, but the intermediate tensors stay in memory. Without
    `suspend`, a pass restarts for each stage, with equal numbers.
    """

    def __init__(
        self,
        block: Block,
        passes: Sequence[ModelPass],
        stops: Sequence[str],
        suspend: bool,
    ) -> None:
        self._block, self._passes, self._stops, self._suspend = block, passes, stops, suspend
        self._here = threading.local()
        self._lanes: list[Suspended | None] = [None] * len(passes)
        self._reached = [0] * len(passes)
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
        # Other workers may still be running after one has failed.
        with self._mutex:
            self._closed = True
        for lane in self._lanes:
            if lane is not None:
                lane.abandon()
        for hook in self._hooks:
            hook.remove()

    def step(self, lane: int) -> tuple[torch.Tensor, ...]:
        """Run micro-batch `lane` to its next stage; return that stage's arguments, each [tokens, any]."""
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
        """Run micro-batch `lane` up to its last stage; call `see` with the name and inputs of each stage.

        The inputs [tokens, K] are copies, because the block may modify them in place.
        """
        count = 0

        def stop(at: int, inputs: tuple[torch.Tensor, ...]) -> None:
            nonlocal count
            count += 1
            see(self._stops[at], inputs[0].reshape(-1, inputs[0].shape[-1]).clone())
            if count == len(self._stops):
                raise Stopped(inputs)

        stopped = self._run_to(lane, stop)
        assert stopped is not None, f"{self._block.name} does not come to all of its stages"

    def finish(self, lane: int) -> torch.Tensor:
        """Run micro-batch `lane` to the next block; return the hidden states between the blocks."""
        if not self._suspend:
            output = self._run(lane)
        else:
            running = self._lane(lane)
            assert running.resume() is None, f"{self._block.name} stops more often than it has stages"
            output = running.output
        return self._passes[lane].advance(output)

    def _lane(self, lane: int) -> Suspended:
        with self._mutex:
            if self._closed:
                raise Abandoned
            found = self._lanes[lane]
            if found is None:
                found = self._lanes[lane] = Suspended(lambda running: self._run_in(lane, running))
            return found

    def _run_in(self, lane: int, running: Suspended) -> Any:
        self._here.lane = running
        return self._run(lane)

    def _run(self, lane: int) -> Any:
        with torch.no_grad(), self._passes[lane].loaded() as call:
            return self._block.run(call)

    def _run_to(
        self, lane: int, stop: Callable[[int, tuple[torch.Tensor, ...]], None]
    ) -> tuple[torch.Tensor, ...] | None:
        """Run the pass number `lane` until `stop` raises `Stopped` before a stage.

        `stop` is called with the number of each stage and its arguments. Returns the arguments of the stage
        before which it raised; None if the pass came to its end.
        """
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
