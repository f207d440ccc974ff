"""Options of a command as the fields of a record."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def with_fields(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as a command: in place of its parameter that is a record, one for each field of that.

    typer reads options from a signature, and has no other way for commands to share them.
    """
    hints = get_type_hints(function, include_extras=True)
    records: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    ((name, record),) = records.items()
    shared = get_type_hints(record, include_extras=True)
    parameters: list[Parameter] = []
    for parameter in signature(function).parameters.values():
        if parameter.name != name:
            parameters.append(
                parameter.replace(annotation=hints[parameter.name], kind=Parameter.KEYWORD_ONLY)
            )
            continue
        parameters += [
            Parameter(
                field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=shared[field.name]
            )
            for field in fields(record)
        ]

    def command(**given: Any) -> None:
        filled = record(**{field.name: given.pop(field.name) for field in fields(record)})
        function(**given, **{name: filled})

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command
