"""Convert number formats to JSON: a row of `FORMATS` by its name, any other format by its fields."""

from dataclasses import asdict, fields
from typing import Any

from quantkit.errors import FormatError
from quantkit.packing.formats import (
    FORMATS,
    CodebookFormat,
    FittedFormat,
    FloatFormat,
    IntFormat,
    NumberFormat,
    number_format,
)

_LARGEST = 1 << 62
_KINDS: dict[str, type[NumberFormat]] = {
    "int": IntFormat,
    "float": FloatFormat,
    "codebook": CodebookFormat,
    "fitted": FittedFormat,
}


def format_to_json(number_format: NumberFormat) -> str | dict[str, Any]:
    """Return the name of a format of `FORMATS`, or all fields of any other, so that a file can define it."""
    if FORMATS.get(number_format.name) == number_format:
        return number_format.name
    kind = next(kind for kind, cls in _KINDS.items() if type(number_format) is cls)
    data = asdict(number_format)
    # Values of a book are read as floats, also where code wrote integers.
    return {"kind": kind, **{k: list(map(float, v)) if isinstance(v, tuple) else v for k, v in data.items()}}


def format_from_json(data: object) -> NumberFormat:
    """Parse the output of `format_to_json`; raise `FormatError` for anything else."""
    if isinstance(data, str):
        return number_format(data)
    if not isinstance(data, dict) or data.get("kind") not in list(_KINDS):
        raise FormatError(
            f"a number format is a name or an object of kind {', '.join(_KINDS)}; found {data!r}."
        )
    cls = _KINDS[data["kind"]]
    expected = {field.name for field in fields(cls)}
    values = {key: value for key, value in data.items() if key != "kind"}
    if set(values) != expected or not isinstance(values["name"], str) or values["name"] in FORMATS:
        raise FormatError(
            f"a custom number format of kind {data['kind']!r} has the fields {sorted(expected)} and a name "
            f"of its own; found {data!r}."
        )
    if isinstance(values.get("book"), list) and all(type(v) is float for v in values["book"]):
        values["book"] = tuple(values["book"])
    numbers = [value for key, value in values.items() if key not in ("name", "book")]
    # Python refuses to print integers of thousands of digits in messages.
    if any(type(value) is not int or abs(value) > _LARGEST for value in numbers) or not isinstance(
        values.get("book", ()), tuple
    ):
        raise FormatError(
            f"custom number format {values['name']!r} has fields of the wrong type or size: {data!r}."
        )
    return cls(**values)
