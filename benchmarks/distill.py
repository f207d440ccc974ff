"""Divergence from the original of a model that is distilled, in many schemes and settings.

    python benchmarks/distill.py MODEL --calibration mixed.jsonl --text books.txt --text docs.txt [--time 240]

Runs rows `--at-once`, each in a process of its own, and prints the bits per weight of the packed linears and
KL mean per text (float32 on the CPU, windows of 1024 tokens). `--time` are the seconds of each training. With
`--row NAME`, once or more, only those rows; `--list` prints their names. With `--processes N` so many of
torchrun train a row together, each on a GPU: take `--at-once 1` then.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quantkit.cli.threads import usable_cores

INT2: dict[str, Any] = {"format": "int2", "group_size": 64, "scale_dtype": "e4m3"}
TERNARY: dict[str, Any] = {**INT2, "format": "ternary", "packing": "radix"}
BINARY: dict[str, Any] = {**INT2, "format": "binary"}
INT2_G32: dict[str, Any] = {**INT2, "group_size": 32}
INT3: dict[str, Any] = {**INT2, "format": "int3"}

#: What `quantize` is given, and what differs in `DistillOptions`, by row.
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "int3 best": (INT3, None),
    "int2 group 32 best": (INT2_G32, None),
    "int2 best": (INT2, None),
    "ternary best": (TERNARY, None),
    "binary best": (BINARY, None),
    "int3": (INT3, {}),
    "int2 group 32": (INT2_G32, {}),
    "int2": (INT2, {}),
    "ternary": (TERNARY, {}),
    "binary": (BINARY, {}),
    "int2 no codes": (INT2, {"code_rate": 0.0, "scale_rate": 2e-3}),
    "int2 text only": (INT2, {"own": 0.0}),
    "int2 own only": (INT2, {"own": 1.0}),
    **{
        f"{name} codes {rate:g}": (scheme, {"code_rate": rate})
        for name, scheme in {"int3": INT3, "int2": INT2, "ternary": TERNARY, "binary": BINARY}.items()
        for rate in (1e-3, 3e-3, 1e-2, 3e-2)
    },
}


def work(asked: argparse.Namespace, row: str, out: Path) -> None:
    """Quantize and evaluate one row, and write its figures to `out`.json."""
    import torch

    from quantkit.calibrate.data.calibration_options import CalibrationOptions
    from quantkit.checkpoint.manifest import read_manifest
    from quantkit.eval.eval_options import EvalOptions
    from quantkit.eval.evaluate import evaluate_many
    from quantkit.quantization.distill.distill_options import DistillOptions
    from quantkit.quantizing import quantize

    given, changed = ROWS[row]
    options = DistillOptions()
    if changed is not None:
        budget = {"steps": asked.steps} if asked.steps else {"seconds": asked.time}
        options = DistillOptions(**{**budget, "batch": asked.batch, **changed})
    last = [0.0]

    def progress(done: int, total: int, label: str) -> None:
        if time.monotonic() - last[0] > 10:
            last[0] = time.monotonic()
            print(f"{time.strftime('%H:%M:%S')} {done}/{total} {label}", flush=True)

    started = time.monotonic()
    quantize(
        asked.model,
        out,
        **given,
        method="best" if changed is None else "distill",
        calibration=CalibrationOptions(str(asked.calibration), asked.samples, asked.length),
        device=asked.device,
        distillation=options,
        progress=progress,
    )
    seconds = time.monotonic() - started
    if os.environ.get("RANK", "0") != "0":
        return
    facts = read_manifest(out).get("distillation")
    print(json.dumps(facts), flush=True)
    if torch.cuda.is_available():
        print(f"most GPU memory: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB", flush=True)
    evaluated = EvalOptions(
        texts=tuple(asked.text),
        against=asked.model,
        window=1024,
        max_windows=8,
        dtype="float32",
        device="cpu",
    )
    report = evaluate_many([out], evaluated)[0]
    found = {
        "row": row,
        "bits": report.sizes.linears,
        "kl": [text.kl_mean for text in report.texts.values()],
        "perplexity": [text.perplexity for text in report.texts.values()],
        "seconds": seconds,
        "facts": facts,
    }
    out.with_suffix(".json").write_text(json.dumps(found))


def main() -> None:
    """Run all rows and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--time", type=float, default=240.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--row", action="append", choices=ROWS, metavar="NAME")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    rows = asked.row or list(ROWS)
    if asked.list:
        print("\n".join(rows))
        return
    if asked.work:
        work(asked, asked.work, asked.out)
        return
    out = asked.out or Path(tempfile.mkdtemp(prefix="distill-"))
    out.mkdir(parents=True, exist_ok=True)
    at_once = min(asked.at_once, len(rows)) * asked.processes
    threads = str(max(1, usable_cores() // at_once))
    environment = {**os.environ, "OMP_NUM_THREADS": threads}

    def run(row: str) -> None:
        place = out / row.replace(" ", "-")
        ranks = ["-m", "torch.distributed.run", f"--nproc-per-node={asked.processes}"]
        python = [sys.executable, *(ranks if asked.processes > 1 else [])]
        command = [*python, __file__, *sys.argv[1:], "--work", row, "--out", str(place)]
        with place.with_suffix(".log").open("w") as log:
            ended = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
        if ended.returncode:
            print(f"{row} failed:\n{place.with_suffix('.log').read_text()[-3000:]}", flush=True)
            return
        found = json.loads(place.with_suffix(".json").read_text())
        facts = found["facts"] or {"kl_before": float("nan"), "kl_after": float("nan"), "steps": 0}
        divergences = " / ".join(f"{kl:.4f}" for kl in found["kl"])
        own = f"{facts['kl_before']:.4f}, {facts['kl_after']:.4f}"
        steps, seconds = facts["steps"], found["seconds"]
        print(
            f"| {row} | {found['bits']:.3f} | {divergences} | {own} | {steps} | {seconds:.0f} |", flush=True
        )

    print(
        "| row | bits | KL mean by text | before, after on what is held out | steps | seconds |", flush=True
    )
    with ThreadPoolExecutor(asked.at_once) as workers:
        list(workers.map(run, rows))


if __name__ == "__main__":
    main()
