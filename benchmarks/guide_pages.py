"""Write every figure of README.md and docs/guide from benchmarks/results.

    python benchmarks/guide_pages.py            # writes the pages
    python benchmarks/guide_pages.py --check    # exits with 1 where a page is not up to date

A page has a line `<!-- generated: NAME -->`. What follows up to an empty line is a table or a paragraph,
made by the row NAME of `PARTS`. No figure stands in a page otherwise.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import known_tables
import measured_codes
from accuracy_page import TABLES
from matmul_report import Run
from model_sizes import MODELS
from performance_page import ENGINE_RUNS, RESULTS, ROOT, engine_cells, grid, paragraph, stored
from written_pages import write_or_check

from quantkit.checkpoint.gguf.block_types import BLOCK_TYPES
from quantkit.packing.formats import FORMATS, FittedFormat
from quantkit.packing.scale_types import SCALE_TYPES
from quantkit.targets.gguf import SCHEMES
from quantkit.targets.target import SupportedScheme

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md")))
SIZES = "guide/model-sizes"
MARKED = re.compile(r"^(<!-- generated: ([\w-]+) -->\n)((?:.+\n)*)", re.MULTILINE)
#: Part of a GPU's or a machine's memory that weights and KV cache may take together.
USABLE = 0.9
#: Names in the tables of sizes, and what `model_sizes.py` calls them.
SIZE_COLUMNS = {
    "16 bits": "bf16",
    "int8, fp8": "int8",
    "fp6": "fp6",
    "nvfp4": "nvfp4",
    "int4": "int4",
    "int4, embedding and head int8": "int4-embeddings-int8",
    "int3": "int3",
    "int2": "int2",
}
#: A model, a machine and its memory in GB, the format to start with, its name in `model_sizes.py`, options.
FITS: tuple[tuple[str, str, float, str, str, str], ...] = (
    ("meta-llama/Llama-3.1-8B-Instruct", "GPU", 24, "int8 or fp8", "int8", "`--format int8`"),
    ("meta-llama/Llama-3.1-8B-Instruct", "GPU", 12, "int4", "int4", "`--format int4 --method best`"),
    ("Qwen/Qwen3-30B-A3B", "GPU", 24, "int4", "int4", "`--format int4 --method best`"),
    ("meta-llama/Llama-3.1-70B-Instruct", "GPU", 80, "int4", "int4", "`--format int4 --method best`"),
    ("meta-llama/Llama-3.1-70B-Instruct", "GPU", 48, "int4, embedding and head int8",
     "int4-embeddings-int8", "`--format int4 --method best --embeddings int8 --lm-head int8`"),
    ("Qwen/Qwen3-4B", "laptop, CPU", 8, "int4 in groups of 32",
     "int4-g32", "`--format int4 --group-size 32`"),
    ("meta-llama/Llama-3.2-1B-Instruct", "edge box, CPU", 2, "int4, embedding int8",
     "int4-embeddings-int8", "`--format int4 --embeddings int8`"),
)  # fmt: skip
#: What `calibrated` of docs/accuracy.md calls a scheme.
INT4 = "int4, group 128"
README_ROWS = ("original", "int8, channel", "fp6 (e2m3), group 128", INT4)
#: The format of a row in the run of linears.
IN_RUN = {"int8, channel": "int8", "fp6 (e2m3), group 128": "fp6", INT4: "int4"}
LINEAR, LINEAR_RUN = "llama3-8b.gate_up", "h200-triton-3.6"
#: What pages call the ways of the run on a CPU.
ENGINES = {"generate": "`generate` of a loaded model", "quantkit generate": "`quantkit generate`"}
CONTEXTS = (8192, 32768, 131072)
#: Bytes of an element of a KV cache over those of 16 bits: bits per element of the stored table.
KV_BITS = {"16 bits": 16.0, "int8": 8.25, "int4": 5.0}


def models() -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, dict[str, Any]] = stored(SIZES)["models"]
    return found


def gigabytes(size: float) -> str:
    """Bytes in 10^9, as vendors count memory."""
    return f"{size / 1e9:.1f}"


def short(name: str) -> str:
    return name.partition("/")[2]


def readme() -> str:
    """Accuracy of the formats of books-28m, beside the time of a linear of an 8B model."""
    run = Run.load(RESULTS / f"{LINEAR_RUN}.json")
    times = {row.format: row for row in run.rows if row.shape == LINEAR and row.m == 1}
    best = {(scheme, row[1]): row for scheme, row in filled("calibrated")}[INT4, "best"]
    cells = [
        [
            "format",
            "bits per weight, linears",
            "size, whole model",
            "KL mean, nats/token, books / docs",
            "same top-1 token",
            "gate and up of an 8B, H200",
        ]
    ]
    rows = TABLES["formats"]["rows"]
    for books, docs in zip(rows[::2], rows[1::2], strict=True):
        name = books[0]
        if name not in README_ROWS:
            continue
        timed = f"{times[IN_RUN[name]].us:.1f} µs" if name in IN_RUN else f"{times['int4'].dense_us:.1f} µs"
        if books[7]:
            digits = 5 if float(books[7]) < 1e-3 else 4
            loss = " / ".join(f"{float(one[7]):.{digits}f}" for one in (books, docs))
            same = " / ".join(f"{float(one[8].removesuffix(' %')):.1f}" for one in (books, docs)) + " %"
        else:
            loss, same = "0", "100 %"
        cells.append([name, books[1], books[3], loss, same, timed])
    size, time = cells[-1][2], cells[-1][5]
    cells.append(
        [f"{INT4}, calibrated (`best`)", best[2], size, best[3], same_top1("int4 best", best[3]), time]
    )
    return grid(cells)


def same_top1(label: str, loss: str) -> str:
    """Same top-1 tokens of a row of known models, books and docs; empty if its KL is not `loss`."""
    rows = {row["label"]: row for run in known_tables.runs_of("books-28m") for row in run["rows"]}
    found = list(rows[label]["texts"].values())
    if " / ".join(f"{one['kl_mean']:.4f}" for one in found) != loss:
        return ""
    return " / ".join(f"{100 * one['same_top1']:.1f}" for one in found) + " %"


def filled(name: str) -> list[tuple[str, list[str]]]:
    """Rows of a stored table with their scheme, which is empty in a row if it is that of the row above."""
    found: list[tuple[str, list[str]]] = []
    for row in TABLES[name]["rows"]:
        found.append((row[0] or found[-1][0], row))
    return found


def sizes() -> str:
    """GB of each model in each format."""
    cells = [["model, GB", *SIZE_COLUMNS]]
    for name, found in models().items():
        cells.append([f"`{name}`", *(gigabytes(found[key]) for key in SIZE_COLUMNS.values())])
    return grid(cells)


def fits() -> str:
    """What to start with for a model and a machine, and the tokens of context that are left room for."""
    cells = [["model", "machine", "start with", "options", "weights", "tokens of KV cache beside it"]]
    for name, machine, memory, format, key, options in FITS:
        found = models()[name]
        left = int((USABLE * memory * 1e9 - found[key]) / found["kv_cache_per_token"] / 1000)
        weights = f"{gigabytes(found[key])} GB"
        cells.append([short(name), f"{memory:g} GB {machine}", format, options, weights, f"{left:,}k"])
    return grid(cells)


def kv_sizes() -> str:
    """GB of a KV cache by model, tokens and format."""
    heads = [f"{tokens // 1024}k tokens, {kind}" for tokens in CONTEXTS for kind in KV_BITS]
    cells = [["model, GB", *heads]]
    for name, found in models().items():
        per_bit = found["kv_cache_per_token"] / 16
        sizes = [per_bit * bits * tokens for tokens in CONTEXTS for bits in KV_BITS.values()]
        cells.append([short(name), *map(gigabytes, sizes)])
    return grid(cells)


def memory() -> str:
    """GPU memory that quantizing to int4 takes, by model and method."""
    methods = list(next(iter(models().values()))["memory"]["gpu"])
    cells = [["model", "on disk, 16 bits", "int4", *(f"`{method}`" for method in methods)]]
    for name, found in models().items():
        gpu = found["memory"]["gpu"]
        sizes = [found["bf16"], found["int4"], *(gpu[method] for method in methods)]
        cells.append([short(name), *(f"{gigabytes(size)} GB" for size in sizes)])
    return grid(cells)


def seventy() -> str:
    """The sizes of a 70B model, in words."""
    name = "meta-llama/Llama-3.1-70B-Instruct"
    found, shape = models()[name], MODELS[name]
    host, gpu = found["memory"]["host"]["mse"], found["memory"]["gpu"]
    # In 16 bits: 128 samples of 512 tokens, and the weights without embedding and head.
    hidden = 2 * 128 * 512 * shape.hidden_size
    dense = 4 * shape.vocab_size * shape.hidden_size
    # Counted in float32, of two passes, twice while new ones replace old ones: 8 times 16 bits.
    block, packed = (found["bf16"] - dense) / shape.num_hidden_layers, found["int4"] - dense
    files = 8 * hidden
    whole = found["bf16"] + found["int4"] + packed + files
    return paragraph(
        f"The model is {gigabytes(found['bf16'])} GB on the disk and {gigabytes(found['int4'])} GB in int4.",
        f"Without calibration data its weights pass through in chunks: {host / 1e9:.2f} GB of memory beyond",
        "the libraries on two cores and in proportion on more, whatever the model. With data, a GPU needs",
        f"{gigabytes(gpu['awq'])} GB for `awq`",
        f"and {gigabytes(gpu['best'])} GB for `best`. Host memory with data was not measured. It has the",
        f"block that is read ahead, {gigabytes(block)} GB, and hidden states of {gigabytes(hidden)} GB,",
        "twice that for `best`. On the disk a run with data has work files beside source and result:",
        f"finished blocks, {gigabytes(packed)} GB, and hidden states, at most {gigabytes(files)} GB, as",
        "`quantize` counts them: in float32, of the original too, and old and new ones at once. With the",
        f"source that is {gigabytes(whole)} GB in all.",
    )


def two_bits() -> str:
    """What 2 bits save of an 8B and of a 70B model, in words."""
    formats = {"int2": "int2", "int3": "int3", "int4": "int4", "bf16": "16 bits"}
    words = []
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"):
        found = [f"{gigabytes(models()[name][key])} GB in {label}" for key, label in formats.items()]
        words.append(f"{short(name)} has {', '.join(found)}.")
    return paragraph(*words, "Embedding and head, at 16 bits, are the larger share of a smaller model.")


def methods() -> str:
    """KL of int4 by method, beside llm-compressor's."""
    cells = [["int4, groups of 128", "KL mean, books / docs"]]
    cells += [[f"`{row[1]}`", row[3]] for scheme, row in filled("calibrated") if scheme == INT4]
    peer = next(row for _, row in filled("activations") if row[0] == "W4A16")
    cells.append([f"llm-compressor, {peer[3].partition(',')[0]}", peer[3].partition(", ")[2]])
    return grid(cells)


