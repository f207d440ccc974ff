"""`quantkit report` and `quantkit push`: the model card, and the upload to the hub."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from quantkit.checkpoint.output.preflight import name_list
from quantkit.cli import options
from quantkit.cli.console import err, note, out, print_json, progress, say
from quantkit.cli.files import REPORT_FILES, make_directory, present, write_files
from quantkit.errors import OutputError, UsageError
from quantkit.escaping import one_line
from quantkit.files import size_text

_Evaluation = Annotated[
    Path | None,
    typer.Option("--eval", metavar="FILE", help="Figures of 'quantkit eval': report.json or eval.json."),
]
_Benchmarks = Annotated[
    list[Path] | None,
    typer.Option(
        "--bench", metavar="FILE", help="Figures of 'quantkit bench': bench.json, serve.json; repeatable."
    ),
]
_BaseModel = Annotated[
    str | None,
    typer.Option(
        "--base-model", metavar="ORG/NAME", help="The original on the hub.", show_default="the source's id"
    ),
]
_License = Annotated[
    str | None, typer.Option(help="The license of the weights.", show_default="that in the README.md of DIR")
]


def report(
    directory: options.PackedDirectory,
    out_directory: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", readable=False, help="Where README.md and plots go.")
    ] = Path("card"),
    evaluation: _Evaluation = None,
    benchmarks: _Benchmarks = None,
    repo: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Where it will be on the hub.", show_default="the name of DIR"),
    ] = None,
    base_model: _BaseModel = None,
    license: _License = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier card.")] = False,
) -> None:
    """Write a model card with the measured figures.

    It says what a packed checkpoint is, how it is stored, what was measured, and how to run it. Figures come
    from the files of 'eval' and 'bench', with the plots of their reports. Without them the card says that
    nothing was measured.
    """
    make_directory(out_directory, REPORT_FILES)
    _check_no_copy(directory, out_directory)
    files = _card_files(directory, evaluation, benchmarks or (), repo, base_model, license)
    if not overwrite and (found := present(out_directory, files)):
        raise OutputError(
            f"output {out_directory} already holds {name_list(found)}. Replace a card with --overwrite or "
            "choose another directory."
        )
    write_files(out_directory, files)
    say(f"wrote {out_directory / 'README.md'}")


def push(
    directory: options.PackedDirectory,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="A repository on the hub, such as ORG/NAME.")],
    card: Annotated[
        Path | None,
        typer.Option(
            "--card", metavar="DIR", help="A card of 'quantkit report'.", show_default="one without figures"
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Create the repository as a private one.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch, created if it is not there.", show_default="main")
    ] = None,
    message: Annotated[
        str | None, typer.Option(help="Of the commit.", show_default="that quantkit quantized the model")
    ] = None,
    base_model: _BaseModel = None,
    license: _License = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List files and sizes; upload nothing.")] = False,
    json: options.Json = False,
) -> None:
    """Upload a packed checkpoint to the hub.

    It goes there with its card, in one commit. Every file is compared with its hash first, if there is a
    manifest; a checkpoint that is not whole is refused.
    """
    from quantkit.publish import upload as uploading
    from quantkit.publish.card import check_repo_id
    from quantkit.runtime.saved_model import NO_MANIFEST, is_saved

    if card is not None and (base_model or license):
        raise UsageError("--card has its own base model and license; give those to 'quantkit report'.")
    check_repo_id(repo)
    files = _card_files(directory, None, (), repo, base_model, license) if card is None else _read_card(card)
    if card is not None and is_saved(directory):
        note(NO_MANIFEST)
    with progress("verifying") as advance:
        prepared = uploading.prepare(directory, files, advance)
    sizes = prepared.sizes
    if dry_run:
        if json:
            print_json({"repo": repo, "files": sizes})
            return
        for name, count in sizes.items():
            out.print(one_line(f"{size_text(count):>10}  {name}"))
        say(f"{len(sizes)} files, {size_text(sum(sizes.values()))}; nothing was uploaded")
        return
    if not err.is_terminal:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
    address = uploading.push(
        prepared,
        repo,
        private=private,
        revision=revision,
        message=message,
        saying=lambda text: err.print(one_line(text)),
    )
    if json:
        print_json({"repo": repo, "files": sizes, "commit": address})
    else:
        say(f"{len(sizes)} files, {size_text(sum(sizes.values()))}: {address}")


def _check_no_copy(directory: Path, out_directory: Path) -> None:
    """Raise `OutputError` if the manifest in `out_directory` lists README.md.

    It is the card of the original model then, a file of that checkpoint, and must not be replaced. The text
    names `directory`, the packed checkpoint.
    """
    from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest
    from quantkit.publish.carried import CARD_NAME

    listed = present(out_directory, [MANIFEST_NAME]) and read_manifest(out_directory)["files"]
    if listed and CARD_NAME in listed:
        raise OutputError(
            f"{out_directory / CARD_NAME} is the card of the original model, a file of the checkpoint there, "
            "and is kept, also with --overwrite. Write the card elsewhere, such as with --out card. Then "
            f"`quantkit push {shlex.quote(str(directory))} REPO --card card` uploads it as the README.md."
        )


def _card_files(
    directory: Path,
    evaluation: Path | None,
    benchmarks: Sequence[Path],
    repo: str | None,
    base_model: str | None,
    license: str | None,
) -> dict[str, bytes]:
    """README.md and the plots beside the files with the figures, by name."""
    from quantkit.publish.card import make_card
    from quantkit.publish.carried import CARD_NAME
    from quantkit.publish.measurements import plots_of, read_measurements

    measurements = read_measurements(directory, evaluation, benchmarks)
    plots, lacking = plots_of(directory, evaluation, benchmarks)
    if lacking is not None:
        note(lacking)
    card = make_card(directory, measurements, plots, repo=repo, base_model=base_model, license=license)
    for line in card.notes:
        note(line)
    return {CARD_NAME: card.markdown().encode(), **{f"{plot.name}.png": plot.png for plot in plots}}


def _read_card(card: Path) -> dict[str, bytes]:
    from quantkit.publish.carried import CARD_NAME

    try:
        found = {path.name: path.read_bytes() for path in sorted(card.glob("*.png"))}
        return {CARD_NAME: (card / CARD_NAME).read_bytes(), **found}
    except OSError as error:
        raise UsageError(
            f"cannot read the card in {card}: {error.strerror or error}. Write one with `quantkit report`."
        ) from error
