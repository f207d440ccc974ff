"""Time and GPU memory of training steps on Llama-3 8B's shapes, with as much memory free as is asked for.

    python benchmarks/distill_step.py --free 72 [--layers 32] [--steps 8] [--json FILE]
    python benchmarks/distill_step.py --processes 2 [--layers 8]

Random weights are written to a temporary folder (436 MB a layer), rounded to int2 in groups of 64, and
trained for some steps on random words; the original writes no samples. With `--free` a second process takes
the rest of the memory. With `--processes` so many of torchrun share the steps, each on a GPU. The first two
steps do not count. Peak is what nvidia-smi counts on the first GPU, sampled every 50 ms, without the second
process.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from quantize_memory import write_source, write_text

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.quantization.distill import training
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantizing import quantize

#: Takes argv[1] bytes of the GPU until its input ends.
HOLDER = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("ready", flush=True)
sys.stdin.read()
"""


def main() -> None:
    """Write the model, and train it in this process or in those of torchrun."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--free", type=float, help="GB of GPU memory to leave; all if not given")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.processes > 1 and asked.free is not None:
        parser.error("--free takes one process")
    if asked.folder is not None:
        train(asked)
        return
    with tempfile.TemporaryDirectory() as folder:
        asked.folder = Path(folder)
        write_source(asked.folder / "source", asked.layers, asked.vocabulary)
        write_text(asked.folder / "source" / "text.txt", 512 * asked.length)
        if asked.processes == 1:
            train(asked)
            return
        ranks = ["-m", "torch.distributed.run", f"--nproc-per-node={asked.processes}"]
        subprocess.run([sys.executable, *ranks, __file__, *sys.argv[1:], "--folder", folder], check=True)


def train(asked: argparse.Namespace) -> None:
    """Train the model in `asked.folder`, and print a line on the first process."""
    # The host waits for each step, so that its time is known.
    training.READ_EVERY = 1
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    free, _ = torch.cuda.mem_get_info()
    holder = None
    if asked.free is not None:
        command = [sys.executable, "-c", HOLDER, str(free - int(asked.free * 1e9))]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        print(holder.stdout.readline().strip())
    most, ended, times = [0], threading.Event(), list[float]()
    own_start = torch.cuda.mem_get_info()[0]

    def watch() -> None:
        while not ended.wait(0.05):
            most[0] = max(most[0], own_start - torch.cuda.mem_get_info()[0])

    def progress(done: int, total: int, label: str) -> None:
        if label.startswith("step "):
            times.append(time.monotonic())
            print(f"{time.strftime('%H:%M:%S')} {label}", flush=True)

    try:
        torch.cuda.empty_cache()
        threading.Thread(target=watch, daemon=True).start()
        quantize(
            asked.folder / "source",
            asked.folder / "out",
            format="int2",
            group_size=64,
            method="mse,distill",
            device="cuda",
            check=False,
            calibration=CalibrationOptions(str(asked.folder / "source" / "text.txt"), 16, asked.length),
            distillation=DistillOptions(steps=asked.steps, own=0.0),
            progress=progress,
        )
        ended.set()
    finally:
        if holder is not None:
            holder.communicate("")
    if os.environ.get("RANK", "0") != "0":
        return
    seconds = (times[-1] - times[1]) / (len(times) - 2)
    tokens = 64 * asked.length
    found = {
        "about": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        **{name: value for name, value in vars(asked).items() if name not in ("json", "folder")},
        "step_seconds": seconds,
        "seconds_per_million_tokens": seconds * 1e6 / tokens,
        "peak_bytes": most[0],
        "allocated": torch.cuda.max_memory_allocated(),
    }
    print(json.dumps(found))
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
