"""How long it takes from a new process to the first token: cold, with nothing that Triton compiled, and warm.

    python benchmarks/start.py PACKED [--device cuda] [--prompt 512] [--new-tokens 32] [--json start.json]

Cold, `TRITON_CACHE_DIR` is an empty directory; then twice more with what is in it since. Files are read once
before, so that all find them in the page cache. Printed are seconds since a process was started: when torch
is there, when transformers and its code of the model are, which `quantkit.load` imports otherwise, when that
returns, when the first token of a prompt is on the host, and when two generations are, of which a GPU replays
in the second what was recorded in the first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STARTS = ("cold", "warm", "warm again")


def main() -> None:
    """Parse the command line, start a process after the other, print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="PACKED")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--since", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.since is not None:
        print(json.dumps(seconds(arguments)))
        return
    for path in sorted(arguments.directory.rglob("*.safetensors")):
        with path.open("rb") as file:
            while file.read(1 << 26):
                pass
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for start in STARTS:
            found[start] = started(arguments, cache)
            times = ", ".join(f"{name} {value:.2f} s" for name, value in found[start].items())
            print(f"{start}: {times}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def started(arguments: argparse.Namespace, cache: str) -> dict[str, float]:
    """What a new process finds."""
    names = ("device", "prompt", "new_tokens")
    options = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in names]
    done = subprocess.run(
        [sys.executable, __file__, str(arguments.directory), *options, f"--since={time.time()}"],
        env={
            **os.environ,
            "TRITON_CACHE_DIR": cache,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        stdout=subprocess.PIPE,
        check=True,
    )
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def seconds(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds since this process was started, at each of the events."""
    import torch

    found = {"torch": time.time() - arguments.since}
    from transformers import AutoConfig, AutoModelForCausalLM

    import quantkit

    with torch.device("meta"):
        # For what transformers imports only then.
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.directory))
    found["transformers"] = time.time() - arguments.since
    model = quantkit.load(arguments.directory, device=arguments.device)
    found["loaded"] = time.time() - arguments.since
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(arguments.prompt, device=model.device)[None] * 7919 % rows
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    generations = (
        ("first token", 1),
        ("first generation", arguments.new_tokens),
        ("second generation", arguments.new_tokens),
    )
    for name, tokens in generations:
        # On the host, when the device is done.
        model.generate(ids, max_new_tokens=tokens, **options).tolist()
        found[name] = time.time() - arguments.since
    return found


if __name__ == "__main__":
    main()
