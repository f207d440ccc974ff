"""Low-rank binary matrices beside planes of binary and int2, at equal bits with all scales counted.

    python benchmarks/low_rank_binary.py books-28m mixed.jsonl --text books.txt --json o.json
    python benchmarks/low_rank_binary.py SmolLM2-135M-Instruct mixed.jsonl --bits 1.125 --layers 5,20

Replaces the linears of the blocks by each way of `ways`. Prints means over linears of three relative squared
errors: of the weights, of the weights with the mean square of their input features, and of the outputs. The
Hessian is that of the original's inputs on 32 samples of 512 tokens. With a text the KL divergence from the
original is that of 4 windows of 512 tokens, in nats per token. `low_rank_fit.py` fits. Adds the run to
the file of runs that `--json` names.

"gptq" rounds by the Hessian; planes have no such method. "weighted" counts the error of a weight by the mean
square of its input feature. All else is fitted to the weights alone.
"""

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from low_rank_fit import bits_of, fit, rank_for
from machine import command, cpu_machine, machine
from torch import nn
from transformers import AutoModelForCausalLM

from quantkit.calibrate.data.documents import read_documents
from quantkit.calibrate.data.samples import draw
from quantkit.calibrate.hessian import Hessian, gram
from quantkit.calibrate.linear_stats import LinearStats
from quantkit.calibrate.methods import METHODS, packed_rows, quantize_tensor
from quantkit.calibrate.parameters import fit_parameters
from quantkit.calibrate.quantize_with_hessian import quantize_calibrated_rows
from quantkit.model.tokenizer import tokenize, tokenizer
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.tensor import PackedTensor

E4M3 = torch.float8_e4m3fn
SAMPLES, LENGTH, WINDOWS = 32, 512, 4
#: Makes a weight and its bits per weight of a weight and the Hessian of its inputs.
Way = Callable[[torch.Tensor, Hessian], tuple[torch.Tensor, float]]


def packed(name: str, group_size: int, scale_dtype: torch.dtype | None = None, method: str = "mse") -> Way:
    """Return the way of a scheme of quantkit's."""

    def make(weight: torch.Tensor, hessian: Hessian) -> tuple[torch.Tensor, float]:
        chosen = scheme(name, group_size=group_size, scale_dtype=scale_dtype).for_columns(weight.shape[1])
        stored = quantize_tensor(weight, chosen) if method == "mse" else by_gptq(weight, chosen, hessian)
        return stored.dequantize().float(), stored.bits_per_weight

    return make


def by_gptq(weight: torch.Tensor, chosen: Scheme, hessian: Hessian) -> PackedTensor:
    method, shape = METHODS["gptq"], (weight.shape[0], weight.shape[1])
    shared = fit_parameters(lambda: iter([weight]), shape, chosen, method.scale_search.fit)
    stats = LinearStats.prepare(hessian, method.needs)
    rows = quantize_calibrated_rows(weight, chosen, method, shared, stats).rows
    return packed_rows([rows], shared, chosen, shape)


def low_rank(bits: float, iterations: int, steps: int, weighted: bool) -> Way:
    """Return the way of a low-rank binary matrix of at most `bits` per weight."""

    def make(weight: torch.Tensor, hessian: Hessian) -> tuple[torch.Tensor, float]:
        n, k = weight.shape
        rank = rank_for(n, k, bits)
        found = fit(
            weight, rank, hessian.importance if weighted else None, iterations=iterations, steps=steps
        )
        return found.matrix(), bits_of(n, k, rank)

    return make


def ways(bits: float, iterations: int, steps: int) -> dict[str, Way]:
    """Return what is compared at 1.125 or 2.25 bits."""
    made: dict[str, Way] = {}
    if bits == 1.125:
        made |= {"binary, groups of 128": packed("binary", 128)}
        made |= {"binary, groups of 64, e4m3": packed("binary", 64, E4M3)}
        made |= {"binary, groups of 64, e4m3, gptq": packed("binary", 64, E4M3, "gptq")}
    else:
        made |= {"binary-residual, groups of 128": packed("binary-residual", 128)}
        made |= {"binary-residual, groups of 64, e4m3": packed("binary-residual", 64, E4M3)}
        made |= {"int2, groups of 32, e4m3": packed("int2", 32, E4M3)}
        made |= {"int2, groups of 32, e4m3, gptq": packed("int2", 32, E4M3, "gptq")}
    made |= {"low-rank binary": low_rank(bits, iterations, steps, False)}
    return made | {"low-rank binary, weighted": low_rank(bits, iterations, steps, True)}


def linears_of(model: Any, layers: Sequence[int]) -> dict[str, nn.Linear]:
    blocks = [(i, model.model.layers[i]) for i in layers or range(len(model.model.layers))]
    return {
        f"{i}.{name}": module
        for i, block in blocks
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    }


def sample_tokens(path: str, texts: str, samples: int) -> torch.Tensor:
    """Return calibration tokens, int64 [samples, LENGTH]."""
    words = tokenizer(path)
    found = [tokenize(words, text) for text in read_documents(Path(texts)) if isinstance(text, str)]
    return draw(found, samples, LENGTH, 0, words.eos_token_id, texts).tokens


