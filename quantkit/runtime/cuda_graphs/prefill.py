"""Prefill with CUDA graphs: one graph serves all prompts of similar length.

Prompts are padded on the right to a bucket length; no earlier token attends to padding. A graph owns its keys
and values, which are copied to the cache of the caller, so it serves caches of any length.

    prompt of 1000 tokens -> padded to 1024 -> replay -> logits of token 999, keys and values [:1000] -> cache

Long prompts are padded too, and run without a graph (`long_prompts.py`).
"""

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer

from quantkit.kernels.jit.compile_pool import compiled_first
from quantkit.kernels.ops.kv_append import fill, fill_reference
from quantkit.runtime.cache.cache_name import CACHE
from quantkit.runtime.cuda_graphs import capture, refusals
from quantkit.runtime.cuda_graphs.capture import Inputs, NotCaptured
from quantkit.runtime.cuda_graphs.long_prompts import FUSED_TOKENS, LongPrompts, Recurring
from quantkit.runtime.passes.fused_forward import constants_of, fused_forward, warn_unchanged
from quantkit.runtime.passes.patterns import can_fuse

logger = logging.getLogger("quantkit.model")

#: Keys and values [B, H, T, D] of a layer.
States = tuple[torch.Tensor, torch.Tensor]

#: Largest batch size times padded length that is captured. Beyond, computing takes a GPU longer than
#: launching takes the host, so a graph gains nothing; its memory grows with the tokens.
PROMPT_TOKENS = 2048
#: Total tokens of all prompt graphs of a model: each graph holds keys and values for its own.
KEPT_TOKENS = 4 * PROMPT_TOKENS
#: Inputs with one number per token. Other tensors may be per token too, which cannot be detected.
_PER_TOKEN = ("input_ids", "attention_mask", "position_ids")
#: Options that must be on.
_NEEDED = ("use_cache", "return_dict")
#: Cache classes whose only state is their layers.
_CACHES = (Cache, DynamicCache, StaticCache)


