"""Decoding as CUDA graphs: all launches of a step are recorded once and replayed for every token.

A step of an 8B model is more than a thousand launches, and launching them takes several times longer than
running them. transformers' `generate` calls a compiled forward for steps with a static cache; here it gets
both, the cache and a forward that replays. The first step of a new shape runs once before it is recorded.
"""

import copy
import inspect
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, StaticLayer
from transformers.generation import MaxLengthCriteria

from quantkit.kernels.table import forced_row
from quantkit.model import deferred, graphs, prompt_graphs
from quantkit.model.attention import use_decode_attention
from quantkit.model.cache_name import CACHE, OLD_NAME, renamed
from quantkit.model.fused_forward import fused_forward, held_tensors
from quantkit.model.graphs import (
    Inputs,
    NotRecorded,
    check_output,
    cloned,
    copy_tensors,
    is_plain,
    outline,
    own_output,
    used_layers,
    why_not_asked,
)
from quantkit.model.packed_module import PackedModule
from quantkit.model.prompt_graphs import PromptGraphs
from quantkit.model.trial import try_step

logger = logging.getLogger("quantkit.model")

#: Graphs that a model keeps, of different batches or lengths of the cache. Each holds the cache it writes.
GRAPHS = 2
#: Lengths of caches are multiples of this, so that answers of other lengths find their graph again.
BUCKET = 256
#: Layers that a cache of whole keys and values does for.
_ATTENTION = frozenset({"full_attention", "sliding_attention"})
#: Arguments of `generate` with which it has a cache, makes another, or takes tokens back from it.
_OWN_CACHE = (
    CACHE,
    OLD_NAME,
    "cache_implementation",
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "is_assistant",
    "custom_generate",
)
#: New tokens that `generate` makes where nobody says how many.
_NEW_TOKENS = 20


class GraphedForward:
    """The forward of `model` for one new token of each sequence, as a CUDA graph; `forward` is for prompts.

    Called as the model is. A step that cannot be recorded runs as it would have, is logged once with the
    reason, and is in `refused`. The outputs are the caller's own. `renew` has to be called where the model
    may have changed since: before each generation.
    """

    def __init__(self, model: Any, plain: Callable[..., Any] | None = None) -> None:
        self._model = model
        #: The forward without graphs.
        self.plain = _without_graphs(model.forward if plain is None else plain)
        self._graphs: OrderedDict[tuple[Any, ...], _Graph | str] = OrderedDict()
        self._recorded: tuple[Any, ...] = ()
        self._unfit: str | None = None
        self._lock = threading.Lock()
        self._prompts = PromptGraphs(self.plain, self._lock)
        self.refused: dict[str, None] = {}

    def __call__(self, **inputs: Any) -> Any:
        given = renamed(inputs)
        reason = self._unfit or why_not(given)
        if reason is not None:
            return self._plainly(inputs, reason)
        # All threads that generate have the same memory for inputs and outputs.
        with self._lock:
            graph = self._graph_of(given)
            if not isinstance(graph, str):
                return graph.replay(given)
        return self._plainly(inputs, graph)

    def forward(self, *arguments: Any, **inputs: Any) -> Any:
        """The model's forward, with prompts as graphs where they can be; `renew` is called for them."""
        # What torch.compile traces is what the model computes.
        traced = torch.compiler.is_compiling()
        given = renamed(inputs)
        if not traced and not arguments and prompt_graphs.is_recordable(given, self._model):
            self.renew()
            fit = self._unfit is None and self._prompts.refused is None
            if fit and prompt_graphs.is_empty(given[CACHE]):
                output = self._prompts.run(given, partial(try_step, self._model, self.plain, given))
                if output is not None:
                    return output
        return self.plain(*arguments, **inputs)

    def _graph_of(self, inputs: Inputs) -> "_Graph | str":
        """The graph for such inputs, recorded unless it is there, or why there is none."""
        key = _key(inputs, inputs[CACHE])
        if key not in self._graphs:
            try:
                self._graphs[key] = _record(self._model, inputs)
            except NotRecorded as error:
                # Not the error, whose traceback keeps the inputs and what else the step had.
                self._graphs[key] = str(error)
            if len(self._graphs) > GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def renew(self, *_: Any) -> "GraphedForward":
        """Drop the graphs if the model is not what it was when they were recorded.

        transformers calls this, as the model's `get_compiled_call`, once for each generation.
        """
        modules = _modules_of(self._model)
        now = _fingerprint(self._model, modules)
        with self._lock:
            if now != self._recorded:
                self._graphs.clear()
                never = _why_no_static_cache(self._model) or prompt_graphs.why_never(self._model, self.plain)
                self._prompts.clear(never)
                self._recorded = now
        self._unfit = _why_unfit(self._model, modules)
        return self

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """The model's own `generate`, with a cache that steps can be recorded with unless it has another."""
        cls = type(self._model)
        bound = inspect.signature(cls.generate).bind_partial(self._model, *arguments, **options).arguments
        asked = {**bound.pop("kwargs", {}), **bound}
        del asked["self"]
        tokens = _tokens_of(asked, self._model.generation_config)
        cache = None
        if tokens is not None:
            cache = static_cache(self._model, tokens)
            if cache is None:
                self._say(str(_why_no_static_cache(self._model)))
            else:
                options[CACHE] = cache
                if deferred.is_enough(asked, self._model.generation_config):
                    options["custom_generate"] = partial(deferred.sample, streamer=asked.get("streamer"))
        found = cls.generate(self._model, *arguments, **options)
        if cache is not None and getattr(found, CACHE, None) is cache:
            setattr(found, CACHE, _growing(cache, self._model))
        return found

    def _plainly(self, inputs: Inputs, reason: str) -> Any:
        self._say(reason)
        return self._model(**inputs)

    def _say(self, reason: str) -> None:
        if reason not in self.refused:
            self.refused[reason] = None
            logger.warning("decoding steps are launched one kernel at a time: %s", reason)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies have graphs of their own.
        return GraphedForward, (self._model, self.plain)


