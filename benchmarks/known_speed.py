"""How fast a model decodes in each width of `known_models.py`, and the bytes of its files, on a GPU.

    python benchmarks/known_speed.py MODEL --json benchmarks/results/known-speed/NAME.json
    python benchmarks/known_speed.py --layers 32 --json FILE    # random weights, Llama-3.1 8B's shapes

Rows of `WIDTHS` without a method, and the model as it is, are timed as `quantkit bench` does, in one process.
Weights are packed by `rtn`, since the method changes neither speed nor bytes. The file is written after each
row, so that a run which is ended keeps what it has. On a GPU the mode is `cuda-graph`.
docs/guide/known-models.md shows what is in benchmarks/results/known-speed.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from known_models import WIDTHS
from machine import command, cpu_machine, machine
from whole_model import parsed, write_source

from quantkit.bench.bench_options import FLAT, GRAPH, BenchOptions
from quantkit.bench.speed import measure_speed
from quantkit.checkpoint.hub.repository import resolve
from quantkit.eval.models import release
from quantkit.quantizing import quantize
from quantkit.runtime.transformers.quiet import silence

#: Rows that differ in size: methods change neither bytes nor speed.
ROWS = {name: given for name, given in WIDTHS.items() if "method" not in given}
ORIGINAL = "original"


def timed(directory: Path, options: BenchOptions) -> dict[str, Any]:
    """Bytes of a checkpoint's tensors, and tokens per second of each batch: median, smallest, largest."""
    speed = measure_speed(str(directory), options)
    release(options.device)
    return {
        "stored_as": speed.format,
        "bytes": speed.file_bytes,
        "decode": [
            {"batch": cell.batch, "prompt": cell.prompt, "mode": cell.mode, **asdict(cell.decode)}
            for cell in speed.cells
        ],
        "notes": list(speed.notes),
    }


def measured(
    source: Path, work: Path, rows: Sequence[str], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the original and then each of `rows`, with seconds for all of it; packed files are removed."""
    mode = FLAT if options.device == "cpu" else GRAPH
    bench = BenchOptions(
        device=options.device, batches=tuple(options.batch), prompts=(options.prompt,), modes=(mode,),
        new_tokens=options.new_tokens, repeats=options.repeats,
    )  # fmt: skip
    for name in (ORIGINAL, *rows):
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=work) as place:
            directory = source
            if name != ORIGINAL:
                directory = Path(place) / "packed"
                head = {} if options.lm_head is None else {"lm_head": options.lm_head}
                quantize(source, directory, **ROWS[name], **head, method="rtn", device=options.device)
            found = timed(directory, bench)
        yield {"label": name, **found, "seconds": time.perf_counter() - begin}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a model and store its rows with machine and command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a directory or a hub id")
    parser.add_argument("--layers", type=int, default=32, help="of random weights, without MODEL")
    parser.add_argument("--row", action="append", choices=ROWS, help="only these rows")
    parser.add_argument("--lm-head", help="format of the head, as of `quantize`")
    parser.add_argument("--prompt", type=int, default=128)
    options = parsed(parser, arguments)
    record: dict[str, Any] = {
        "command": command(),
        "machine": cpu_machine() if options.device == "cpu" else machine(),
        "model": f"random weights, {options.layers} layers of Llama-3.1 8B" if options.model is None
        else Path(options.model).name,
        "prompt": options.prompt,
        "new_tokens": options.new_tokens,
        "rows": [],
    }  # fmt: skip
    options.json.parent.mkdir(parents=True, exist_ok=True)
    silence()
    with tempfile.TemporaryDirectory() as work:
        if options.model is None:
            source = write_source(Path(work) / "dense", options.layers, options.device)
        else:
            source = resolve(options.model)
        for row in measured(source, Path(work), options.row or list(ROWS), options):
            record["rows"].append(row)
            options.json.write_text(json.dumps(record, indent=1) + "\n")
            rates = ", ".join(f"{one['median']:.0f} at batch {one['batch']}" for one in row["decode"])
            size = f"{row['bytes'] / 1e6:.1f} MB"
            print(f"{row['label']}: {size}, {rates} tokens/s, {row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