def fp8() -> str:
    """KL of the schemes that engines run on 8-bit products."""
    cells = [["`--scheme`", "`--method`", "KL mean, books / docs", "llm-compressor"]]
    for scheme, row in filled("activations"):
        if scheme in ("FP8_DYNAMIC", "FP8", "FP8_BLOCK", "W8A8"):
            cells.append([scheme, row[1].replace(", rotated", ", with `--rotate`"), row[2], row[3]])
    return grid(cells)


def table(name: str, remark: str = "") -> Callable[[], str]:
    """A stored table as it is; `remark` stands behind the last heading."""
    *heads, last = TABLES[name]["columns"]
    return lambda: grid([[*heads, last + remark], *TABLES[name]["rows"]])


def engines() -> str:
    """Tokens a second in vLLM on an H100: its own kernels beside quantkit's plug-in."""
    return grid(engine_cells(ENGINE_RUNS[1]))


def on_a_cpu() -> str:
    """SmolLM2 beside llama.cpp on as many threads."""
    run = stored("cpu-smollm2")
    cells = [["engine", "threads", "tokens/s", "prompt of 512 tokens, s"]]
    for row in run["rows"]:
        speed = [f"{row['tokens_per_second']:.0f}", f"{row['prompt_seconds']:.1f}"]
        cells.append([ENGINES.get(row["engine"], row["engine"]), str(row["threads"]), *speed])
    return grid(cells)


