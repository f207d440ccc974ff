"""Fuzz for long: `python -m tests.fuzz --cases 1000000 --seed 1 --jobs 2`.

Cases are numbered, and a number with the seed says what a case is, so that any run can be repeated. Each
finding is written to `--findings`; with the fix it moves to `tests/fuzz/corpus`, where tests replay it.
"""

import argparse
import json
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000, help="in all, shared among the targets")
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
    from .campaign import run_target
    from .targets import TARGETS

    names = arguments.target or [*TARGETS]
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    shares = {name: TARGETS[name].share for name in names}
    began, total, kinds = time.monotonic(), 0, 0
    for name, share in shares.items():
        count = max(1, round(arguments.cases * share / sum(shares.values())))
        tally, findings, took = run_target(name, count, arguments, began)
        total, kinds = total + tally.cases, kinds + len(findings)
        outcomes = dict(tally.outcomes.most_common())
        line = {"target": name, "cases": tally.cases, "seconds": round(took, 1), "outcomes": outcomes}
        print(json.dumps({**line, "findings": findings}), flush=True)
    print(json.dumps({"cases": total, "seconds": round(time.monotonic() - began, 1), "findings": kinds}))
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
