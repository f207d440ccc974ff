"""Prompts as CUDA graphs: the forward of a prompt is recorded, for all prompts of about its length.

A prompt is padded on the right, to which no token before attends, and so graphs are few. A graph has keys and
values of its own, which are copied to the caller's cache: one graph does for caches of any length.
"""

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer

from quantkit.kernels.jit.compile_pool import compiled_first
from quantkit.kernels.ops.kv_append import fill, fill_reference
from quantkit.runtime.cache.cache_name import CACHE
from quantkit.runtime.cuda_graphs import capture
from quantkit.runtime.cuda_graphs.capture import Inputs, NotRecorded
from quantkit.runtime.passes.fused_forward import fused_forward, held_tensors, warn_unchanged
from quantkit.runtime.passes.patterns import is_possible

logger = logging.getLogger("quantkit.model")

#: Keys and values [B, H, T, D] of a layer.
States = tuple[torch.Tensor, torch.Tensor]

#: Tokens of a batch, with padding, up to which its prompts are recorded. For more, a GPU computes longer than
#: the host launches, so that a graph gains nothing, and its memory grows with them.
PROMPT_TOKENS = 2048
#: Tokens of all prompts whose graphs a model keeps: each holds keys and values for its own.
KEPT_TOKENS = 4 * PROMPT_TOKENS
#: Shapes of prompts that came once and are remembered until they come again.
_SHAPES = 64
#: Inputs with a number for each token. Another tensor may be one too, which cannot be told.
_PER_TOKEN = ("input_ids", "attention_mask", "position_ids")
#: What an output has to have.
_NEEDED = ("use_cache", "return_dict")
#: Caches that are their layers and no more.
_CACHES = (Cache, DynamicCache, StaticCache)


