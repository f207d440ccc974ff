"""Run the model tests against several versions of transformers.

    python tests/compat/run.py                              all tested versions
    python tests/compat/run.py --versions 5.12.1 5.23.0     only these
    python tests/compat/run.py -- -k generate -x            the rest goes to pytest

Each version gets a virtual environment of its own, kept in --environments for the next run. It holds
transformers and what that version needs in another version than here; everything else, torch among it,
comes from the environment that runs this script, whose packages it finds behind its own. Install
quantkit with its `test` extra there first. Exit status 1 if any version failed.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from quantkit.about import TESTED_TRANSFORMERS

ROOT = Path(__file__).resolve().parents[2]
#: Tests of what builds, quantizes and runs models of transformers.
FOLDERS = ("tests/model", "tests/quantization", "tests/runtime", "tests/verification")


def main() -> int:
    """Parse the command line, run each version, print a line per version."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", nargs="+", default=TESTED_TRANSFORMERS, metavar="VERSION")
    parser.add_argument(
        "--environments", type=Path, default=Path(tempfile.gettempdir()) / "quantkit-compat", metavar="DIR"
    )
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args()
    results = {
        version: run_tests(environment(arguments.environments, version), arguments.pytest)
        for version in arguments.versions
    }
    for version, passed in results.items():
        print(f"transformers {version}: {'passed' if passed else 'FAILED'}")
    return 0 if all(results.values()) else 1


def environment(directory: Path, version: str) -> Path:
    """The Python of the environment with transformers `version`, made if it is not there yet."""
    home = directory.resolve() / f"transformers-{version}"
    python = home / "bin" / "python"
    done = home / "complete"
    if done.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(home)], check=True)
    # Directories of a .pth file come after the environment's own, so what is installed there wins.
    base = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (home / "lib" / name / "site-packages" / "base.pth").write_text("\n".join(sorted(base)) + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    constraints = str(ROOT / "constraints.txt")
    subprocess.run([*install, "--constraint", constraints, f"transformers=={version}"], check=True)
    done.touch()
    return python


def run_tests(python: Path, arguments: list[str]) -> bool:
    """Whether pytest passes the model tests; prints its output."""
    print(f"== {python}", flush=True)
    result = subprocess.run(
        [str(python), "-m", "pytest", *FOLDERS, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    return result.returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
