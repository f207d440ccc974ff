"""Measure time to first token, decoding and memory of one model.

Rules, explained in docs/cli.md: greedy decoding with transformers' own static cache and forward. The host
waits for every token, as a server does. The first generation does not count. Reported are the median of the
repetitions, the smallest and the largest.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from quantkit.bench.bench_options import FLAT, GRAPH, BenchOptions
from quantkit.bench.course import WARM_UP, Course, Times
from quantkit.bench.figures import Cell, Memory, Speed, Spread, label_of, percentile
from quantkit.bench.machine import EnergyMeter, machine, peak_bytes, used_bytes
from quantkit.calibrate.data.documents import read_text
from quantkit.checkpoint.hub.repository import resolve
from quantkit.checkpoint.source import Checkpoint
from quantkit.devices import pick_device, synchronize
from quantkit.errors import UsageError
from quantkit.eval.models import dtype_named, language_limits, release
from quantkit.eval.sizes import measure
from quantkit.kernels.ops.argmax import argmax_tokens
from quantkit.model.tokenizer import tokenize, tokenizer
from quantkit.progress import Progress
from quantkit.runtime.cache.static_cache import static_cache
from quantkit.runtime.cpu_steps.flat_forward import FlatForward
from quantkit.runtime.cuda_graphs.decode import GraphedForward, plain_forward
from quantkit.runtime.generate import cache_name, last_logits
from quantkit.runtime.host_copy import HostCopy
from quantkit.runtime.load import load_language_model
from quantkit.runtime.unpacked import unpacked

#: Decoding step: takes tokens and returns the following ones, int64 [B, 1].
Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _DecodingMode:
    """Mode of decoding: its name, the forward, and the number of generations until all steps are captured."""

    name: str
    forward: type[GraphedForward]
    generations: int


_CAPTURED = {
    FLAT: _DecodingMode("flat steps", FlatForward, 1),
    # The first builds kernel layouts, which invalidates graphs; the second sees the prompt for the first
    # time; the third captures it.
    GRAPH: _DecodingMode("CUDA graph", GraphedForward, 3),
}
#: Tokens in a profile.
_PROFILED = 4


def measure_speed(
    source: str,
    options: BenchOptions,
    *,
    profile: Path | None = None,
    progress: Progress | None = None,
    estimated: Callable[[float], None] | None = None,
) -> Speed:
    """Load the model of a directory or hub id in this process and time it.

    With `profile`, a trace of one generation by torch's profiler is written there. `estimated` is called
    once, after the first generation that counts, with the seconds that all generations will take. Memory is
    of the whole process: run it in a fresh one (`worker.py`). Raises `UsageError` for options that are
    invalid or do not fit the model or device, and `CheckpointError` for unusable checkpoints.
    """
    device = pick_device(options.device)
    checkpoint = Checkpoint.open(resolve(source))
    directory = checkpoint.directory
    vocabulary, positions = language_limits(directory)
    grid, notes = options.on(device).within(positions)
    draw = prompts_of(options, directory, vocabulary)
    before = used_bytes(device)
    started = time.perf_counter()
    dtype = None if options.dtype == "auto" else dtype_named(options.dtype)
    model = load_language_model(directory, device=device, dtype=dtype)
    synchronize(device)
    load_seconds = time.perf_counter() - started
    read = weight_bytes(model)
    # For steps only: a prompt has so many rows of x that dequantizing the weight first is usually fastest.
    slow = [line for batch in grid.batches for line in unpacked(model, batch)]
    cells: list[Cell] = []
    skipped: list[str] = []
    steady = 0
    meter = EnergyMeter(device)
    course = Course(grid, {name: one.generations for name, one in _CAPTURED.items()}, progress, estimated)
    for batch, prompt, mode in grid.settings:
        course.begin(f"{label_of(source)}: batch {batch}, prompt {prompt}, {mode}")
        try:
            cells.append(
                _cell(
                    model,
                    draw(batch, prompt),
                    mode,
                    grid.new_tokens,
                    grid.repeats,
                    read,
                    meter,
                    after=course.generated,
                )
            )
        except torch.OutOfMemoryError:
            skipped.append(f"batch {batch} with prompts of {prompt} tokens does not fit in the GPU's memory")
        except _NoGraph as error:
            skipped.append(f"no {_CAPTURED[mode].name} at batch {batch}, prompt {prompt}: {error}")
        release(device.type)
        steady = steady or used_bytes(device)
    if profile is not None:
        _write_profile(model, draw(grid.batches[0], grid.prompts[0]), profile)
    memory = Memory(before, steady, max(steady, peak_bytes(device)))
    sizes = measure(checkpoint)
    return Speed(
        label=label_of(source),
        model=source,
        format=sizes.format,
        dtype=str(model.dtype).removeprefix("torch."),
        file_bytes=sizes.nbytes,
        load_seconds=load_seconds,
        weight_bytes=read,
        memory=memory,
        machine=machine(device),
        cells=tuple(cells),
        new_tokens=grid.new_tokens,
        repeats=grid.repeats,
        prompts=f"random tokens, seed {options.seed}" if options.text is None else Path(options.text).name,
        notes=(*notes, *slow, *dict.fromkeys(skipped)),
    )


def prompts_of(options: BenchOptions, directory: Path, vocabulary: int) -> Callable[[int, int], torch.Tensor]:
    """Return `draw(batch, length)`, a function that returns prompts int64 [batch, length].

    Prompts are the same in every run: random tokens, or successive parts of the text in `options.text`. After
    its last token, the text starts over. Raises `UsageError` if it has no tokens.
    """
    if options.text is None:

        def drawn(batch: int, length: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(options.seed)
            return torch.randint(vocabulary, (batch, length), generator=generator)

        return drawn
    stream = tokenize(tokenizer(directory), read_text(Path(options.text)))
    if not len(stream):
        raise UsageError(f"{options.text} has no tokens; give a longer text, or none for random tokens.")

    def cut(batch: int, length: int) -> torch.Tensor:
        return stream[torch.arange(batch * length) % len(stream)].view(batch, length)

    return cut


def weight_bytes(model: Any) -> int | None:
    """Return the bytes of weights that a decoding step reads: all stored parameters except an embedding.

    Returns None for mixtures of experts, where the routing decides which weights are read.
    """
    if any("experts" in name.split(".") for name, _ in model.named_modules()):
        return None
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(head, "weight", None) is not embedding.weight:
        for parameter in embedding.parameters():
            del parameters[id(parameter)]
    return sum(int(parameter.nbytes) for parameter in parameters.values())


class _NoGraph(Exception):
    """Reason why a decoding step could not be captured."""


@torch.no_grad()
def _cell(
    model: Any,
    prompt: torch.Tensor,
    mode: str,
    new_tokens: int,
    repeats: int,
    read: int | None,
    meter: EnergyMeter,
    *,
    after: Callable[[Times], None] = lambda times: None,
) -> Cell:
    """Time `repeats` generations of `new_tokens` tokens after `prompt` int64 [B, P], after a warm-up.

    `mode` is eager, flat or cuda-graph; warm-up lasts until all steps are captured. `read` is the bytes of
    weights that a step reads. `after` gets the times of each generation, of the warm-up too. Raises
    `_NoGraph` if a step cannot be captured.
    """
    from transformers import StaticCache

    batch, length = prompt.shape
    prompt = prompt.to(model.device)
    cache = static_cache(model, length + new_tokens)
    if cache is None:
        cache = StaticCache(config=model.config, max_cache_len=length + new_tokens)
    prefill = step = greedy_step(model, cache, plain_forward(model))
    graphed, captured = None, _CAPTURED.get(mode)
    if captured is not None:
        graphed = captured.forward(model).renew()
        prefill, step = greedy_step(model, cache, graphed.forward), greedy_step(model, cache, graphed)
    for _ in range(1 if captured is None else captured.generations):
        after(generate_timed(prefill, step, cache, prompt, min(new_tokens, WARM_UP)))
        if graphed is not None and graphed.refused:
            raise _NoGraph(", ".join(graphed.refused))
    first, between, rates = [], [], []
    joules, decoded = 0.0, 0
    metered = meter.joules() is not None
    for _ in range(repeats):
        times = generate_timed(prefill, step, cache, prompt, new_tokens, meter)
        after(times)
        first.append(times.first)
        between += times.between
        rates.append(batch * len(times.between) / sum(times.between))
        joules += times.joules
        decoded += batch * len(times.between)
    token = percentile(between, 50)
    return Cell(
        batch=batch,
        prompt=length,
        mode=mode,
        first_token=Spread.of(first),
        prefill=Spread.of([batch * length / seconds for seconds in first]),
        token_p50=token,
        token_p99=percentile(between, 99),
        decode=Spread.of(rates),
        read_bandwidth=None if read is None else read / token,
        joules=joules / decoded if metered else None,
    )


def greedy_step(model: Any, cache: Any, forward: Any = None) -> Step:
    """Return a function from tokens int64 [B, T] to the next tokens, int64 [B, 1].

    It appends to `cache`, and takes the token of the largest logit. `forward` runs the model, by default
    `model`.
    """
    given = {cache_name(model): cache, "use_cache": True, **last_logits(model)}

    def step(tokens: torch.Tensor) -> torch.Tensor:
        logits = (forward or model)(input_ids=tokens, **given).logits
        return argmax_tokens(logits[:, -1])[:, None]

    return step


def generate_timed(
    prefill: Step,
    step: Step,
    cache: Any,
    prompt: torch.Tensor,
    new_tokens: int,
    meter: EnergyMeter | None = None,
) -> Times:
    """Generate `new_tokens` tokens after `prompt` int64 [B, T], from an empty `cache`; return the times.

    The host reads each token. As in `quantkit generate`, a GPU runs the next step while the host waits for a
    token.
    """
    cache.reset()
    synchronize(prompt.device)
    began = time.perf_counter()
    tokens = prefill(prompt)
    tokens.tolist()
    first = time.perf_counter() - began
    before = None if meter is None else meter.joules()
    # Reading the energy counter takes milliseconds.
    moments = [time.perf_counter()]
    running = step(tokens)
    for left in reversed(range(new_tokens - 1)):
        answer = HostCopy(running)
        ahead = step(running) if left and running.is_cuda else None
        answer.get()
        moments.append(time.perf_counter())
        if left:
            running = step(running) if ahead is None else ahead
    after = None if meter is None else meter.joules()
    between = [later - earlier for earlier, later in pairwise(moments)]
    used = after - before if after is not None and before is not None else 0.0
    return Times(first, between, used)


@torch.inference_mode()
def _write_profile(model: Any, prompt: torch.Tensor, path: Path) -> None:
    """Write to `path` a trace of a prefill of `prompt` int64 [B, T] and some decoding steps.

    chrome://tracing and Perfetto show it.
    """
    from torch.profiler import profile
    from transformers import StaticCache

    prompt = prompt.to(model.device)
    cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + _PROFILED)
    step = greedy_step(model, cache, plain_forward(model))
    generate_timed(step, step, cache, prompt, _PROFILED)
    with profile() as trace:
        generate_timed(step, step, cache, prompt, _PROFILED)
    trace.export_chrome_trace(str(path))
