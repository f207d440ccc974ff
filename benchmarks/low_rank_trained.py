"""Low-rank binary matrices beside binary and int2 of as many bits, trained alike against the original.

    python benchmarks/low_rank_trained.py books-28m mixed.jsonl --text books.txt --text docs.txt --json o.json

Replaces the linears of the blocks by each way of `WAYS`. Trains signs or codes (straight through), scales and
norms by the KL divergence from the original's predictions. Every way sees the same sequences: the original
wrote three of four, the rest are calibration text. Prints KL in nats per token of 8 windows of 1024 tokens of
each text, after the start and after the training. Trains once for each of `--rates`, the first learning rate
of the latent numbers. The starts are those of `low_rank_binary.py`. Adds the run to the file of runs that
`--json` names.
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from low_rank_binary import E4M3, add_run, by_gptq, hessians_of, linears_of, sample_tokens
from low_rank_fit import LowRank, bits_of, column_weights, fit, rank_for, signs, solved
from machine import command, cpu_machine, machine
from torch import nn
from transformers import AutoModelForCausalLM

from quantkit.calibrate.hessian import Hessian
from quantkit.model.tokenizer import tokenize, tokenizer
from quantkit.packing.schemes import scheme

LENGTH, PROMPT, WINDOW, WINDOWS = 256, 4, 1024, 8
#: Samples of calibration text, of 512 tokens.
TEXTS = 512
SCALE_RATE, NORM_RATE, WARM_UP = 1e-3, 5e-4, 50
#: Latent magnitude of a sign that least squares would turn.
DOUBTFUL = 0.05


class Trained(nn.Module):
    """A linear whose weight [N, K] is made of parameters; `bits` are those per weight when stored."""

    bits: float

    def weight(self) -> torch.Tensor:
        raise NotImplementedError

    def latents(self) -> list[nn.Parameter]:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight().to(x.dtype))


def through(values: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """Return the values, with the gradient that they have passed to the latent numbers."""
    return latent + (values - latent).detach()


class Grouped(Trained):
    """Values of a scheme without zero-points: the nearest of its code book, times a scale of each group."""

    def __init__(self, weight: torch.Tensor, hessian: Hessian, name: str, group_size: int) -> None:
        super().__init__()
        chosen = scheme(name, group_size=group_size, scale_dtype=E4M3)
        packed = by_gptq(weight, chosen, hessian)
        self.bits = packed.bits_per_weight
        book = torch.tensor(chosen.format.values, device=weight.device)
        scales = packed.group_scale()[..., None]
        codes = book[packed.codes().long()].view(len(weight), -1, group_size)
        assert torch.allclose((codes * scales).flatten(1), packed.dequantize().float(), rtol=1e-2, atol=1e-6)
        self.register_buffer("book", book)
        self.register_buffer("turn", signs(scales))
        scales = torch.where(scales == 0, scales.abs().mean(), scales.abs())
        # The weight itself where its nearest code is the one that GPTQ chose, else the edge of that code.
        exact = weight.view_as(codes) / (scales * self.turn)
        half = 0.45 * float((book[1:] - book[:-1]).min())
        near = codes + (exact - codes).clamp(-half, half)
        self.latent, self.log_scale = nn.Parameter(near), nn.Parameter(scales.log())

    def weight(self) -> torch.Tensor:
        edges = (self.book[1:] + self.book[:-1]) / 2
        codes = self.book[torch.bucketize(self.latent.detach(), edges)]
        return (through(codes, self.latent) * (self.turn * self.log_scale.exp())).flatten(1)

    def latents(self) -> list[nn.Parameter]:
        return [self.latent]


class LowRankBinary(Trained):
    """diag(a) U diag(c) V^T diag(b) of signs U [N, r] and V [K, r]."""

    def __init__(self, weight: torch.Tensor, hessian: Hessian, bits: float, iterations: int) -> None:
        super().__init__()
        n, k = weight.shape
        rank = rank_for(n, k, bits)
        self.bits = bits_of(n, k, rank)
        found = fit(weight, rank, hessian.importance, iterations=iterations)
        root = column_weights(hessian.importance)
        self.u = nn.Parameter(sure(weight * root, found, found.b * root))
        turned = found.transposed()
        self.v = nn.Parameter(sure((weight * root).T, turned, found.a, turned.a * root))
        self.scales = nn.ParameterList(part.clone() for part in (found.a, found.c, found.b))

    def weight(self) -> torch.Tensor:
        u, v = (through(signs(part.detach()), part) for part in (self.u, self.v))
        return LowRank(u, v, *self.scales).matrix()

    def latents(self) -> list[nn.Parameter]:
        return [self.u, self.v]


def sure(
    weight: torch.Tensor, found: LowRank, columns: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Return latent numbers of the signs u: how large least squares would have them, mean 1, against v."""
    right = found.v * columns[:, None] * found.c
    rows = found.a if rows is None else rows
    exact = solved(weight / torch.where(rows == 0, 1.0, rows)[:, None], right, found.u, 1e-2)
    exact = exact / exact.abs().mean()
    return found.u * torch.where(exact * found.u > 0, exact.abs(), 0.0).clamp(DOUBTFUL, 3.0)


