"""Check and pack the calibration text that comes with quantkit.

    gzip -dc quantkit/calibrate/data/text/default.jsonl.gz > documents.jsonl    # to edit it
    python benchmarks/calibration_text.py pack documents.jsonl
    python benchmarks/calibration_text.py check TEXT...    # what it shares with texts for evaluation

A document is a line, {"title": ..., "text": ...}, whose title `SOURCES.md` has to explain. Packing the same
documents gives the same bytes. `check` fails if twelve words in a row are in one of the texts as well (.txt,
or .jsonl, of which every string counts): a model would be measured on what it was calibrated on.
"""

import argparse
import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.calibrate.data.texts import BUNDLED

RUN = 12


def runs(text: str) -> Iterator[tuple[str, ...]]:
    """Every run of `RUN` words, in order, regardless of case and punctuation."""
    words = re.findall(r"\w+", text.lower())
    return zip(*(words[i:] for i in range(RUN)), strict=False)


def texts_of(path: Path) -> Iterator[str]:
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8")
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        yield " ".join(strings(json.loads(line)))


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def documents(data: bytes) -> list[dict[str, str]]:
    return [json.loads(line) for line in data.decode("utf-8").split("\n") if line]


def shared(rows: list[dict[str, str]], paths: list[Path]) -> list[str]:
    """A line for each document and file that share a run."""
    own = {run: row["title"] for row in rows for run in runs(row["text"])}
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for path in paths:
        for text in texts_of(path):
            for run in runs(text):
                if run in own:
                    found.setdefault((own[run], path.name), run)
    return [f"{title} and {name}: {' '.join(run)}" for (title, name), run in found.items()]


def pack(data: bytes) -> bytes:
    """The file to ship; `SystemExit` naming a title that `SOURCES.md` lacks, or that is there twice."""
    explained = BUNDLED.with_name("SOURCES.md").read_text(encoding="utf-8")
    titles = [row["title"] for row in documents(data)]
    for title in titles:
        if f"| {title} |" not in explained or titles.count(title) > 1:
            sys.exit(f"{title!r}: every document has a title of its own, and a row of SOURCES.md")
    return gzip.compress(data, 9, mtime=0)


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("command", choices=("pack", "check"))
    parser.add_argument("paths", nargs="+", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "pack":
        BUNDLED.write_bytes(pack(arguments.paths[0].read_bytes()))
        return
    rows = documents(gzip.decompress(BUNDLED.read_bytes()))
    if lines := shared(rows, arguments.paths):
        sys.exit("\n".join(lines))
    print(f"{len(rows)} documents share no {RUN} words in a row with {len(arguments.paths)} files")


if __name__ == "__main__":
    main()
