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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from quantkit.runtime import async_sampling
from quantkit.runtime.cache.cache_name import CACHE, renamed
from quantkit.runtime.cache.static_cache import (
    max_tokens,
    option_of,
    static_cache,
    to_dynamic,
    why_no_static_cache,
)
from quantkit.runtime.cuda_graphs import capture, prefill
from quantkit.runtime.cuda_graphs.capture import (
    Inputs,
    NotCaptured,
    check_output,
    cloned,
    copy_tensors,
    is_plain,
    outline,
    own_output,
    used_layers,
    why_not_asked,
)
from quantkit.runtime.cuda_graphs.prefill import PromptGraphs
from quantkit.runtime.cuda_graphs.warmup import warm_up
from quantkit.runtime.fitness import fingerprint, modules_of, why_unfit
from quantkit.runtime.packed_module import PackedModule
from quantkit.runtime.passes.fused_forward import constants_of, fused_forward
from quantkit.runtime.ready import make_ready
from quantkit.runtime.tensor_parallel import all_agree, ranks_of
from quantkit.runtime.transformers.patches import process_groups
from quantkit.runtime.transformers.patches.attention import decode_attention_in

logger = logging.getLogger("quantkit.model")

#: Graphs that a model keeps, of different batches or lengths of the cache. Each holds the cache it writes.
GRAPHS = 2

#: The output that a step writes to, or None, what runs it, and what it reads that nobody else holds.
Captured = tuple[Any, Callable[[], Any], list[torch.Tensor]]