def bucket(tokens: int) -> int:
    """The length that prompts of so many tokens are padded to.

    A multiple of 32; from 128 on there are four in each octave, so that at most a fifth of it is padding.
    """
    step = max(32, 1 << (tokens - 1).bit_length() >> 3)
    return -(-tokens // step) * step


class PromptGraphs:
    """The prompts of a model, whose forward is `forward`, as CUDA graphs that share memory.

    A prompt of a new shape runs padded, kernel by kernel, and the second of this shape is recorded: recording
    takes longer than running. `lock` is held while a graph is replayed and its
    output copied, as all have the same memory. `refused` says why no more prompts are recorded.
    """

    def __init__(self, forward: Callable[..., Any], lock: Any) -> None:
        self._forward = forward
        self._lock = lock
        self.clear(None)

    def clear(self, refused: str | None) -> None:
        """Forget all graphs; no more are recorded where there is a reason against it."""
        self.graphs: OrderedDict[Any, _PromptGraph] = OrderedDict()
        self._once: OrderedDict[Any, None] = OrderedDict()
        self._pool = capture.Pool()
        self.refused = refused

    def run(self, inputs: Inputs, ahead: Callable[[], None]) -> Any:
        """The output for inputs that are recordable; None where they are to run plainly.

        `ahead` launches what comes after them, where kernels are being compiled.
        """
        cache, tokens = inputs[CACHE], inputs["input_ids"].shape[1]
        given = _padded(inputs)
        if given is None:
            return None
        key = capture.outline(given), torch.is_inference_mode_enabled()
        with self._lock:
            graph = self._graph_of(key, given)
            if graph is not None:
                return _handed_over(graph.replay(given), cache, tokens)
            if self.refused is not None:
                return None
        try:
            device = given["input_ids"].device
            output = compiled_first(device, lambda: _forward(self._forward, given), ahead=lambda _: ahead())
        except (NotRecorded, torch.OutOfMemoryError) as error:
            with self._lock:
                self._refuse(error)
            return None
        return _handed_over(output, cache, tokens)

    def _graph_of(self, key: Any, given: Inputs) -> "_PromptGraph | None":
        """The graph for such inputs, recorded now if they came once before; None if there is none."""
        if key in self.graphs:
            self.graphs.move_to_end(key)
        elif key in self._once:
            del self._once[key]
            try:
                self.graphs[key] = _record(self._forward, given, self._pool)
            except (NotRecorded, torch.OutOfMemoryError) as error:
                self._refuse(error)
            while sum(graph.tokens for graph in self.graphs.values()) > KEPT_TOKENS:
                self.graphs.popitem(last=False)
        else:
            self._once[key] = None
            if len(self._once) > _SHAPES:
                self._once.popitem(last=False)
        return self.graphs.get(key)

    def _refuse(self, error: Exception) -> None:
        """Record no more, and give back the memory of graphs, of which there may be too little."""
        lacking = isinstance(error, torch.OutOfMemoryError)
        reason = "there is too little memory for graphs" if lacking else str(error)
        logger.warning("prompts are launched one kernel at a time: %s", reason)
        self.clear(reason)


def why_never(model: Any, forward: Callable[..., Any]) -> str | None:
    """None if prompts of `model`, whose forward is `forward`, can be padded, else the reason they cannot."""
    if model.config.get_text_config(decoder=True) is not model.config:
        return "the model may remember where images of a prompt are"
    bidirectional = getattr(model.config, "use_bidirectional_attention", None)
    if bidirectional or not getattr(model.config, "is_causal", True):
        return "tokens attend to those after them"
    parameters = inspect.signature(forward).parameters
    missing = [name for name in (*_PER_TOKEN, CACHE, "logits_to_keep") if name not in parameters]
    if missing:
        return f"the model takes no {missing[0]}"
    # What takes numbers alone would take a tensor for the number in it.
    if "Tensor" not in str(parameters["logits_to_keep"].annotation):
        return "the model takes logits_to_keep as a number alone"
    return None


def is_recordable(inputs: Mapping[str, Any], model: Any) -> bool:
    """Whether inputs of `model` are a prompt that can be recorded, if its cache `is_empty`."""
    ids = inputs.get("input_ids")
    return (
        torch.is_tensor(ids)
        and capture.records_on(ids.device)
        and ids.device == model.device
        and _is_prompt(ids, model.config)
        and _is_cache(inputs.get(CACHE))
        and _is_for_one_token(inputs, model.config)
        and all(_is_known(name, value, ids) for name, value in inputs.items())
        and capture.why_not_asked(inputs, ids.device) is None
    )


def is_empty(cache: Any) -> bool:
    """Whether `cache` holds no tokens, which the GPU may have to be asked."""
    return int(cache.get_seq_length()) == 0


def _is_prompt(ids: torch.Tensor, config: Any) -> bool:
    """Whether there are several tokens of each sequence, and with padding not too many."""
    if ids.dim() != 2 or ids.shape[1] < 2:
        return False
    length = bucket(ids.shape[1])
    positions = getattr(config, "max_position_embeddings", None) or length
    return length <= positions and len(ids) * length <= PROMPT_TOKENS


def _is_cache(cache: Any) -> bool:
    """Whether `cache` is one of whole keys and values."""
    if type(cache) not in _CACHES or cache.offloading:
        return False
    kinds = {type(layer) for layer in cache.layers} | {cache.layer_class_to_replicate}
    return kinds <= {StaticLayer, DynamicLayer, None}


def _is_for_one_token(inputs: Mapping[str, Any], config: Any) -> bool:
    """Whether the logits of the last token and the cache are all that is asked for."""
    kept = inputs.get("logits_to_keep")
    return type(kept) is int and kept == 1 and all(_said(name, inputs, config) for name in _NEEDED)


def _said(name: str, inputs: Mapping[str, Any], config: Any) -> bool:
    """What an input says, or the config where there is none."""
    value = inputs.get(name)
    return getattr(config, name, True) if value is None else value


def _is_known(name: str, value: Any, ids: torch.Tensor) -> bool:
    """Whether it is known how to pad an input for tokens `ids` [B, T]."""
    if name == "attention_mask":
        return _is_mask(value, ids)
    if name == "position_ids":
        return value is None or value.shape in ((1, ids.shape[1]), ids.shape)
    return name in ("input_ids", CACHE) or value is None or isinstance(value, int | float | str)


def _is_mask(mask: Any, ids: torch.Tensor) -> bool:
    """Whether `mask` is none, of tokens [B, T], of queries and keys [B or 1, H, T, T or more], or several."""
    if mask is None or isinstance(mask, Mapping):
        return mask is None or all(_is_mask(part, ids) for part in mask.values())
    if not torch.is_tensor(mask) or mask.dim() == 2:
        return torch.is_tensor(mask) and mask.shape == ids.shape
    numbers = mask.dtype == torch.bool or mask.is_floating_point()
    return numbers and mask.dim() == 4 and mask.shape[2] == ids.shape[1] <= mask.shape[3]


def _padded(inputs: Inputs) -> Inputs | None:
    """`inputs` with as many tokens as its bucket has, without the cache.

    None where only the model knows the positions of tokens.
    """
    ids = inputs["input_ids"]
    tokens = ids.shape[1]
    length = bucket(tokens)
    # The last position again, as others may be more than the model has.
    places = torch.arange(length, device=ids.device).clamp(max=tokens - 1)
    positions = inputs.get("position_ids")
    mask = inputs.get("attention_mask")
    if torch.is_tensor(mask) and mask.dim() == 2 and bool(mask.all()):
        # Without one, attention needs not read it.
        mask = None
    if positions is None and mask is not None:
        # Some models count the tokens that are not masked, others all.
        return None
    given = {name: value for name, value in inputs.items() if name != CACHE}
    return given | {
        "input_ids": F.pad(ids, (0, length - tokens)),
        "position_ids": places[None] if positions is None else positions[:, places],
        "attention_mask": _padded_mask(mask, tokens, length),
        "logits_to_keep": torch.full((1,), tokens - 1, device=ids.device),
    }


def _padded_mask(mask: Any, tokens: int, length: int) -> Any:
    """The mask for `length` tokens, of which those after `tokens` are padding, and for as many keys.

    Padding is open to itself: a row without any key would be no numbers.
    """
    if isinstance(mask, Mapping):
        return {name: _padded_mask(part, tokens, length) for name, part in mask.items()}
    if mask is None:
        return None
    more = length - tokens
    if mask.dim() == 2:
        return F.pad(mask, (0, more), value=1)
    # The cache is empty, so that keys after these are masked, and there are none of them in a graph.
    hidden, shown = (False, True) if mask.dtype == torch.bool else (torch.finfo(mask.dtype).min, 0.0)
    keys = F.pad(mask[..., :tokens], (0, more), value=hidden)
    return F.pad(keys, (0, 0, 0, more), value=shown)


def _forward(forward: Callable[..., Any], given: Inputs) -> Any:
    """The output of `forward` for padded inputs, with a cache of keys and values of all tokens.

    Raises `NotRecorded` if it has not the logits of one token.
    """
    # Without a config it makes no layers of windows, which would keep padding in place of tokens.
    cache = DynamicCache()
    cache.layer_class_to_replicate = _PromptLayer
    output = forward(**given, **{CACHE: cache})
    capture.check_output(output)
    if output.logits.shape[:-1] != (len(given["input_ids"]), 1):
        raise NotRecorded(f"the model returns logits of shape {tuple(output.logits.shape)} for one token")
    return output


class _PromptLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of a prompt alone.

    transformers adds them to empty tensors, which it has the host give the GPU.
    """

    is_initialized: bool

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        if self.is_initialized:
            return super().update(keys, values)
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.keys, self.values = _alone(keys), _alone(values)
        return self.keys, self.values


def _alone(states: torch.Tensor) -> torch.Tensor:
    """`states`, copied if they are a part of a product, all of which they would keep."""
    return states if states.untyped_storage().nbytes() == states.nbytes else states.contiguous()


def _handed_over(output: Any, cache: Any, tokens: int) -> Any:
    """The caller's own output, with `cache`, which gets the keys and values of so many tokens."""
    at_once: list[tuple[Any, States]] = []
    for number, layer in enumerate(getattr(output, CACHE).layers):
        if not layer.is_initialized:
            continue
        states = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
        if number < len(cache.layers) and _is_room(cache.layers[number], states):
            at_once.append((cache.layers[number], states))
        else:
            # Layers that grow copy.
            cache.update(*states, number)
    if at_once:
        _fill(at_once)
    return capture.own_output(output, cache)


def _is_room(layer: Any, states: States) -> bool:
    """Whether `layer` of an empty cache is a static one that `states` fit in."""
    tokens = states[0].shape[2]
    if type(layer) is not StaticLayer or layer.max_cache_len < tokens:
        return False
    held = (layer.keys, layer.values) if layer.is_initialized else ()
    return all(
        old.device == new.device and capture.outline(old[:, :, :tokens]) == capture.outline(new)
        for old, new in zip(held, states, strict=False)
    )


def _fill(layers: Sequence[tuple[Any, States]]) -> None:
    """Write to static layers that hold no tokens, in few launches and without waiting for the GPU."""
    new = [(layer, states) for layer, states in layers if not layer.is_initialized]
    before = [dict(vars(layer)) for layer, _ in new]
    try:
        for layer, states in new:
            _allocate(layer, states)
    except BaseException:
        # Memory has run out, and the cache is to be as empty as it was: there may be some later.
        for (layer, _), attributes in zip(new, before, strict=True):
            vars(layer).clear()
            vars(layer).update(attributes)
        raise
    if new:
        torch._foreach_zero_([layer.cumulative_length for layer, _ in new])
    rooms = [part for layer, _ in layers for part in (layer.keys, layer.values)]
    parts = [part for _, states in layers for part in states]
    # What is masked is multiplied with 0, which makes no number of what is none.
    (fill if is_possible(parts[0].device) else fill_reference)(rooms, parts, clear=bool(new))
    torch._foreach_add_([layer.cumulative_length for layer, _ in layers], parts[0].shape[2])


def _allocate(layer: Any, states: States) -> None:
    """Give a static layer memory for keys and values as `states`, with any numbers in it.

    transformers fills each tensor by a launch of its own, and the counter of tokens comes from the host,
    which waits for all that runs.
    """
    layer.lazy_initialization(*(torch.empty(part.shape, dtype=part.dtype, device="meta") for part in states))
    layer.device = states[0].device
    for name in ("keys", "values", "cumulative_length"):
        outline = getattr(layer, name)
        tensor = torch.empty(outline.shape, dtype=outline.dtype, device=layer.device)
        torch._dynamo.mark_static_address(tensor)
        setattr(layer, name, tensor)


@dataclass(eq=False)
class _PromptGraph:
    """A recorded prompt: the tensors it reads, and its output with the cache it writes."""

    given: Inputs
    output: Any
    run: Callable[[], None]
    #: What it reads beside the model and `given`.
    held: list[torch.Tensor]

    @property
    def tokens(self) -> int:
        return int(self.given["input_ids"].numel())

    def replay(self, given: Inputs) -> Any:
        """The output for padded inputs, whose memory is that of all graphs of the pool."""
        capture.copy_tensors(given, self.given)
        self.run()
        return self.output


def _record(forward: Callable[..., Any], given: Inputs, pool: capture.Pool) -> _PromptGraph:
    """The graph of a prompt with padded inputs, of a shape that has run before."""
    static = capture.cloned(given)

    def step() -> Any:
        return _forward(forward, static)

    recorded = step
    try:
        recorded = fused_forward("prompts", step, static)
    except NotRecorded as error:
        # Whether a mask is all true, say, which transformers does not ask while a graph is recorded.
        warn_unchanged("prompts", str(error))
    output, run = capture.capture(recorded, None, static["input_ids"].device, pool)
    return _PromptGraph(static, output, run, held_tensors(recorded))
