"""List the model types that mlx-lm loads, for `quantkit/targets/mlx_types.py`.

    python -m tests.compat.mlx            of the version that the table names
    python -m tests.compat.mlx 0.32.2     of this one

Downloads the wheel without what it requires, and reads its source: nothing of it runs.
"""

import ast
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from pathlib import Path

from quantkit.targets.mlx_types import MLX_LM


def model_types(wheel: Path) -> list[str]:
    """Return the types of config.json for which a wheel of mlx-lm has a model."""
    with zipfile.ZipFile(wheel) as files:
        found = {
            Path(name).stem
            for name in files.namelist()
            if name.startswith("mlx_lm/models/") and name.endswith(".py")
            if {"Model", "ModelArgs"} <= _names(files.read(name).decode())
        }
        utilities = ast.parse(files.read("mlx_lm/utils.py").decode())
    for node in utilities.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_REMAPPING":
            others: dict[str, str] = ast.literal_eval(node.value)
            found |= {name for name, file in others.items() if file in found}
    return sorted(found)


def _names(source: str) -> set[str]:
    """Return the classes that a module defines, and what it imports by name."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name for one in node.names}
    return found


def main() -> None:
    """Print the table."""
    version = sys.argv[1] if len(sys.argv) > 1 else MLX_LM
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*command, f"mlx-lm=={version}"], check=True)
        names = model_types(next(Path(folder).glob("*.whl")))
    print("\n".join(textwrap.wrap(" ".join(names), 104)))


if __name__ == "__main__":
    main()
