"""Rewrite a forward of a model so that it takes fewer launches, and check that it computes the same."""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import arg_tree_leaves
from transformers.cache_utils import StaticLayer

from quantkit.errors import FormatError
from quantkit.kernels.jit.compile_pool import compiled_first
from quantkit.packing.schemes import parse_token
from quantkit.runtime.cache.cache_name import CACHE
from quantkit.runtime.cuda_graphs.capture import Inputs, NotCaptured, check_output, tensors_of, used_layers
from quantkit.runtime.passes.fold_constants import folded_constants
from quantkit.runtime.passes.patterns import can_fuse, fused

logger = logging.getLogger("quantkit.model")

#: Largest accepted difference of any tensor, relative to the norm of the original. Sums have another order,
#: which many layers of random bfloat16 weights amplify: 0.05 was measured on an 8B. Inputs rounded to 8 bits
#: amplify 2 to 5 times more: 0.27 was measured with FP8 in blocks and 4096 tokens (H200).
MOST_DIFFERENCE, MOST_OF_ROUNDED = 0.25, 0.5


#: Callable that returns the tensors of a forward.
_Module = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class _Rewritten:
    """Rewritten forward. A call returns an output like the model's, with the tensors that `module` computes.

    module   traced and fused module, called with `inputs`
    inputs   tensors that the forward reads; callers overwrite their values
    output   output of the original forward without its tensors
    """

    module: _Module
    inputs: Sequence[torch.Tensor]
    output: Any

    def __call__(self) -> Any:
        return _with(self.output, self.module(*self.inputs))


def fused_forward(
    what: str, forward: Callable[[], Any], inputs: Inputs, rewind: Callable[[], None] | None = None
) -> Callable[[], Any]:
    """Return a function that computes the same as `forward`, but in fewer launches.

    forward   reads the tensors in `inputs`, and returns the output of a model
    rewind    undoes the writes of a run, such as to the KV cache

    Returns `forward` itself, and logs a warning that names `what`, if it cannot be traced, does not run, or
    would compute other values. Raises `NotCaptured` if the host reads values from the GPU or sends values
    there, or if a CUDA graph cannot replay the output. Raises torch's OutOfMemoryError too.
    """
    if not can_fuse(inputs["input_ids"].device):
        return forward
    return rewritten_forward(what, lambda step, tensors: fused(step, tensors, what), forward, inputs, rewind)


def rewritten_forward(
    what: str,
    change: Callable[..., _Module],
    forward: Callable[[], Any],
    inputs: Inputs,
    rewind: Callable[[], None] | None,
) -> Callable[[], Any]:
    """Return `forward`, which reads `inputs`, as rewritten by `change`, or unchanged if that fails.

    `change(step, tensors)` returns a module that should compute the same as `step(*tensors)`. As a check,
    `forward` and its rewrite both run on tokens other than those of `inputs`. If their outputs differ, or
    anything else fails, a warning that names `what` is logged. `rewind`, if given, undoes the writes of a
    run. Only `NotCaptured` and torch's OutOfMemoryError are raised.
    """
    device = inputs["input_ids"].device
    try:
        rewritten = compiled_first(
            device, lambda: _rewrite(change, forward, tensors_of(inputs)), rewind, ahead=_Rewritten.__call__
        )
        difference = _difference(forward, rewritten, rewind, inputs["input_ids"])
    except (NotCaptured, torch.OutOfMemoryError):
        raise
    except Exception as error:
        warn_unchanged(what, str(error))
        return forward
    finally:
        if rewind is not None:
            rewind()
    if difference <= (MOST_OF_ROUNDED if _rounds_inputs(rewritten.module) else MOST_DIFFERENCE):
        return rewritten
    warn_unchanged(what, f"something computes that torch does not see (relative difference {difference:.2g})")
    return forward


def warm_up_fused(forward: Callable[[], Any], inputs: Inputs) -> None:
    """Fuse a decoding step and run it once, so that its kernels are compiled; discard the output.

    `forward` runs the step and reads the tensors in `inputs`. Does nothing on a device without fused kernels.
    """
    if can_fuse(inputs["input_ids"].device):
        _rewrite(lambda step, tensors: fused(step, tensors, "decoding steps"), forward, tensors_of(inputs))()


def constants_of(forward: Callable[[], Any]) -> list[torch.Tensor]:
    """Return the folded constants of a fused `forward`, to which no other object refers.

    A CUDA graph that reads these constants must keep them alive.
    """
    if not isinstance(forward, _Rewritten) or not isinstance(forward.module, GraphModule):
        return []
    return folded_constants(forward.module)


