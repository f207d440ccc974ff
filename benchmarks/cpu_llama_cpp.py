"""Decoding and prompts on a CPU: quantkit beside llama.cpp, the same model and threads, in one run.

    pip install llama-cpp-python
    python benchmarks/cpu_llama_cpp.py PACKED MODEL.gguf [--threads 1,2] [--json out.json]

PACKED is a directory that quantkit wrote, MODEL.gguf the same model for llama.cpp. Each engine has a process
of its own, which waits while the other computes; they take turns for each repetition, so that what else the
machine does slows both. The first repetition does not count. Prompts are the same random tokens for both.

`generate` is transformers' `generate` of the model that `quantkit.load` returns, `quantkit generate` what
that command runs. All decode greedily, each token after the one before, with its number on the host, and do
not stop at the end of a text. Ratios are of speeds, to llama.cpp: above 1, quantkit is faster.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import cpu_machine

LLAMA = "llama.cpp"
#: Tokens of the prompt before those that are decoded.
START = 32


@dataclass(frozen=True)
class Row:
    """Medians over the repetitions, each with the smallest and the largest; ratios are to llama.cpp."""

    engine: str
    threads: int
    tokens_per_second: float
    decode_low: float
    decode_high: float
    decode_ratio: float
    prompt_seconds: float
    prompt_low: float
    prompt_high: float
    prompt_ratio: float

    def __str__(self) -> str:
        return (
            f"| {self.engine} | {self.threads} | {self.tokens_per_second:.1f} ({self.decode_low:.1f} to "
            f"{self.decode_high:.1f}) | {self.decode_ratio:.2f} | {self.prompt_seconds:.2f} "
            f"({self.prompt_low:.2f} to {self.prompt_high:.2f}) | {self.prompt_ratio:.2f} |"
        )


#: Of an engine that is loaded: seconds for a prompt, and tokens per second after one.
Timed = tuple[Callable[[list[int]], float], Callable[[list[int], int], float]]


def _llama(path: str, threads: int, room: int) -> Timed:
    from llama_cpp import Llama

    model = Llama(
        path,
        n_ctx=room,
        n_batch=room,
        n_ubatch=room,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def prompt(ids: list[int]) -> float:
        model.reset()
        began = time.perf_counter()
        model.eval(ids)
        model.sample(temp=0.0)
        return time.perf_counter() - began

    def decode(ids: list[int], tokens: int) -> float:
        stream = model.generate(ids, temp=0.0, reset=True)
        next(stream)
        began = time.perf_counter()
        for _ in range(tokens - 1):
            next(stream)
        return (tokens - 1) / (time.perf_counter() - began)

    return prompt, decode


def _loaded(path: str, threads: int) -> Any:
    import torch

    import quantkit

    torch.set_num_threads(threads)
    model = quantkit.load(path, device="cpu", dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class _Moments:
    """A streamer of transformers that notes when each token is there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        tokens.tolist()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _generate(path: str, threads: int, room: int) -> Timed:
    import torch

    model = _loaded(path, threads)

    def run(ids: list[int], tokens: int) -> list[float]:
        moments = _Moments()
        model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, streamer=moments)
        # The first is the prompt itself.
        return moments.times[1:]

    def prompt(ids: list[int]) -> float:
        began = time.perf_counter()
        return run(ids, 1)[0] - began

    def decode(ids: list[int], tokens: int) -> float:
        times = run(ids, tokens)
        return (len(times) - 1) / (times[-1] - times[0])

    return prompt, decode


def _command(path: str, threads: int, room: int) -> Timed:
    from quantkit.model.tokenizer import tokenizer
    from quantkit.runtime.generate import generate

    model, words = _loaded(path, threads), tokenizer(Path(path))

    class Numbers:
        """Gives the prompt's tokens, as numbers, for any text."""

        ids: list[int]

        def __call__(self, text: str, return_tensors: str) -> Any:
            import torch

            return argparse.Namespace(input_ids=torch.tensor([self.ids]))

        def __getattr__(self, name: str) -> Any:
            return getattr(words, name)

    numbers = Numbers()

    def prompt(ids: list[int]) -> float:
        numbers.ids = ids
        return generate(model, numbers, "", max_new_tokens=1).prefill_seconds

    def decode(ids: list[int], tokens: int) -> float:
        numbers.ids = ids
        return generate(model, numbers, "", max_new_tokens=tokens).tokens_per_second

    return prompt, decode


