"""Options of a command as the fields of a record, with the documentation of each field as its help."""

import re
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from inspect import Parameter, Signature, getdoc, signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints

#: A line of a docstring that begins the documentation of a field, and one that goes on with it.
_FIELD = re.compile(r"(\w+) {2,}(\S.*)")
_MORE = re.compile(r" {2,}(\S.*)")


@dataclass(frozen=True)
class Documents:
    """Metadata of an option: the field of the library's record whose documentation is its help.

    For options whose name is another; options with the name of a field need none. `record` is the record if
    several have such a field; the first one counts otherwise.
    """

    field: str
    record: type | None = None


def field_docs(record: type) -> dict[str, str]:
    """Return the documentation of fields in the docstring of a record, where it lists them by name.

    A field is a line `name   text`, with lines that go on further to the right.
    """
    docs: dict[str, str] = {}
    name = None
    for line in (getdoc(record) or "").splitlines():
        if found := _FIELD.fullmatch(line):
            name = found[1]
            docs[name] = found[2]
        elif name is not None and (more := _MORE.fullmatch(line)):
            docs[name] += f" {more[1]}"
        else:
            name = None
    return docs


def with_fields(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as a command: in place of its parameter that is a record, one for each field of that.

    typer reads options from a signature, and has no other way for commands to share them. The help of an
    option is what the docstring of the record says of its field, or those of the records of the library that
    it names as `library`, the first that does. Without any the option brings its own.
    """
    hints = get_type_hints(function, include_extras=True)
    records: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    ((name, record),) = records.items()
    parameters: list[Parameter] = []
    for parameter in signature(function).parameters.values():
        if parameter.name != name:
            parameters.append(
                parameter.replace(annotation=hints[parameter.name], kind=Parameter.KEYWORD_ONLY)
            )
            continue
        parameters += _options(record)

    def command(**given: Any) -> None:
        filled = record(**{field.name: given.pop(field.name) for field in fields(record)})
        function(**given, **{name: filled})

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command


def _options(record: Any) -> list[Parameter]:
    """Return a keyword-only parameter for each field of a dataclass, with its documentation as help."""
    shared = get_type_hints(record, include_extras=True)
    sources = (record, *getattr(record, "library", ()))
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=_with_help(field.name, shared[field.name], sources),
        )
        for field in fields(record)
    ]


def _with_help(name: str, hint: Any, sources: Iterable[type]) -> Any:
    """The annotation `hint` of an option, with the documentation of its field in `sources` as help."""
    if get_origin(hint) is not Annotated:
        return hint
    kind, option, *rest = get_args(hint)
    named = next((one for one in rest if isinstance(one, Documents)), Documents(name))
    records = sources if named.record is None else (named.record,)
    text = next((docs[named.field] for docs in map(field_docs, records) if named.field in docs), None)
    if text is not None:
        option = copy(option)
        option.help = f"{text[0].upper()}{text[1:]}{'' if text.endswith('?') else '.'}"
    return Annotated[kind, option]