class _ModelForward:
    """What `model.forward` is with graphs: a callable that says it has the arguments of the model's own."""

    def __init__(self, graphed: GraphedForward) -> None:
        self.graphed = graphed

    def __call__(self, *arguments: Any, **inputs: Any) -> Any:
        return self.graphed.forward(*arguments, **inputs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.graphed.plain)


def _without_graphs(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward.graphed.plain if isinstance(forward, _ModelForward) else forward


def graph_decoding(model: Any) -> None:
    """Make `model`, on one GPU, decode by graphs: by `generate` of transformers, and by `forward_of`.

    `generate` then uses a static cache where it is not told otherwise. Prompts are recorded wherever the
    model is called with them.
    """
    use_decode_attention(model)
    graphed = GraphedForward(model)
    model.forward = _ModelForward(graphed)
    model.get_compiled_call = graphed.renew
    model.generate = graphed.generate


def forward_of(model: Any) -> Any:
    """What to call for the tokens of one generation: the graphs of `model` if it has any, else `model`."""
    renew = vars(model).get("get_compiled_call")
    return model if renew is None else renew()


def plain_forward(model: Any) -> Callable[..., Any]:
    """The forward of `model` without graphs."""
    return _without_graphs(model.forward)


def _modules_of(model: Any) -> list[Any]:
    """What `model.modules()` has, in another order and in a third of the time: each prompt waits for it."""
    found: dict[Any, None] = {}
    left = [model]
    for module in left:
        if module is not None and module not in found:
            found[module] = None
            left += module._modules.values()
    return list(found)


def _fingerprint(model: Any, modules: Sequence[Any]) -> tuple[Any, ...]:
    """What a graph of `model` depends on besides its inputs: its `modules`, and where their tensors lie."""
    states = tuple((id(module), module.training) for module in modules)
    held = (group for module in modules for group in (module._parameters, module._buffers) if group)
    tensors = tuple(tensor.data_ptr() for group in held for tensor in group.values() if tensor is not None)
    packed = (module for module in modules if isinstance(module, PackedModule))
    layouts = tuple(address for module in packed for address in module.layout_addresses())
    # What the config asks for beside logits.
    asked = tuple(name for name, value in vars(model.config).items() if value and "output_" in name)
    return states, tensors, layouts, asked, model.config._attn_implementation, forced_row()


def _why_unfit(model: Any, modules: Sequence[Any]) -> str | None:
    """None if a step of `model` may be recorded, else what the host does at each step in one of `modules`."""
    if any(_package(kind) == "peft" for kind in {type(module) for module in modules}):
        return "adapters may change what it computes from step to step"
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            # Those of transformers do nothing until somebody asks for outputs.
            if hooks and any(_package(hook) != "transformers" for hook in hooks.values()):
                name = next(name for name, one in model.named_modules() if one is module)
                return f"a hook of {name or type(module).__name__!r} is to be called at each"
    return None


def _package(of: Any) -> str:
    return str(getattr(of, "__module__", "")).partition(".")[0]


def why_not(inputs: Mapping[str, Any]) -> str | None:
    """None if a step with these inputs can be recorded, else the reason it cannot."""
    cache, ids = inputs.get(CACHE), inputs.get("input_ids")
    if ids is None or ids.dim() != 2 or ids.shape[1] != 1:
        return "it is not one token of each sequence"
    if cache is None or not all(type(layer) is StaticLayer for layer in cache.layers):
        return "the cache is not one of static layers for all keys and values"
    used = used_layers(cache)
    if not used:
        return "the cache is empty"
    if len({layer.keys.device for layer in used} | {ids.device}) > 1:
        return "the model is on several devices"
    asked = why_not_asked(inputs, ids.device)
    if asked is not None:
        return asked
    odd = [name for name, value in inputs.items() if value is not cache and not is_plain(value)]
    return f"{odd[0]} is a {type(inputs[odd[0]]).__name__}" if odd else None


def _tokens_of(asked: Mapping[str, Any], defaults: Any) -> int | None:
    """The most tokens of a sequence, with its prompt, that `generate` makes when it is asked for this.

    None where it needs another cache than a static one. `defaults` is the generation config of the model.
    """
    config = asked.get("generation_config")

    def said(name: str) -> Any:
        if name in asked:
            return asked[name]
        values = (getattr(config, name, None), getattr(defaults, name, None))
        return next((value for value in values if value is not None), None)

    # "hybrid" is what old checkpoints of sliding windows say, which transformers takes for nothing.
    own = [said(name) for name in _OWN_CACHE]
    if any(value not in (None, False, "hybrid") for value in own):
        return None
    # None, if that is asked for, is no cache either.
    if said("use_cache") is False or asked.get("use_cache", True) is None:
        return None
    prompts = [asked.get(name) for name in ("inputs", "input_ids", "inputs_embeds")]
    prompt = max((part.shape[1] for part in prompts if part is not None), default=1)
    new: int | None = said("max_new_tokens")
    tokens = prompt + new if new is not None else max(prompt, said("max_length") or 0) + _NEW_TOKENS
    # Criteria of the caller are taken instead.
    criteria = asked.get("stopping_criteria") or ()
    lengths: list[int] = [one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)]
    return max([tokens, *lengths])


