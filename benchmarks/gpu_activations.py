"""Time linears whose inputs a scheme rounds on a GPU, beside dense bfloat16, int4 and torch's 8-bit products.

    python benchmarks/gpu_activations.py --m 16,64,512 --json activations.json

Each figure is the median of CUDA-graph replays in microseconds, with weights rotated past the L2 cache. x is
bfloat16, and its quantization counts. `torch fp8` is `torch._scaled_mm` with a scale per row and column and
fast accumulation, `torch int8` is `torch._int_mm` without scales; quantkit's kernel quantizes x for both.
`error` is that of y against the product of the rounded x and the dequantized weight, in Frobenius norms.

`before` are the norm and the gate before such linears: alone, with rounding or quantizing of their results in
the same launch, and the kernel that rounds x by itself.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from machine import command, machine

from quantkit.kernels.eager import KernelLayout
from quantkit.kernels.gemm.fused_kernels import FRAGMENTS
from quantkit.kernels.linear import linear_parts
from quantkit.kernels.ops.activation import gate, gate_codes
from quantkit.kernels.ops.norm import add_rms_norm, norm_codes
from quantkit.kernels.ops.quantize_x import NATURAL_ORDER, quantize_x, round_x
from quantkit.kernels.tuning.shapes import shapes_named
from quantkit.kernels.tuning.timing import copies, graph_time, random_packed, rest_for
from quantkit.packing.activations import ActivationScheme, activations_named
from quantkit.packing.presets import SCHEMES
from quantkit.packing.schemes import Scheme, scheme

#: Names of `--scheme`; W4A16 is int4 whose inputs are not rounded.
NAMES = ("W4A16", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W4AFP8", "W4A8")
SHAPES = "llama3-8b.gate_up,llama3-8b.down"
MS = "1,16,64,128,256,512,1024,4096"
REPLAYS = 20
#: Weights that are timed one after the other with many rows of x, as in `quantkit tune`.
FEW_COPIES, MANY_ROWS = 3, 512
DTYPE = torch.bfloat16

Calls = Sequence[Callable[[], object]]


def named(name: str) -> Scheme:
    """The scheme of a name of `--scheme`."""
    preset = SCHEMES[name]
    return scheme(preset.format, group_size=preset.group_size, activations=preset.activations)


def inputs_named(name: str) -> ActivationScheme:
    """The activation scheme of a name of `--activations`."""
    found = activations_named(name)
    assert found is not None
    return found


def dense(x: torch.Tensor, n: int, count: int) -> Calls:
    weights = [torch.randn(n, x.shape[1], device="cuda", dtype=DTYPE) for _ in range(count)]
    return [partial(torch.matmul, x, weight.T) for weight in weights]


def torch_fp8(x: torch.Tensor, n: int, count: int) -> Calls:
    fp8 = inputs_named("fp8")
    scales = torch.rand(1, n, device="cuda")

    def product(weight: torch.Tensor) -> torch.Tensor:
        q = quantize_x(x, fp8, NATURAL_ORDER)
        rows = q.scales[: len(x), None]
        return torch._scaled_mm(q.codes, weight.T, rows, scales, out_dtype=DTYPE, use_fast_accum=True)

    weights = [torch.randn(n, x.shape[1], device="cuda").to(torch.float8_e4m3fn) for _ in range(count)]
    return [partial(product, weight) for weight in weights]


def torch_int8(x: torch.Tensor, n: int, count: int) -> Calls:
    int8 = inputs_named("int8")

    def product(weight: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(quantize_x(x, int8, NATURAL_ORDER).codes, weight.T)

    size = n, x.shape[1]
    weights = [torch.randint(-128, 128, size, device="cuda", dtype=torch.int8) for _ in range(count)]
    return [partial(product, weight) for weight in weights]


def packed(x: torch.Tensor, n: int, count: int, name: str) -> tuple[Calls, float]:
    """Calls of a packed linear, and the error of the first."""
    asked, k = named(name), x.shape[1]
    weight = random_packed(asked.of_weights.for_columns(k), n, k, x.device)
    layout = FRAGMENTS.build(weight, DTYPE)
    token = asked.for_columns(k).token
    layouts = [KernelLayout("fragments", DTYPE, tuple(part.clone() for part in layout)) for _ in range(count)]
    calls = [partial(linear_parts, x, (), None, token, n, one) for one in layouts]
    rounded = x if asked.activations is None else asked.activations.round(x.float())
    expected = rounded.float() @ weight.dequantize(torch.float32).T
    y = calls[0]().float()
    return calls, float((y - expected).norm() / expected.norm())


#: What is timed beside the schemes; int8 products of torch take more than 16 rows.
PEERS: dict[str, tuple[Callable[[torch.Tensor, int, int], Calls], int, float]] = {
    "dense": (dense, 1, 2.0),
    "torch fp8": (torch_fp8, 1, 1.0),
    "torch int8": (torch_int8, 17, 1.0),
}


def measured(n: int, k: int, m: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Microseconds of peers and schemes, and the errors of these, for x [m, k] and weights [n, k]."""
    x = torch.randn(m, k, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).to(DTYPE)
    rows: dict[str, dict[str, float]] = {}

    def count(bits: float) -> int:
        return FEW_COPIES if m >= MANY_ROWS else copies(int(n * k * bits / 8))

    def time(calls: Calls) -> float:
        return round(graph_time(calls, REPLAYS, rest=rest_for(m)), 2)

    for name, (peer, least, nbytes) in PEERS.items():
        if m >= least:
            rows[name] = {"us": time(peer(x, n, count(8 * nbytes)))}
    for name in names:
        calls, error = packed(x, n, count(named(name).format.bits), name)
        rows[name] = {"us": time(calls), "error": error}
    return rows