def bucket(tokens: int) -> int:
    """Return the length to which prompts of `tokens` tokens are padded.

    Lengths are multiples of 32 up to 256, of 64 up to 512, of 128 up to 1024, and of 256 beyond. From 128
    tokens on, at most a fifth is padding.
    """
    step = min(256, max(32, 1 << (tokens - 1).bit_length() >> 3))
    return -(-tokens // step) * step


class PromptGraphs:
    """CUDA graphs for prompts of a model, one for each padded shape; they share memory.

    The first prompt of a shape runs padded, without a graph; the second is captured, because a capture takes
    longer than a run. `forward` is the forward of the model. `lock` guards the shared memory during replay
    and copy of the output. `refused` is the reason if no more prompts are captured.
    """

    def __init__(self, forward: Callable[..., Any], lock: Any) -> None:
        self._forward = forward
        self._lock = lock
        self.clear(None)

    def clear(self, refused: str | None) -> None:
        """Drop all graphs; capture no more if `refused` is a reason, not None."""
        self.graphs: OrderedDict[Any, _PromptGraph] = OrderedDict()
        self._recurring = Recurring()
        self._long = LongPrompts(partial(_forward, self._forward))
        self._pool = capture.Pool()
        self.refused = refused

    def run(self, inputs: Inputs, ahead: Callable[[], None], adapters: int = 0) -> Any:
        """Run a prompt and fill the cache in `inputs`; return its output, or None if the caller must run it.

        Replays the graph of the padded shape; if the shape is new, runs the padded prompt without a graph.
        Returns None if the prompt cannot be padded, or no more prompts are captured. That is so after a
        prompt that lacked memory or raised `NotCaptured`. `ahead` is called while kernels of the prompt
        compile, to launch later work. `adapters` is the number of the active ones (`ActiveAdapters`).
        """
        cache, tokens = inputs[CACHE], inputs["input_ids"].shape[1]
        padded = _padded(inputs)
        if padded is None:
            return None
        key = adapters, capture.outline(padded), torch.is_inference_mode_enabled()
        if padded["input_ids"].numel() > PROMPT_TOKENS:
            return self._long.run(key, padded, lambda output: _copy_out(output, cache, tokens))
        with self._lock:
            graph = self._graph_of(key, padded)
            if graph is not None:
                return _copy_out(graph.replay(padded), cache, tokens)
            if self.refused is not None:
                return None
        try:
            device = padded["input_ids"].device
            output = compiled_first(device, lambda: _forward(self._forward, padded), ahead=lambda _: ahead())
        except (NotCaptured, torch.OutOfMemoryError) as error:
            with self._lock:
                self._refuse(error)
            return None
        return _copy_out(output, cache, tokens)

    def _graph_of(self, key: Any, inputs: Inputs) -> "_PromptGraph | None":
        """Return the graph for inputs with this `key` (their shapes); None if there is none.

        If the key came once before, the graph is captured now, from `inputs`.
        """
        if key in self.graphs:
            self.graphs.move_to_end(key)
        elif self._recurring.comes_again(key):
            try:
                self.graphs[key] = _capture_prompt(self._forward, inputs, self._pool)
            except (NotCaptured, torch.OutOfMemoryError) as error:
                self._refuse(error)
            while sum(graph.tokens for graph in self.graphs.values()) > KEPT_TOKENS:
                self.graphs.popitem(last=False)
        return self.graphs.get(key)

    def _refuse(self, error: Exception) -> None:
        """Stop capturing prompts because of `error`, log it, and free all graphs."""
        lacking = isinstance(error, torch.OutOfMemoryError)
        reason = refusals.NO_MEMORY.because() if lacking else str(error)
        logger.warning("prompts are launched one kernel at a time: %s", reason)
        self.clear(reason)


def why_never(model: Any, forward: Callable[..., Any]) -> str | None:
    """Return why no prompt of `model`, whose forward is `forward`, can be padded; None if prompts can."""
    if model.config.get_text_config(decoder=True) is not model.config:
        return refusals.IMAGES.because()
    bidirectional = getattr(model.config, "use_bidirectional_attention", None)
    if bidirectional or not getattr(model.config, "is_causal", True):
        return refusals.BIDIRECTIONAL.because()
    parameters = inspect.signature(forward).parameters
    missing = [name for name in (*_PER_TOKEN, CACHE, "logits_to_keep") if name not in parameters]
    if missing:
        return refusals.NO_PARAMETER.because(name=missing[0])
    # If the annotation is just int, the model would mistake a tensor for its number.
    if "Tensor" not in str(parameters["logits_to_keep"].annotation):
        return refusals.NUMBER_ONLY.because()
    return None


def why_not(inputs: Mapping[str, Any], model: Any) -> str | None:
    """Return why `inputs` of `model` are no prompt to capture; None if they are.

    Does not check that the cache `is_empty`, which may wait for the GPU.
    """
    ids: Any = inputs.get("input_ids")
    if not _is_prompt(ids, model.device):
        return refusals.NOT_A_PROMPT.because()
    if not _is_short(ids, model.config):
        return refusals.LONG_PROMPT.because(most=FUSED_TOKENS)
    if not _is_cache(inputs.get(CACHE)):
        return refusals.OTHER_CACHE.because()
    if not _is_for_one_token(inputs, model.config):
        return refusals.MORE_ASKED.because()
    for name, value in inputs.items():
        if not _can_pad(name, value, ids):
            return refusals.NO_PADDING.because(name=name)
    return capture.why_not_asked(inputs, ids.device)


def is_empty(cache: Any) -> bool:
    """Return True if `cache` holds no tokens; may wait for the GPU."""
    return int(cache.get_seq_length()) == 0


def _is_prompt(ids: Any, device: torch.device) -> bool:
    """Return True if `ids` are tokens [B, T], T >= 2, on `device`, and `device` can capture graphs."""
    return (
        torch.is_tensor(ids)
        and capture.captures_on(ids.device)
        and ids.device == device
        and ids.dim() == 2
        and ids.shape[1] >= 2
    )


def _is_short(ids: torch.Tensor, config: Any) -> bool:
    """Return True if `ids` int64 [B, T], padded, are at most `FUSED_TOKENS` and fit the model's positions."""
    length = bucket(ids.shape[1])
    positions = getattr(config, "max_position_embeddings", None) or length
    return length <= positions and len(ids) * length <= FUSED_TOKENS


def _is_cache(cache: Any) -> bool:
    """Return True if `cache` keeps all keys and values, in static or growing layers of transformers."""
    if type(cache) not in _CACHES or cache.offloading:
        return False
    kinds = {type(layer) for layer in cache.layers} | {cache.layer_class_to_replicate}
    return kinds <= {StaticLayer, DynamicLayer, None}


def _is_for_one_token(inputs: Mapping[str, Any], config: Any) -> bool:
    """Return True if the inputs request exactly the logits of the last token and the cache."""
    count = inputs.get("logits_to_keep")
    return type(count) is int and count == 1 and all(_option(name, inputs, config) for name in _NEEDED)


def _option(name: str, inputs: Mapping[str, Any], config: Any) -> bool:
    """Return option `name` of the inputs of a forward, else of the config; True if neither has it."""
    value = inputs.get(name)
    return getattr(config, name, True) if value is None else value


def _can_pad(name: str, value: Any, ids: torch.Tensor) -> bool:
    """Return True if the input `name` of a forward can be padded to a longer prompt.

    A mask or positions can be padded if their shapes fit `ids`, the tokens int64 [B, T]. No other tensor can.
    """
    if name == "attention_mask":
        return _is_mask(value, ids)
    if name == "position_ids":
        return value is None or value.shape in ((1, ids.shape[1]), ids.shape)
    return name in ("input_ids", CACHE) or value is None or isinstance(value, int | float | str)


def _is_mask(mask: Any, ids: torch.Tensor) -> bool:
    """Return True if `mask` is a mask for a prompt of tokens `ids` [B, T] that can be padded.

    Such a mask is None, [B, T], or bool or float of four dimensions, with T queries and T or more keys. A
    mapping must have only such masks.
    """
    if mask is None or isinstance(mask, Mapping):
        return mask is None or all(_is_mask(part, ids) for part in mask.values())
    if not torch.is_tensor(mask) or mask.dim() == 2:
        return torch.is_tensor(mask) and mask.shape == ids.shape
    numbers = mask.dtype == torch.bool or mask.is_floating_point()
    return numbers and mask.dim() == 4 and mask.shape[2] == ids.shape[1] <= mask.shape[3]


def _padded(inputs: Inputs) -> Inputs | None:
    """Return a copy of `inputs` of a prompt, padded to the length `bucket(T)`, without the cache.

    None if only the model can compute the positions of the tokens.
    """
    ids = inputs["input_ids"]
    tokens = ids.shape[1]
    length = bucket(tokens)
    # Repeat the last position: higher ones may exceed the positions of the model.
    places = torch.arange(length, device=ids.device).clamp(max=tokens - 1)
    positions = inputs.get("position_ids")
    mask = inputs.get("attention_mask")
    if torch.is_tensor(mask) and mask.dim() == 2 and bool(mask.all()):
        # Without a mask, attention skips reading one.
        mask = None
    if positions is None and mask is not None:
        # Some models count unmasked tokens only, without_cache all.
        return None
    without_cache = {name: value for name, value in inputs.items() if name != CACHE}
    return without_cache | {
        "input_ids": F.pad(ids, (0, length - tokens)),
        "position_ids": places[None] if positions is None else positions[:, places],
        "attention_mask": _padded_mask(mask, tokens, length),
        "logits_to_keep": torch.full((1,), tokens - 1, device=ids.device),
    }


def _padded_mask(mask: Any, tokens: int, length: int) -> Any:
    """Pad a mask from `tokens` T to `length` L: [B, T] to [B, L], or [B, H, T, any] to [B, H, L, L].

    `mask` may be None, or a mapping of masks. A mask with heads, bool or float, hides padding from the
    prompt. Padding attends to itself, because a row without any visible key would be NaN.
    """
    if isinstance(mask, Mapping):
        return {name: _padded_mask(part, tokens, length) for name, part in mask.items()}
    if mask is None:
        return None
    extra = length - tokens
    if mask.dim() == 2:
        return F.pad(mask, (0, extra), value=1)
    # The cache is empty, so keys after the prompt are masked; the graph has none of them.
    hidden, shown = (False, True) if mask.dtype == torch.bool else (torch.finfo(mask.dtype).min, 0.0)
    keys = F.pad(mask[..., :tokens], (0, extra), value=hidden)
    return F.pad(keys, (0, 0, 0, extra), value=shown)


def _forward(forward: Callable[..., Any], padded: Inputs) -> Any:
    """Run `forward` on padded inputs with a new cache; return its output.

    Raises `NotCaptured` unless the output has the logits of exactly one token.
    """
    # Without a config there are no sliding-window layers, which would keep padding instead of tokens.
    cache = DynamicCache()
    cache.layer_class_to_replicate = _PromptLayer
    output = forward(**padded, **{CACHE: cache})
    capture.check_output(output)
    if output.logits.shape[:-1] != (len(padded["input_ids"]), 1):
        raise NotCaptured(refusals.OTHER_LOGITS.because(shape=tuple(output.logits.shape)))
    return output


class _PromptLayer(DynamicLayer):  # type: ignore[misc]
    """Cache layer with the keys and values of one prompt.

    The class of transformers starts with an empty tensor sent from the host, which a graph cannot capture.
    """

    is_initialized: bool

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        if self.is_initialized:
            return super().update(keys, values)
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.keys, self.values = _compact(keys), _compact(values)
        return self.keys, self.values


def _compact(states: torch.Tensor) -> torch.Tensor:
    """Return keys or values `states` [B, H, T, D], copied if a view would keep a larger tensor alive."""
    return states if states.untyped_storage().nbytes() == states.nbytes else states.contiguous()


def _copy_out(output: Any, cache: Any, tokens: int) -> Any:
    """Copy keys and values of the first `tokens` tokens from `output` to `cache`, the cache of the caller.

    Returns a copy of `output` that holds `cache`; later replays overwrite `output`, but not the copy. After
    an error, such as too little memory, `cache` is empty again.
    """
    static: list[tuple[Any, States]] = []
    before = [dict(vars(layer)) for layer in cache.layers]
    try:
        for number, layer in enumerate(getattr(output, CACHE).layers):
            if not layer.is_initialized:
                continue
            states = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
            if number < len(before) and _is_room(cache.layers[number], states):
                static.append((cache.layers[number], states))
            else:
                # Growing layers copy.
                cache.update(*states, number)
        if static:
            _fill(static)
        return capture.own_output(output, cache)
    except BaseException:
        del cache.layers[len(before) :]
        for layer, attributes in zip(cache.layers, before, strict=True):
            vars(layer).clear()
            vars(layer).update(attributes)
        raise


def _is_room(layer: Any, states: States) -> bool:
    """Return True if `layer` is a static cache layer that can hold `states`, (keys, values) [B, H, T, D]."""
    tokens = states[0].shape[2]
    if type(layer) is not StaticLayer or layer.max_cache_len < tokens:
        return False
    present = (layer.keys, layer.values) if layer.is_initialized else ()
    return all(
        old.device == new.device and capture.outline(old[:, :, :tokens]) == capture.outline(new)
        for old, new in zip(present, states, strict=False)
    )


def _fill(layers: Sequence[tuple[Any, States]]) -> None:
    """Write keys and values to empty static layers in few launches, without waiting for the GPU.

    `layers` pairs each layer with its keys and values, [B, H, T, D] each. Memory of new layers is allocated
    first.
    """
    fresh = [(layer, states) for layer, states in layers if not layer.is_initialized]
    for layer, states in fresh:
        _allocate(layer, states)
    if fresh:
        torch._foreach_zero_([layer.cumulative_length for layer, _ in fresh])
    rooms = [part for layer, _ in layers for part in (layer.keys, layer.values)]
    parts = [part for _, states in layers for part in states]
    # Clear new memory: masked values are multiplied with 0, and 0 * NaN would be NaN.
    (fill if can_fuse(parts[0].device) else fill_reference)(rooms, parts, clear=bool(fresh))
    torch._foreach_add_([layer.cumulative_length for layer, _ in layers], parts[0].shape[2])


def _allocate(layer: Any, states: States) -> None:
    """Allocate memory in a static cache layer for keys and values like `states`, uninitialized.

    transformers would fill each tensor in a launch of its own and send the token counter from the host, which
    waits for all running work.
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
    """Captured prompt: the tensors that it reads, and its output with the cache that it writes.

    `run` replays it. `constants` are tensors that the graph reads and no other object refers to.
    """

    inputs: Inputs
    output: Any
    run: Callable[[], None]
    constants: list[torch.Tensor]

    @property
    def tokens(self) -> int:
        return int(self.inputs["input_ids"].numel())

    def replay(self, padded: Inputs) -> Any:
        """Replay the prompt for `padded` inputs; return the output, which any later replay overwrites."""
        capture.copy_tensors(padded, self.inputs)
        self.run()
        return self.output


def _capture_prompt(forward: Callable[..., Any], padded: Inputs, pool: capture.Pool) -> _PromptGraph:
    """Capture `forward` on `padded` inputs as a graph with memory from `pool`.

    Inputs of the same shapes must have run before.
    """
    static = capture.cloned(padded)

    def step() -> Any:
        return _forward(forward, static)

    captured = step
    try:
        captured = fused_forward("prompts", step, static)
    except NotCaptured as error:
        # For example, transformers checks if a mask is all True, except during capture.
        warn_unchanged("prompts", str(error))
    output, run = capture.capture(captured, None, static["input_ids"].device, pool)
    return _PromptGraph(static, output, run, constants_of(captured))
