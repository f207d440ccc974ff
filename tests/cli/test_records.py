"""The help of an option is the documentation of a field, and stands in one place."""

import re
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

import pytest
import typer

from quantkit.cli import options
from quantkit.cli.choices import DTYPES
from quantkit.cli.commands.bench import BenchArguments
from quantkit.cli.commands.evaluate import EvalArguments
from quantkit.cli.commands.tune import TuneArguments
from quantkit.cli.records import Documents, field_docs, with_fields
from quantkit.eval.eval_options import EvalOptions
from quantkit.runtime.cache.kv_formats import KV_FORMATS

RECORDS = (BenchArguments, EvalArguments, TuneArguments)


@dataclass(frozen=True)
class Options:
    """A record of the library.

    size     how large it is,
             in bytes
    colour   which colour
    """

    size: int = 1
    colour: str = "red"


@dataclass(frozen=True)
class More:
    """Another.

    size   how large the other is
    """

    size: int = 2


@dataclass(frozen=True)
class Arguments:
    """The command line.

    asked   is anything asked?
    """

    library: ClassVar[tuple[type, ...]] = (Options, More)

    size: Annotated[int, typer.Option()] = 1
    hue: Annotated[str, typer.Option(), Documents("colour")] = "red"
    other: Annotated[int, typer.Option(), Documents("size", More)] = 2
    asked: Annotated[bool, typer.Option("--asked")] = False
    device: options.Device = "auto"


def helps(command: Any) -> dict[str, str | None]:
    found = {}
    for name, hint in command.__annotations__.items():
        (option,) = (one for one in get_args(hint) if isinstance(one, typer.models.ParameterInfo))
        found[name] = option.help
    return found


def test_docs_of_fields_are_read_with_the_lines_that_go_on() -> None:
    assert field_docs(Options) == {"size": "how large it is, in bytes", "colour": "which colour"}
    assert field_docs(BaseException) == {}


def test_help_is_the_documentation_of_the_field() -> None:
    given: list[Arguments] = []

    @with_fields
    def command(asked_for: Arguments) -> None:
        given.append(asked_for)

    assert helps(command) == {
        "size": "How large it is, in bytes.",
        "hue": "Which colour.",
        "other": "How large the other is.",
        "asked": "Is anything asked?",
        "device": "auto (a GPU if there is one), cpu or cuda.",
    }
    command(size=3, hue="blue", other=2, asked=True, device="cpu")
    assert given == [Arguments(3, "blue", 2, True, "cpu")]


def test_the_option_of_another_command_keeps_its_help() -> None:
    assert helps(with_fields(_own))["device"] == "Where it runs."
    assert get_args(options.Device)[1].help == "auto (a GPU if there is one), cpu or cuda."


@dataclass(frozen=True)
class Own:
    """One with a shared option.

    device   where it runs
    """

    device: options.Device = "auto"


def _own(given: Own) -> None:
    """Do nothing."""


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_option_has_a_help_and_none_has_two(record: type) -> None:
    hints = get_type_hints(record, include_extras=True)

    def command(given) -> None:
        """Do nothing."""

    command.__annotations__ = {"given": record, "return": None}
    shown = helps(with_fields(command))
    own = field_docs(record)
    library = [field_docs(one) for one in getattr(record, "library", ())]
    shared = {id(one) for one in vars(options).values()}
    for field in fields(record):
        text = shown[field.name]
        assert text and text[-1] in ".?", field.name
        option = next(one for one in get_args(hints[field.name]) if isinstance(one, typer.models.OptionInfo))
        if option.help is not None:
            # Of an option that commands share.
            assert id(record.__annotations__[field.name]) in shared or field.name in ("json", "report")
    # What is documented is an option, and not again what a record of the library says of it.
    assert own.keys() <= {field.name for field in fields(record)}
    assert not {*own.values()} & {text for docs in library for text in docs.values()}


def test_names_in_the_documentation_are_those_of_the_tables() -> None:
    docs = field_docs(EvalOptions)
    assert re.findall(r"b?float\d+", docs["dtype"].partition(", or auto")[0]) == list(DTYPES)
    assert docs["kv_cache"].partition(": ")[2].partition(";")[0] == ", ".join(KV_FORMATS)
