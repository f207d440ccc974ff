"""The `quantkit` command: its subcommands, and how errors and signals end it."""

import signal
import sys
from types import FrameType

import typer

from quantkit.cli.console import err
from quantkit.cli.demo import demo
from quantkit.cli.doctor import doctor
from quantkit.cli.evaluate import evaluate
from quantkit.cli.generate import generate
from quantkit.cli.inspection import inspect
from quantkit.cli.plan import plan
from quantkit.cli.quantize import quantize
from quantkit.cli.verify import verify
from quantkit.errors import QuantkitError

app = typer.Typer(
    help="Quantize language models to packed low-bit checkpoints, run them, and measure what it cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(quantize)
app.command()(plan)
app.command()(inspect)
app.command()(verify)
app.command(name="eval")(evaluate)
app.command()(generate)
app.command()(doctor)
app.command()(demo)


def main() -> None:
    """Run the command line. A `QuantkitError` is one message and its exit code, never a traceback."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except QuantkitError as error:
        err.print(f"error: {error}", style="red")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("interrupted. Finished files are kept; continue with --resume.")
        sys.exit(128 + signal.SIGINT)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
