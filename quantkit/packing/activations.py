"""Activation schemes: how a linear rounds its inputs x before the product.

    x [..., K] -> codes of a number format, and one scale per token or per group of a token
    y = round(x) W^T, with the codes and scales multiplied back

Scales are dynamic: computed from x itself. So nothing is stored, and a result depends on no calibration.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from quantkit.errors import FormatError, unknown_name
from quantkit.packing.formats import FORMATS, NumberFormat
from quantkit.packing.presets import ACTIVATIONS
from quantkit.packing.scale_types import MAX_GROUP_SIZE

ScaleKind = Literal["float32", "e8m0"]
SCALE_KINDS: tuple[ScaleKind, ...] = ("float32", "e8m0")
#: Smallest scale, so that a token of zeros has a divisor.
_SMALLEST = torch.finfo(torch.float32).tiny
#: Carries a float32 whose significand is at least 1.75 to the next exponent: 0.25 in units of its last place.
_CARRY = 1 << 21


@dataclass(frozen=True)
class ActivationScheme:
    """Rounding of the inputs x [..., K] of a linear.

    format       name of a number format
    group_size   consecutive features of a token that share a scale; None for one scale per token
    scale        float32, or e8m0: a power of two
    """

    format: str
    group_size: int | None = None
    scale: ScaleKind = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.format, str) or self.format not in FORMATS or not self.number_format.has_zero:
            known = ", ".join(dict.fromkeys(preset.format for preset in ACTIVATIONS.values()))
            raise FormatError(f"inputs cannot be rounded to {self.format!r}; use one of {known}.")
        size = self.group_size
        if size is not None and (type(size) is not int or not 1 <= size <= MAX_GROUP_SIZE):
            raise FormatError(
                f"the group size of inputs is {size!r}; use 1 to {MAX_GROUP_SIZE}, or null for one scale per "
                "token."
            )
        if self.scale not in SCALE_KINDS:
            raise FormatError(
                f"the scale of inputs is {self.scale!r}; it is one of {', '.join(SCALE_KINDS)}."
            )

    @property
    def number_format(self) -> NumberFormat:
        return FORMATS[self.format]

    def why_not(self, columns: int) -> str | None:
        """Return why inputs of `columns` features cannot be rounded; None if they can."""
        if self.group_size is None or columns % self.group_size == 0:
            return None
        return f"groups of {self.group_size} inputs do not divide {columns} features"

    def scales(self, groups: torch.Tensor) -> torch.Tensor:
        """Return the scales float32 [..., 1] of groups float32 [..., g].

        A group with NaN or infinity has none, and gets NaN. The largest magnitude of a group becomes that of
        the format. An e8m0 scale brings it into the binade of that of the format; from a significand of 1.75
        on, into the one below, as in compressed-tensors.
        """
        largest = groups.abs().amax(-1, keepdim=True)
        if self.scale == "float32":
            # A tensor, because a GPU multiplies by the inverse of a number.
            scale = (largest / largest.new_full((), self.number_format.absmax)).clamp(min=_SMALLEST)
            return torch.where(largest.isfinite(), scale, math.nan)
        exponent = (largest.view(torch.int32) + _CARRY) >> 23
        exponent = (exponent - math.floor(math.log2(self.number_format.absmax))).clamp(1, 254)
        scale = (exponent << 23).view(torch.float32)
        return torch.where(largest.isfinite(), scale, math.nan)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [..., K] rounded to the scheme, in its dtype; computed in float32 and rounded once.

        A token or group with NaN or infinity becomes NaN: it has no scale. Gradients pass as if nothing was
        rounded.
        """
        if not x.numel():
            return x
        with torch.no_grad():
            size = x.shape[-1] if self.group_size is None else self.group_size
            groups = x.to(torch.float32).reshape(*x.shape[:-1], -1, size)
            scale = self.scales(groups)
            y = self.number_format.round(groups / scale).mul(scale).flatten(-2)
            # The largest inputs of float16 may round up to 65536.
            most = torch.finfo(x.dtype).max
            y = y.clamp(-most, most).to(x.dtype)
        return x + (y - x).detach() if torch.is_grad_enabled() and x.requires_grad else y

    def to_dict(self) -> dict[str, Any]:
        """Return the scheme as JSON values; `from_dict` is the inverse."""
        return {"format": self.format, "group_size": self.group_size, "scale": self.scale}

    @classmethod
    def from_dict(cls, data: object) -> "ActivationScheme":
        """Parse the output of `to_dict`; raise `FormatError` for a missing, unknown or ill-typed field."""
        expected = {field.name for field in fields(cls)}
        if not isinstance(data, Mapping) or set(data) != expected:
            found = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise FormatError(
                f"the activations of a scheme have the fields {sorted(expected)}; found {found}."
            )
        return cls(**data)

    @property
    def granularity(self) -> str:
        """Return the unit that has its own scale: `token`, or group `g128`."""
        return "token" if self.group_size is None else f"g{self.group_size}"

    def __str__(self) -> str:
        scale = "" if self.scale == "float32" else f" {self.scale}"
        return f"{self.format} {self.granularity}{scale}"


def activations_named(name: str | None) -> ActivationScheme | None:
    """Return the activation scheme of `--activations name`; None for "none" or None: inputs as they are."""
    if name is None or name == "none":
        return None
    preset = ACTIVATIONS.get(name)
    if preset is None:
        raise unknown_name("activations", name, ("none", *ACTIVATIONS))
    return ActivationScheme(preset.format, preset.group_size, preset.scale)