ENGINES: dict[str, Callable[[str, int, int], Timed]] = {
    LLAMA: _llama,
    "generate": _generate,
    "quantkit generate": _command,
}


def _work(engine: str, path: str, threads: int, room: int, pipe: Any) -> None:
    """What the process of an engine does: load, then what comes through the pipe until None comes."""
    timed = ENGINES[engine](path, threads, room)
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        number, arguments = asked
        pipe.send(timed[number](*arguments))


def measure(paths: dict[str, str], threads: int, options: argparse.Namespace) -> list[Row]:
    """The rows of all engines with so many threads."""
    import random

    drawn = random.Random(0)
    long = [drawn.randrange(3, options.vocabulary) for _ in range(options.prompt)]
    room = options.prompt + options.new_tokens
    # torch's libraries read it when they are loaded.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for engine, path in paths.items():
        pipes[engine], theirs = context.Pipe()
        processes.append(
            context.Process(target=_work, args=(engine, path, threads, room, theirs), daemon=True)
        )
        processes[-1].start()
        theirs.close()
        pipes[engine].recv()

    def ask(engine: str, number: int, *arguments: Any) -> float:
        # Threads of the engine before wait for some milliseconds before they sleep.
        time.sleep(0.1)
        pipes[engine].send((number, arguments))
        seconds: float = pipes[engine].recv()
        return seconds

    prompts: dict[str, list[float]] = {engine: [] for engine in paths}
    rates: dict[str, list[float]] = {engine: [] for engine in paths}
    for repetition in range(options.repeats + 1):
        for engine in paths:
            second, rate = ask(engine, 0, long), ask(engine, 1, long[:START], options.new_tokens)
            if repetition:
                prompts[engine].append(second)
                rates[engine].append(rate)
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(None)
        process.join()
    other_prompt, other_rate = statistics.median(prompts[LLAMA]), statistics.median(rates[LLAMA])
    rows = []
    for engine in paths:
        second, rate = statistics.median(prompts[engine]), statistics.median(rates[engine])
        decode = rate, min(rates[engine]), max(rates[engine]), rate / other_rate
        prompt = second, min(prompts[engine]), max(prompts[engine]), other_prompt / second
        rows.append(Row(engine, threads, *decode, *prompt))
    return rows


def main() -> None:
    """Parse the command line, measure with each number of threads, print and store the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packed")
    parser.add_argument("gguf")
    parser.add_argument(
        "--threads", type=lambda given: [int(one) for one in given.split(",")], default=[1, 2]
    )
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        import llama_cpp
    except ImportError as error:
        sys.exit(f"llama.cpp is not there: {error}. pip install llama-cpp-python, which needs gcc and cmake.")
    for path in (options.packed, options.gguf):
        if not Path(path).exists():
            sys.exit(f"{path}: no such file or directory.")
    options.vocabulary = json.loads((Path(options.packed) / "config.json").read_text())["vocab_size"]
    about = cpu_machine()
    print(f"{about}; prompts of {options.prompt}, {options.new_tokens} new tokens after {START}")
    print(
        "| engine | threads | tokens/s | ratio | prompt, s | ratio |\n|---|---|---|---|---|---|", flush=True
    )
    paths = {engine: options.gguf if engine == LLAMA else options.packed for engine in ENGINES}
    rows = []
    for threads in options.threads:
        rows += measure(paths, threads, options)
        print(*rows[-len(paths) :], sep="\n", flush=True)
    if options.json is not None:
        files = Path(options.packed).name, Path(options.gguf).name
        command = f"python benchmarks/cpu_llama_cpp.py {' '.join(files)} --repeats {options.repeats}"
        more = {"llama-cpp-python": llama_cpp.__version__, "prompt": options.prompt}
        record = {"machine": about, "command": command, **more, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