def before(m: int) -> dict[str, dict[str, float]]:
    """Microseconds of a norm of 4096 and a gate of 14336 columns, m rows, by how the result is rounded."""
    token, order = named("W4AFP8").for_columns(4096).token, (64, True)
    rounds = inputs_named("fp8")

    def many(columns: int) -> list[torch.Tensor]:
        count = copies(2 * m * columns)
        return [torch.randn(m, columns, device="cuda", dtype=DTYPE) for _ in range(count)]

    weight, rows, wide = torch.ones(4096, device="cuda", dtype=DTYPE), many(4096), many(2 * 14336)
    halves = [tuple(one.chunk(2, 1)) for one in wide]
    plain = [one[:, :14336].contiguous() for one in wide]
    norm = partial(add_rms_norm, weight=weight, eps=1e-5, kind="llama")
    codes = partial(norm_codes, weight=weight, eps=1e-5, kind="llama", rounding=token, span=64, sums=True)
    calls: dict[str, dict[str, Calls]] = {
        "norm": {
            "alone": [partial(norm, one, one) for one in rows],
            "rounded": [partial(norm, one, one, rounding=token) for one in rows],
            "codes": [partial(codes, one, one) for one in rows],
            "rounding alone": [partial(round_x, one, rounds) for one in rows],
        },
        "gate": {
            "alone": [partial(gate, *one, "silu") for one in halves],
            "codes": [partial(gate_codes, *one, "silu", token, *order) for one in halves],
            "rounding alone": [partial(round_x, one, rounds) for one in plain],
        },
    }
    return {
        op: {how: round(graph_time(of, REPLAYS, rest=rest_for(m)), 2) for how, of in ways.items()}
        for op, ways in calls.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--m", default=MS)
    parser.add_argument("--schemes", default=",".join(NAMES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found: list[dict[str, object]] = []
    ops = {m: before(m) for m in map(int, options.m.split(","))}
    print(json.dumps(ops), flush=True)
    for shape, (n, k) in shapes_named(options.shapes.split(",")).items():
        for m in map(int, options.m.split(",")):
            rows = measured(n, k, m, options.schemes.split(","))
            found.append({"shape": shape, "n": n, "k": k, "m": m, "rows": rows})
            print(shape, m, " ".join(f"{name} {row['us']:.1f}" for name, row in rows.items()), flush=True)
            if options.json:
                data = {"machine": machine(), "command": command(), "products": found, "before": ops}
                options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
