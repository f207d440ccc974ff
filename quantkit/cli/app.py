"""The subcommands of `quantkit`."""

from collections.abc import Callable
from typing import Annotated

import typer

from quantkit.cli.commands.bench import bench
from quantkit.cli.commands.convert import convert
from quantkit.cli.commands.demo import demo
from quantkit.cli.commands.doctor import doctor
from quantkit.cli.commands.evaluate import evaluate
from quantkit.cli.commands.export import export
from quantkit.cli.commands.formats import formats
from quantkit.cli.commands.generate import generate
from quantkit.cli.commands.inspection import inspect
from quantkit.cli.commands.merge import merge
from quantkit.cli.commands.methods import methods
from quantkit.cli.commands.plan import plan
from quantkit.cli.commands.publish import push, report
from quantkit.cli.commands.quantize import quantize
from quantkit.cli.commands.tune import tune
from quantkit.cli.commands.verify import verify
from quantkit.cli.help import Command, Group
from quantkit.cli.threads import with_threads

app = typer.Typer(
    cls=Group,
    help="Quantize language models to packed low-bit checkpoints, run them, and measure what it cost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain help: rich would take what is in square brackets for markup.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
#: Commands that compute, on a CPU unless there is a GPU, and take `--threads`.
COMPUTING: dict[str, Callable[..., None]] = {
    "quantize": quantize,
    "convert": convert,
    "export": export,
    "merge": merge,
    "plan": plan,
    "verify": verify,
    "eval": evaluate,
    "bench": bench,
    "generate": generate,
    "doctor": doctor,
    "demo": demo,
}
for _name, _command in COMPUTING.items():
    app.command(name=_name, cls=Command)(with_threads(_command))
app.command(cls=Command)(inspect)
app.command(cls=Command)(report)
app.command(cls=Command)(push)
app.command(cls=Command)(tune)
app.command(cls=Command)(formats)
app.command(cls=Command)(methods)


def _print_version(wanted: bool) -> None:
    if wanted:
        from quantkit import __version__

        print(f"quantkit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", is_eager=True, callback=_print_version, help="Show the version."),
    ] = False,
) -> None:
    pass