def windows_of(path: str, text: Path) -> torch.Tensor:
    """Return the first windows of a text, int64 [WINDOWS, LENGTH]."""
    ids = tokenize(tokenizer(path), text.read_text(encoding="utf-8"))
    return ids[: WINDOWS * LENGTH].view(WINDOWS, LENGTH)


@torch.no_grad()
def hessians_of(model: Any, linears: dict[str, nn.Linear], tokens: torch.Tensor) -> dict[str, Hessian]:
    """Return the Hessian of the inputs of each linear."""
    sums: dict[str, torch.Tensor] = {}

    def add(name: str, x: torch.Tensor) -> None:
        found = gram(x.flatten(0, -2).float())
        sums[name] = sums[name] + found if name in sums else found

    hooks = [
        linear.register_forward_pre_hook(lambda _, x, name=name: add(name, x[0]))
        for name, linear in linears.items()
    ]
    for batch in tokens.split(4):
        model.model(input_ids=batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: Hessian(found / tokens.numel(), tokens.numel()) for name, found in sums.items()}


@torch.no_grad()
def log_probabilities(model: Any, windows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield log-probabilities of the next token, window by window."""
    for window in windows:
        yield F.log_softmax(model(input_ids=window[None], use_cache=False).logits[0].float(), -1)


def divergence(model: Any, windows: torch.Tensor, wanted: Sequence[torch.Tensor]) -> float:
    """Return the mean of KL(original || model)."""
    pairs = zip(wanted, log_probabilities(model, windows), strict=True)
    found = [F.kl_div(other, right, reduction="batchmean", log_target=True) for right, other in pairs]
    return float(torch.stack(found).mean())


def errors(weight: torch.Tensor, made: torch.Tensor, hessian: Hessian) -> dict[str, float]:
    """Return relative squared errors: of weights, weighted by input features, and of outputs."""
    rest, diagonal = weight - made, hessian.importance
    return {
        "weights": float(rest.square().sum() / weight.square().sum()),
        "weighted": float((rest.square() @ diagonal).sum() / (weight.square() @ diagonal).sum()),
        "outputs": hessian.output_energy(rest) / hessian.output_energy(weight),
    }


def about(model: str, layers: str) -> str:
    """Return which linears were replaced, as "books-28m, layers 1,5"."""
    return Path(model).name + (f", layer{'s' * (',' in layers)} {layers}" if layers else "")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("--bits", default="1.125,2.25")
    parser.add_argument("--layers", default="", help="as 1,5; all by default")
    parser.add_argument("--ways", default="", help="those whose names have this pattern; all by default")
    parser.add_argument("--iterations", type=int, default=120, help="of ADMM")
    parser.add_argument("--steps", type=int, default=0, help="of Adam, on latent numbers")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval().to(asked.device)
    layers = [int(layer) for layer in asked.layers.split(",") if layer]
    linears = linears_of(model, layers)
    if layers and not asked.text:
        # Nobody needs the blocks behind these.
        del model.model.layers[max(layers) + 1 :]
    hessians = hessians_of(model, linears, sample_tokens(asked.model, asked.texts, SAMPLES).to(asked.device))
    weights = {name: linear.weight.data for name, linear in linears.items()}
    windows, wanted = None, []
    if asked.text:
        windows = windows_of(asked.model, asked.text).to(asked.device)
        wanted = list(log_probabilities(model, windows))
    rows = []
    for bits in map(float, asked.bits.split(",")):
        chosen = ways(bits, asked.iterations, asked.steps)
        for label, way in ((label, way) for label, way in chosen.items() if re.search(asked.ways, label)):
            started, found, size = time.perf_counter(), defaultdict(list), 0.0
            for name, linear in linears.items():
                made, stored = way(weights[name], hessians[name])
                linear.weight.data = made
                size += stored * made.numel()
                for key, error in errors(weights[name], made, hessians[name]).items():
                    found[key].append(error)
            row: dict[str, Any] = {"at": bits, "way": label}
            row["bits"] = size / sum(weight.numel() for weight in weights.values())
            row |= {key: sum(values) / len(values) for key, values in found.items()}
            row["seconds"] = time.perf_counter() - started
            if windows is not None:
                row["kl"] = divergence(model, windows, wanted)
            for name, linear in linears.items():
                linear.weight.data = weights[name]
            rows.append(row)
            print(json.dumps(row), flush=True)
    if asked.json:
        kind = machine() if asked.device == "cuda" else cpu_machine()
        add_run(
            asked.json,
            {"command": command(), "machine": kind, "about": about(asked.model, asked.layers), "rows": rows},
        )


def add_run(path: Path, run: dict[str, Any]) -> None:
    """Add a run to a file of runs, in place of that of the same command."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    kept = [one for one in runs if one["command"] != run["command"]]
    path.write_text(json.dumps({"runs": [*kept, run]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
