"""Schemes: a number format together with how its scales are shared and stored."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch

from quantkit.errors import FormatError
from quantkit.packing.formats import IntFormat, NumberFormat, number_format
from quantkit.packing.words import words_per_row

ZeroPoint = Literal["none", "integer"]

#: Scale dtypes by the name a file uses for them.
SCALE_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_SCALE_NAMES = {dtype: name for name, dtype in SCALE_DTYPES.items()}

MAX_GROUP_SIZE = 1 << 20


@dataclass(frozen=True)
class Scheme:
    """How the weight of one linear layer, [N output channels, K input features], is stored.

    A weight is `scale * value(code)`, or `scale * (code - zero_point)` with an integer zero-point. A
    scale is shared by `group_size` consecutive input features of one output channel; the last group of
    a row holds what is left. `group_size` None is one group per output channel.
    """

    format: NumberFormat
    group_size: int | None
    zero_point: ZeroPoint = "none"
    scale_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.group_size is not None and type(self.group_size) is not int:
            raise FormatError(
                f"group size {self.group_size!r} is a {type(self.group_size).__name__}; use a positive "
                "integer, or 'channel' for one group per output channel."
            )
        if self.group_size is not None and not 1 <= self.group_size <= MAX_GROUP_SIZE:
            raise FormatError(
                f"group size {self.group_size} is out of range; use 1 to {MAX_GROUP_SIZE}, or "
                "'channel' for one group per output channel."
            )
        if self.zero_point != "none" and not isinstance(self.format, IntFormat):
            raise FormatError(
                f"format {self.format.name!r} has no integer zero-point; asymmetric schemes need an int "
                "format."
            )
        if self.scale_dtype not in _SCALE_NAMES:
            raise FormatError(
                f"scale dtype {self.scale_dtype} is not supported; use one of {', '.join(SCALE_DTYPES)}."
            )

    def for_columns(self, columns: int) -> "Scheme":
        """The scheme as it applies to rows of `columns`: a group as long as the row is the row."""
        if self.group_size is not None and self.group_size >= columns:
            return replace(self, group_size=None)
        return self

    def groups(self, columns: int) -> int:
        """Groups in a row of `columns` weights, a ragged last one included."""
        return 1 if self.group_size is None else -(-columns // self.group_size)

    def storage_shapes(self, shape: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each stored part of a weight [N, K], by part name."""
        rows, columns = shape
        parts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "packed": (torch.int32, (rows, words_per_row(columns, self.format.bits))),
            "scale": (self.scale_dtype, (rows, self.groups(columns))),
        }
        if self.zero_point == "integer":
            # Zero-points are codes, packed along N as compressed-tensors does.
            parts["zero_point"] = (
                torch.int32,
                (words_per_row(rows, self.format.bits), self.groups(columns)),
            )
        parts["shape"] = (torch.int64, (2,))
        return parts

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; `from_dict` is its inverse."""
        return {
            "format": self.format.name,
            "group_size": self.group_size,
            "zero_point": self.zero_point,
            "scale_dtype": _SCALE_NAMES[self.scale_dtype],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Scheme":
        """Parse what `to_dict` wrote; `FormatError` for a missing, unknown or ill-typed field."""
        expected = {"format", "group_size", "zero_point", "scale_dtype"}
        if not isinstance(data, Mapping) or set(data) != expected:
            found = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise FormatError(f"a scheme has the fields {sorted(expected)}; found {found}.")
        group_size = data["group_size"]
        if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, int)):
            raise FormatError(f"scheme field 'group_size' is {group_size!r}; it is an integer or null.")
        if data["zero_point"] not in ("none", "integer"):
            raise FormatError(
                f"scheme field 'zero_point' is {data['zero_point']!r}; it is 'none' or 'integer'."
            )
        if not isinstance(data["scale_dtype"], str) or data["scale_dtype"] not in SCALE_DTYPES:
            raise FormatError(
                f"scheme field 'scale_dtype' is {data['scale_dtype']!r}; it is one of "
                f"{', '.join(SCALE_DTYPES)}."
            )
        if not isinstance(data["format"], str):
            raise FormatError(f"scheme field 'format' is {data['format']!r}; it is a name.")
        return cls(
            number_format(data["format"]),
            group_size,
            data["zero_point"],
            SCALE_DTYPES[data["scale_dtype"]],
        )

    @property
    def token(self) -> str:
        """The scheme as one string, for operator arguments; `parse_token` is its inverse."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    def __str__(self) -> str:
        granularity = "channel" if self.group_size is None else f"g{self.group_size}"
        zero = "" if self.zero_point == "none" else " asym"
        return f"{self.format.name} {granularity}{zero} {_SCALE_NAMES[self.scale_dtype]}"


@lru_cache(maxsize=1024)
def parse_token(token: str) -> Scheme:
    """The scheme that `Scheme.token` wrote."""
    try:
        data = json.loads(token)
    except json.JSONDecodeError as error:
        raise FormatError(f"scheme token {token!r} is not JSON: {error}.") from error
    return Scheme.from_dict(data)


@dataclass(frozen=True)
class Preset:
    """What a format name on the command line stands for until flags say otherwise."""

    format: str
    group_size: int | None


#: Default granularity per format. int8 needs no groups; the others do (docs/accuracy.md).
PRESETS: dict[str, Preset] = {
    "int8": Preset("int8", None),
    "int4": Preset("int4", 128),
    "fp6": Preset("fp6-e2m3", 128),
    "fp6-e2m3": Preset("fp6-e2m3", 128),
    "fp6-e3m2": Preset("fp6-e3m2", 128),
    "binary": Preset("binary", 128),
}


def default_scale_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """fp16 weights keep fp16 scales; everything else gets bf16, whose range no weight overflows."""
    return torch.float16 if weight_dtype == torch.float16 else torch.bfloat16


def scheme(
    name: str,
    *,
    group_size: int | Literal["channel"] | None = None,
    asymmetric: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Scheme:
    """The scheme of format `name` with its preset's granularity unless `group_size` is given.

    Raises `FormatError` for an unknown format, a group size out of range, or a zero-point that the
    format cannot have.
    """
    preset = PRESETS.get(name)
    if preset is None:
        raise FormatError(f"unknown format {name!r}; known are {', '.join(PRESETS)}.")
    size = preset.group_size if group_size is None else group_size
    return Scheme(
        number_format(preset.format),
        None if size == "channel" else size,
        "integer" if asymmetric else "none",
        scale_dtype,
    )
