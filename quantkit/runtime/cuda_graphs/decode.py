"""Decode with CUDA graphs: capture all launches of a step once and replay them for every token.

A step of an 8B model is more than 1000 launches. Launching them takes several times longer than running them.
`generate` of transformers calls a compiled forward for steps with a static cache. Here it receives both: a
static cache, and a forward that replays. The first step of a new shape runs once before its capture.

    generate --> forward(prompt)   plain, or a prompt graph (prefill.py)
             --> step(token)       known key: replay; new key: capture, replay; else the plain forward
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
from functools import partial
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
from quantkit.runtime.cuda_graphs import capture, prefill, refusals
from quantkit.runtime.cuda_graphs.active_adapters import ActiveAdapters
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
from quantkit.runtime.tensor_parallel import all_agree, is_first_rank, ranks_of, tell_of_ranks
from quantkit.runtime.transformers.patches import process_groups
from quantkit.runtime.transformers.patches.attention import decode_attention_in

logger = logging.getLogger("quantkit.model")

#: Graphs that a model keeps, of different batch sizes or cache lengths. Each owns the cache it writes. With
#: more sets of active adapters it is one for each.
GRAPHS = 2

#: Output that a step writes to, or None; the function that runs the step; constants only the graph refers to.
CapturedStep = tuple[Any, Callable[[], Any], list[torch.Tensor]]


class GraphedForward:
    """Forward of a model with CUDA graphs, for decoding steps: one new token per sequence.

    Call it like the model. `forward` also runs prompts. A step that cannot be captured runs without a graph;
    the reason is logged once and kept in `refused`. Outputs are copies. Call `renew` before each generation,
    as the model may have changed. Holds only a weak reference to the model.
    """

    #: True if `generate` may run one surplus step, so that the host never waits for a step.
    defers = True
    #: Log text for a step that is not captured, with the reason.
    refusal = "decoding steps are launched one kernel at a time: %s"

    def __init__(self, model: Any) -> None:
        self._reference = weakref.ref(model)
        #: Forward without graphs.
        self.plain = _PlainForward(model)
        self._graphs: OrderedDict[tuple[Any, ...], _Graph | str] = OrderedDict()
        self._fingerprint: tuple[Any, ...] = ()
        self._unfit: str | None = None
        self._adapters = ActiveAdapters(())
        #: Process group of the ranks that share the model.
        self._ranks: Any = None
        self._lock = threading.Lock()
        self._prompts = PromptGraphs(self.plain, self._lock)
        #: One of the packed modules, all of which move together.
        self._packed: Callable[[], PackedModule | None] | None = None
        self._thread = threading.local()
        self.refused: dict[str, None] = {}

    @property
    def _model(self) -> Any:
        return self._reference()

    @property
    def captures(self) -> bool:
        """Return True if steps can be captured on the device of the model."""
        return capture.captures_on(self._model.device)

    def __call__(self, **inputs: Any) -> Any:
        output = self.step(renamed(inputs))
        return self._model(**inputs) if output is None else output

    def step(self, inputs: Inputs) -> Any:
        """Return the output of a decoding step; None, with the reason logged, if it cannot be captured."""
        self._thread.last = (), lambda: None
        adapters = self._adapters.number()
        reason = self._unfit or why_not(inputs) or self._adapters.why_not(adapters)
        if reason is None:
            # All threads share the memory of inputs and outputs.
            with self._lock:
                key = adapters, *_key(inputs, inputs[CACHE])
                graph = self._graph_of(key, inputs)
                if not isinstance(graph, str):
                    self._thread.last = key, weakref.ref(graph)
                    return graph.replay(inputs)
            reason = graph
        self._refuse(reason)
        return None

    def following(self) -> Callable[[Inputs], Any]:
        """Return a function that replays this thread's last step, for inputs with other tensor values."""
        return partial(self._replay, *self._thread.last)

    def _replay(self, key: tuple[Any, ...], graph_ref: "weakref.ref[_Graph]", inputs: Inputs) -> Any:
        graph = graph_ref()
        with self._lock:
            # The graph may have been evicted, or dropped because the model changed. Adapters may be switched.
            kept = None if graph is None or self._graphs.get(key) is not graph else graph
            if kept is not None and key[0] == self._adapters.number():
                return kept.replay(renamed(inputs))
        return self(**inputs)

    def forward(self, *arguments: Any, **inputs: Any) -> Any:
        """Run the forward of the model; prompts run as CUDA graphs where possible.

        Builds the kernel layouts first if the model was moved or cast since the last call.
        """
        self._prepare()
        call = renamed(inputs)
        may_capture = not arguments and not getattr(self._thread, "plain", False)
        if may_capture and prefill.why_not(call, self._model) is None:
            self.renew()
            adapters = self._adapters.number()
            refused = self._unfit or self._prompts.refused or self._adapters.why_not(adapters)
            if refused is None and prefill.is_empty(call[CACHE]):
                output = self._prompts.run(call, partial(self._warm_up, call), adapters)
                if output is not None:
                    return output
        return self.plain(*arguments, **inputs)

    def _prepare(self) -> None:
        """Build the kernel layouts of the model again if it was moved or cast."""
        if self._packed is None:
            first = next((one for one in modules_of(self._model) if isinstance(one, PackedModule)), None)
            self._packed = (lambda: None) if first is None else weakref.ref(first)
        packed = self._packed()
        if packed is not None and packed.lacks_layouts:
            make_ready(self._model)

    def _warm_up(self, prompt: Inputs) -> None:
        with decode_attention_in(self._model):
            warm_up(self._model, self.plain, prompt)

    def _graph_of(self, key: tuple[Any, ...], inputs: Inputs) -> "_Graph | str":
        """Return the graph for steps with this key, captured on first use, or why it cannot be captured."""
        if key not in self._graphs:
            try:
                with decode_attention_in(self._model):
                    self._graphs[key] = _capture_graph(self._model, inputs, self.capture_step)
            except NotCaptured as error:
                # Keep the text only: the traceback of the error would keep inputs alive.
                self._graphs[key] = str(error)
            if self._ranks is not None:
                self._agree(key, inputs["input_ids"].device)
            if len(self._graphs) > max(GRAPHS, self._adapters.count):
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _agree(self, key: tuple[Any, ...], device: torch.device) -> None:
        """Keep the graph for `key` only if every rank has one, because all ranks must sum in the same order.

        Every rank must call this.
        """
        is_graph = not isinstance(self._graphs[key], str)
        if all_agree(self._ranks, is_graph, device):
            process_groups.drop_before_destroying(self)
            tell_of_ranks()
        elif is_graph:
            self._graphs[key] = refusals.OTHER_RANK.because()

    def drop(self) -> None:
        """Drop all graphs; later steps are captured anew."""
        self._graphs.clear()
        self._fingerprint = ()

    def renew(self) -> "GraphedForward":
        """Drop the graphs if the model has changed since their capture; return this object."""
        modules = modules_of(self._model)
        # Another thread may be capturing, with another attention in the config.
        with self._lock:
            current = fingerprint(self._model, modules)
            is_changed = current != self._fingerprint
            self._unfit = why_unfit(self._model, modules) if is_changed else None
            if is_changed and self._unfit is None:
                self._graphs.clear()
                self._ranks = ranks_of(modules)
                never = why_no_static_cache(self._model) or prefill.why_never(self._model, self.plain)
                if self._ranks is not None:
                    never = refusals.SHARED.because()
                self._prompts.clear(never)
                self._adapters = ActiveAdapters(modules)
                self._fingerprint = current
        return self

    def cache_for(self, tokens: int) -> Any:
        """Return a new static KV cache for `tokens` tokens a sequence; None if steps cannot be captured."""
        if not self.captures:
            return None
        reason = why_unfit(self._model, modules_of(self._model)) or why_no_static_cache(self._model)
        if reason is not None:
            self._refuse(reason)
            return None
        return static_cache(self._model, tokens)

    def generate(self, own: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call `own`, the model's generate, with a static cache unless the arguments ask for another cache.

        If the option `disable_compile` is set, or steps cannot be captured, pass the arguments unchanged.
        """
        if not self.captures:
            return own(*arguments, **options)
        bound = inspect.signature(own).bind_partial(*arguments, **options).arguments
        requested = {**bound.pop("kwargs", {}), **bound}
        defaults = self._model.generation_config
        if option_of(requested, defaults, "disable_compile"):
            with self._kernel_by_kernel():
                return own(*arguments, **options)
        tokens = max_tokens(requested, defaults)
        cache = None if tokens is None else self.cache_for(tokens)
        if cache is not None:
            options[CACHE] = cache
            if self.defers and async_sampling.is_supported(requested, defaults):
                options["custom_generate"] = partial(
                    async_sampling.sample, streamer=requested.get("streamer")
                )
        output = own(*arguments, **options)
        if cache is not None and getattr(output, CACHE, None) is cache:
            setattr(output, CACHE, to_dynamic(cache, self._model))
        return output

    @contextmanager
    def _kernel_by_kernel(self) -> Iterator[None]:
        """Context manager: prompts of this thread run without CUDA graphs inside."""
        self._thread.plain = True
        try:
            yield
        finally:
            self._thread.plain = False

    def _refuse(self, reason: str) -> None:
        if reason not in self.refused:
            self.refused[reason] = None
            if is_first_rank():
                logger.warning(self.refusal, reason)

    def capture_step(
        self, step: Callable[[], Any], inputs: Inputs, rewind: Callable[[], None]
    ) -> CapturedStep:
        """Capture `step`, which reads `inputs`, as a graph of fused launches; `rewind` undoes its writes.

        Returns a `CapturedStep`: (output, function that runs the step, constants that only the graph reads).
        """
        if self._ranks is None:
            # No fusion under ranks: a rank may have kernels to compile and run the step, with its sums, more
            # often.
            step = fused_forward("decoding steps", step, inputs, rewind)
        output, run = capture.capture(step, rewind, inputs["input_ids"].device)
        check_output(output)
        return output, run, constants_of(step)


def plain_forward(model: Any) -> Callable[..., Any]:
    """Return the forward of `model` without graphs; a forward set on the instance takes precedence."""
    forward: Callable[..., Any] = model.forward if "forward" in vars(model) else _forward_of_class(model)
    return forward


def _forward_of_class(model: Any) -> Callable[..., Any]:
    """Return the `forward` of the class of `model`, as it was before `patches/generation.py` replaced it."""
    before = getattr(type(model), "class_before", None)
    forward: Callable[..., Any] = model.forward if before is None else before.forward.__get__(model)
    return forward


class _PlainForward:
    """Forward of a model without graphs, which holds a weak reference to the model only."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)

    def __call__(self, *arguments: Any, **inputs: Any) -> Any:
        return _forward_of_class(self._model())(*arguments, **inputs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_forward_of_class(self._model()))


def why_not(inputs: Mapping[str, Any]) -> str | None:
    """Return why a decoding step of a model with `inputs` cannot be captured; None if it can."""
    cache, ids = inputs.get(CACHE), inputs.get("input_ids")
    if ids is None or ids.dim() != 2 or ids.shape[1] != 1:
        return refusals.NOT_ONE_TOKEN.because()
    # Caches of recurrent models, such as xLSTM's, may have no layers.
    if not all(type(layer) is StaticLayer for layer in getattr(cache, "layers", [None])):
        return refusals.NOT_STATIC.because()
    used = used_layers(cache)
    if not used:
        return refusals.EMPTY_CACHE.because()
    if len({layer.keys.device for layer in used} | {ids.device}) > 1:
        return refusals.SEVERAL_DEVICES.because()
    reason = why_not_asked(inputs, ids.device)
    if reason is not None:
        return reason
    odd = [name for name, value in inputs.items() if value is not cache and not is_plain(value)]
    kinds = [refusals.OTHER_INPUT.because(name=name, kind=type(inputs[name]).__name__) for name in odd]
    return kinds[0] if kinds else None


@dataclass(eq=False)
class _Graph:
    """Captured decoding step: the tensors that it reads, the cache tensors that it writes, and its output.

    state       tensors of each cache layer in use, by name
    output      tensors that each replay overwrites; None if `run` returns its own output
    run         replays the step
    constants   tensors that the graph reads and no other object refers to
    cache       weak reference to the cache object that holds `state` at present
    """

    inputs: dict[str, Any]
    state: list[dict[str, torch.Tensor]]
    output: Any
    run: Callable[[], Any]
    constants: list[torch.Tensor]
    cache: weakref.ref[Any]

    def replay(self, inputs: Inputs) -> Any:
        """Replay the step for `inputs`; return a copy of the output.

        Afterwards the cache in `inputs` holds the tensors of `state`, which each replay writes.
        """
        cache = inputs[CACHE]
        self._attach(cache)
        copy_tensors(inputs, self.inputs)
        output = self.run()
        return own_output(self.output if output is None else output, cache)

    def _attach(self, cache: Any) -> None:
        """Copy the tensors of `cache` to `state`, which the graph writes; then make `cache` hold `state`.

        Another cache that holds `state` and is still in use gets copies.
        """
        layers = used_layers(cache)
        if all(
            getattr(layer, name) is tensor
            for layer, state in zip(layers, self.state, strict=True)
            for name, tensor in state.items()
        ):
            return
        previous = self.cache()
        if previous is not None and previous is not cache:
            # A caller still uses that cache: give it copies.
            for layer, state in zip(used_layers(previous), self.state, strict=True):
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


def _capture_graph(model: Any, inputs: Inputs, capture: Callable[..., CapturedStep]) -> _Graph:
    """Capture a decoding step of `model` for inputs of these shapes by `capture`; keep the cache as it is."""
    cache = inputs[CACHE]
    # Cache object owned by the graph, on the same tensors: the cache of the caller is neither kept nor
    # changed.
    own = copy.copy(cache)
    own.layers = [copy.copy(layer) for layer in cache.layers]
    state = [_state(layer) for layer in used_layers(own)]
    static = {name: cloned(value) for name, value in inputs.items()} | {CACHE: own}
    # Keys and values need no rewind: the next step overwrites them. Counters do.
    counters = [
        (tensor, tensor.clone())
        for layer in state
        for name, tensor in layer.items()
        if name not in ("keys", "values")
    ]

    def step() -> Any:
        return model(**static)

    def rewind() -> None:
        for tensor, before in counters:
            tensor.copy_(before)

    host = [_host_state(layer) for layer in own.layers]
    output, run, constants = capture(step, static, rewind)
    if [_host_state(layer) for layer in own.layers] != host:
        raise NotCaptured(refusals.COUNTS_ON_HOST.because())
    return _Graph(static, state, output, run, constants, weakref.ref(cache))


def _key(inputs: Inputs, cache: Any) -> tuple[Any, ...]:
    """Return the key of a step: shapes, dtypes and other properties. Steps with equal keys share a graph."""
    inputs_key = outline({name: value for name, value in inputs.items() if value is not cache})
    layers = tuple((layer.keys.shape, layer.values.shape, layer.keys.dtype) for layer in used_layers(cache))
    return inputs_key, layers, torch.is_inference_mode_enabled()


def _state(layer: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(layer).items() if torch.is_tensor(value)}


def _host_state(layer: Any) -> dict[str, int]:
    return {name: value for name, value in vars(layer).items() if isinstance(value, int)}
