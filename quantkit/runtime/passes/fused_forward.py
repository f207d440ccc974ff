"""A forward in fewer launches, which is taken where it computes what the model's own does."""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.fx import GraphModule
from transformers.cache_utils import StaticLayer

from quantkit.kernels.jit.compile_pool import compiled_first
from quantkit.runtime.cache.cache_name import CACHE
from quantkit.runtime.cuda_graphs.capture import Inputs, NotRecorded, check_output, tensors_of, used_layers
from quantkit.runtime.passes.fold_constants import held_by
from quantkit.runtime.passes.patterns import fused, is_possible

logger = logging.getLogger("quantkit.model")

#: The most that each tensor that a forward in fewer launches makes may differ, relative to that of the model.
#: Sums have another order, which many layers of random weights in bfloat16 make more of: 0.05 was seen.
MOST_DIFFERENCE = 0.25


#: What returns the tensors that a forward makes.
_Module = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class _Changed:
    """A forward in fewer launches: what it became, what that reads, and an output without tensors."""

    module: _Module
    inputs: Sequence[torch.Tensor]
    output: Any

    def __call__(self) -> Any:
        return _with(self.output, self.module(*self.inputs))


def fused_forward(
    what: str, forward: Callable[[], Any], given: Inputs, rewind: Callable[[], None] | None = None
) -> Callable[[], Any]:
    """`forward`, which reads the tensors of `given`, in fewer launches where kernels do for several.

    It is as it was where that cannot be traced, does not run, or would not compute the same: a warning says
    so of `what`. `rewind` takes back what a run writes. Raises `NotRecorded` as `trace` and `check_output`
    do, and torch's OutOfMemoryError.
    """
    if not is_possible(given["input_ids"].device):
        return forward
    return changed_forward(what, lambda step, inputs: fused(step, inputs, what), forward, given, rewind)


def changed_forward(
    what: str,
    change: Callable[..., _Module],
    forward: Callable[[], Any],
    given: Inputs,
    rewind: Callable[[], None] | None,
) -> Callable[[], Any]:
    """`fused_forward` by what `change`, called as `fused` is, makes of it, wherever that runs."""
    device = given["input_ids"].device
    try:
        changed = compiled_first(
            device, lambda: _changed(change, forward, tensors_of(given)), rewind, ahead=_Changed.__call__
        )
        difference = _difference(forward, changed, rewind, given["input_ids"])
    except (NotRecorded, torch.OutOfMemoryError):
        raise
    except Exception as error:
        warn_unchanged(what, str(error))
        return forward
    finally:
        if rewind is not None:
            rewind()
    if difference <= MOST_DIFFERENCE:
        return changed
    warn_unchanged(what, f"something computes that torch does not see (relative difference {difference:.2g})")
    return forward


def try_fused(forward: Callable[[], Any], given: Inputs) -> None:
    """Launch what `fused_forward` of a decoding step would, once: for kernels that are compiled."""
    if is_possible(given["input_ids"].device):
        _changed(lambda step, inputs: fused(step, inputs, "decoding steps"), forward, tensors_of(given))()


def held_tensors(forward: Callable[[], Any]) -> list[torch.Tensor]:
    """What a graph of `forward`, which `fused_forward` returned, reads and nobody else holds."""
    if not isinstance(forward, _Changed) or not isinstance(forward.module, GraphModule):
        return []
    return held_by(forward.module)


@lru_cache(maxsize=256)
def warn_unchanged(what: str, reason: str) -> None:
    """Say why forwards, which are called `what`, are not in fewer launches: once for each reason."""
    logger.warning("%s are recorded as they are, with more launches: %s", what, reason)


def _changed(
    change: Callable[..., _Module], forward: Callable[[], Any], inputs: Sequence[torch.Tensor]
) -> _Changed:
    """`forward`, which reads `inputs`, as `change` makes it."""
    outputs = []

    def traced(*_: torch.Tensor) -> list[torch.Tensor]:
        output = forward()
        check_output(output)
        made = _made(output)
        # Without what it computed now, which would be kept beside what the module computes.
        outputs.append(_with(output, [None] * len(made)))
        return made

    module = change(traced, inputs)
    (output,) = outputs
    return _Changed(module, inputs, output)


def _difference(
    forward: Callable[[], Any],
    changed: Callable[[], Any],
    rewind: Callable[[], None] | None,
    ids: torch.Tensor,
) -> float:
    """How far both are from each other for other tokens than `ids`, which they read and keep.

    The largest of all tensors that they make. A kernel that is not launched through torch is not traced, and
    its result stays what it was for `ids`.
    """
    before, made = ids.clone(), []
    ids.copy_(torch.where(ids > 0, ids - 1, ids + 1))
    try:
        for one in (forward, changed):
            if rewind is not None:
                rewind()
            made.append(_made(compiled_first(ids.device, one, rewind)))
    finally:
        ids.copy_(before)
    return float(torch.stack([_relative(*pair) for pair in zip(*made, strict=True)]).max())


def _relative(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The size of the difference of two tensors by the size of the first.

    What is infinite, or no number, in both alike is no difference: logits of what is never said, say.
    """
    expected, found = expected.float(), found.float()
    same = (expected == found) | (expected.isnan() & found.isnan())
    size: torch.Tensor = torch.linalg.vector_norm(expected.where(expected.isfinite(), 0.0))
    difference: torch.Tensor = torch.linalg.vector_norm((found - expected).masked_fill(same, 0.0))
    return difference / size.clamp(min=torch.finfo(torch.float32).tiny)


def _made(output: Any) -> list[torch.Tensor]:
    """What a forward makes: logits, and keys and values but for those that it writes where others were."""
    return [output.logits, *(part for layer in _new_layers(output) for part in (layer.keys, layer.values))]


def _with(output: Any, made: Sequence[torch.Tensor | None]) -> Any:
    """`output` with `made` in place of what it made itself."""
    logits, *states = made
    cache = copy.copy(getattr(output, CACHE))
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    found = type(output)(logits=logits, **{CACHE: cache})
    for layer, keys, values in zip(_new_layers(found), states[::2], states[1::2], strict=True):
        layer.keys, layer.values = keys, values
    return found


def _new_layers(output: Any) -> list[Any]:
    """The layers of a cache whose keys and values are those of this forward alone."""
    return [layer for layer in used_layers(getattr(output, CACHE)) if not isinstance(layer, StaticLayer)]
