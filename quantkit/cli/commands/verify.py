"""`quantkit verify`: is a packed checkpoint whole, unchanged and loadable."""

from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import fail, print_json, progress, say
from quantkit.errors import CheckpointError
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
    json: options.Json = False,
) -> None:
    """Check that a packed checkpoint is whole and runs.

    Files against the hashes of the manifest, headers, config.json and manifest against each other, and
    that a fresh process loads the model and runs it. Exits with 3 if a check fails. What save_pretrained
    wrote has no manifest: the checks that take one are skipped. With --against, every weight is compared with
    that of SOURCE, bit by bit.
    """
    from quantkit.verification.verify import verify as check

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
