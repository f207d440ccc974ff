"""Capture CUDA graphs, and handle the inputs that a graph reads and the outputs that it writes."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch

from quantkit.kernels.autograd import is_transformed
from quantkit.runtime.cache.cache_name import CACHE
from quantkit.runtime.cuda_graphs import refusals

Inputs = dict[str, Any]


def captures_on(device: torch.device) -> bool:
    """Return True if CUDA graphs can be captured on `device`."""
    return device.type == "cuda"


class NotCaptured(Exception):
    """A forward could not be captured as a CUDA graph; the message is the reason."""


class Pool:
    """Memory pool for the intermediate tensors of several CUDA graphs.

    A replay overwrites the outputs of the other graphs, so outputs must be copied first. More graphs may join
    while one graph is alive. After all were freed, or after a failed capture, the pool must not be used
    again.
    """

    @cached_property
    def handle(self) -> Any:
        return torch.cuda.graph_pool_handle()


def capture(
    step: Callable[[], Any], rewind: Callable[[], None] | None, device: torch.device, pool: Pool | None = None
) -> tuple[Any, Callable[[], None]]:
    """Capture `step` as a CUDA graph on `device`; return (its output, function that replays the graph).

    Kernels compile at their first launch. So if `rewind` is given, `step` first runs once, and `rewind`
    undoes its writes; else `step` must have run with these shapes before. Memory comes from `pool`; if None,
    from a pool of its own. Raises `NotCaptured` if a CUDA graph cannot hold `step`, and torch's
    OutOfMemoryError.
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
            # torch's default capture stream belongs to the device that was current at its first use.
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
    """Make random numbers on `device` work again after a failed capture on `stream`.

    A failed capture leaves torch's generator registered, and later draws raise. A small capture that succeeds
    releases the generator.
    """
    with suppress(RuntimeError):
        number = torch.zeros((), device=device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            number.add_(1)


def why_not_asked(inputs: Mapping[str, Any], device: torch.device) -> str | None:
    """Return why a graph on `device` cannot return what the model inputs `inputs` ask for; None if it can.

    A graph returns no optional outputs, such as attention weights, and no gradients, tangents or transforms.
    It does not run under autocast.
    """
    requests = [name for name, value in inputs.items() if name.startswith("output_") and value]
    requests += ["a gradient"] * torch.is_grad_enabled()
    # Gradients of weights count too, because a graph reads weights in place.
    requests += ["a tangent or another transform"] * is_transformed(inputs["input_ids"])
    # The casted weights are freed at the end of the autocast block.
    requests += ["autocast"] * torch.is_autocast_enabled(device.type)
    return refusals.ASKED.because(what=requests[0]) if requests else None


def check_output(output: Mapping[str, Any]) -> None:
    """Raise `NotCaptured` if the `output` of a model has more than logits and a cache."""
    supported = ("logits", CACHE)
    unsupported = [name for name, value in output.items() if value is not None and name not in supported]
    if unsupported:
        raise NotCaptured(refusals.MORE_OUTPUTS.because(names=", ".join(unsupported)))


def own_output(output: Any, cache: Any) -> Any:
    """Return a copy of a model's `output` that later replays of its graph do not overwrite.

    Tensors of the copy are clones; its cache is `cache` itself.
    """
    fields = {name: part.clone() if torch.is_tensor(part) else part for name, part in output.items()}
    fields[CACHE] = cache
    return type(output)(**fields)


def used_layers(cache: Any) -> list[Any]:
    """Return the initialised layers of `cache`; layers that share the states of another layer stay empty."""
    return [layer for layer in cache.layers if layer.is_initialized]


def is_plain(value: Any) -> bool:
    """Return True if `outline(value)` describes `value`, an input of a model, except for tensor values."""
    if isinstance(value, Mapping):
        return all(is_plain(part) for part in value.values())
    return value is None or isinstance(value, torch.Tensor | int | float | str)


def outline(value: Any) -> Any:
    """Return the key of an input `value` of a model: all of it except tensor values.

    A graph that was captured with one input can replay all inputs with an equal key. A tensor counts by shape
    and dtype.
    """
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, Mapping):
        return tuple((name, outline(part)) for name, part in value.items())
    return value


def copy_tensors(source: Any, target: Any) -> None:
    """Copy the values of the tensors in `source` to those in `target`, pair by pair, in place.

    Both are a tensor, or mappings of the same structure. Tensors of a cache are left out.
    """
    for static, tensor in zip(tensors_of(target), tensors_of(source), strict=True):
        static.copy_(tensor)


def cloned(value: Any) -> Any:
    """Return a copy of `value`, an input of a model, with all tensors cloned, also inside mappings."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {name: cloned(part) for name, part in value.items()} if isinstance(value, Mapping) else value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in `value`, an input of a model, also inside mappings; not those of a cache."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in tensors_of(part)]
    return []
