"""Fuzzing guided by coverage: atheris keeps what reaches new code of quantkit, and mutates it further.

The mutations are those of the targets. atheris has wheels for Linux: `pip install '.[fuzz]'`.
"""

import sys
from pathlib import Path
from random import Random
from typing import Any


def guided(arguments: Any) -> int:
    """Fuzz one target for `--seconds`; 1 at the first finding, which libFuzzer writes to `--findings`."""
    try:
        import atheris
    except ImportError as error:
        print(f"atheris cannot be imported ({error}); pip install '.[fuzz]'", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=["quantkit"]):
        from .runner import Place, finding, in_scratch, run_case
        from .targets import TARGETS
    target = TARGETS[name := arguments.target[0]]
    arguments.findings.mkdir(parents=True, exist_ok=True)
    with in_scratch() as scratch:
        place, corpus = Place(Path(scratch)), Path(scratch) / "corpus"
        corpus.mkdir()
        for i, seed in enumerate(target.seeds()):
            (corpus / str(i)).write_bytes(seed)

        def mutate(data: bytes, size: int, seed: int) -> bytes:
            random = Random(seed)
            return target.mutate(data or random.choice(target.seeds()), random)[:size]

        def one(data: bytes) -> None:
            try:
                run_case(target, data, place)
            except BaseException as error:
                print(f"{name}: {finding(error)}", file=sys.stderr, flush=True)
                raise

        options = [f"-max_total_time={arguments.seconds or 60:.0f}", f"-seed={arguments.seed or 1}"]
        options += [
            f"-artifact_prefix={arguments.findings}/{name}-",
            "-rss_limit_mb=8192",
            "-max_len=1000000",
        ]
        atheris.Setup(["fuzz", *options, str(corpus)], one, custom_mutator=mutate)
        atheris.Fuzz()
    return 0
