"""Compile the fused kernels for compute capability 9.0 with each tested version of Triton, without a GPU.

    python tests/compat/triton.py                           all tested versions, a preset of each kind
    python tests/compat/triton.py --versions 3.9 --all      one version, every preset

Checks that each kernel compiles, fits in shared memory, and waits for its products before it overwrites their
operands, and runs the tests of compiling and launching. Each version is installed into a directory of its
own, kept in --environments for the next run; everything else comes from the environment that runs this. Exit
status 1 if any version failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from quantkit.kernels.triton_support import TESTED_TRITON
from quantkit.packing.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
CODEGEN = ROOT / "tests" / "kernels" / "codegen.py"
#: One preset of each that are decoded alike.
KINDS = ("int8", "int7", "int4", "int3", "binary", "fp6", "book4", "mxfp4", "nvfp4")
#: Kernels as `codegen.py` names them, with rows of x.
KERNELS = (
    ("decode 8 2 1 2 0", 2),
    ("small-m 8 8 2 0", 16),
    ("small-m 8 4 2 1", 8),
    ("wgmma", 4096),
    ("portable-gemm", 64),
    ("portable-gemv", 1),
    ("dequantize", 1),
)
#: The kernel for rounded inputs, and names of `--scheme`.
ROUNDED = (
    ("bytes 128 2 1", "W4AFP8"),
    ("bytes 128 2 1", "FP8_BLOCK"),
    ("bytes 256 1 0", "FP8_DYNAMIC"),
    ("bytes 256 1 0", "W8A8"),
    ("bytes 64 2 1", "W4A8"),
)


def main() -> int:
    """Parse the command line, compile with each version, print a line per version and per failure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", nargs="+", default=TESTED_TRITON, metavar="VERSION")
    parser.add_argument("--all", action="store_true", help="every preset, which takes half an hour a version")
    parser.add_argument(
        "--environments", type=Path, default=Path(tempfile.gettempdir()) / "quantkit-compat", metavar="DIR"
    )
    arguments = parser.parse_args()
    names = [name for name in PRESETS if PRESETS[name].planes == 1] if arguments.all else KINDS
    cases = [(kernel, name, 90, m) for name in names for kernel, m in KERNELS]
    cases += [(kernel, name, 90, 512) for kernel, name in ROUNDED]
    failures = 0
    for version in arguments.versions:
        found = compile_with(installed(arguments.environments, version), cases)
        wrong = [(case, reason) for case, facts in found if (reason := why_wrong(facts)) is not None]
        for case, reason in wrong:
            print(f"triton {version}: {case}: {reason}")
        print(f"triton {version}: {len(found) - len(wrong)} of {len(found)} right", flush=True)
        failures += len(wrong) + (not passes(installed(arguments.environments, version)))
    return 1 if failures else 0


def installed(directory: Path, version: str) -> Path:
    """The directory that has Triton `version`, installed if it is not there yet."""
    home = directory.resolve() / f"triton-{version}"
    done = home / "complete"
    if not done.exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"]
        subprocess.run([*install, str(home), f"triton=={version}.*"], check=True)
        done.touch()
    return home


def passes(triton: Path) -> bool:
    """Run the tests of compiling and launching with the Triton in a directory: they meet its own classes."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/kernels/jit"],
        cwd=ROOT,
        env=environment_of(triton),
        check=False,
    )
    return done.returncode == 0


def environment_of(triton: Path) -> dict[str, str]:
    """The variables of a process that imports the Triton in a directory, and everything else from here."""
    places = [str(triton), str(ROOT), *filter(None, sys.path)]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": os.pathsep.join(places), "TRITON_CACHE_DIR": str(triton / "cache")}


def compile_with(triton: Path, cases: list[tuple[str, str, int, int]]) -> list[tuple[Any, dict[str, Any]]]:
    """What `codegen.py` says of each case with the Triton in a directory."""
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    command = [sys.executable, "-W", "ignore", str(CODEGEN)]
    done = subprocess.run(
        command, input=lines, text=True, stdout=subprocess.PIPE, env=environment_of(triton), check=True
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return list(zip(cases, answers, strict=True))


def why_wrong(facts: dict[str, Any]) -> str | None:
    """Why a compiled kernel would not do; None if it would."""
    if "error" in facts:
        return str(facts["error"]).strip().splitlines()[-1]
    if facts["shared"] > facts["limit"]:
        return f"{facts['shared']} bytes of shared memory, where there are {facts['limit']}"
    if facts["overwritten"]:
        return f"operands of running products are overwritten: {facts['overwritten']}"
    if len(facts["chains"]) <= 1 and set(facts["in_flight"]) - {0}:
        return f"products in flight where operands are overwritten: {facts['in_flight']}"
    return None


if __name__ == "__main__":
    sys.exit(main())
