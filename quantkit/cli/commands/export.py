"""`quantkit export`: a packed directory in the layout of another tool."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import completion, options, parsing
from quantkit.cli.choices import TARGETS, listed
from quantkit.cli.console import note, print_json, progress, say
from quantkit.files import size_text
from quantkit.signals import advising


def export(
    packed: Annotated[
        Path,
        typer.Argument(
            metavar="PACKED",
            exists=True,
            file_okay=False,
            readable=False,
            help="A packed checkpoint directory, as 'quantize' and 'convert' write.",
        ),
    ],
    out_directory: options.OutDirectory,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TARGET",
            help=f"The layout: {listed(TARGETS)}.",
            autocompletion=completion.names(*TARGETS),
        ),
    ],
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    max_shard_size: options.ShardSize = options.SHARD_SIZE,
    json: options.Json = False,
) -> None:
    """Write a packed checkpoint in another tool's layout.

    Codes and scales of PACKED become those of TARGET. The written files are read back, and every weight is
    compared with that of PACKED, bit by bit. A linear whose values TARGET does not have is refused by name
    before anything is written. Tokenizer, chat template and generation config go along.
    """
    from quantkit import exporting
    from quantkit.cli.files import resume_advice

    asked = exporting.ExportOptions(
        max_shard_bytes=parsing.parse_size(max_shard_size), resume=resume, overwrite=overwrite
    )

    advice = partial(resume_advice, out_directory, overwrite=overwrite)
    with advising(advice), progress("exporting") as report:
        result = exporting.export(packed, out_directory, to, asked, progress=report)
    for text in result.notes:
        note(text)
    if not result.readers:
        note(f"no other tool was tried with such files of {to}: try yours before you publish them")
    if json:
        print_json(
            {
                "directory": str(result.directory),
                "to": result.to,
                "files": list(result.files),
                "bytes": result.output_bytes,
                "stored": dict(result.stored),
                "readers": list(result.readers),
            }
        )
        return
    kinds = list(dict.fromkeys(result.stored.values()))
    for kind in kinds:
        names = [name for name, of_one in result.stored.items() if of_one == kind]
        say(f"{len(names)} {kind} ({names[0]}{', ...' if len(names) > 1 else ''})")
    say(f"{len(result.stored)} tensors have the values of {packed}, bit by bit")
    if result.readers:
        say(f"tried with such files: {', '.join(result.readers)}")
    say(f"wrote {result.directory} ({size_text(result.output_bytes)})")
