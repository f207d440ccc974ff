"""GPU memory of quantization: what `plan` names, what torch allocates and reserves, what the driver counts.

    python benchmarks/quantize_memory.py --method mse gptq mse,distill --layers 2 --allocators off

Random weights of Llama-3 8B's shapes are written to a temporary folder (436 MB a layer), and `quantkit
quantize` runs in fresh processes, with torch's allocator as it is and with expandable segments. The driver's
figure is that of nvidia-smi: used memory of the GPU less what was used before, sampled every 10 ms. No other
process may use the GPU.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch

from quantkit.calibrate.methods import method_named

TOKENIZER = Path(__file__).parents[1] / "examples" / "stories260K"
#: Runs the command line with argv, and prints its memory and seconds as the last line of stdout.
CHILD = """
import json, sys, threading, time
import torch
before = torch.cuda.device_count() and int(sys.argv.pop(1))
most, ended = [0], threading.Event()
def watch():
    while not ended.wait(0.01):
        free, total = torch.cuda.mem_get_info(0)
        most[0] = max(most[0], total - free)
torch.cuda.init()
thread = threading.Thread(target=watch, daemon=True)
thread.start()
from quantkit.cli.main import main
sys.argv[0] = "quantkit"
start = time.monotonic()
try:
    main()
except SystemExit as error:
    if error.code:
        raise
ended.set()
thread.join()
print(json.dumps({"seconds": time.monotonic() - start, "driver": most[0] - before,
    "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}))
"""


def write_source(directory: Path, layers: int, vocabulary: int) -> None:
    """A random model of Llama-3 8B's shapes in bfloat16, with the tokenizer of stories260K."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    for path in TOKENIZER.glob("*token*.json"):
        shutil.copy(path, directory)


def write_text(path: Path, tokens: int) -> None:
    """Random words, more of them than `tokens`."""
    words = random.Random(0)
    letters = "etaoinshrdlucmfw"
    lines = ("".join(words.choices(f"{letters}   ", k=100)) for _ in range(tokens // 25 + 1))
    path.write_text("\n".join(lines), encoding="utf-8")


def used_before() -> int:
    """Bytes of GPU 0 that are used by others."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) << 20


def measured(
    source: Path, out: Path, options: argparse.Namespace, method: str, expandable: bool
) -> dict[str, float]:
    """Seconds, and the bytes that `plan` named, and the most of the driver and of torch."""
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if expandable else {}
    command = [sys.executable, "-c", CHILD, str(used_before())]
    command += ["quantize", str(source), str(out), "--method", method, "--device", "cuda"]
    if method_named(method).distill:
        command += ["--steps", str(options.steps), "--format", "int2", "--group-size", "64"]
    if method_named(method).needs_data:
        command += ["--calibration-samples", str(options.samples)]
        command += ["--calibration-length", str(options.length)]
        command += ["--calibration", str(source / "calibration.txt")]
    command += ["--overwrite", "--no-check", "--json"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **settings}
    )
    told, _, last = done.stdout.rstrip().rpartition("\n")
    found: dict[str, float] = json.loads(last)
    return {"plan": json.loads(told)["gpu_memory"]["quantizing"], **found}


def main() -> None:
    """Print a line per method and setting of the allocator, and write all as JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", nargs="+", default=["gptq"], help="methods")
    parser.add_argument("--steps", type=int, default=12, help="steps of a method that trains, of int2")
    parser.add_argument("--allocators", default="off,on", help="off and on: expandable segments")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU to measure on")
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "source", Path(folder) / "out"
        write_source(source, options.layers, options.vocabulary)
        write_text(source / "calibration.txt", 2 * options.samples * options.length)
        torch.cuda.empty_cache()
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {vars(options)}")
        rows = []
        for method, expandable in product(options.method, options.allocators.split(",")):
            found = measured(source, out, options, method, expandable == "on")
            kinds = ("plan", "allocated", "reserved", "driver")
            sizes = ", ".join(f"{kind} {found[kind] / 1e9:.2f} GB" for kind in kinds)
            ratio = found["plan"] / found["driver"]
            print(
                f"{method}, expandable segments {expandable}: {sizes}, plan / driver {ratio:.2f}, "
                f"{found['seconds']:.1f} s",
                flush=True,
            )
            rows.append({"method": method, "expandable_segments": expandable == "on", **found})
    if options.json is not None:
        asked = {name: value for name, value in vars(options).items() if name != "json"}
        about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        options.json.write_text(json.dumps({"about": about, **asked, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
