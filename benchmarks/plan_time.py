"""CPU seconds of `quantkit plan`, and which packages it spends them on to import.

    python benchmarks/plan_time.py MODEL... [--repeats 3] [--json benchmarks/results/guide/plan-time.json]

Every run is a process of its own on one thread; user and system time are added up, start and end of the
process included. The packages are those of as many runs more of the first model with `-X importtime`, which
measures time on the clock: of each module the shortest counts.
"""

import argparse
import json
import math
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from machine import cpu_machine

ROOT = Path(__file__).resolve().parents[1]
#: A line of `-X importtime`: microseconds of the module itself, with what it imports, and its name.
IMPORT = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)")
#: Packages that are listed; all others are one.
LISTED = 8


def plan(model: str, *options: str) -> tuple[float, str]:
    """CPU seconds of planning a model in int4, and what the process says on stderr."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *options, "-m", "quantkit", "plan", model, "--format", "int4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done.stderr


def imports(runs: Sequence[str]) -> dict[str, float]:
    """Seconds by package, the longest first, from what `-X importtime` printed in several runs."""
    shortest: dict[str, float] = {}
    for said in runs:
        for found in IMPORT.finditer(said):
            shortest[found[2]] = min(shortest.get(found[2], math.inf), int(found[1]) / 1e6)
    seconds: Counter[str] = Counter()
    for module, one in shortest.items():
        seconds[module.partition(".")[0]] += one
    listed = dict(seconds.most_common(LISTED))
    return {**listed, "others": sum(seconds.values()) - sum(listed.values())}


def main(arguments: Sequence[str] | None = None) -> None:
    """Time every model, print the seconds, and store them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    runs = [plan(options.models[0], "-X", "importtime")[1] for _ in range(options.repeats)]
    found = {
        "command": " ".join(
            (
                "python benchmarks/plan_time.py",
                *(Path(one).name for one in options.models),
                f"--repeats {options.repeats}",
            )
        ),
        "machine": cpu_machine(),
        "seconds": {
            Path(model).name: [round(plan(model)[0], 2) for _ in range(options.repeats)]
            for model in options.models
        },
        "imports": {name: round(seconds, 3) for name, seconds in imports(runs).items()},
    }
    for model, seconds in found["seconds"].items():
        print(f"{model}: {median(seconds):.2f} s")
    for name, seconds in found["imports"].items():
        print(f"  import {name}: {seconds:.3f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