def static_cache(model: Any, tokens: int) -> Cache | None:
    """A cache for so many tokens that graphs can be recorded with; None where the model needs another.

    Windows of sliding attention come from masks: every layer has room for all tokens.
    """
    if _why_no_static_cache(model) is not None:
        return None
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    length = -(-tokens // BUCKET) * BUCKET
    return Cache(layers=[StaticLayer(max_cache_len=length) for _ in range(layers)])


def layers_without_keys(model: Any) -> list[str]:
    """The kinds of layers of `model` that have something else than keys and values of all tokens."""
    config = model.config.get_text_config(decoder=True)
    return sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION)


def _why_no_static_cache(model: Any) -> str | None:
    """None if keys and values of a length that is fixed do for `model`, else the reason they do not."""
    config = model.config.get_text_config(decoder=True)
    if others := layers_without_keys(model):
        return f"the model has layers of {others[0]}"
    # transformers says of a model that it compiles if it runs with such keys and values.
    if getattr(config, "is_encoder_decoder", False) or not getattr(model, "_can_compile_fullgraph", False):
        return "transformers does not run the model with a static cache"
    # Keys and values may have two dtypes then, for which a static layer has one.
    return "autocast is asked for" if torch.is_autocast_enabled(model.device.type) else None


def _growing(cache: Cache, model: Any) -> Cache:
    """A cache as transformers makes it, which has room for more tokens, with what `cache` holds."""
    grown = DynamicCache(config=model.config.get_text_config(decoder=True))
    for number, layer in enumerate(cache.layers):
        if layer.is_initialized:
            held = int(layer.get_seq_length())
            grown.update(layer.keys[:, :, :held], layer.values[:, :, :held], number)
    return grown


