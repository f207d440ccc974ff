"""How commands are parsed and shown: options in groups, and what is meant by names that there are not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperCommand, TyperGroup

from quantkit.cli.meant import COMMANDS, option_meant


class Command(TyperCommand):
    """A command whose help has its options in groups, and which knows the options of other tools."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _naming_options(self):
            return super().parse_args(ctx, args)


class Group(TyperGroup):
    """The commands, which are also known by the names that other tools give theirs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _naming_options(self):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        meant = COMMANDS.get(args[0].lower())
        if meant is not None and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {meant!r}?")
        return super().resolve_command(ctx, args)


@contextmanager
def _naming_options(command: TyperCommand | TyperGroup) -> Iterator[None]:
    """Say in the error for an option that `command` has not, which of its options does that."""
    try:
        yield
    except Exception as error:
        # `NoSuchOption` of click, or of the copy that newer versions of typer bring.
        if type(error).__name__ == "NoSuchOption":
            options = (name for one in command.params for name in one.opts)
            arguments = (str(one.metavar) for one in command.params)
            meant = option_meant(error.option_name, options, arguments)
            if meant is not None:
                error.message, error.possibilities = f"{error.message}. {meant}", None
        raise