def laptop() -> str:
    """Speed and memory of a 4B on a few cores, in words."""
    run = stored("guide/laptop")
    parts = [
        f"`{row['options']}` decodes {row['tokens_per_second']['median']:.1f} tokens/s, reads a prompt of "
        f"{row['prompt']} in {row['first_token']['median']:.1f} s and holds "
        f"{row['steady_bytes'] / 1e9:.1f} GB"
        for row in run["rows"]
    ]
    return paragraph(f"{'; '.join(parts)}. By `{run['command']}` on {run['machine']}.")


def chat_questions() -> str:
    """Right answers of a chat model to ten questions, as it is and distilled."""
    run = stored("guide/chat-questions")
    cells = [
        [
            "format",
            "bits, linears",
            "right of 10",
            "KL held out, before and after",
            "steps",
            "seconds",
            "commit",
        ]
    ]
    for row in run["rows"]:
        name, bits, right = row["format"], f"{row['bits']:.3f}", str(row["right"])
        if row["command"] is None:
            cells.append([name, bits, right, "", "", "", ""])
            continue
        divergence = f"{row['kl_before']:.2f}, {row['kl_after']:.2f}"
        seconds = f"{row['seconds']:.0f}{', shared' if row.get('shared') else ''}"
        cells.append([name, bits, right, divergence, str(row["steps"]), seconds, row["commit"]])
    return grid(cells)


