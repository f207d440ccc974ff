"""Read exports by the tools that they are for, and compare their logits with quantkit's.

    python -m tests.engines.exports                               all targets of two models
    python -m tests.engines.exports --targets gguf --models llama --model books=DIRECTORY

Each tool gets a virtual environment of its own, kept in --environments. Models are packed and exported once
in --work. Of 32 tokens the largest difference of logits from `quantkit.load` in float32 is shown, relative to
the largest logit: by weights that the tool dequantized, and as it computes, with activations of 8 or 16 bits.
Exit status 1 if one of the first is out of bounds.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import quantkit

from .environments import about, add_places, with_packages
from .models import MODELS, sources

#: Largest relative difference of logits by dequantized weights.
BOUND = 1e-3
TOKENS = 32
LLAMA_CPP = ("llama-cpp-python==0.3.36",)
MLX = ("mlx-lm==0.32.2", "mlx[cpu]==0.32.4")
GPTQMODEL = ("gptqmodel==7.7.0", "optimum==2.3.0")


@dataclass(frozen=True)
class Case:
    """Export: its target, arguments of `quantize`, and packages that read it."""

    target: str
    quantize: Mapping[str, Any]
    packages: tuple[str, ...]


def _case(target: str, packages: tuple[str, ...], format: str, group: int | str, **more: Any) -> Case:
    return Case(target, {"format": format, "group_size": group, "scale_dtype": "float16", **more}, packages)


_ZEROS = {"zero_point": "integer"}
CASES = {
    "gguf Q4_0": _case("gguf", LLAMA_CPP, "int4", 32),
    "gguf Q5_0": _case("gguf", LLAMA_CPP, "int5", 32),
    "gguf Q8_0": _case("gguf", LLAMA_CPP, "int8", 32),
    "gguf Q8_0 of int6": _case("gguf", LLAMA_CPP, "int6", 32),
    "gguf MXFP4": Case("gguf", {"format": "mxfp4"}, LLAMA_CPP),
    "mlx int4": _case("mlx", MLX, "int4", 32),
    "mlx int4 zero-points": _case("mlx", MLX, "int4", 32, **_ZEROS),
    "mlx int3": _case("mlx", MLX, "int3", 32),
    "mlx int6": _case("mlx", MLX, "int6", 32),
    "mlx int8": _case("mlx", MLX, "int8", 32),
    "gptq int4": _case("gptq", GPTQMODEL, "int4", 32),
    "gptq int4 zero-points": _case("gptq", GPTQMODEL, "int4", 32, **_ZEROS),
    "gptq int8": _case("gptq", GPTQMODEL, "int8", 32),
    "awq int4": _case("awq", GPTQMODEL, "int4", 32),
    "awq int4 zero-points": _case("awq", GPTQMODEL, "int4", 32, **_ZEROS),
}


def exported(work: Path, model: str, source: Path, case: Case) -> tuple[Path, Path]:
    """Return the packed and the exported directory of a case; made if they are not there yet."""
    packed = work / "-".join([model, *map(str, case.quantize.values())])
    out = work / f"{packed.name}-{case.target}"
    if not packed.exists():
        quantkit.quantize(source, packed, method="rtn", **case.quantize)
    if not out.exists():
        quantkit.export(packed, out, case.target)
    return packed, out


def tokens_of(vocabulary: int) -> torch.Tensor:
    """Return ids [T], without the first ids of a vocabulary, which are special tokens."""
    return torch.randint(10, vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(0))


def differences(packed: Path, logits: Path) -> dict[str, Any]:
    """Return the relative differences of logits in a file, and how many tokens have quantkit's argmax."""
    if not logits.exists():
        reason = logits.with_suffix(".txt")
        return {"error": reason.read_text() if reason.exists() else "the tool ended without an answer"}
    model = quantkit.load(packed, device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        own = model(tokens_of(model.config.vocab_size)[None]).logits[0].numpy()
    result: dict[str, Any] = {}
    for name, found in np.load(logits).items():
        result[name] = float(f"{np.abs(found - own).max() / np.abs(own).max():.2g}")
        result[f"{name} argmax"] = int((found.argmax(-1) == own.argmax(-1)).sum())
    return result


def compare(python: Path, pairs: Mapping[str, tuple[Path, Path]], vocabulary: int) -> dict[str, Any]:
    """Read all exports of `pairs` of packed and exported directories in one process; return `differences`."""
    script = Path(__file__).with_name("read_logits.py")
    ids = json.dumps(tokens_of(vocabulary).tolist())
    with TemporaryDirectory() as answers:
        places = [str(out.resolve()) for _, out in pairs.values()]
        inside = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [str(python), str(script), answers, ids, *places]
        subprocess.run(command, env=inside, cwd=answers, check=False)
        files = {name: Path(answers) / f"{out.name}.npz" for name, (_, out) in pairs.items()}
        return {name: differences(pairs[name][0], file) for name, file in files.items()}


def is_within(found: Mapping[str, Any]) -> bool:
    """Return True if the logits by dequantized weights are within the bound."""
    return "error" not in found and found["dequantized"] <= BOUND


def main() -> int:
    """Pack, export, read, compare, print a line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["llama", "qwen2"], choices=MODELS)
    parser.add_argument("--model", action="append", default=[], metavar="NAME=DIRECTORY")
    parser.add_argument("--targets", nargs="+", default=["gguf", "mlx", "gptq", "awq"], metavar="TARGET")
    add_places(parser)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    cases = {name: case for name, case in CASES.items() if case.target in arguments.targets}
    pythons = {
        packages: with_packages(arguments.environments, packages[0].replace("==", "-"), *packages)
        for packages in dict.fromkeys(case.packages for case in cases.values())
    }
    found: dict[str, Any] = {}
    for model, source in sources(arguments.work, arguments.models, arguments.model).items():
        vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
        for packages, python in pythons.items():
            pairs = {
                f"{model}: {name}": exported(arguments.work, model, source, case)
                for name, case in cases.items()
                if case.packages == packages
            }
            found |= compare(python, pairs, vocabulary)
    for name, row in found.items():
        print(f"{name:32} {row}")
    if arguments.json is not None:
        table: dict[str, Any] = {"command": "", "machine": "", "versions": {}}
        for packages, python in pythons.items():
            names = [one.partition("==")[0].partition("[")[0] for one in packages]
            said = about("tests.engines.exports", python, names)
            table |= {**said, "versions": {**table["versions"], **said["versions"]}}
        table |= {"tokens": TOKENS, "relative to": "quantkit.load in float32", "bound": BOUND, "cases": found}
        arguments.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0 if all(map(is_within, found.values())) else 1


if __name__ == "__main__":
    raise SystemExit(main())
