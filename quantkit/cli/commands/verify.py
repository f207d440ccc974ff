"""`quantkit verify`: is a packed checkpoint whole, unchanged and loadable."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import fail, note, print_json, progress, say
from quantkit.cli.layers import print_engine_layers
from quantkit.errors import CheckpointError, UsageError
from quantkit.escaping import one_line


def verify(
    directory: options.PackedDirectory,
    reload: Annotated[
        bool,
        typer.Option("--reload/--no-reload", help="Load the model in a fresh process and run a few tokens."),
    ] = True,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="SOURCE",
            help="Compare every weight with SOURCE, whose weights 'convert' keeps.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="ENGINE",
            help="Instead, say what vllm or sglang makes of it, such as vllm==0.26.0; the newest version "
            "known otherwise.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Check that a packed checkpoint is whole and runs.

    Files against the hashes of the manifest, headers, config.json and manifest against each other, and
    that a fresh process loads the model and runs it. Exits with 3 if a check fails. What save_pretrained
    wrote has no manifest: the checks that take one are skipped. With --against, every weight is compared with
    that of SOURCE, bit by bit. With --engine, reads headers alone: which class of the engine reads each
    linear, among how many GPUs the engine can divide the model, and why it would refuse or misread it.
    """
    from quantkit.verification.verify import verify as check

    if engine is not None:
        if against is not None:
            raise UsageError(
                "--engine reads headers and compares no weights. Leave out --against or --engine."
            )
        print_engine(directory, engine, as_json=json)
        return
    with progress("verifying") as report:
        checks = check(directory, reload=reload, against=against, progress=report)
    failed = [one for one in checks if one.problems]
    if json:
        print_json(
            {"ok": not failed, "checks": [vars(one) | {"problems": list(one.problems)} for one in checks]}
        )
    else:
        for one in checks:
            result = "FAILED" if one.problems else "skip" if one.skipped else "ok"
            say(one_line(f"{result:7}{one.name}: {one.detail}"))
            for problem in one.problems:
                say(one_line(f"       {problem}"))
    if failed:
        fail(
            f"{len(failed)} of {len(checks)} checks failed. Download the checkpoint again, or quantize the "
            "model again."
        )
        raise typer.Exit(CheckpointError.exit_code)


def print_engine(directory: Path, asked: str, *, as_json: bool) -> None:
    """Print what the engine that was `asked` for makes of a packed checkpoint; exit with 3 if it refuses."""
    from quantkit.checkpoint.engines import asked_engine
    from quantkit.verification.engine import engine_report

    engine, version = asked_engine(asked)
    report = engine_report(directory, engine, version)
    if as_json:
        print_json(report.to_dict())
    else:
        print_engine_layers(report)
        works = [str(ranks) for ranks, reason in report.tensor_parallel.items() if reason is None]
        if works:
            say(f"tensor parallel sizes: {', '.join(works)}")
        for ranks, reason in report.tensor_parallel.items():
            if reason is not None:
                say(one_line(f"not {ranks}: {reason}"))
        for text in report.notes:
            note(text)
        for text in report.refusals:
            say(one_line(f"FAILED {text}"))
    if report.refusals:
        fail(f"{engine.name} {version} cannot load {directory}, for the reasons printed.")
        raise typer.Exit(CheckpointError.exit_code)
    if not as_json:
        say(f"{engine.name} {version} has a class for each linear")
