"""Write docs/performance.md from the runs in benchmarks/results.

    python benchmarks/performance_page.py            # writes the page
    python benchmarks/performance_page.py --check    # exits with 1 where it is not up to date

Every figure comes from a stored run, which names its command, machine, versions and commit. A new run is
stored with `--json` of its script under the name that `SOURCES` has. Needs no GPU and no torch.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median
from textwrap import fill
from typing import Any

from matmul_report import FEW, OURS, Row, Run, table
from written_pages import ROOT, write_or_check

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
#: Linears of a decoder layer of Llama-3 8B, whose times are added up.
LAYER = tuple(f"llama3-8b.{name}" for name in ("qkv", "o", "gate_up", "down"))
#: Names of GPUs, of their run of a layer, and of their run of other models.
GPUS = (("H200", "h200-triton-3.6", "h200-shapes"), ("H100", "h100", "h100-models"))
#: Products that take longer than this multiple with the newer Triton are counted, and from there on listed.
SLOWER, LISTED = 1.10, 1.2

HEAD = """\
# Performance

<!-- Written by `python benchmarks/performance_page.py` from benchmarks/results. Do not edit it here. -->

Each section names a stored run in `benchmarks/results`; [the last one](#the-runs) has its command, machine,
versions and commit. Speed is not tested in `make test`. [kernels.md](kernels.md) explains the kernels.
"""

READING = f"""\
## Linears on a GPU

M is the number of rows of x: sequences at decoding, tokens in a prompt. Times are microseconds of
`quantkit.linear` in bfloat16, the median of CUDA-graph replays over weights that exceed the L2 cache. The
second number is

- up to M = {FEW} the time as a multiple of the floor. The floor is a kernel that only reads the packed bytes.
- above M = {FEW} the speed against dense bf16. More than 1 is faster.

Products with 128 rows and more are timed after a rest of 0.12 s, as a GPU at its power limit clocks down
([under load](#under-load)). A kernel starts while the one before it ends, so a small weight can take less
than the floor. Groups are those that each format has by default; int2 has groups of 64.
"""


def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def grid(cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row of `cells` is its head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in cells)
    lines = [head, "|---" * len(cells[0]) + "|", *body]
    # An empty cell is one space; two may follow each other.
    return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in lines)


def paragraph(*parts: str) -> str:
    """Sentences in lines of at most 120 characters."""
    return fill(" ".join(parts), 120, break_long_words=False, break_on_hyphens=False)


def source(*names: str) -> str:
    """A sentence with the runs that a table is of."""
    return "Run: " + ", ".join(f"`{name}.json`" for name in names) + "."


def total(run: Run, shapes: Sequence[str]) -> Run:
    """The run with one shape, "layer": the times of `shapes` added up, where all of them were timed."""
    rows = []
    for row in run.rows:
        if row.shape != shapes[0]:
            continue
        same = [
            other
            for other in run.rows
            if (other.library, other.format, other.m) == (row.library, row.format, row.m)
            and other.shape in shapes
        ]
        if len(same) == len(shapes):
            sums = {name: sum(getattr(one, name) for one in same) for name in ("us", "floor_us", "dense_us")}
            size = sum(one.bytes for one in same)
            rows.append(Row(row.format, "layer", row.m, **sums, bytes=size, library=row.library))
    return Run(run.about, {"layer": (0, 0)}, rows)


def layers() -> list[str]:
    """A table per GPU: the four linears of a layer of Llama-3 8B, every format."""
    parts = []
    for gpu, name, _ in GPUS:
        run = Run.load(RESULTS / f"{name}.json")
        cells = table(total(run, LAYER), "layer")
        parts += [
            f"### A layer of Llama-3 8B on an {gpu}",
            paragraph(
                "The sum of its four linears: q, k, v in one (6144 x 4096), o (4096 x 4096), gate and up",
                "in one",
                f"(28672 x 4096), down (4096 x 14336). {source(name)}",
            ),
            f"![Speed and floor of each linear on an {gpu}](performance-{gpu.lower()}.png)",
            grid(cells),
        ]
    return parts


def weights() -> list[str]:
    """A table per GPU: int4 on each linear of four models."""
    parts = ["### int4, each linear"]
    for gpu, name, others in GPUS:
        runs = [Run.load(RESULTS / f"{one}.json") for one in (name, others)]
        rows = [row for run in runs for row in run.rows if row.library == OURS and row.format == "int4"]
        shapes = {shape: sides for run in runs for shape, sides in run.shapes.items()}
        ms = sorted({row.m for row in rows})
        cells = [[gpu, "N x K", "floor", *(f"M={m}" for m in ms)]]
        for shape, (n, k) in shapes.items():
            line = {row.m: row for row in rows if row.shape == shape}
            floor = f"{line[ms[0]].floor_us:.1f}"
            cells.append([shape, f"{n} x {k}", floor, *(str(line.get(m, "")) for m in ms)])
        parts += [source(name, others), grid(cells)]
    return parts


def peers() -> list[str]:
    """int4 beside the kernels of torch and GemLite."""
    parts = [
        "### int4 beside other libraries",
        paragraph(
            "tinygemm is torch's own int4 kernel; GemLite is tuned per M in its default mode. quantkit is",
            "that",
            f"of each run's commit. {source('h200-peers', 'h100-peers')}",
        ),
    ]
    cells = [["GPU and weight", "M", "floor", "dense bf16", OURS, "gemlite", "tinygemm"]]
    for gpu, name in (("H200", "h200-peers"), ("H100", "h100-peers")):
        run = Run.load(RESULTS / f"{name}.json")
        for shape in run.shapes:
            for m in sorted({row.m for row in run.rows}):
                found = {row.library: row for row in run.rows if (row.shape, row.m) == (shape, m)}
                if len(found) == 1:
                    continue
                ours = found[OURS]
                times = [f"{found[one].us:.1f}" if one in found else "" for one in cells[0][4:]]
                cells.append(
                    [f"{gpu}, {shape}", str(m), f"{ours.floor_us:.1f}", f"{ours.dense_us:.1f}", *times]
                )
    return [*parts, grid(cells)]


def load() -> list[str]:
    """Products after a rest and after 0.3 s of the same product."""
    rested, loaded = (Run.load(RESULTS / f"{name}.json") for name in ("h100", "h100-loaded"))
    before = {(row.format, row.shape, row.m): row for row in rested.rows if row.library == OURS}
    ratios = [row.us / before[row.format, row.shape, row.m].us for row in loaded.rows]
    return [
        "### Under load",
        paragraph(
            "Products with 256 rows of x and more draw as much power as the GPU is allowed. After 0.3 s",
            "of the",
            f"same product its clock has fallen: ours take {median(ratios):.2f} times as long, by the",
            "median of",
            f"{len(ratios)} products. {source('h100', 'h100-loaded')}",
        ),
    ]


def rounded_inputs() -> list[str]:
    """Schemes that round their inputs, beside int4, dense bf16 and torch's 8-bit products."""
    run = stored("h200-activations")
    names = list(max((product["rows"] for product in run["products"]), key=len))
    cells = [["weight", "M", *names]]
    for product in sorted(run["products"], key=lambda one: (one["k"], one["m"])):
        rows, dense = product["rows"], product["rows"]["dense"]["us"]
        shown = [
            f"{rows[name]['us']:.1f}, {dense / rows[name]['us']:.2f}" if name in rows else ""
            for name in names
        ]
        cells.append([product["shape"].removeprefix("llama3-8b."), str(product["m"]), *shown])
    return [
        "### Rounded inputs",
        paragraph(
            "Names of `--scheme` on an H200, with the speed against dense bf16. x is bfloat16; rounding it",
            "counts. W4A16 does not round. `torch fp8` is `_scaled_mm` with scales per row, `torch int8` is",
            f"`_int_mm` without scales, both after quantkit's kernel for x. {source('h200-activations')}",
        ),
        grid(cells),
        _blocks(),
        paragraph(
            "In CUDA graphs the norm (of 4096 columns) writes rounded numbers for few rows, norm and gate",
            "(14336) codes for many, and `fused-gemv` rounds a few rows itself. Microseconds by M:",
        ),
        grid(_rounding_before(run["before"])),
    ]


def _blocks() -> str:
    """What `scaled-mm` takes of FP8_BLOCK beside `fused-wgmma-8bit`, in words."""
    us = {(one["shape"], one["m"]): one["us"] for one in stored("h200-fp8-blocks")["products"]}
    parts = []
    for m in (4096, 16384):
        for name in ("gate_up", "down"):
            ours, fused, dense = (
                us[f"llama3-8b.{name}", m][kernel] for kernel in ("scaled-mm", "fused-wgmma-8bit", "dense")
            )
            parts.append(f"{name}, M={m}: {ours:.0f} ({fused:.0f}; {dense:.0f})")
    return paragraph(
        "FP8_BLOCK is that of `fused-wgmma-8bit`. From M=2048 on `scaled-mm` runs. In another run it takes",
        "these µs (`fused-wgmma-8bit`; dense):",
        f"{', '.join(parts)}. {source('h200-fp8-blocks')}",
    )


def _rounding_before(run: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[list[str]]:
    """The cells of times of norms and gates, by M, with and without rounding."""
    sizes = sorted(run, key=int)
    cells = [["", *sizes]]
    for op, ways in run[sizes[0]].items():
        cells += [[f"{op}, {way}", *(f"{run[m][op][way]:.1f}" for m in sizes)] for way in ways]
    return cells


def versions() -> list[str]:
    """Triton 3.9 beside 3.6: all products on an H200, and those with other tiles since on an H100."""
    words, runs, cells = [], [], [["slower with 3.9", "M", "3.6", "3.9", "ratio"]]
    for gpu in ("H200", "H100"):
        names = [f"{gpu.lower()}-triton-{one}" for one in ("3.6", "3.9")]
        runs += names
        old, new = (Run.load(RESULTS / f"{name}.json") for name in names)
        before = {(row.format, row.shape, row.m): row.us for row in old.rows}
        ratios = {(x.format, x.shape, x.m): x.us / before[x.format, x.shape, x.m] for x in new.rows}
        slower = sorted((key for key in ratios if ratios[key] > SLOWER), key=ratios.__getitem__, reverse=True)
        cells += [
            [
                f"{gpu}, {f}, {shape}",
                str(m),
                f"{before[f, shape, m]:.1f}",
                f"{before[f, shape, m] * r:.1f}",
                f"{r:.2f}",
            ]
            for f, shape, m in slower
            if (r := ratios[f, shape, m]) >= LISTED
        ]
        words.append(
            f"{gpu}: the median of {len(ratios)} products takes {median(ratios.values()):.3f} times as long "
            f"with 3.9; {len(slower)} take more than {SLOWER:.2f} times as long."
        )
    listed = f"The table lists those from {LISTED:.2f} on."
    return ["### Triton 3.9 beside 3.6", paragraph(*words, listed, source(*runs)), grid(cells)]


WAYS = {
    "load": "`quantkit.load`, `generate`",
    "from_pretrained": '`from_pretrained(..., device_map="cuda:0")`, `generate`',
    "eager": "`from_pretrained`, `generate(..., disable_compile=True)`: no CUDA graphs",
    "dense-eager": "dense bf16 by transformers, no CUDA graphs",
}


def generating() -> list[str]:
    """Tokens a second by each way to load a model, and what the host takes for a linear."""
    run = stored("h100-front-door")
    cells = [["way", "tokens/s", "least and most", "first token, ms"]]
    for row in run["rows"]:
        spread = f"{row['low']:.3g} to {row['high']:.3g}"
        cells.append([WAYS[row["way"]], f"{row['tokens_per_second']:.3g}", spread, f"{row['first_ms']:.1f}"])
    rounds = len(run["rows"][0]["rounds"])
    host = [["mode", *(f"{one}, {kind}" for kind in ("int4", "nvfp4") for one in ("a linear", "q, k, v"))]]
    times = stored("h200-host-time")["rows"]
    for mode in ("inference_mode", "no_grad", "grad", "backward"):
        cells_of_mode = []
        for kind in ("int4", "nvfp4"):
            of_mode = [row for row in times if row["mode"] == mode and row["format"] == kind and row["ratio"]]
            for joined in (False, True):
                ratios = [row["ratio"] for row in of_mode if (row["what"] == "q, k, v") == joined]
                cells_of_mode.append(f"{median(ratios):.2f}")
        host.append([f"`{mode}`", *cells_of_mode])
    return [
        "## Generating on a GPU",
        paragraph(
            f"Shapes of Llama-3 8B, random weights, {run['format']}, {run['layers']} layers, one prompt of",
            f"{run['prompt']} tokens; the median of {rounds} rounds, in each of which every way runs once.",
            "Without",
            f"graphs the host sets the pace. {source('h100-front-door')}",
        ),
        grid(cells),
        "### Time of the host",
        paragraph(
            "Launching a packed linear in eager mode, as a multiple of `F.linear`: the median over 1 and",
            "16 rows",
            "of x and the linears of a 1B model. Row `backward` is of an older commit than [LoRA's",
            f"steps](guide/adapters.md). {source('h200-host-time')}",
        ),
        grid(host),
    ]


ENGINES = {
    "plugin": "vLLM with quantkit's plug-in, int4",
    "marlin": "vLLM with Marlin, int4",
    "vllm": "vLLM with Machete, its choice, int4",
    "dense": "vLLM, dense bf16",
    "load": "`quantkit.load`, `generate`, int4",
}
#: Runs of `vllm_speed.py`: those of one machine make a table.
ENGINE_RUNS = (("h200-vllm",), ("h100-vllm", "h100-vllm-load"))


def engine_cells(names: Sequence[str]) -> list[list[str]]:
    """The table of tokens a second that some runs on one machine make together."""
    run = stored(names[0])
    rates = {
        way["way"]: {row["batch"]: row["tokens_per_second"] for row in way["rows"]}
        for name in names
        for way in stored(name)["ways"]
    }
    base = rates[run["against"]]
    gpu = names[0].partition("-")[0].upper()
    cells = [
        [f"{gpu}, tokens/s (against Marlin)", "1 sequence", *(str(batch) for batch in base if batch > 1)]
    ]
    for way, title in ENGINES.items():
        if way in rates:
            found = [
                f"{rates[way][batch]:,.0f} ({rates[way][batch] / base[batch]:.2f}x)"
                if batch in rates[way]
                else ""
                for batch in base
            ]
            cells.append([title, *found])
    return cells


def in_engines() -> list[str]:
    """Tokens a second of vLLM's own kernels, of the plug-in, and of `quantkit.load`."""
    run = stored(ENGINE_RUNS[0][0])
    names = [name for names in ENGINE_RUNS for name in names]
    return [
        "## vLLM",
        paragraph(
            f"vLLM {run['vllm']}, shapes of Llama-3 8B, random weights, groups of 128, {run['layers']}",
            f"layers; prompts of {run['prompt']} tokens, {run['new_tokens']} new ones, CUDA graphs; medians,",
            f"one GPU, without FlashInfer's sampler. On the H200 {run['beside']}. {source(*names)}",
        ),
        *(grid(engine_cells(names)) for names in ENGINE_RUNS),
    ]


def whole_models() -> list[str]:
    """A table of the runs of `whole_model.py`; nothing where none is stored."""
    paths = sorted(RESULTS.glob("*-bench.json"))
    if not paths:
        return []
    files = [stored(path.stem) for path in paths]
    runs = [file["speed"] for file in files]
    batches = sorted({cell["batch"] for run in runs for one in run for cell in one["cells"]})
    head = [
        f"{words}, {batch}" for batch in batches for words in ("first token, ms", "tokens/s", "bandwidth")
    ]
    cells = [["model", "prompt", *head, f"joules a token, {batches[0]}"]]
    for path, run in zip(paths, runs, strict=True):
        beside = "" if path is paths[0] else f", beside {run[0]['label']}"
        for one in run:
            label = one["label"] + (beside if one["label"] != run[0]["label"] else "")
            for prompt in dict.fromkeys(cell["prompt"] for cell in one["cells"]):
                of = {cell["batch"]: cell for cell in one["cells"] if cell["prompt"] == prompt}
                limit = one["machine"]["read_bandwidth"]
                row = chain.from_iterable(figures(of.get(batch), limit) for batch in batches)
                cells.append([label, str(prompt), *row, _joules(of.get(batches[0]))])
    one = runs[0][0]
    sizes = f"{one['new_tokens']} new tokens, the median of {one['repeats']}"
    notes = chain.from_iterable(file.get("notes", ()) for file in files)
    return [
        "## A whole model",
        paragraph(
            f"Shapes of Llama-3.1 8B, random weights, {files[0]['layers']} layers, the head in int8; {sizes}",
            f"repetitions by `quantkit bench`, mode {one['cells'][0]['mode']}. Columns name the sequences.",
            *notes,
            source(*(path.stem for path in paths)),
        ),
        grid(cells),
    ]


def _joules(cell: dict[str, Any] | None) -> str:
    return "" if cell is None or cell["joules"] is None else f"{cell['joules']:.3g}"


def figures(cell: dict[str, Any] | None, limit: float) -> list[str]:
    """The cells of one generation that `bench` measured, on a device that reads `limit` bytes a second."""
    if cell is None:
        return ["", "", ""]
    read = cell["read_bandwidth"]
    return [
        f"{1e3 * cell['first_token']['median']:.3g}",
        f"{cell['decode']['median']:,.0f}",
        "" if read is None else f"{read / limit:.0%}",
    ]


def on_cpus() -> list[str]:
    """SmolLM2 beside llama.cpp, and the linears of a 1B model."""
    run = stored("cpu-smollm2")
    cells = [["engine", "threads", "tokens/s", "against llama.cpp", "prompt, s", "against llama.cpp"]]
    for row in run["rows"]:
        decode = [f"{row['tokens_per_second']:.1f}", f"{row['decode_ratio']:.2f}x"]
        prompt = [f"{row['prompt_seconds']:.2f}", f"{row['prompt_ratio']:.2f}x"]
        cells.append([row["engine"], str(row["threads"]), *decode, *prompt])
    linears = [["weights", "kernel", "1 thread", "2 threads"]]
    one, two = (stored(f"cpu-1b-{threads}")["rows"] for threads in (1, 2))
    for first, second in zip(one, two, strict=True):
        name = (
            f"{first['kernel']}, chosen"
            if first["chosen"] and first["kernel"] != "torch"
            else first["kernel"]
        )
        times = [f"{row['ms']:.1f}" for row in (first, second)]
        if first["weights"] != "dense":
            times = [f"{ms} ({row['speedup']:.2f}x)" for ms, row in zip(times, (first, second), strict=True)]
        linears.append([first["weights"].removesuffix(" bfloat16"), name, *times])
    return [
        "## On a CPU",
        paragraph(
            f"SmolLM2-135M-Instruct beside llama.cpp (llama-cpp-python {run['llama-cpp-python']}, Q4_1",
            "with the",
            f"head in Q8_0), a prompt of {run['prompt']} tokens. quantkit has int4 in groups of 32 with",
            "integer",
            "zero-points, the head in int8, in bfloat16: `quantkit quantize SMOLLM2 g32zh --format int4",
            "--group-size",
            f"32 --zero-point integer --lm-head int8`. {source('cpu-smollm2')}",
        ),
        grid(cells),
        paragraph(
            "One row of x through the linears of a 1B Llama, random weights, bfloat16: ms for a token,",
            "and the speed",
            "against dense. `quantkit doctor` shows which kernel a machine gets.",
            source("cpu-1b-1", "cpu-1b-2"),
        ),
        grid(linears),
    ]


def quantizing() -> list[str]:
    """GPU memory of calibrated methods: what `plan` says, what torch allocates, what the driver counts."""
    run, planned = stored("h200-quantize-memory"), stored("h200-plan-memory")
    cells = [["method", "expandable segments", "plan", "by the driver", "reserved", "allocated", "seconds"]]
    for row in planned["rows"]:
        sizes = [f"{row[kind] / 1e9:.1f} GB" for kind in ("plan", "driver", "reserved", "allocated")]
        cells.append([f"`{row['method']}`", "off", *sizes, f"{row['seconds']:.1f}"])
    for row in run["rows"]:
        if row["expandable_segments"]:
            sizes = [f"{row[f'{kind}_gb']:.1f} GB" for kind in ("driver", "reserved", "allocated")]
            cells.append(["`gptq`", "on", "", *sizes, f"{row['seconds']:.1f}"])
    return [
        "## Quantizing on a GPU",
        paragraph(
            f"int4, two layers in the shapes of Llama-3 8B, {run['samples']} samples of {run['length']}",
            "tokens; `on` sets `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.",
            source("h200-plan-memory", "h200-quantize-memory"),
        ),
        grid(cells),
    ]


def low_bit_sources() -> list[str]:
    """Sources that are low-bit already, beside bfloat16 of as many weights, and a converted GGUF file."""
    run, converted = stored("cpu-low-bit-stream")["runs"][0], stored("cpu-gguf-logits")
    cells = [["source", "weights", "size", "seconds", "of bf16", "memory beyond the libraries"]]
    for row in run["rows"]:
        sizes = [f"{row['weights'] / 1e9:.2f} 10^9", f"{row['source_bytes'] / 1e9:.2f} GB"]
        figures = [f"{row['seconds']:.1f}", f"{row['ratio']:.2f}", f"{row['memory_bytes'] / 1e6:.0f} MB"]
        cells.append([row["source"], *sizes, *figures])
    difference = converted["largest difference of logits, relative"]
    return [
        "## Low-bit sources",
        paragraph(
            "`quantize --method rtn` to int4 on a CPU, from sources that are low-bit already.",
            f"SmolLM2-135M-Instruct by `convert` from Q4_1, {converted['packed linears']} linears and",
            f"{converted['packed embeddings']} embedding: logits in float32 differ by",
            f"{difference:g} from those of transformers' dequantized load, and",
            f"{converted['weights that differ']} weights differ.",
            source("cpu-low-bit-stream", "cpu-gguf-logits"),
        ),
        grid(cells),
    ]


def several_gpus() -> list[str]:
    """Decoding under tensor parallelism, beside one GPU."""
    run = stored("h200-tensor-parallel")
    names = {
        "one": "one GPU",
        "one-eager": "one GPU, without graphs",
        "tensor": f"{run['ranks']} GPUs, tensor parallelism",
        "tensor-eager": f"{run['ranks']} GPUs, tensor parallelism, without graphs",
    }
    found = {row["way"]: row for row in run["rows"] if "way" in row}
    cells = [["way", "tokens/s", "first token"]]
    for way, name in names.items():
        row = found[way]
        cells.append([name, f"{row['tokens_per_second']:.0f}", f"{row['first_ms']:.1f} ms"])
    return [
        "## Several GPUs",
        paragraph(
            f"`generate` with int4 and one sequence, {run['layers']} layers in the shapes of Llama-3 8B.",
            "One GPU decodes",
            "faster where the model fits.",
            source("h200-tensor-parallel"),
        ),
        grid(cells),
    ]


def runs() -> list[str]:
    """Where each stored run is from."""
    cells = [["run", "machine", "command"]]
    for path in sorted(RESULTS.glob("*.json")):
        of_file = stored(path.stem)
        run, *more = of_file.get("runs", [of_file])
        about = run.get("machine") or run["about"]
        command = f"`{run['command']}`" + (f" and {len(more)} more" if more else "")
        cells.append([f"`{path.name}`", about.replace("NVIDIA ", ""), command])
    return [
        "## The runs",
        grid(cells),
    ]


def page() -> str:
    """The text of docs/performance.md."""
    linears = (layers(), weights(), peers(), load(), rounded_inputs(), versions())
    sections = (
        *linears,
        whole_models(),
        generating(),
        in_engines(),
        several_gpus(),
        on_cpus(),
        quantizing(),
        low_bit_sources(),
    )
    return (
        "\n\n".join([HEAD.strip(), READING.strip(), *(part for one in (*sections, runs()) for part in one)])
        + "\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page, or say that it is not up to date."""
    write_or_check(arguments, __doc__, "performance_page.py", {PAGE: page()}, ROOT)


if __name__ == "__main__":
    main()
