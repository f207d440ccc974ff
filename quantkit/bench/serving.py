"""Measure latency under load: replay a trace of requests through transformers' continuous batching.

Arrivals are a Poisson process, lengths are log-uniform. One seed gives the same requests at every rate, only
closer together, so that rates compare. Requests arrive at their time even if earlier ones are unfinished.
"""

import math
import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.bench.bench_options import SERVE_DEFAULTS, ServeOptions
from quantkit.bench.figures import Load, Percentiles, Serving, label_of
from quantkit.bench.machine import machine
from quantkit.checkpoint.hub.repository import resolve
from quantkit.checkpoint.source import Checkpoint
from quantkit.devices import pick_device
from quantkit.errors import EnvironmentProblem, UsageError
from quantkit.eval.models import dtype_named, language_limits
from quantkit.eval.sizes import measure
from quantkit.progress import Progress
from quantkit.runtime.cache.static_cache import layers_without_keys
from quantkit.runtime.load import load_language_model

#: Tokens of a page of transformers' cache.
_PAGE = 256
#: Tokens of a forward on a CPU; on a GPU transformers chooses by free memory.
_CPU_BATCH_TOKENS = 512


@dataclass(frozen=True)
class Request:
    """Request: arrival in seconds at a rate of one per second, prompt, and number of tokens to generate."""

    arrival: float
    prompt: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True)
class Answer:
    """Arrival time of a request and of each of its tokens, in seconds of one clock."""

    arrival: float
    token_times: tuple[float, ...]


def make_trace(
    requests: int, prompt_tokens: tuple[int, int], new_tokens: tuple[int, int], vocabulary: int, seed: int
) -> tuple[Request, ...]:
    """Draw requests at one per second on average, the first at 0, with random tokens as prompts.

    `prompt_tokens` and `new_tokens` are (least, most), drawn evenly on a logarithmic scale.
    """
    draw = random.Random(seed)

    def length(shortest: int, longest: int) -> int:
        return round(math.exp(draw.uniform(math.log(shortest), math.log(longest))))

    made = []
    arrival = 0.0
    for _ in range(requests):
        prompt = tuple(draw.randrange(vocabulary) for _ in range(length(*prompt_tokens)))
        made.append(Request(arrival, prompt, length(*new_tokens)))
        arrival += draw.expovariate(1.0)
    return tuple(made)


def summarize(rate: float, answers: Sequence[Answer]) -> Load:
    """Summarize the latencies of `answers`, which have at least one token each."""
    first = [answer.token_times[0] - answer.arrival for answer in answers]
    whole = [answer.token_times[-1] - answer.arrival for answer in answers]
    # A single token has no time between tokens; if no request has two, that time is zero.
    between = [
        (answer.token_times[-1] - answer.token_times[0]) / (len(answer.token_times) - 1)
        for answer in answers
        if len(answer.token_times) > 1
    ] or [0.0]
    began = min(answer.arrival for answer in answers)
    seconds = max(answer.token_times[-1] for answer in answers) - began
    tokens = sum(len(answer.token_times) for answer in answers)
    return Load(
        rate=rate,
        first_token=Percentiles.of(first),
        token=Percentiles.of(between),
        end_to_end=Percentiles.of(whole),
        served=len(answers) / seconds,
        decode=tokens / seconds,
    )


def measure_serving(source: str, options: ServeOptions, *, progress: Progress | None = None) -> Serving:
    """Load the model of a directory or hub id in this process and replay a trace at each rate.

    Raises `UsageError` for options that are invalid or do not fit the model, `CheckpointError` for an
    unusable checkpoint, and `EnvironmentProblem` if continuous batching stops.
    """
    device = pick_device(options.device)
    rates, prompt_tokens, new_tokens = SERVE_DEFAULTS[device.type]
    rates, prompt_tokens = options.rates or rates, options.prompt_tokens or prompt_tokens
    new_tokens = options.new_tokens or new_tokens
    checkpoint = Checkpoint.open(resolve(source))
    vocabulary, positions = language_limits(checkpoint.directory)
    if positions is not None and prompt_tokens[1] + new_tokens[1] > positions:
        raise UsageError(
            f"prompts of up to {prompt_tokens[1]} tokens with up to {new_tokens[1]} new ones are more than "
            f"the {positions} positions of the model. Give smaller --prompt-range or --answer-range."
        )
    trace = make_trace(options.requests, prompt_tokens, new_tokens, vocabulary, options.seed)
    dtype = None if options.dtype == "auto" else dtype_named(options.dtype)
    model = load_language_model(checkpoint.directory, device=device, dtype=dtype)
    if others := layers_without_keys(model):
        raise UsageError(
            f"{source} has layers of {others[0]}, for which continuous batching of transformers has no "
            "cache. Measure it without --serve-like."
        )
    loads = []
    with _running(model, trace, device) as manager:
        # Continuous batching may change the attention, which some versions mark, and restores it at the end.
        attention = str(model.config._attn_implementation).removeprefix("paged|")
        _replay(manager, trace[:2], math.inf)
        for number, rate in enumerate(rates):
            if progress is not None:
                progress(number, len(rates), f"{label_of(source)}: {rate:g} requests per second")
            loads.append(summarize(rate, _replay(manager, trace, rate)))
    return Serving(
        label=label_of(source),
        model=source,
        format=measure(checkpoint).format,
        dtype=str(model.dtype).removeprefix("torch."),
        attention=attention,
        machine=machine(device),
        loads=tuple(loads),
        requests=options.requests,
        seed=options.seed,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
    )


def _running(model: Any, trace: Sequence[Request], device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that runs greedy continuous batching of `model`.

    Generation has no end token, so answers have full length.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    sizes: dict[str, int] = {}
    if device.type == "cpu":
        # Room for all requests at once: by default the cache takes most of the free memory.
        pages = sum(math.ceil((len(one.prompt) + one.new_tokens) / _PAGE) for one in trace)
        sizes = {"num_blocks": pages + 1, "max_batch_tokens": _CPU_BATCH_TOKENS}
    # All rates have the same prompts, which must not be found in the cache.
    config = ContinuousBatchingConfig(allow_block_sharing=False, **sizes)
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    running: AbstractContextManager[Any] = model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=config
    )
    return running


def _replay(manager: Any, trace: Sequence[Request], rate: float) -> list[Answer]:
    """Send the requests of `trace` to `manager` at `rate` per second; return their answers as they end.

    `manager` runs continuous batching. Waits for all answers. Raises `EnvironmentProblem` if it stops, or
    fails for a request.
    """
    started = time.perf_counter()
    arrivals = {}
    for number, request in enumerate(trace):
        arrival = started + request.arrival / rate
        time.sleep(max(0.0, arrival - time.perf_counter()))
        name = f"{rate:g}-{number}"
        arrivals[name] = arrival
        manager.add_request(
            list(request.prompt), name, max_new_tokens=request.new_tokens, record_timestamps=True
        )
    answers: list[Answer] = []
    while len(answers) < len(trace):
        result = manager.get_result(timeout=1.0)
        if result is None:
            if manager.is_running():
                continue
            raise EnvironmentProblem(_STOPPED.format("it ended without a message"))
        if result.error is not None:
            raise EnvironmentProblem(_STOPPED.format(result.error))
        answers.append(Answer(arrivals[result.request_id], tuple(result.timestamps)))
    return answers


_STOPPED = (
    "continuous batching of transformers stopped: {}. Try fewer or shorter requests, or another version of "
    "transformers."
)