@lru_cache(maxsize=256)
def warn_unchanged(what: str, reason: str) -> None:
    """Log once per `reason` that `what` (such as "decoding steps") run unchanged, with more launches."""
    logger.warning("%s run as they are, with more launches: %s", what, reason)


def _rewrite(
    change: Callable[..., _Module], forward: Callable[[], Any], inputs: Sequence[torch.Tensor]
) -> _Rewritten:
    """Trace `forward`, which reads `inputs`; return it as rewritten by `change` (see `rewritten_forward`)."""
    outputs = []

    def traced(*_: torch.Tensor) -> list[torch.Tensor]:
        output = forward()
        check_output(output)
        tensors = _tensors(output)
        # Drop the tensors of this run; the module computes its own.
        outputs.append(_with(_copied(output), [None] * len(tensors)))
        return tensors

    module = change(traced, inputs)
    (output,) = outputs
    return _Rewritten(module, inputs, output)


def _rounds_inputs(module: _Module) -> bool:
    """Return True if a linear of a traced module rounds its inputs, by the tokens of schemes in its nodes."""
    if not isinstance(module, GraphModule):
        return False
    leaves = chain.from_iterable(arg_tree_leaves(*node.args, **node.kwargs) for node in module.graph.nodes)
    texts = {leaf for leaf in leaves if isinstance(leaf, str) and leaf.startswith("{")}
    return any(map(_rounds, texts))


def _rounds(text: str) -> bool:
    """Return True if `text` is the token of a scheme that rounds inputs."""
    try:
        return parse_token(text).activations is not None
    except FormatError:
        return False


def _difference(
    forward: Callable[[], Any],
    rewritten: Callable[[], Any],
    rewind: Callable[[], None] | None,
    ids: torch.Tensor,
) -> float:
    """Return the largest relative difference of an output tensor between `forward` and `rewritten`.

    Before both run, the token ids in `ids` [B, T] int64 are changed in place; they are restored at the end.
    So a kernel that was launched outside torch, and thus not traced, is noticed: its result stays that of the
    old ids. `rewind`, if given, undoes the writes of a run.
    """
    original_ids, outputs = ids.clone(), []
    ids.copy_(torch.where(ids > 0, ids - 1, ids + 1))
    try:
        for run in (forward, rewritten):
            if rewind is not None:
                rewind()
            outputs.append(_tensors(compiled_first(ids.device, run, rewind)))
    finally:
        ids.copy_(original_ids)
    return float(torch.stack([_relative(*pair) for pair in zip(*outputs, strict=True)]).max())


def _relative(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Return norm(actual - expected) / norm(expected) of two tensors [...]: a float32 scalar.

    Equal infinities and equal NaNs count as no difference. Logits of tokens that are never generated have
    them.
    """
    expected, actual = expected.float(), actual.float()
    same = (expected == actual) | (expected.isnan() & actual.isnan())
    size: torch.Tensor = torch.linalg.vector_norm(expected.where(expected.isfinite(), 0.0))
    difference: torch.Tensor = torch.linalg.vector_norm((actual - expected).masked_fill(same, 0.0))
    return difference / size.clamp(min=torch.finfo(torch.float32).tiny)


def _tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output: logits, then keys and values of each layer in `_new_layers`."""
    return [output.logits, *(part for layer in _new_layers(output) for part in (layer.keys, layer.values))]


def _with(output: Any, tensors: Sequence[torch.Tensor | None]) -> Any:
    """Return a model's `output` with `tensors`, in the order of `_tensors`, as its tensors.

    None stands for a tensor that is filled in later. Layers that get tensors are copies. Static ones, which
    get none, are those of `output`: to copy 30 of them at each step takes 0.1 ms.
    """
    logits, *states = tensors
    made = _copied(output) if states else output
    made = type(output)(logits=logits, **{CACHE: getattr(made, CACHE)})
    for layer, keys, values in zip(
        _new_layers(made) if states else (), states[::2], states[1::2], strict=True
    ):
        layer.keys, layer.values = keys, values
    return made


def _copied(output: Any) -> Any:
    """Return a copy of a model's `output`: its logits, and copies of its cache and the cache's layers."""
    cache = copy.copy(getattr(output, CACHE))
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    return type(output)(logits=output.logits, **{CACHE: cache})


def _new_layers(output: Any) -> list[Any]:
    """Return the cache layers of `output` whose keys and values the forward created: all but static ones."""
    return [layer for layer in used_layers(getattr(output, CACHE)) if not isinstance(layer, StaticLayer)]