class GraphedForward:
    """The forward of `model` for one new token of each sequence, as a CUDA graph; `forward` is for prompts.

    Called as the model is. A step that cannot be recorded runs as it would have, is logged once with the
    reason, and is in `refused`. The outputs are the caller's own. `renew` has to be called where the model
    may have changed since: before each generation. It does not keep the model.
    """

    #: Whether `generate` may run a step more than it needs, so that it waits for none.
    defers = True
    #: What a step that is not recorded is logged as, with the reason.
    refusal = "decoding steps are launched one kernel at a time: %s"

    def __init__(self, model: Any) -> None:
        self._reference = weakref.ref(model)
        #: The forward without graphs.
        self.plain = _PlainForward(model)
        self._graphs: OrderedDict[tuple[Any, ...], _Graph | str] = OrderedDict()
        self._recorded: tuple[Any, ...] = ()
        self._unfit: str | None = None
        #: The process group of the ranks that share the model.
        self._ranks: Any = None
        self._lock = threading.Lock()
        self._prompts = PromptGraphs(self.plain, self._lock)
        #: One of the packed modules, which are moved together.
        self._packed: Callable[[], PackedModule | None] | None = None
        self._thread = threading.local()
        self.refused: dict[str, None] = {}

    @property
    def _model(self) -> Any:
        return self._reference()

    @property
    def captures(self) -> bool:
        """Whether steps are recorded where the model is."""
        return capture.captures_on(self._model.device)

    def __call__(self, **inputs: Any) -> Any:
        output = self.step(renamed(inputs))
        return self._model(**inputs) if output is None else output

    def step(self, given: Inputs) -> Any:
        """The output for a step with these inputs; None, and the reason logged, where it is not recorded."""
        self._thread.last = (), lambda: None
        reason = self._unfit or why_not(given)
        if reason is None:
            # All threads that generate have the same memory for inputs and outputs.
            with self._lock:
                key = _key(given, given[CACHE])
                graph = self._graph_of(key, given)
                if not isinstance(graph, str):
                    self._thread.last = key, weakref.ref(graph)
                    return graph.replay(given)
            reason = graph
        self._say(reason)
        return None

    def following(self) -> Callable[[Inputs], Any]:
        """What to call for steps that differ from this thread's last one in the numbers of tensors alone."""
        return partial(self._again, *self._thread.last)

    def _again(self, key: tuple[Any, ...], recorded: "weakref.ref[_Graph]", inputs: Inputs) -> Any:
        graph = recorded()
        with self._lock:
            # It may have been dropped since, for another one or because the model has changed.
            if graph is not None and self._graphs.get(key) is graph:
                return graph.replay(renamed(inputs))
        return self(**inputs)

    def forward(self, *arguments: Any, **inputs: Any) -> Any:
        """The model's forward, with prompts as graphs where they can be; `renew` is called for them.

        Kernel layouts are built first if the model was moved or cast since it was called last.
        """
        self._prepare()
        given = renamed(inputs)
        asked = not arguments and not getattr(self._thread, "plain", False)
        if asked and prefill.is_recordable(given, self._model):
            self.renew()
            fit = self._unfit is None and self._prompts.refused is None
            if fit and prefill.is_empty(given[CACHE]):
                output = self._prompts.run(given, partial(self._try_step, given))
                if output is not None:
                    return output
        return self.plain(*arguments, **inputs)

    def _prepare(self) -> None:
        """Build the kernel layouts of a model that was moved or cast."""
        if self._packed is None:
            found = next((one for one in modules_of(self._model) if isinstance(one, PackedModule)), None)
            self._packed = (lambda: None) if found is None else weakref.ref(found)
        packed = self._packed()
        if packed is not None and packed.lacks_layouts:
            make_ready(self._model)

    def _try_step(self, prompt: Inputs) -> None:
        with decode_attention_in(self._model):
            warm_up(self._model, self.plain, prompt)

    def _graph_of(self, key: tuple[Any, ...], inputs: Inputs) -> "_Graph | str":
        """The graph for inputs of that key, recorded unless it is there, or why there is none."""
        if key not in self._graphs:
            try:
                with decode_attention_in(self._model):
                    self._graphs[key] = _record(self._model, inputs, self.capture)
            except NotCaptured as error:
                # Not the error, whose traceback keeps the inputs and what else the step had.
                self._graphs[key] = str(error)
            if self._ranks is not None:
                self._agree(key, inputs["input_ids"].device)
            if len(self._graphs) > GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _agree(self, key: tuple[Any, ...], device: torch.device) -> None:
        """Keep the graph of that key if every rank has one: all have to sum in one order."""
        is_graph = not isinstance(self._graphs[key], str)
        if all_agree(self._ranks, is_graph, device):
            process_groups.drop_before_destroying(self)
            _tell_of_ranks()
        elif is_graph:
            self._graphs[key] = "another rank could not record its share"

    def drop(self) -> None:
        """Let go of all graphs; what comes next is recorded anew."""
        self._graphs.clear()
        self._recorded = ()

    def renew(self) -> "GraphedForward":
        """Drop the graphs if the model is not what it was when they were recorded."""
        modules = modules_of(self._model)
        self._unfit = why_unfit(self._model, modules)
        if self._unfit is not None:
            return self
        # Another thread may be recording, with another attention in the model's config.
        with self._lock:
            now = fingerprint(self._model, modules)
            if now != self._recorded:
                self._graphs.clear()
                self._ranks = ranks_of(modules)
                never = why_no_static_cache(self._model) or prefill.why_never(self._model, self.plain)
                if self._ranks is not None:
                    never = "ranks share the model"
                self._prompts.clear(never)
                self._recorded = now
        return self

    def cache_for(self, tokens: int) -> Any:
        """A cache for so many tokens that steps are recorded with, None where they are not.

        The reason is logged once.
        """
        if not self.captures:
            return None
        reason = why_unfit(self._model, modules_of(self._model)) or why_no_static_cache(self._model)
        if reason is not None:
            self._say(reason)
            return None
        return static_cache(self._model, tokens)

    def generate(self, own: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The model's `own` generate, with a cache that steps can be recorded with unless it has another.

        With `disable_compile`, or where the model cannot be recorded, it is as it would have been.
        """
        if not self.captures:
            return own(*arguments, **options)
        bound = inspect.signature(own).bind_partial(*arguments, **options).arguments
        asked = {**bound.pop("kwargs", {}), **bound}
        defaults = self._model.generation_config
        if option_of(asked, defaults, "disable_compile"):
            with self._kernel_by_kernel():
                return own(*arguments, **options)
        tokens = max_tokens(asked, defaults)
        cache = None if tokens is None else self.cache_for(tokens)
        if cache is not None:
            options[CACHE] = cache
            if self.defers and async_sampling.is_supported(asked, defaults):
                options["custom_generate"] = partial(async_sampling.sample, streamer=asked.get("streamer"))
        found = own(*arguments, **options)
        if cache is not None and getattr(found, CACHE, None) is cache:
            setattr(found, CACHE, to_dynamic(cache, self._model))
        return found

    @contextmanager
    def _kernel_by_kernel(self) -> Iterator[None]:
        """A block in which this thread's prompts are not recorded either."""
        self._thread.plain = True
        try:
            yield
        finally:
            self._thread.plain = False

    def _say(self, reason: str) -> None:
        if reason not in self.refused:
            self.refused[reason] = None
            if _is_first_rank():
                logger.warning(self.refusal, reason)

    def capture(self, step: Callable[[], Any], given: Inputs, rewind: Callable[[], None]) -> Captured:
        """`step`, which reads `given`, as a graph; `rewind` takes back what it writes."""
        if self._ranks is None:
            # Ranks may have other kernels to compile, for which a step runs more often, and its sums with it.
            step = fused_forward("decoding steps", step, given, rewind)
        output, run = capture.capture(step, rewind, given["input_ids"].device)
        check_output(output)
        return output, run, constants_of(step)


@lru_cache(maxsize=1)
def _tell_of_ranks() -> None:
    if _is_first_rank():
        logger.warning(
            "ranks share the model (tensor parallelism): decoding steps are CUDA graphs with more launches "
            "than on one GPU, and prompts are launched one kernel at a time; load it on one GPU where it fits"
        )


def _is_first_rank() -> bool:
    """Whether this process is the only one, or the first of those that share a model."""
    ranks = torch.distributed
    return not (ranks.is_available() and ranks.is_initialized() and ranks.get_rank())


def plain_forward(model: Any) -> Callable[..., Any]:
    """The forward of `model` without graphs, with what somebody put before it."""
    forward: Callable[..., Any] = model.forward if "forward" in vars(model) else _forward_of_class(model)
    return forward


def _forward_of_class(model: Any) -> Callable[..., Any]:
    """The forward of the class that `model` had before graphs, as that is now."""
    before = getattr(type(model), "class_before", None)
    forward: Callable[..., Any] = model.forward if before is None else before.forward.__get__(model)
    return forward


class _PlainForward:
    """The forward of `model` without graphs, which does not keep the model."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)

    def __call__(self, *arguments: Any, **inputs: Any) -> Any:
        return _forward_of_class(self._model())(*arguments, **inputs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_forward_of_class(self._model()))


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


@dataclass(eq=False)
class _Graph:
    """A recorded step: the tensors it reads, the tensors of the cache it writes, and its output."""

    given: dict[str, Any]
    #: Of each layer that is used.
    state: list[dict[str, torch.Tensor]]
    #: None where each run returns its own.
    output: Any
    run: Callable[[], Any]
    #: What it reads beside the model and these.
    held: list[torch.Tensor]
    #: The cache whose tensors are `state` now.
    cache: weakref.ref[Any]

    def replay(self, inputs: Inputs) -> Any:
        """The output for `inputs`, whose cache has the tensors of `state` from then on."""
        cache = inputs[CACHE]
        self._attach(cache)
        copy_tensors(inputs, self.given)
        output = self.run()
        return own_output(self.output if output is None else output, cache)

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


def _record(model: Any, inputs: Inputs, capture: Callable[..., Captured]) -> _Graph:
    """The graph of a step with inputs of such shapes, of fewer launches where kernels do for several.

    The cache is left as it was.
    """
    cache = inputs[CACHE]
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
    output, run, held = capture(step, given, rewind)
    if [_host_state(layer) for layer in own.layers] != host:
        raise NotCaptured("the cache counts its tokens on the host")
    return _Graph(given, state, output, run, held, weakref.ref(cache))


def _key(inputs: Inputs, cache: Any) -> tuple[Any, ...]:
    """What two steps have in common if the graph of one does for the other."""
    given = outline({name: value for name, value in inputs.items() if value is not cache})
    layers = tuple((layer.keys.shape, layer.values.shape, layer.keys.dtype) for layer in used_layers(cache))
    return given, layers, torch.is_inference_mode_enabled()


def _state(layer: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(layer).items() if torch.is_tensor(value)}


def _host_state(layer: Any) -> dict[str, int]:
    return {name: value for name, value in vars(layer).items() if isinstance(value, int)}
