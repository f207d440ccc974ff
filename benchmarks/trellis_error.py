"""Error of trellis codes beside int2: how near weights come to their values, at 2 bits and a scale per 64.

    python benchmarks/trellis_error.py books-28m --json benchmarks/results/guide/trellis-error.json

The codes are those of `trellis_kernel.py`. A chunk of 64 weights has 128 bits, read as a ring. Viterbi's
algorithm finds the best windows, with those of the seam taken from a pass that begins half a chunk later. The
scale is the best of `SCALES` times the root mean square. int2 is that of `mse`. Weights are Gaussian numbers,
and chunks of a model's linears, evenly spaced.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from machine import command, cpu_machine
from transformers import AutoModelForCausalLM
from trellis_decode import CHUNK, hashed, instructions

from quantkit.calibrate.methods import quantize_tensor
from quantkit.packing.schemes import scheme

BITS, WINDOWS = 16, 1 << 16
SCALES = (0.9, 0.97, 1.04)


def values_of(code: str) -> tuple[torch.Tensor, int]:
    """Return the weights of each window, float32 [WINDOWS, 1 or 2], and the bits that it moves by.

    Their mean square is 1.
    """
    halves = hashed(torch.arange(WINDOWS)).float()
    values, step = (halves.sum(1, keepdim=True), 2) if code == "trellis" else (halves, 4)
    return values / values.square().mean().sqrt(), step


def viterbi(
    chunk: torch.Tensor, values: torch.Tensor, step: int, seam: int | None = None
) -> tuple[float, list[int]]:
    """Return the least squared error of a chunk [steps, 1 or 2], and the windows that have it.

    `seam` are the bits that the first window and the one after the last have in common; None if they may
    differ.
    """
    kept, moved = BITS - step, 1 << step
    cost = torch.zeros(WINDOWS)
    if seam is not None:
        cost.fill_(math.inf)
        cost[(torch.arange(moved) << kept) | seam] = 0
    before: list[torch.Tensor] = []
    for number, weights in enumerate(chunk):
        if number:
            # The window before has `moved` values of the bits that left.
            least = cost.view(-1, moved).min(1)
            before.append(least.indices)
            cost = least.values.repeat(moved)
        cost = cost + (weights - values).square().sum(1)
    if seam is not None:
        cost = torch.where(torch.arange(WINDOWS) >> step == seam, cost, math.inf)
    error, last = cost.min(0)
    windows = [int(last)]
    for left in reversed(before):
        rest = windows[-1] & ((1 << kept) - 1)
        windows.append((rest << step) | int(left[rest]))
    return float(error), windows[::-1]


def ring_error(chunk: torch.Tensor, values: torch.Tensor, step: int) -> float:
    """Return the squared error of a chunk whose windows are a ring."""
    half = len(chunk) // 2
    _, windows = viterbi(chunk.roll(half, 0), values, step)
    return viterbi(chunk, values, step, windows[half] & ((1 << BITS - step) - 1))[0]


def relative_error(chunks: torch.Tensor, code: str) -> float:
    """Return the squared error of chunks [n, CHUNK] over the sum of their squares."""
    if code == "int2":
        stored = quantize_tensor(chunks, scheme("int2", group_size=CHUNK)).dequantize().float()
        return float((chunks - stored).square().sum() / chunks.square().sum())
    values, step = values_of(code)
    total = 0.0
    for chunk in chunks:
        root = chunk.square().mean().sqrt()
        steps = (chunk / root).view(-1, values.shape[1])
        total += float(root**2) * min(ring_error(steps, values * scale, step) for scale in SCALES)
    return total / float(chunks.square().sum())


def chunks_of(path: str, count: int) -> torch.Tensor:
    """Return chunks of the weights of a model's blocks, evenly spaced."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    parts = [part for part in model.model.layers.parameters() if part.dim() == 2]
    whole = torch.cat([part.data.reshape(-1, CHUNK) for part in parts])
    return whole[:: len(whole) // count][:count].clone()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    torch.manual_seed(0)
    of_model = {"Gaussian": torch.randn(asked.chunks, CHUNK)}
    of_model[Path(asked.model).name] = chunks_of(asked.model, asked.chunks)
    found = {
        name: {code: relative_error(chunks, code) for code in ("int2", "trellis", "pairs")}
        for name, chunks in of_model.items()
    }
    print(json.dumps(found))
    if asked.json:
        counts = {code: instructions(code) for code in ("int2", "trellis", "pairs")}
        run = {"command": command(), "machine": cpu_machine(), "chunks": asked.chunks, "instructions": counts}
        asked.json.write_text(json.dumps({**run, "weights": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
