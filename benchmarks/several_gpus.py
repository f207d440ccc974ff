"""Whether several GPUs generate what one does: device_map="auto", and tensor parallelism of transformers.

    python benchmarks/several_gpus.py PACKED [PACKED ...]                two GPUs
    python benchmarks/several_gpus.py PACKED --ranks 2 --device cpu      two processes on a CPU, through gloo

Every placement runs in processes of its own and generates greedily after each prompt. Printed is for how
many tokens it agrees with one device, and by how much the logits of the prompts differ, as a share of their
largest magnitude. Sums have another order on several devices: compare --dtype float32 with bfloat16. The
directories are packed, or dense to compare with. Exit status 1 if logits differ by more than --tolerance.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PROMPTS = ("Once upon a time", "The value of the function is", "He said that the")
PLACEMENTS = ("one", "auto", "tensor")


def main() -> int:
    """Parse the command line, run each placement of each model, print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="PACKED")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--placement", choices=PLACEMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.placement is not None:
        run(arguments)
        return 0
    worst = 0.0
    for directory in arguments.directories:
        found = {placement: started(placement, directory, arguments) for placement in PLACEMENTS}
        for placement in PLACEMENTS[1:]:
            alike, total, error = difference(found[placement], found["one"])
            worst = max(worst, error)
            line = f"{placement}: {alike} of {total} tokens, logits {error:.2e}"
            print(f"{directory.name} {arguments.dtype}, {line}", flush=True)
    return int(not worst <= arguments.tolerance)


def started(placement: str, directory: Path, arguments: argparse.Namespace) -> Any:
    """What fresh processes find."""
    ranks = (
        ["-m", "torch.distributed.run", f"--nproc-per-node={arguments.ranks}"]
        if placement == "tensor"
        else []
    )
    with tempfile.TemporaryDirectory() as out:
        options = {
            key: getattr(arguments, key.replace("-", "_")) for key in ("device", "dtype", "new-tokens")
        }
        subprocess.run(
            [
                *(sys.executable, *ranks, __file__, str(directory), "--placement", placement),
                *(f"--{key}={value}" for key, value in options.items()),
                *("--out", f"{out}/found.pt"),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            check=True,
        )
        return torch.load(f"{out}/found.pt", weights_only=True)


def run(arguments: argparse.Namespace) -> None:
    """Load, generate, and write tokens and logits; of several ranks the first one writes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import quantkit  # noqa: F401  registers the plug-in

    (directory,) = arguments.directories
    places: dict[str, dict[str, Any]] = {
        "one": {"device_map": f"{arguments.device}:0" if arguments.device == "cuda" else "cpu"},
        "auto": {"device_map": "balanced" if arguments.device == "cuda" else "auto"},
        "tensor": {"tp_plan": "auto"},
    }
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, arguments.dtype), **places[arguments.placement]
    ).eval()
    if arguments.placement == "auto":
        print(
            "devices:", *sorted({str(parameter.device) for parameter in model.parameters()}), file=sys.stderr
        )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens, logits = [], []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
        with torch.no_grad():
            logits.append(model(ids).logits[0].float().cpu())
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=arguments.new_tokens, do_sample=False
        )
        tokens.append(out[0, ids.shape[1] :].tolist())
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save({"tokens": tokens, "logits": logits}, arguments.out)
    if arguments.placement == "tensor":
        torch.distributed.destroy_process_group()


def difference(found: Any, expected: Any) -> tuple[int, int, float]:
    """Tokens that agree before the first that does not, of how many, and the largest error of logits."""
    alike = total = 0
    for mine, theirs in zip(found["tokens"], expected["tokens"], strict=True):
        total += len(theirs)
        alike += next(
            (at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(theirs)
        )
    errors = [
        ((mine - theirs).abs().max() / theirs.abs().max()).item()
        for mine, theirs in zip(found["logits"], expected["logits"], strict=True)
    ]
    return alike, total, max(errors)


if __name__ == "__main__":
    raise SystemExit(main())
