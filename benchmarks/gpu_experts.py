"""Time the experts of a mixture-of-experts model on a GPU: packed and grouped, one by one, and dense.

    python benchmarks/gpu_experts.py --formats int4,nvfp4 --tokens 1,4,16,64,512 --json o.json

Microseconds of a call of the experts module: random weights, bfloat16 activations, and for every token other
experts, drawn anew for each of the calls of a round. `grouped`, the same `in a step`, with as few launches as
in a model of `quantkit.load`, and transformers' `grouped_mm` and `batched_mm` are medians of CUDA-graph
replays. The loops, of which the host reads which experts are chosen, are no graph: they are timed call by
call, with the launches and waits of a model without graphs. So is `grouped eager`, to compare with them. The
floor is a kernel that only reads the packed bytes of the experts that are chosen.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from machine import machine
from torch import nn
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from quantkit.kernels.tuning.timing import graph_time, random_packed, read_time
from quantkit.model.experts import DOWN, GATE_UP
from quantkit.packing.schemes import Scheme, scheme
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.passes.patterns import fused

#: Experts, hidden and intermediate size, and experts per token.
SHAPES = {
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "qwen3-30b-a3b": (128, 2048, 768, 8),
}
FORMATS = "int4,int8,mxfp4,nvfp4"
TOKENS = "1,4,16,64,512"
#: Calls of a round.
ROUND = 8
#: Of transformers' dense experts; those that read choices on the host are not captured.
DENSE = {"grouped_mm": True, "batched_mm": True, "eager": False}


@dataclass(frozen=True)
class Row:
    """What was timed, with the microseconds of one call, or None with the reason why there are none."""

    shape: str
    what: str
    tokens: int
    us: float | None
    note: str = ""


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(shape: str, tokens: int) -> list[Inputs]:
    """Those of the calls of a round, of which no two have the same experts."""
    return [drawn(shape, tokens, seed) for seed in range(ROUND)]


def drawn(shape: str, tokens: int, seed: int) -> Inputs:
    count, hidden, _, slots = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, generator=generator)
    scores = torch.rand(tokens, count, device="cuda", generator=generator)
    weights, index = scores.softmax(-1).topk(slots)
    return x, index, weights / weights.sum(-1, keepdim=True)


def packed_experts(shape: str, row: Scheme) -> PackedExperts:
    count, hidden, intermediate, _ = SHAPES[shape]
    schemes = row.for_columns(hidden), row.for_columns(intermediate)
    module = PackedExperts((count, hidden, intermediate), nn.SiLU(), *schemes, "quantkit")
    for parameter, halves, sides in (
        (GATE_UP, 2, (intermediate, hidden)),
        (DOWN, 1, (hidden, intermediate)),
    ):
        # All matrices have the same numbers, in places of their own.
        one = random_packed(row, *sides, torch.device("cuda"))
        for part, tensor in one.parts():
            stored = module._stored[parameter]
            stack = torch.cat([stored.to_file(part, tensor)] * halves)
            whole = stack.expand(count, *stack.shape).contiguous()
            setattr(module, stored.part_name(parameter, part), nn.Parameter(whole, requires_grad=False))
    module.build_kernel_layouts(torch.bfloat16)
    return module


def dense_experts(shape: str) -> MixtralExperts:
    count, hidden, intermediate, slots = SHAPES[shape]
    config = MixtralConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_local_experts=count,
        num_experts_per_tok=slots,
    )
    config._experts_implementation = "eager"
    with torch.device("cuda"):
        experts = MixtralExperts(config).to(torch.bfloat16)
    for parameter in experts.parameters():
        parameter.data.normal_(std=0.02)
        parameter.requires_grad_(False)
    return experts


def eager_time(calls: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of calls, each begun when the work of the last has ended."""
    times = []
    for call in [*calls] * 4:
        torch.cuda.synchronize()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times[len(calls) :])


def timed(
    shape: str, what: str, run: Callable[..., object], operands: Sequence[Inputs], captured: bool
) -> Row:
    tokens = operands[0][0].shape[0]
    calls = [partial(run, *one) for one in operands]
    try:
        us = graph_time(calls) if captured else eager_time(calls)
    except Exception as error:
        return Row(shape, what, tokens, None, f"{type(error).__name__}: {error}".splitlines()[0][:200])
    return Row(shape, what, tokens, us)


