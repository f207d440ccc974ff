"""`quantkit verify`: is a packed checkpoint whole, unchanged and loadable."""

from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import out, print_json, progress


def verify(
    directory: options.PackedDirectory,
    reload: Annotated[
        bool, typer.Option(help="Also load the model in a fresh process and run a few tokens.")
    ] = True,
    json: options.Json = False,
) -> None:
    """Check hashes, headers, missing tensors, and that a fresh process can load and run DIRECTORY."""
    from quantkit.model.verify import verify as check

    with progress("verifying") as report:
        checks = check(directory, reload=reload, progress=report)
    failed = [one for one in checks if one.problems]
    if json:
        print_json(
            {"ok": not failed, "checks": [vars(one) | {"problems": list(one.problems)} for one in checks]}
        )
    else:
        for one in checks:
            out.print(f"{'FAILED' if one.problems else 'ok':7}{one.name}: {one.detail}")
            for problem in one.problems:
                out.print(f"       {problem}")
    if failed:
        raise typer.Exit(3)
