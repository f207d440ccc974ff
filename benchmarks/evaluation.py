"""Time of an evaluation beside a bare transformers loop that computes the same perplexity.

    python benchmarks/evaluation.py MODEL --text books.txt [--window 1024] [--max-windows 8] [--rounds 3]

Both load MODEL in float32 on the CPU and score the same windows one at a time; the loop takes the loss that
transformers computes. Each is timed `--rounds` times in turn, and the fastest counts: seconds of the
processor, which other work on the machine disturbs less than those of the clock.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit.eval.evaluate import evaluate


def bare_perplexity(path: str, text: Path, window: int, max_windows: int) -> float:
    """The perplexity of the first windows of a text, as any script would compute it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, return_tensors="pt").input_ids
    losses = []
    for start in range(0, min(max_windows, ids.shape[1] // window) * window, window):
        tokens = ids[:, start : start + window]
        with torch.inference_mode():
            losses.append(float(model(input_ids=tokens, labels=tokens, use_cache=False).loss))
    return math.exp(sum(losses) / len(losses))


def timed(function: Callable[[], float | None]) -> tuple[float, float | None]:
    """Seconds of the processor that `function` takes, and what it returns."""
    started = time.process_time()
    value = function()
    return time.process_time() - started, value


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--max-windows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()

    def quantkits() -> float | None:
        report = evaluate(
            asked.model,
            texts=[asked.text],
            window=asked.window,
            max_windows=asked.max_windows,
            device="cpu",
        )
        return report.texts[asked.text.name].perplexity

    def bare() -> float:
        return bare_perplexity(asked.model, asked.text, asked.window, asked.max_windows)

    runs = {"bare loop": bare, "quantkit": quantkits}
    rounds = [{name: timed(run) for name, run in runs.items()} for _ in range(asked.rounds)]
    found = {name: [one[name] for one in rounds] for name in runs}
    fastest = {name: min(seconds for seconds, _ in results) for name, results in found.items()}
    for name, results in found.items():
        ratio = fastest[name] / fastest["bare loop"]
        print(f"{name:10} {fastest[name]:7.2f} s, {ratio:.3f} of the loop; perplexity {results[0][1]:.6f}")


if __name__ == "__main__":
    main()
