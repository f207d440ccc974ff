"""Measure in a fresh process: memory is of one model, and no state is left from another.

The process reads a JSON object on stdin and prints JSON objects, one per line: progress, then a result or an
error.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit.bench.bench_options import BenchOptions, ServeOptions
from quantkit.bench.figures import Serving, Speed
from quantkit.bench.serving import measure_serving
from quantkit.bench.speed import measure_speed
from quantkit.errors import EnvironmentProblem, QuantkitError
from quantkit.files import from_json
from quantkit.progress import Progress
from quantkit.signals import kept_from_children

_PROGRAM = "from quantkit.bench.worker import main; main()"


def speed_of(
    source: str,
    options: BenchOptions,
    *,
    profile: Path | None = None,
    progress: Progress | None = None,
    estimated: Callable[[float], None] | None = None,
) -> Speed:
    """Run `measure_speed` in a fresh process, so that its memory is of this model alone."""
    wanted = {"speed": asdict(options), "profile": None if profile is None else str(profile)}
    return from_json(Speed, _run({"source": source, **wanted}, progress, estimated))


def serving_of(source: str, options: ServeOptions, *, progress: Progress | None = None) -> Serving:
    """Run `measure_serving` in a fresh process, without state of earlier models."""
    return from_json(Serving, _run({"source": source, "traffic": asdict(options)}, progress))


def _run(
    wanted: dict[str, Any], progress: Progress | None, estimated: Callable[[float], None] | None = None
) -> dict[str, Any]:
    # -P: with -c, Python would also import modules from the working directory, which may be the checkpoint.
    with kept_from_children():
        started = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
    with started as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(wanted))
            process.stdin.close()
            for line in process.stdout:
                message = json.loads(line)
                if "result" in message:
                    result: dict[str, Any] = message["result"]
                    return result
                if "error" in message:
                    raise _error(message["code"], message["error"])
                if "estimate" in message:
                    if estimated is not None:
                        estimated(message["estimate"])
                elif progress is not None:
                    progress(*message["progress"])
        except BaseException:
            process.kill()
            raise
    raise EnvironmentProblem(
        f"{wanted['source']}: the process that measured ended with status {process.returncode}; -9 often "
        "means too little memory. Use smaller batches or prompts."
    )


def _error(code: int, text: str) -> QuantkitError:
    kinds = {kind.exit_code: kind for kind in QuantkitError.__subclasses__()}
    return kinds.get(code, QuantkitError)(text)


def main() -> None:
    """Run one measurement in the fresh process: read it from stdin, print progress and the result."""
    # Libraries may print to stdout: redirect that to stderr, so that stdout has messages only.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**message: Any) -> None:
        print(json.dumps(message), file=messages, flush=True)

    def report(done: int, total: int, label: str) -> None:
        tell(progress=(done, total, label))

    def estimated(seconds: float) -> None:
        tell(estimate=seconds)

    try:
        tell(result=_measured(json.load(sys.stdin), report, estimated))
    except QuantkitError as error:
        tell(error=str(error), code=error.exit_code)


def _measured(
    wanted: dict[str, Any], progress: Progress, estimated: Callable[[float], None]
) -> dict[str, Any]:
    from quantkit.memory import enough_memory
    from quantkit.model.hf_files import explained
    from quantkit.runtime.transformers.quiet import silence

    silence()
    source = wanted["source"]
    with enough_memory(source, "Use --device cpu, or a smaller model."), explained(source):
        if "traffic" in wanted:
            return measure_serving(source, ServeOptions(**wanted["traffic"]), progress=progress).to_dict()
        profile = wanted["profile"]
        return measure_speed(
            source,
            BenchOptions(**wanted["speed"]),
            profile=None if profile is None else Path(profile),
            progress=progress,
            estimated=estimated,
        ).to_dict()
