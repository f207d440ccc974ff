"""Hessian of an expert with few tokens: the table of docs/methods.md.

    python benchmarks/expert_moments.py MODEL TEXTS.jsonl [--layers 1,5]

Shares out the inputs of gate and down projections of a dense model to clusters, two to a token, as a router
does to experts. Rounds rows of the weights with gptq to int3 in groups of 64 by the Hessian of n tokens of a
cluster joined with those of all tokens, which count as m. Measures the error of the outputs on other tokens
of the cluster, relative to that with the Hessian of all tokens alone. Prints a row per n and a column per m,
both in tokens per feature.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from quantkit.calibrate.data.documents import read_documents
from quantkit.calibrate.data.samples import draw
from quantkit.calibrate.hessian import Hessian, gram
from quantkit.calibrate.linear_stats import LinearStats
from quantkit.calibrate.methods import METHODS
from quantkit.calibrate.parameters import TensorParameters
from quantkit.calibrate.quantize_with_hessian import quantize_calibrated_rows
from quantkit.model.tokenizer import tokenize, tokenizer
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor

OWN = (0.125, 0.5, 1.0, 2.0, 4.0)
PRIORS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
CLUSTERS, TRIED, ROWS = 8, (0, 3, 6), 128
METHOD = METHODS["gptq"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("--layers", default="1,5")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    words = tokenizer(options.model)
    documents = [
        tokenize(words, text) for text in read_documents(Path(options.texts)) if isinstance(text, str)
    ]
    tokens = draw(documents, 192, 256, 0, words.eos_token_id, options.texts).tokens
    found: dict[tuple[str, float, float], list[float]] = defaultdict(list)
    for layer in map(int, options.layers.split(",")):
        mlp = model.model.layers[layer].mlp
        inputs = inputs_of(model, {"gate": mlp.gate_proj, "down": mlp.down_proj}, tokens)
        chosen = clusters(inputs["gate"])
        for name, linear in (("gate", mlp.gate_proj), ("down", mlp.down_proj)):
            measure(name, linear.weight.data[:ROWS], inputs[name], chosen, found)
    print(
        "| | n / K | " + " | ".join(f"m = {prior:g} K" if prior else "own alone" for prior in PRIORS) + " |"
    )
    print("|" + "---|" * (len(PRIORS) + 2))
    for name in ("gate", "down"):
        for own in OWN:
            cells = [found[name, own, prior] for prior in PRIORS]
            means = [f"{sum(cell) / len(cell):.3f}" if cell else "" for cell in cells]
            print(f"| {name} | {own:g} | {' | '.join(means)} |")


@torch.no_grad()
def inputs_of(model, linears, tokens) -> dict[str, torch.Tensor]:
    """What linears see, [tokens, K] each."""
    caught: dict[str, list[torch.Tensor]] = {name: [] for name in linears}
    hooks = [
        linear.register_forward_pre_hook(lambda _, x, name=name: caught[name].append(x[0].flatten(0, -2)))
        for name, linear in linears.items()
    ]
    for batch in tokens.split(8):
        model(input_ids=batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in caught.items()}


def clusters(inputs: torch.Tensor) -> torch.Tensor:
    """The two nearest of the centres of the first half of the inputs by direction, int64 [tokens, 2]."""
    torch.manual_seed(0)
    first = F.normalize(inputs[: len(inputs) // 2], dim=1)
    centres = first[torch.randperm(len(first))[:CLUSTERS]]
    for _ in range(5):
        nearest = (first @ centres.T).argmax(1)
        centres = F.normalize(torch.stack([first[nearest == i].mean(0) for i in range(CLUSTERS)]), dim=1)
    return (F.normalize(inputs, dim=1) @ centres.T).topk(2, 1).indices


def measure(name: str, weight: torch.Tensor, inputs: torch.Tensor, chosen: torch.Tensor, found) -> None:
    """Adds relative errors of one weight by name, n per feature and prior."""
    half, features = len(inputs) // 2, inputs.shape[1]
    everyone = Hessian(gram(inputs[:half]) / half, half)
    for cluster in TRIED:
        member = (chosen == cluster).any(1)
        own, unseen = inputs[:half][member[:half]], inputs[half:][member[half:]]
        own = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(1))]
        judge = Hessian(gram(unseen) / len(unseen), len(unseen))
        base = output_error(weight, everyone, judge)
        for per_feature in OWN:
            count = int(per_feature * features)
            if count > len(own):
                continue
            few = Hessian(gram(own[:count]) / count, count)
            for prior in PRIORS:
                hessian = everyone.joined(few, prior * features) if prior else few
                found[name, per_feature, prior].append(output_error(weight, hessian, judge) / base)


def output_error(weight: torch.Tensor, hessian: Hessian, judge: Hessian) -> float:
    four = scheme("int3", group_size=64).for_columns(weight.shape[1])
    done = quantize_calibrated_rows(
        weight, four, METHOD, TensorParameters(), LinearStats.prepare(hessian, METHOD.needs)
    )
    parts = {"packed": done.rows.words, "scale": done.rows.scale, "zero_point": None}
    stored = PackedTensor.from_parts(parts, four, tuple(weight.shape)).dequantize()
    return judge.output_energy(weight - stored)


if __name__ == "__main__":
    main()