#: Makes a trained linear of a weight, the Hessian of its inputs and a number of iterations.
Way = Callable[[torch.Tensor, Hessian, int], Trained]


def grouped(name: str, group_size: int) -> Way:
    return lambda weight, hessian, _: Grouped(weight, hessian, name, group_size)


def low_rank(bits: float) -> Way:
    return lambda weight, hessian, iterations: LowRankBinary(weight, hessian, bits, iterations)


#: What is compared, by name.
WAYS: dict[str, Way] = {
    "binary, groups of 64": grouped("binary", 64),
    "low-rank binary, 1.125 bits": low_rank(1.125),
    "int2, groups of 32": grouped("int2", 32),
    "low-rank binary, 2.25 bits": low_rank(2.25),
}


@torch.no_grad()
def written(model: Any, path: str, texts: str, count: int) -> torch.Tensor:
    """Return sequences, int64 [count, LENGTH]: the first quarter is text, the rest the model wrote itself.

    Of count 0 all text, once.
    """
    text = sample_tokens(path, texts, TEXTS).view(-1, LENGTH).to(model.device)
    if not count:
        return text
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(text), (3 * count // 4, 1), generator=generator)
    starts = torch.randint(LENGTH - PROMPT, (3 * count // 4, 1), generator=generator)
    rest = text.cpu()[rows, starts + torch.arange(PROMPT)].to(model.device)
    made = [
        model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=True,
            top_k=0,
            min_new_tokens=LENGTH - PROMPT,
            max_new_tokens=LENGTH - PROMPT,
            pad_token_id=0,
        )
        for batch in rest.split(1024)
    ]
    return torch.cat([text.repeat(-(-count // 4 // len(text)), 1)[: count // 4], *made])


@torch.no_grad()
def divergence(student: Any, teacher: Any, path: str, text: Path) -> float:
    """Return the mean of KL(teacher || student) over windows of a text, in float32."""
    ids = tokenize(tokenizer(path), text.read_text(encoding="utf-8"))[: WINDOWS * WINDOW]
    total = 0.0
    for window in ids.view(-1, 1, WINDOW).to(teacher.device):
        wanted, found = (
            F.log_softmax(model(input_ids=window, use_cache=False).logits[0].float(), -1)
            for model in (teacher, student)
        )
        total += float(F.kl_div(found, wanted, reduction="batchmean", log_target=True))
    return total / WINDOWS


def train(student: Any, teacher: Any, sequences: torch.Tensor, steps: int, batch: int, rate: float) -> float:
    """Train; returns the mean loss of the last 50 steps, in nats per token."""
    linears = [module for module in student.modules() if isinstance(module, Trained)]
    latents = [latent for linear in linears for latent in linear.latents()]
    known = {id(latent) for latent in latents}
    scales = [one for linear in linears for one in linear.parameters() if id(one) not in known]
    norms = [one for name, one in student.named_parameters() if "norm" in name]
    # Scales of low rank matrices are not logarithms: their rate is relative to their mean.
    groups: list[dict[str, Any]] = [{"params": latents, "lr": rate}, {"params": norms, "lr": NORM_RATE}]
    for one in scales:
        size = 1.0 if one.ndim == 3 else float(one.detach().abs().mean())
        groups.append({"params": [one], "lr": SCALE_RATE * size})
    for one in student.parameters():
        one.requires_grad_(False)
    for group in groups:
        for one in group["params"]:
            one.requires_grad_(True)
    adam = torch.optim.Adam(groups, betas=(0.9, 0.98))
    warm = torch.optim.lr_scheduler.LinearLR(adam, 0.02, total_iters=WARM_UP)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    order = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        rows = torch.randint(len(sequences), (batch,), generator=order)
        tokens = sequences[rows.to(sequences.device)]
        with torch.autocast(tokens.device.type, torch.bfloat16):
            with torch.no_grad():
                wanted = F.log_softmax(teacher(input_ids=tokens, use_cache=False).logits.float(), -1)
            found = F.log_softmax(student(input_ids=tokens, use_cache=False).logits.float(), -1)
            loss = F.kl_div(found.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([one for group in groups for one in group["params"]], 1.0)
        adam.step()
        warm.step()
        fall.step()
        losses.append(loss.detach())
    return float(torch.stack(losses[-50:]).mean())


def replaced(model: Any, ways: dict[str, Trained]) -> None:
    """Put trained linears in the place of those that `linears_of` names."""
    for name, made in ways.items():
        index, rest = name.split(".", 1)
        parent, _, leaf = rest.rpartition(".")
        block = model.model.layers[int(index)]
        setattr(block.get_submodule(parent) if parent else block, leaf, made)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("--text", type=Path, action="append", default=[])
    parser.add_argument("--ways", default="", help="those whose names have this pattern; all by default")
    parser.add_argument("--rates", default="0.003,0.01,0.03")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=8192, help="0 for the calibration text alone")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence in a step")
    parser.add_argument("--iterations", type=int, default=200, help="of ADMM")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    torch.manual_seed(0)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval().to(asked.device)

    teacher = load()
    sequences = written(teacher, asked.model, asked.texts, asked.sequences)
    hessians = hessians_of(
        teacher, linears_of(teacher, []), sample_tokens(asked.model, asked.texts, 32).to(asked.device)
    )
    rows = []
    for label, way in ((label, way) for label, way in WAYS.items() if re.search(asked.ways, label)):
        student = load()
        linears = linears_of(student, [])
        made = {
            name: way(linear.weight.data, hessians[name], asked.iterations)
            for name, linear in linears.items()
        }
        weights = {name: linear.weight.numel() for name, linear in linears.items()}
        bits = sum(made[name].bits * size for name, size in weights.items()) / sum(weights.values())
        replaced(student, made)
        start = {name: value.clone() for name, value in student.state_dict().items()}
        before = [divergence(student, teacher, asked.model, text) for text in asked.text]
        for rate in map(float, asked.rates.split(",")):
            student.load_state_dict(start)
            started = time.perf_counter()
            loss = train(student, teacher, sequences[:, : asked.length], asked.steps, asked.batch, rate)
            row = {"way": label, "bits": bits, "rate": rate, "steps": asked.steps, "loss": loss}
            row |= {"kl_start": before, "seconds": time.perf_counter() - started}
            row |= {"kl": [divergence(student, teacher, asked.model, text) for text in asked.text]}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if asked.json:
        run = {
            "command": command(),
            "machine": machine() if asked.device == "cuda" else cpu_machine(),
            "about": Path(asked.model).name,
            "rows": rows,
        }
        add_run(asked.json, run)


if __name__ == "__main__":
    main()
