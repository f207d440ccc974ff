"""CUDA graphs of what a model computes: capture, and the inputs that a graph reads."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch

from quantkit.kernels.autograd import is_transformed
from quantkit.runtime.cache.cache_name import CACHE

Inputs = dict[str, Any]


def captures_on(device: torch.device) -> bool:
    """Whether what runs on `device` can be recorded."""
    return device.type == "cuda"


class NotCaptured(Exception):
    """Why something could not be recorded."""


class Pool:
    """Memory that graphs share, which holds what each computes on its way.

    So a graph overwrites what others returned: take that before another is replayed. As long as a graph
    lives, others may join; a pool that all left, or in which a capture failed, is not to be used again.
    """

    @cached_property
    def handle(self) -> Any:
        return torch.cuda.graph_pool_handle()


def capture(
    step: Callable[[], Any], rewind: Callable[[], None] | None, device: torch.device, pool: Pool | None = None
) -> tuple[Any, Callable[[], None]]:
    """What `step`, which runs on `device`, returns, and a function that runs it again on the same memory.

    With `rewind`, `step` runs once, for what kernels do when they are first launched, and `rewind` takes that
    back; without, it has run with such shapes. The memory is in `pool`, by default the graph's own. Raises
    `NotCaptured` for what a graph cannot have, and torch's OutOfMemoryError.
    """
    with torch.cuda.device(device):
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            if rewind is not None:
                with torch.cuda.stream(stream):
                    step()
                    rewind()
                torch.cuda.current_stream().wait_stream(stream)
            # torch's own stream for this is on the device that was current when it was first used.
            with torch.cuda.graph(graph, stream=stream, pool=None if pool is None else pool.handle):
                output = step()
        except RuntimeError as error:
            _end_failed(stream, device)
            if rewind is not None:
                rewind()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise NotCaptured(str(error).partition("\n")[0]) from error
    return output, graph.replay


def _end_failed(stream: Any, device: torch.device) -> None:
    """Take torch's random numbers out of a capture that failed, in which it leaves them and draws no more.

    A capture that succeeds does so at its end.
    """
    with suppress(RuntimeError):
        number = torch.zeros((), device=device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            number.add_(1)


def why_not_asked(inputs: Mapping[str, Any], device: torch.device) -> str | None:
    """None if nothing is asked for that a graph on `device` does not give, else the reason."""
    asked = [name for name, value in inputs.items() if name.startswith("output_") and value]
    asked += ["a gradient"] * torch.is_grad_enabled()
    # Of weights as well, which lie where they did.
    asked += ["a tangent or another transform"] * is_transformed(inputs["input_ids"])
    # What it casts weights to is freed when its block ends.
    asked += ["autocast"] * torch.is_autocast_enabled(device.type)
    return f"{asked[0]} is asked for" if asked else None


def check_output(output: Mapping[str, Any]) -> None:
    """Raise `NotCaptured` for an output with more than logits and a cache."""
    known = ("logits", CACHE)
    others = [name for name, value in output.items() if value is not None and name not in known]
    if others:
        raise NotCaptured(f"the model returns {', '.join(others)}")


def own_output(output: Any, cache: Any) -> Any:
    """`output` with `cache` and copies of tensors, which the next replay does not change."""
    fields = {name: part.clone() if torch.is_tensor(part) else part for name, part in output.items()}
    fields[CACHE] = cache
    return type(output)(**fields)


def used_layers(cache: Any) -> list[Any]:
    """The layers of `cache` that hold something: those that attend to what another holds never do."""
    return [layer for layer in cache.layers if layer.is_initialized]


def is_plain(value: Any) -> bool:
    """Whether an input is one that `outline` says all of but the numbers in tensors."""
    if isinstance(value, Mapping):
        return all(is_plain(part) for part in value.values())
    return value is None or isinstance(value, torch.Tensor | int | float | str)


def outline(value: Any) -> Any:
    """What two inputs have in common if a graph of one reads the other: all but the numbers in tensors."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, Mapping):
        return tuple((name, outline(part)) for name, part in value.items())
    return value


def copy_tensors(source: Any, target: Any) -> None:
    """Copy the tensors in `source`, which may be in mappings, to those in `target` of the same outline."""
    for static, tensor in zip(tensors_of(target), tensors_of(source), strict=True):
        static.copy_(tensor)


def cloned(value: Any) -> Any:
    """`value` with copies of tensors, also of those in mappings."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {name: cloned(part) for name, part in value.items()} if isinstance(value, Mapping) else value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, but not those of a cache."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in tensors_of(part)]
    return []
