"""The command line of a script that writes pages: write them, or say which is not up to date."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def write_or_check(
    arguments: Sequence[str] | None, doc: str, script: str, wanted: Mapping[Path, str], root: Path = ROOT
) -> None:
    """Write the texts `wanted` by page; with `--check` exit with 1 at the first page that has another.

    `doc` is that of the script, whose file name is `script`; pages are named from `root` on.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where a file differs"
    )
    options = parser.parse_args(arguments)
    for path, text in wanted.items():
        if not options.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.relative_to(root)} is not up to date: run python benchmarks/{script}")
