"""Fuzz for long: `python -m tests.fuzz --cases 1000000 --seed 1 --jobs 2`.

Cases are numbered, and a number with the seed says what a case is, so that any run can be repeated. Each
finding is written to `--findings`; with the fix it moves to `tests/fuzz/corpus`, where tests replay it.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .campaign import Result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000, help="in all, shared among the targets")
    parser.add_argument(
        "--least", action="append", metavar="TARGET=CASES", help="of --cases; may be repeated"
    )
    parser.add_argument("--seconds", type=float, default=None, help="stop after so many")
    parser.add_argument("--target", action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where findings go")
    parser.add_argument("--atheris", action="store_true", help="one target guided by coverage, for --seconds")
    arguments = parser.parse_args()
    if arguments.atheris:
        if len(arguments.target or ()) != 1:
            parser.error("--atheris takes one --target")
        # It imports quantkit itself, to see what is covered.
        from .guided import guided

        return guided(arguments)
    from .campaign import count, run, shares
    from .targets import TARGETS

    names = arguments.target or [*TARGETS]
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    began = time.monotonic()
    end = None if arguments.seconds is None else began + arguments.seconds
    try:
        least = dict(count(text) for text in arguments.least or ())
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    counts = shares(names, arguments.cases, {k: n for k, n in least.items() if k in names})
    results = run(counts, arguments.seed, arguments.jobs, end, arguments.findings)
    for name, result in results.items():
        print(json.dumps({"target": name, **figures(result)}))
    total = sum(result.tally.cases for result in results.values())
    kinds = sum(len(result.findings) for result in results.values())
    took = round(time.monotonic() - began, 1)
    whole = {"cases": total, "of": sum(counts.values()), "seconds": took, "findings": kinds}
    print(json.dumps(whole))
    return 1 if kinds else 0


def figures(result: "Result") -> dict[str, object]:
    """What is told of a target: `seconds` are those of all processes together."""
    outcomes = dict(result.tally.outcomes.most_common())
    seconds = round(result.seconds, 1)
    return {
        "cases": result.tally.cases,
        "seconds": seconds,
        "outcomes": outcomes,
        "findings": result.findings,
    }


if __name__ == "__main__":
    sys.exit(main())