@dataclass(eq=False)
class _Graph:
    """A recorded step: the tensors it reads, the tensors of the cache it writes, and its output."""

    given: dict[str, Any]
    #: Of each layer that is used.
    state: list[dict[str, torch.Tensor]]
    output: Any
    run: Callable[[], None]
    #: What it reads beside the model and these.
    held: list[torch.Tensor]
    #: The cache whose tensors are `state` now.
    cache: weakref.ref[Any]

    def replay(self, inputs: Inputs) -> Any:
        """The output for `inputs`, whose cache has the tensors of `state` from then on."""
        cache = inputs[CACHE]
        self._attach(cache)
        copy_tensors(inputs, self.given)
        self.run()
        return own_output(self.output, cache)

    def _attach(self, cache: Any) -> None:
        """Give `cache` the tensors of `state`, with what it holds in them."""
        layers = used_layers(cache)
        if all(
            getattr(layer, name) is tensor
            for layer, state in zip(layers, self.state, strict=True)
            for name, tensor in state.items()
        ):
            return
        before = self.cache()
        if before is not None and before is not cache:
            # It is somebody's: it keeps what it holds.
            for layer, state in zip(used_layers(before), self.state, strict=True):
                for name, tensor in state.items():
                    if getattr(layer, name) is tensor:
                        setattr(layer, name, tensor.clone())
        for name in dict.fromkeys(name for state in self.state for name in state):
            # One launch for all layers.
            pairs = [(state[name], layer) for layer, state in zip(layers, self.state, strict=True)]
            torch._foreach_copy_(
                [tensor for tensor, _ in pairs], [getattr(layer, name) for _, layer in pairs]
            )
            for tensor, layer in pairs:
                setattr(layer, name, tensor)
        self.cache = weakref.ref(cache)


def _record(model: Any, inputs: Inputs) -> _Graph:
    """The graph of a step with inputs of such shapes, of fewer launches where kernels do for several.

    The cache is left as it was.
    """
    cache, device = inputs[CACHE], inputs["input_ids"].device
    # A cache of the graph's own, on the same tensors: the caller's is not kept alive, nor its layers changed.
    own = copy.copy(cache)
    own.layers = [copy.copy(layer) for layer in cache.layers]
    state = [_state(layer) for layer in used_layers(own)]
    given = {name: cloned(value) for name, value in inputs.items()} | {CACHE: own}
    # Keys and values that a step writes lie where the next step writes its own.
    counters = [
        (tensor, tensor.clone())
        for layer in state
        for name, tensor in layer.items()
        if name not in ("keys", "values")
    ]

    def step() -> Any:
        return model(**given)

    def rewind() -> None:
        for tensor, before in counters:
            tensor.copy_(before)

    host = [_host_state(layer) for layer in own.layers]
    step = fused_forward("decoding steps", step, given, rewind)
    output, run = graphs.capture(step, rewind, device)
    if [_host_state(layer) for layer in own.layers] != host:
        raise NotRecorded("the cache counts its tokens on the host")
    check_output(output)
    return _Graph(given, state, output, run, held_tensors(step), weakref.ref(cache))


def _key(inputs: Inputs, cache: Any) -> tuple[Any, ...]:
    """What two steps have in common if the graph of one does for the other."""
    given = outline({name: value for name, value in inputs.items() if value is not cache})
    layers = tuple((layer.keys.shape, layer.values.shape, layer.keys.dtype) for layer in used_layers(cache))
    return given, layers, torch.is_inference_mode_enabled()


def _state(layer: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(layer).items() if torch.is_tensor(value)}


def _host_state(layer: Any) -> dict[str, int]:
    return {name: value for name, value in vars(layer).items() if isinstance(value, int)}
