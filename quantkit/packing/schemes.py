"""Schemes: a number format, and how its scales are shared and stored."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch

from quantkit.errors import FormatError, unknown_name
from quantkit.packing.activations import INPUT_PARTS, ActivationScheme, activations_named
from quantkit.packing.format_json import format_from_json, format_to_json
from quantkit.packing.formats import (
    MAX_BITS,
    FittedFormat,
    NumberFormat,
    number_format,
)
from quantkit.packing.packings import PACKINGS, PackingName
from quantkit.packing.presets import PRESETS, preset_named
from quantkit.packing.scale_types import MAX_GROUP_SIZE, SCALE_DTYPES, SCALE_TYPES, ScaleType
from quantkit.packing.zero_points import ZERO_POINTS, ZeroPoint, ZeroPointType, at_least_16_bits

#: Columns, "channel", "tensor", or a block such as "128x128"; None for the format's default.
GroupSize = int | str | None
BLOCK = re.compile(r"([1-9][0-9]{0,7})x([1-9][0-9]{0,7})")


#: All parts of a stored weight, those needed to compute first, in the order that operators take them.
PARTS = ("packed", "scale", "zero_point", "global_scale", "column_scale", "codebook", "shape")
#: Parts that do not make the weight: the logical shape, and numbers of the scales of inputs.
_BESIDE = ("shape", *INPUT_PARTS.values())


@dataclass(frozen=True)
class Scheme:
    """Storage of the weight of one linear layer, [N output channels, K input features].

    A weight is `scale * value(code)`. With a zero-point, which is a code or a float between codes, it is
    `scale * (code - zero_point)`. With a minimum it is `scale * code + minimum`. `group_size` consecutive
    input features of one output channel share a scale; the last group of a row may be shorter. None is one
    scale per output channel, and "tensor" one scale for all weights. With `group_rows` above 1, a block of
    `group_rows` output channels x `group_size` shares a scale. `global_scale`: all scales are divided by one
    float32.

    With `planes` above 1, a weight is the sum of `planes` values, each with its own scale. Its code holds the
    codes of all planes, plane 0 in the lowest bits. `column_scale`: every weight is also multiplied by a
    factor of its input feature. `packing`: how codes become words, a row of `PACKINGS`. A `FittedFormat` has
    its values stored with each tensor.

    `activations` says how the linear rounds its inputs; None leaves them as they are. It belongs to the
    linear: packed tensors and kernels see `of_weights`.
    """

    format: NumberFormat
    group_size: int | Literal["tensor"] | None
    zero_point: ZeroPoint = "none"
    scale_dtype: torch.dtype = torch.bfloat16
    global_scale: bool = False
    planes: int = 1
    column_scale: bool = False
    packing: PackingName = "bits"
    group_rows: int = 1
    activations: ActivationScheme | None = None

    def __post_init__(self) -> None:
        if type(self.group_size) is not int and self.group_size not in (None, "tensor"):
            raise FormatError(
                f"group size {self.group_size!r} is a {type(self.group_size).__name__}; use a positive "
                "integer, 'channel' for one group per output channel, or 'tensor' for one scale in all."
            )
        if isinstance(self.group_size, int) and not 1 <= self.group_size <= MAX_GROUP_SIZE:
            raise FormatError(
                f"group size {self.group_size} is out of range; use 1 to {MAX_GROUP_SIZE}, 'channel' for one "
                "group per output channel, or 'tensor' for one scale in all."
            )
        if self.zero_point not in ZERO_POINTS:
            raise unknown_name("zero-point", str(self.zero_point), ZERO_POINTS, error=FormatError)
        if (reason := self.zero_point_type.why_not(self.format)) is not None:
            raise FormatError(f"{reason}.")
        if self.scale_dtype not in SCALE_TYPES:
            raise FormatError(
                f"scale dtype {self.scale_dtype} is not supported; use one of {', '.join(SCALE_DTYPES)}."
            )
        self._check_planes()
        if type(self.group_rows) is not int or not 1 <= self.group_rows <= MAX_GROUP_SIZE:
            raise FormatError(
                f"{self.group_rows!r} rows of a block are out of range; use 1 to {MAX_GROUP_SIZE}."
            )
        if self.per_tensor or self.group_rows > 1:
            self._check_shared_by_rows()
        if (reason := PACKINGS[self.packing].why_not(self.format, self.planes)) is not None:
            raise FormatError(f"packing {self.packing!r} is not for {self.format.name!r}: {reason}.")

    def _check_planes(self) -> None:
        most = MAX_BITS // self.format.bits
        if type(self.planes) is not int or not 1 <= self.planes <= most:
            raise FormatError(
                f"{self.planes!r} planes of {self.format.name!r} are out of range; a code has at most "
                f"{MAX_BITS} bits, so use 1 to {most}."
            )
        if self.planes > 1 and self.has_zero_point:
            raise FormatError(
                f"{self.planes} planes have no zero-point; use zero_point 'none', or one plane."
            )
        if self.planes > 1 and self.is_fitted:
            raise FormatError(
                f"the values of {self.format.name!r} are fitted to one plane; use one plane, or a code book "
                "of fixed values."
            )

    def _check_shared_by_rows(self) -> None:
        """Refuse options that are fitted per group, row or column, if rows share a scale."""
        unfit = {
            f"blocks of {self.group_rows} rows": self.per_tensor and self.group_rows > 1,
            f"{self.planes} planes": self.planes > 1,
            "column scales": self.column_scale,
            f"the fitted values of {self.format.name!r}": self.is_fitted,
            f"{self.zero_point} zero-points": self.has_zero_point,
            # 8-bit scales only save space, and one scale per tensor leaves nothing to save.
            f"{self.scale_type.name} scales": self.per_tensor and self.scale_dtype.itemsize < 2,
            "a global scale": self.global_scale,
        }
        for what, there in unfit.items():
            if there:
                one = "tensor" if self.per_tensor else "block"
                kind = "group size 'tensor'" if self.per_tensor else f"a block of {self.group_rows} rows"
                dtypes = ", and is float32, float16 or bfloat16" if self.per_tensor else ""
                raise FormatError(
                    f"{kind} does not go with {what}: one scale per {one} is for symmetric schemes of fixed "
                    f"values{dtypes}. Change that, or use a group size or 'channel'."
                )

    @cached_property
    def of_weights(self) -> "Scheme":
        """Return the scheme of the stored weights alone: without `activations`."""
        return self if self.activations is None else replace(self, activations=None)

    @property
    def per_tensor(self) -> bool:
        """Return True if all weights of a tensor have one scale."""
        return self.group_size == "tensor"

    @property
    def is_fitted(self) -> bool:
        """Return True if the values of codes are stored with each tensor."""
        return isinstance(self.format, FittedFormat)

    @property
    def code_bits(self) -> int:
        """Return the bits of a code, all planes together."""
        return self.planes * self.format.bits

    def words_per_row(self, columns: int) -> int:
        """Return the number of int32 words for a row of `columns` codes."""
        return PACKINGS[self.packing].words_per_row(columns, self.format, self.planes)

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Pack codes (uint8 [..., K], all planes in one code) to words (int32 [..., W])."""
        return PACKINGS[self.packing].pack(codes, self.format, self.planes)

    def unpack(self, packed: torch.Tensor, columns: int) -> torch.Tensor:
        """Unpack words (int32 [..., W]) to codes (uint8 [..., columns]), all planes in one code.

        Do not write to the result: 8-bit codes may share the memory of `packed`.
        """
        return PACKINGS[self.packing].unpack(packed, self.format, self.planes, columns)

    @property
    def scale_type(self) -> ScaleType:
        return SCALE_TYPES[self.scale_dtype]

    @property
    def zero_point_type(self) -> ZeroPointType:
        return ZERO_POINTS[self.zero_point]

    @property
    def has_zero_point(self) -> bool:
        """Return True if a zero-point is subtracted from codes."""
        return self.zero_point_type.storage is not None

    @property
    def zero_point_dtype(self) -> torch.dtype:
        """Return the dtype of zero-points [N, G] in memory; float32 without zero-points."""
        storage = self.zero_point_type.storage
        return torch.float32 if storage is None else storage.values(self.scale_dtype)

    @property
    def column_scale_dtype(self) -> torch.dtype:
        """Return the dtype of stored column scales: that of the scales, but at least 16 bits."""
        return at_least_16_bits(self.scale_dtype)

    def for_columns(self, columns: int) -> "Scheme":
        """Return the scheme for rows of `columns` weights: a group as long as a row becomes the row."""
        if isinstance(self.group_size, int) and self.group_size >= columns:
            return replace(self, group_size=None)
        return self

    def check_features(self, name: str, columns: int) -> None:
        """Raise `FormatError` if the inputs of the linear `name`, `columns` features, cannot be rounded."""
        reason = None if self.activations is None else self.activations.why_not(columns)
        if reason is not None:
            raise FormatError(f"{name!r} is stored as {self}, and {reason}. Quantize the model again.")

    def group_columns(self, columns: int) -> int:
        """Return how many of a row's `columns` weights share a scale; a ragged last group has fewer."""
        return min(self.group_size, columns) if isinstance(self.group_size, int) else columns

    def group_spans(self, columns: int) -> tuple[tuple[slice, int], ...]:
        """Return columns and group size of a row's whole groups, then of its shorter last group, if any."""
        size = self.group_columns(columns)
        full = columns // size * size
        spans = ((slice(0, full), size), (slice(full, columns), columns - full))
        return tuple(span for span in spans if span[0].start < span[0].stop)

    def groups(self, columns: int) -> int:
        """Return the number of groups in a row of `columns` weights; a shorter last group counts."""
        return -(-columns // self.group_columns(columns))

    def row_units(self) -> dict[str, int]:
        """Return numbers of rows at whose multiples alone a matrix can be cut, by text on the unit."""
        storage = self.zero_point_type.storage
        count = 1 if storage is None else storage.cut(self.format.bits)
        units = {f"words of {count} zero-points": count, f"blocks of {self.group_rows} rows": self.group_rows}
        return {name: unit for name, unit in units.items() if unit > 1}

    def column_units(self, columns: int) -> dict[str, int]:
        """Return numbers of columns at whose multiples alone a row can be cut, by text on the unit.

        Units are groups of weights, inputs that share a scale, and codes that share words.
        """
        count = PACKINGS[self.packing].codes_per_cut(self.format, self.planes)
        group = self.group_columns(columns)
        groups = {f"groups of {group}": group} if group < columns else {}
        if self.activations is not None:
            # Whoever has a part of a row must find the scale that the whole row has.
            size = self.activations.group_size or (1 if self.activations.static else columns)
            groups[f"{size} inputs that share a scale"] = size
        return {**groups, f"words of {count} codes": count}

    def whole_blocks(self, rows: int) -> int:
        """Round `rows` down to whole blocks of rows that share scales, but to one block at least."""
        return max(1, rows // self.group_rows) * self.group_rows

    def row_scale(
        self, scale: torch.Tensor, rows: int, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """Repeat stored scales for rows `start:stop` of a matrix of `rows`: [stop - start, groups * planes].

        `scale` has its stored shape: a row of scales for each block of rows, or a single one.
        """
        start, stop, _ = slice(start, stop).indices(rows)
        if self.per_tensor:
            return scale.expand(rows, 1)[start:stop]
        first, size = start // self.group_rows, self.group_rows
        if size == 1:
            return scale[start:stop]
        blocks = scale[first : -(-stop // size)]
        # torch cannot repeat all 8-bit dtypes.
        of_rows = blocks.unsqueeze(1).expand(-1, size, -1).reshape(-1, scale.shape[1])
        return of_rows[start - first * size : stop - first * size]

    def storage_shapes(self, shape: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of each stored part of a weight [N, K], by part name."""
        rows, columns = shape
        parts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "packed": (torch.int32, (rows, self.words_per_row(columns))),
            "scale": (
                self.scale_dtype,
                (1,)
                if self.per_tensor
                else (-(-rows // self.group_rows), self.groups(columns) * self.planes),
            ),
        }
        if (storage := self.zero_point_type.storage) is not None:
            parts["zero_point"] = (
                storage.dtype(self.scale_dtype),
                (storage.rows(rows, self.format.bits), self.groups(columns)),
            )
        if self.global_scale:
            parts["global_scale"] = (torch.float32, (1,))
        if self.column_scale:
            parts["column_scale"] = (self.column_scale_dtype, (columns,))
        if self.is_fitted:
            parts["codebook"] = (torch.float32, (2**self.format.bits,))
        if self.activations is not None and self.activations.part is not None:
            parts[self.activations.part] = (torch.float32, (1,))
        parts["shape"] = (torch.int64, (2,))
        return parts

    @cached_property
    def part_names(self) -> tuple[str, ...]:
        """Return the names of the parts that determine the weights, in the order of operator arguments."""
        return tuple(part for part in self.storage_shapes((1, 1)) if part not in _BESIDE)

    @cached_property
    def cast_parts(self) -> frozenset[str]:
        """Return the parts whose dtype follows the dtype of the scales: casting a model casts only these."""
        one, other = (
            replace(self, scale_dtype=dtype).storage_shapes((1, 1))
            for dtype in (torch.float16, torch.float32)
        )
        return frozenset(part for part in one if one[part] != other[part])

    def __repr__(self) -> str:
        return f"Scheme({str(self)!r})"

    def to_dict(self) -> dict[str, Any]:
        """Return the scheme as JSON values; `from_dict` is the inverse."""
        return {
            "format": format_to_json(self.format),
            "group_size": self.group_size if self.group_rows == 1 else [self.group_rows, self.group_size],
            "zero_point": self.zero_point,
            "scale_dtype": self.scale_type.name,
            "global_scale": self.global_scale,
            "planes": self.planes,
            "column_scale": self.column_scale,
            "packing": self.packing,
            **({} if self.activations is None else {"activations": self.activations.to_dict()}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Scheme":
        """Parse the output of `to_dict`; raise `FormatError` for a missing, unknown or ill-typed field."""
        expected = {field.name for field in fields(cls)} - {"group_rows", "activations"}
        if not isinstance(data, Mapping) or set(data) - {"activations"} != expected:
            found = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise FormatError(f"a scheme has the fields {sorted(expected)}; found {found}.")
        group_rows, group_size = 1, data["group_size"]
        is_block = isinstance(group_size, list) and len(group_size) == 2 and group_size[0] != 1
        if is_block:
            group_rows, group_size = group_size
        others = (None,) if is_block else (None, "tensor")
        if type(group_rows) is not int or (type(group_size) is not int and group_size not in others):
            raise FormatError(
                f"scheme field 'group_size' is {data['group_size']!r}; it is an integer, null or 'tensor', "
                "or the rows and columns of a block."
            )
        names: dict[str, Collection[str]] = {
            "zero_point": ZERO_POINTS,
            "scale_dtype": SCALE_DTYPES,
            "packing": PACKINGS,
        }
        for key, known in names.items():
            if not isinstance(data[key], str) or data[key] not in known:
                raise FormatError(f"scheme field {key!r} is {data[key]!r}; it is one of {', '.join(known)}.")
        for key in ("global_scale", "column_scale"):
            if not isinstance(data[key], bool):
                raise FormatError(f"scheme field {key!r} is {data[key]!r}; it is a boolean.")
        if type(data["planes"]) is not int:
            raise FormatError(f"scheme field 'planes' is {data['planes']!r}; it is an integer.")
        return cls(
            format_from_json(data["format"]),
            group_size,
            ZERO_POINTS[data["zero_point"]].name,
            SCALE_DTYPES[data["scale_dtype"]],
            data["global_scale"],
            data["planes"],
            data["column_scale"],
            PACKINGS[data["packing"]].name,
            group_rows,
            ActivationScheme.from_dict(data["activations"]) if "activations" in data else None,
        )

    @cached_property
    def token(self) -> str:
        """Return the scheme as one string, for arguments of operators; `parse_token` is the inverse."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @property
    def granularity(self) -> str:
        """Return the unit that has its own scale: `tensor`, `channel`, group `g128` or block `128x128`."""
        if self.group_rows > 1:
            return f"{self.group_rows}x{self.group_size or 'K'}"
        if isinstance(self.group_size, int):
            return f"g{self.group_size}"
        return self.group_size or "channel"

    def __str__(self) -> str:
        zero = self.zero_point_type.suffix
        planes = f" {self.planes}-planes" if self.planes > 1 else ""
        columns = " columns" if self.column_scale else ""
        packing = "" if self.packing == "bits" else f" {self.packing}"
        inputs = "" if self.activations is None else f", x {self.activations}"
        weights = f"{self.format.name} {self.granularity}{zero}{planes}{columns}{packing}"
        return f"{weights} {self.scale_type.name}{inputs}"


@lru_cache(maxsize=1024)
def parse_token(token: str) -> Scheme:
    """Return the scheme that `token`, JSON of `Scheme.token`, describes; `FormatError` if it is no scheme."""
    try:
        data = json.loads(token)
    except json.JSONDecodeError as error:
        raise FormatError(f"scheme token {token!r} is not JSON: {error}.") from error
    return Scheme.from_dict(data)


def default_scale_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """Return float16 for float16 weights, else bfloat16, whose range no weight overflows."""
    return torch.float16 if weight_dtype == torch.float16 else torch.bfloat16


def scheme(
    name: str,
    *,
    group_size: GroupSize = None,
    zero_point: ZeroPoint = "none",
    scale_dtype: torch.dtype | None = None,
    packing: PackingName = "bits",
    activations: str | None = None,
    weight_dtype: torch.dtype = torch.bfloat16,
) -> Scheme:
    """Return the scheme of format `name`; its preset gives `group_size` and `scale_dtype` unless given.

    A scale dtype given by neither is bfloat16, or float16 for float16 weights. `activations` is a name of
    `presets.ACTIVATIONS`; symmetric 8-bit integers with one are packed as "bytes", as engines read them.
    Raises `FormatError` for an unknown format, a group size out of range, or any option that the format does
    not support.
    """
    preset = preset_named(name)
    if preset is None:
        raise unknown_name("format", name, PRESETS, error=FormatError)
    size: Any = preset.group_size if group_size is None else group_size
    block = BLOCK.fullmatch(size) if isinstance(size, str) else None
    rows, size = (int(block[1]), int(block[2])) if block else (1, size)
    if scale_dtype is None:
        named = preset.scale_dtype
        scale_dtype = default_scale_dtype(weight_dtype) if named is None else SCALE_DTYPES[named]
    made = Scheme(
        number_format(preset.format),
        None if size == "channel" else size,
        zero_point,
        scale_dtype,
        scale_dtype in SCALE_TYPES and SCALE_TYPES[scale_dtype].relative,
        preset.planes,
        preset.column_scale,
        packing,
        rows,
        activations_named(activations),
    )
    fits = PACKINGS["bytes"].why_not(made.format, made.planes) is None and not made.has_zero_point
    as_bytes = made.activations is not None and packing == "bits" and fits
    return replace(made, packing="bytes") if as_bytes else made