def chat_questions_run() -> str:
    """How the questions were asked, and how the rows were trained."""
    run = stored("guide/chat-questions")
    questions = " ".join(run["questions"])
    commands = [f"{row['format']}: `{row['command']}`." for row in run["rows"] if row["command"]]
    return paragraph(
        f"{run['about']} {questions}",
        *commands,
        f"By `{run['command']}` on {run['machine']}.",
    )


def plan_time() -> str:
    """CPU seconds of a plan, and of what it imports."""
    run = stored("guide/plan-time")
    models = ", ".join(f"{median(seconds):.1f} s for `{name}`" for name, seconds in run["seconds"].items())
    imports = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in run["imports"].items())
    return paragraph(
        f"CPU time on one thread: {models}. Imports, the shortest of several runs on the clock: {imports}.",
        f"By `{run['command']}` on {run['machine']}.",
    )


def adapters() -> str:
    """Losses before and after an adapter was trained."""
    run = stored("guide/adapters")
    names = {"dense": "dense", "packed": f"packed ({run['packed']})"}
    cells = [["model", "loss before", "loss after"]]
    for name, found in run["trained"].items():
        cells.append([names[name], *(f"{loss:.3f}" for loss in found["losses"])])
    return grid(cells)


def merged() -> str:
    """What merging an adapter costs, by what it was added to."""
    run = stored("guide/adapters")
    options = {"original": "the original weights", "packed": "the packed weights (`--from-packed`)"}
    cells = [["added to", "KL mean", "perplexity", "perplexity, adapter beside the model"]]
    for name, found in run["merged_from"].items():
        figures = (found["perplexity"], found["beside"])
        cells.append([options[name], f"{found['kl_mean']:.4f}", *(f"{one:.2f}" for one in figures)])
    return grid(cells)


def adapters_run() -> str:
    """How the adapters were trained."""
    run = stored("guide/adapters")
    return paragraph(
        f"Rank 8 on all linears, {run['steps']} steps of {run['tokens_per_step']} tokens.",
        f"By `{run['command']}` on {run['machine']}, PEFT {run['peft']}.",
    )


def adapter_steps() -> str:
    """Time and memory of a step of LoRA at an 8B's shapes, dense and packed."""
    run = stored("guide/adapter-steps")
    cells = [["tokens a step", "model", "s a step", "peak memory", "of it weights"]]
    for batch in run["rows"]["dense"]:
        for name, rows in run["rows"].items():
            one = rows[batch]
            label = name if name == "dense" else f"{name} ({run['format']}, head int8)"
            sizes = (f"{one[key] / 1e9:.1f} GB" for key in ("peak_bytes", "weight_bytes"))
            cells.append([str(int(batch) * run["length"]), label, f"{one['seconds_per_step']:.2f}", *sizes])
    return grid(cells)


def adapter_decode() -> str:
    """Decoding speed with a LoRA beside a packed 8B."""
    run = stored("guide/adapter-decode")
    batches = sorted({row["batch"] for row in run["rows"]})
    cells = [["tokens/s", *(f"{batch} sequence{'s' * (batch > 1)}" for batch in batches)]]
    for kind in dict.fromkeys(row["kind"] for row in run["rows"]):
        speeds = [row["tokens_per_second"] for row in run["rows"] if row["kind"] == kind]
        cells.append([kind, *(f"{speed:,.0f}" for speed in speeds)])
    return grid(cells)


def adapter_decode_run() -> str:
    """How decoding with a LoRA was timed."""
    run = stored("guide/adapter-decode")
    return paragraph(
        f"`generate` of an int4 model of Llama-3.1 8B's shapes, {run['layers']} layers, random weights;",
        f"a LoRA of rank {run['rank']} on all linears.",
        f"By `{run['command']}` on {run['machine']}, PEFT {run['peft']}.",
        *run["notes"],
    )


def adapter_steps_run() -> str:
    """How steps of LoRA were timed."""
    run = stored("guide/adapter-steps")
    return paragraph(
        f"{run['layers']} layers of Llama-3.1 8B's shapes, rank 8 on all linears, gradient checkpointing,",
        "bfloat16, random weights.",
        f"By `{run['command']}` on {run['machine']}, PEFT {run['peft']}.",
    )