def measure_packed(shape: str, name: str, counts: Sequence[int]) -> list[Row]:
    module = packed_experts(shape, scheme(name))
    count = SHAPES[shape][0]
    every = sum(p.numel() * p.element_size() for p in module.parameters())
    found = []
    for tokens in counts:
        operands = inputs(shape, tokens)
        chosen = sum(index.unique().numel() for _, index, _ in operands)
        floor = read_time(every * chosen // (count * len(operands)))
        found.append(Row(shape, f"{name} floor", tokens, floor))
        if module.is_grouped(torch.bfloat16):
            agree(module, operands[0], name)
            found.append(timed(shape, f"{name} grouped", module, operands, True))
            step = fused(module, operands[0], "experts")
            found.append(timed(shape, f"{name} grouped in a step", step, operands, True))
            found.append(timed(shape, f"{name} grouped eager", module, operands, False))
        found.append(timed(shape, f"{name} loop", module._one_by_one, operands, False))
        show(found)
    return found


def agree(module: PackedExperts, operands: Inputs, name: str) -> None:
    """Both ways compute the same but for roundings."""
    found, expected = module(*operands).double(), module._one_by_one(*operands).double()
    error = float((found - expected).norm() / expected.norm())
    print(f"{name} {tuple(operands[0].shape)}: grouped differs by {error:.1e}", file=sys.stderr)
    if not error < 2e-2:
        raise SystemExit(f"{name}: grouped experts are wrong, relative error {error}")


def measure_dense(shape: str, counts: Sequence[int]) -> list[Row]:
    experts = dense_experts(shape)
    found = []
    for tokens in counts:
        operands = inputs(shape, tokens)
        for what, captured in DENSE.items():
            if what == "batched_mm" and tokens > 4:
                continue  # it copies the weights of every pair
            experts.config._experts_implementation = what
            found.append(timed(shape, f"dense {what}", experts, operands, captured))
        show(found)
    return found


_shown: set[int] = set()


def show(rows: Sequence[Row]) -> None:
    for row in rows:
        if id(row) not in _shown:
            _shown.add(id(row))
            figure = f"{row.us:.1f} us" if row.us is not None else f"failed: {row.note}"
            print(f"{row.shape} T={row.tokens} {row.what}: {figure}", file=sys.stderr, flush=True)


def table(rows: Sequence[Row], counts: Sequence[int]) -> str:
    """A table per shape: what was timed against numbers of tokens, in microseconds."""
    lines = []
    for shape in dict.fromkeys(row.shape for row in rows):
        lines += [f"{shape}, us", "", "| | " + " | ".join(f"T={t}" for t in counts) + " |"]
        lines += ["|---|" + "---|" * len(counts)]
        for what in dict.fromkeys(row.what for row in rows if row.shape == shape):
            us = {row.tokens: row.us for row in rows if (row.shape, row.what) == (shape, what)}
            figures = (f"{us[t]:.1f}" if us.get(t) is not None else "" for t in counts)
            lines += [f"| {what} | " + " | ".join(figures) + " |"]
        lines += [""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="mixtral-8x7b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--formats", default=FORMATS, metavar="A,B", help=f"default {FORMATS}")
    parser.add_argument("--tokens", default=TOKENS, metavar="1,2", help=f"default {TOKENS}")
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="store the figures")
    options = parser.parse_args()
    counts = [int(number) for number in options.tokens.split(",")]
    rows: list[Row] = []
    with torch.no_grad():
        for shape in options.shapes.split(","):
            rows += measure_dense(shape, counts)
            torch.cuda.empty_cache()
            for name in filter(None, options.formats.split(",")):
                rows += measure_packed(shape, name, counts)
                torch.cuda.empty_cache()
                if options.json is not None:
                    stored = {"about": machine(), "rows": [asdict(row) for row in rows]}
                    options.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(machine(), "", table(rows, counts), sep="\n")


if __name__ == "__main__":
    main()
