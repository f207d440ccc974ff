"""Hash packed outputs and print help texts, to show that a change of the code changes neither.

    python -m tests.outputs write /tmp/before      in one checkout
    python -m tests.outputs write /tmp/after       in another, on the same machine
    diff -r /tmp/before /tmp/after

It runs the command line only, so that it needs no module of quantkit by name. `stories260K` is quantized by
each method, its linears to all schemes in turn. `outputs.json` has the SHA-256 of each tensor file's names,
dtypes, shapes and bytes by method and scheme; `help.txt` has `--help` of each command.

`tests/golden` keeps those of the data-free methods, whose bytes are the same with and without AVX2 and
AVX-512 (`ATEN_CPU_CAPABILITY`) and with one thread and two. Calibrated methods depend on the order in which a
machine sums (awq's bytes differ with AVX2 and AVX-512), so they are compared between two checkouts only.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "examples" / "stories260K"
GOLDEN = Path(__file__).parent / "golden"
LAYERS = 5
LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
#: Fields of a recipe's rule, by name.
SCHEMES: dict[str, dict[str, Any]] = {
    "int8-channel": {"format": "int8"},
    "int8-tensor": {"format": "int8", "group_size": "tensor"},
    "int4": {"format": "int4", "group_size": 32},
    "int4-integer-zero": {"format": "int4", "group_size": 32, "zero_point": "integer"},
    "int3-e4m3": {"format": "int3", "group_size": 32, "scale_dtype": "e4m3"},
    "int2-float-zero": {"format": "int2", "group_size": 16, "zero_point": "float"},
    "ternary-radix": {"format": "ternary", "group_size": 32, "packing": "radix"},
    "binary-residual": {"format": "binary-residual", "group_size": 32},
    "binary-rank1": {"format": "binary-rank1"},
    "fp8": {"format": "fp8"},
    "fp6": {"format": "fp6", "group_size": 48},
    "nf4": {"format": "nf4"},
    "book4": {"format": "book4"},
    "mxfp4": {"format": "mxfp4"},
    "nvfp4": {"format": "nvfp4"},
}
#: What methods can fit: not all have a way to choose scales of a tensor, several terms and scales of columns.
GROUPS = tuple(name for name in SCHEMES if not name.startswith(("binary", "int8-tensor")))
INTEGERS = tuple(name for name in GROUPS if name.startswith("int"))
DATA_FREE = {"rtn": tuple(SCHEMES), "mse": tuple(SCHEMES), "hqq": INTEGERS}
CALIBRATED = {"awq": GROUPS, "gptq": GROUPS, "best": GROUPS, "signround": INTEGERS}


def recipe(method: str, schemes: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """A recipe in TOML that gives the linears all `schemes` in turn, and the scheme of each linear."""
    names = [f"model.layers.{layer}.{linear}" for layer in range(LAYERS) for linear in LINEARS]
    of = {name: schemes[i % len(schemes)] for i, name in enumerate(names)}
    lines = ["[default]", f"method = {json.dumps(method)}"]
    for name, scheme in of.items():
        fields = {"match": name, **SCHEMES[scheme]}
        lines += ["[[rule]]", *(f"{field} = {json.dumps(value)}" for field, value in fields.items())]
    return "\n".join(lines) + "\n", of


def tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Dtype, shape and bytes of each tensor of a safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: (one["dtype"], one["shape"], data[slice(*(start + at for at in one["data_offsets"]))])
        for name, one in header.items()
    }


def hashes(directory: Path, of: dict[str, str]) -> dict[str, str]:
    """SHA-256 of the tensors of each scheme's linears, and of all tensors that belong to no linear."""
    sums: defaultdict[str, Any] = defaultdict(hashlib.sha256)
    found = {name: one for path in directory.glob("*.safetensors") for name, one in tensors(path).items()}
    for name, (dtype, shape, data) in sorted(found.items()):
        sums[of.get(name.rpartition(".")[0], "dense")].update(f"{name} {dtype} {shape}\n".encode() + data)
    return {scheme: one.hexdigest() for scheme, one in sorted(sums.items())}


def output_hashes(
    methods: dict[str, tuple[str, ...]], directory: Path, run: Callable[..., object]
) -> dict[str, dict[str, str]]:
    """Hashes by method and scheme of what `run("quantize", ...)` writes below `directory`."""
    found = {}
    for method, schemes in methods.items():
        text, of = recipe(method, schemes)
        path, out = directory / f"{method}.toml", directory / method
        path.write_text(text)
        data = ("--calibration-samples", 16, "--calibration-length", 64)
        run("quantize", SOURCE, out, "--recipe", path, "--no-check", "--device", "cpu", *data)
        found[method] = hashes(out, of)
    return found


def help_texts(run: Callable[..., str]) -> str:
    """`--help` of quantkit and each of its commands, in lines of 80 columns."""
    text = run("--help")
    commands = re.findall(r"^  (\w+)  ", text.partition("Commands:")[2], re.MULTILINE)
    parts = {"quantkit": text, **{f"quantkit {one}": run(one, "--help") for one in commands}}
    return "\n".join(f"$ {name} --help\n{part}" for name, part in parts.items())


def _run(*arguments: object) -> str:
    """The standard output of the `quantkit` command of this checkout, on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    # Named as the installed command is, which help texts begin with.
    start = "import sys; sys.argv[0] = 'quantkit'; from quantkit.__main__ import main; main()"
    command = [sys.executable, "-c", start, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments))} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.outputs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="write outputs.json and help.txt of this checkout")
    writing.add_argument("directory", type=Path)
    commands.add_parser("golden", help="write those of the data-free methods to tests/golden")
    given = parser.parse_args()
    is_golden = given.command == "golden"
    directory = GOLDEN if is_golden else given.directory
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        found = output_hashes(DATA_FREE | ({} if is_golden else CALIBRATED), Path(scratch), _run)
    (directory / "outputs.json").write_text(json.dumps(found, indent=1) + "\n")
    (directory / "help.txt").write_text(help_texts(_run))


if __name__ == "__main__":
    main()