def distill_step() -> str:
    """Time and memory of a step of distillation at an 8B's shapes."""
    run = stored("guide/distill-step")
    return paragraph(
        f"{run['layers']} layers of Llama-3.1 8B's shapes, random weights, with {run['free']:.0f} GB of GPU "
        f"memory free: {run['step_seconds']:.1f} s a step of 64 sequences of {run['length']} tokens, "
        f"{run['seconds_per_million_tokens']:.0f} s per million tokens, at most "
        f"{run['peak_bytes'] / 1e9:.1f} GB, as nvidia-smi counts it.",
        f"By `{run['command']}` on {run['machine']}.",
        *run["notes"],
    )


def intermediate_loss() -> str:
    """What a loss on hidden states brings to a distillation."""
    run = stored("guide/intermediate-loss")
    plain, *rows = run["rows"]

    def figures(row: Mapping[str, Any]) -> str:
        return " / ".join(f"{kl:.3f}" for kl in row["texts"].values())

    changed = "; ".join(f"{figures(row)} at a weight of {row['weight']:g}" for row in rows)
    return paragraph(
        f"int2 of books-28m, {run['steps']} steps of 8 sequences of 128 tokens, one seed: KL on books / docs",
        f"is {figures(plain)} by KL alone. With the mean squared difference of the outputs of all blocks,",
        f"over their variance, beside it: {changed}. By `{run['command']}` on {run['machine']}.",
    )


def written_as(scheme: SupportedScheme) -> list[str]:
    """Formats that `export` writes as a type of GGUF: no smaller type of such groups and scales has them."""
    alike = [
        one
        for one in SCHEMES
        if (one.groups, one.scale_dtypes, one.zero_points)
        == (scheme.groups, scheme.scale_dtypes, scheme.zero_points)
    ]
    before = alike[: alike.index(scheme)]
    return [
        name
        for name, form in FORMATS.items()
        # The values of a fitted book are of one matrix.
        if not isinstance(form, FittedFormat)
        and scheme.code_table(form) is not None
        and not any(one.code_table(form) is not None for one in before)
    ]


def gguf_types() -> str:
    """Every type of GGUF that is read: what `convert` makes of it, and of what `export` writes it."""
    numbers = [row.name for row in BLOCK_TYPES.values() if row.dtype is not None]
    others = [row.name for row in BLOCK_TYPES.values() if row.dtype is None and row.grid is None]
    cells = [["type", "bits", "`convert` keeps it as", "`export` writes it of"]]
    cells.append([", ".join(numbers), "", "dense", "dense"])
    for scheme, row in SCHEMES.items():
        minimums = " with minimums" if "minimum" in scheme.zero_points else ""
        scales = SCALE_TYPES[scheme.scale_dtypes[0]].name
        known = FORMATS.get(scheme.format.name) == scheme.format
        kept = scheme.format.name if known else f"the code book {scheme.format.name}"
        cells.append(
            [
                row.name,
                f"{8 * row.nbytes / row.elements:.3f}",
                f"{kept}{minimums}, groups of {row.elements}, {scales} scales",
                f"{', '.join(written_as(scheme)) or kept}{minimums}",
            ]
        )
    return grid([*cells, [", ".join(others), "", "refused; `quantize` rounds it anew", "never"]])


#: What pages ask for by name.
PARTS: Mapping[str, Callable[[], str]] = {
    "readme": readme,
    "sizes": sizes,
    "fits": fits,
    "kv-sizes": kv_sizes,
    "kv-cache": table("kv-cache"),
    "memory": memory,
    "seventy": seventy,
    "two-bits": two_bits,
    "methods": methods,
    "texts": table("texts", " where measured"),
    "distilled": table("distilled"),
    "laptop": laptop,
    "chat-questions": chat_questions,
    "chat-questions-run": chat_questions_run,
    "fp8": fp8,
    "engines": engines,
    "cpu": on_a_cpu,
    "plan-time": plan_time,
    "adapters": adapters,
    "merged": merged,
    "adapters-run": adapters_run,
    "adapter-steps": adapter_steps,
    "adapter-steps-run": adapter_steps_run,
    "adapter-decode": adapter_decode,
    "adapter-decode-run": adapter_decode_run,
    "distill-step": distill_step,
    "intermediate-loss": intermediate_loss,
    "gguf-types": gguf_types,
    **known_tables.PARTS,
    **measured_codes.PARTS,
}


def page(text: str) -> str:
    """The text of a page with every part of `PARTS` below its mark."""
    return MARKED.sub(
        lambda found: f"{found[1]}{PARTS[found[2]]()}\n" if found[2] in PARTS else found[0], text
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write all pages, or say which is not up to date."""
    wanted = {path: page(path.read_text(encoding="utf-8")) for path in PAGES}
    write_or_check(arguments, __doc__, "guide_pages.py", wanted, ROOT)


if __name__ == "__main__":
    main()
