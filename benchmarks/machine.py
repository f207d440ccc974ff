"""What figures were measured with, in a line: the GPU or CPU, packages, and the commit of the tree."""

import importlib.metadata
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from quantkit.bench.machine import cpu_name
from quantkit.cli.threads import usable_cores

#: Beside torch, those that are installed.
PACKAGES = ("triton", "transformers", "gemlite")


def machine() -> str:
    """As "NVIDIA H200, torch 2.11.0, triton 3.6.0, commit 1234567 with changes"."""
    return _with_versions(torch.cuda.get_device_name())


def cpu_machine() -> str:
    """As "2 cores of AMD EPYC (AVX512), torch 2.13.0, transformers 5.24.0, commit 1234567"."""
    kind = torch.backends.cpu.get_cpu_capability()
    return _with_versions(f"{usable_cores()} cores of {cpu_name()} ({kind})")


def command() -> str:
    """How this script was called, as "python benchmarks/gpu_matmul.py --m 1", without where to store it."""
    arguments = sys.argv[1:]
    if "--json" in arguments:
        place = arguments.index("--json")
        del arguments[place : place + 2]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def _with_versions(device: str) -> str:
    packages = [("torch", torch.__version__), *((name, _version(name)) for name in PACKAGES)]
    versions = [f"{name} {version}" for name, version in packages if version]
    return ", ".join([device, *versions, commit()])


def commit(tree: Path = Path(__file__).parent) -> str:
    """The last commit of a tree, and whether files of the tree are others, but for stored results."""
    last = _git(tree, "rev-parse", "--short", "HEAD")
    if not last:
        return "no commit"
    changes = _git(
        tree, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results"
    )
    return f"commit {last} with changes" if changes else f"commit {last}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _git(tree: Path, *arguments: str) -> str:
    """What git prints; nothing where there is no git or no history."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=tree, capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""
