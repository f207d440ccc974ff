"""Run packed checkpoints in SGLang on a CPU, through the plug-in, and compare with quantkit's own numbers.

    python -m tests.engines.run_sglang PYTHON                         models and cases of `CASES`
    python -m tests.engines.run_sglang PYTHON --cases llama-int3
    python -m tests.engines.run_sglang PYTHON --options '{"tp_size": 2}' --cases llama-int3-zeros

PYTHON is that of an environment with SGLang 0.5.23, transformers 5.19 and a torch for CPUs: `pip install
--no-deps sglang==0.5.23`, then what its imports ask for. The torchvision of another torch needs an empty
`_meta_registrations.py`. `sglang-kernel` has no build for CPUs: a stub of the two functions that a model
without Intel's tiles calls stands for it. Bounds and models are those of `run.py`.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from .environments import ROOT
from .generate import PROMPTS, TOKENS
from .models import MODELS, random_model
from .run import answer_of, differences, is_within, pack

KERNELS = """
def assign_req_to_token_pool_cpu(requests, pool, starts, stops, places, width):
    first = 0
    for one, start, stop in zip(requests.tolist(), starts.tolist(), stops.tolist()):
        pool[one, start:stop] = places[first : first + stop - start].to(pool.dtype)
        first += stop - start


def __getattr__(name):
    if name.startswith("__") or not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*arguments, **keywords):
        raise NotImplementedError(f"stub of sgl_kernel: {name}")

    return missing
"""
ENTRY_POINT = "[sglang.srt.plugins]\nquantkit = quantkit.runtime.sglang.register:register\n"
#: SGLang's Mixtral has no fused experts for other quantizations, so there is a model that has.
EXPERTS = random_model(
    "Qwen3Moe",
    hidden_size=256,
    intermediate_size=384,
    moe_intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
)
CASES = ("llama-mixed", "llama-embedding", "qwen2-fp6", "mixtral-int3", "qwen3moe-int3")


def stub(folder: Path) -> Path:
    """Write the stub of the kernels, and the entry point of quantkit, which is not installed there."""
    for name, text in {
        "sgl_kernel/__init__.py": KERNELS,
        "quantkit_sglang.dist-info/METADATA": "Metadata-Version: 2.1\nName: quantkit-sglang\nVersion: 0\n",
        "quantkit_sglang.dist-info/entry_points.txt": ENTRY_POINT,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def main() -> int:
    """Pack, generate, compare, print a line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", type=Path)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="MODEL-CASE")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="of sglang.Engine")
    work = Path(tempfile.gettempdir()) / "quantkit-engines-sglang"
    parser.add_argument("--work", type=Path, default=work, metavar="DIR")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    packed = []
    for model, _, case in (one.partition("-") for one in arguments.cases):
        source = arguments.work / model
        if not source.exists():
            {**MODELS, "qwen3moe": EXPERTS}[model](source)
        packed.append(pack(arguments.work, model, source, case))
    options = {"dtype": "float32", **arguments.options}
    kernels = stub(arguments.work / "stub")
    inside = {**os.environ, "PYTHONPATH": f"{kernels}:{ROOT}", "SGLANG_USE_CPU_ENGINE": "1"}
    script = Path(__file__).with_name("generate_sglang.py")
    asked = [json.dumps(options), json.dumps(PROMPTS), str(TOKENS)]
    command = [str(arguments.python), str(script), *asked, *map(str, packed)]
    # SGLang ends the processes of its group.
    subprocess.run(command, cwd=arguments.work, env=inside, check=True, start_new_session=True)
    found = {
        directory.name: differences(answer_of(Path(f"{directory}.json")), directory) for directory in packed
    }
    for name, one in found.items():
        print(f"{name:32} {' '.join(f'{k} {v}' for k, v in one.items())}")
    return 0 if all(is_within(name, one, options["dtype"]) for name, one in found.items()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
