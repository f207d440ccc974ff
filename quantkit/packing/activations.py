"""Activation schemes: how a linear rounds its inputs x before the product.

    x [..., K] -> codes of a number format, and one scale per tensor, per token or per group of a token
    y = round(x) W^T, with the codes and scales multiplied back

Scales are dynamic, computed from x itself, or static: one number of the linear, from calibration data, is
stored beside its weight. With static scales, inputs beyond the calibrated range saturate.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from quantkit.errors import FormatError, unknown_name
from quantkit.packing.formats import FORMATS, NumberFormat
from quantkit.packing.presets import ACTIVATIONS
from quantkit.packing.scale_types import MAX_GROUP_SIZE

ScaleKind = Literal["float32", "e8m0", "e4m3"]
SCALE_KINDS: tuple[ScaleKind, ...] = ("float32", "e8m0", "e4m3")
#: Parts of a linear that hold the number of static scales [1], float32, by the kind of scale: the scale of
#: all inputs, or the factor that e4m3 scales were multiplied by.
INPUT_PARTS: dict[ScaleKind, str] = {"float32": "input_scale", "e4m3": "input_global_scale"}
#: Smallest scale, so that a token of zeros has a divisor.
_SMALLEST = torch.finfo(torch.float32).tiny
#: Stands for an e4m3 scale that rounds to 0, as in compressed-tensors.
_INSTEAD_OF_ZERO = 0.125
#: Largest e4m3 scale.
_E4M3_MAX = 448.0
#: Carries a float32 whose significand is at least 1.75 to the next exponent: 0.25 in units of its last place.
_CARRY = 1 << 21


@dataclass(frozen=True)
class ActivationScheme:
    """Rounding of the inputs x [..., K] of a linear.

    format       name of a number format
    group_size   consecutive features of a token that share a scale; None for one scale per token, or for one
                 scale of all inputs if static
    scale        float32; e8m0: a power of two; e4m3: of groups, divided by a factor of the linear
    static       True if the linear stores a number of its scales, see `INPUT_PARTS`: the float32 scale of all
                 its inputs, which have no groups, or the factor of e4m3 scales
    stored       that number; None if unknown, as in a recipe
    """

    format: str
    group_size: int | None = None
    scale: ScaleKind = "float32"
    static: bool = False
    stored: float | None = None

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
        if type(self.static) is not bool or self.static not in self._staticness():
            raise FormatError(
                f"static is {self.static!r} with {self.scale} scales of inputs and group size {size}; e4m3 "
                "scales of groups are static, e8m0 scales are not, and a static float32 scale has no groups."
            )
        if self.stored is not None and not (self.static and _is_scale(self.stored)):
            raise FormatError(
                f"the stored scale of inputs is {self.stored!r}; static scales have a positive finite "
                "number, others none."
            )

    def _staticness(self) -> tuple[bool, ...]:
        """Return the allowed values of `static`."""
        if self.scale == "float32":
            return (False, True) if self.group_size is None else (False,)
        return (self.scale == "e4m3" and self.group_size is not None,)

    @property
    def part(self) -> str | None:
        """Return the name of the part of a linear that holds `stored`; None for dynamic scales."""
        return INPUT_PARTS[self.scale] if self.static else None

    @cached_property
    def unbound(self) -> "ActivationScheme":
        """Return the scheme without its stored number, as a recipe has it."""
        return self if self.stored is None else replace(self, stored=None)

    def bind(self, *stored: float) -> "ActivationScheme":
        """Return the static scheme with the number that a linear stores; `FormatError` if it is no scale.

        Of several numbers it takes the one for the largest inputs: experts of a layer store one each, and
        round by one.
        """
        wrong = next((one for one in stored if not _is_scale(one)), None)
        widest = max(stored) if self.scale == "float32" else min(stored)
        return replace(self, stored=widest if wrong is None else wrong)

    def fit(self, largest: float) -> "ActivationScheme":
        """Return the static scheme for inputs whose largest magnitude is `largest`, as in compressed-tensors.

        A float32 scale makes `largest` half the range of the format: its largest number, and 127.5 for int8.
        The factor of e4m3 scales makes it the largest number with the largest scale.
        """
        # compressed-tensors divides a number by a tensor, which torch rounds twice, and two tensors.
        form, seen = self.number_format, torch.tensor(largest, dtype=torch.float32)
        most = (form.max - form.min) / 2
        found = seen / torch.tensor(most) if self.scale == "float32" else _E4M3_MAX * most / seen
        return self.bind(float(found))

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

        A group with NaN or infinity gets NaN. A dynamic scale maps the largest magnitude of a group to the
        largest of the format. An e8m0 scale maps it into the binade of the largest of the format; from a
        significand of 1.75 on, into the binade below, as in compressed-tensors. Raises `FormatError` for a
        static scheme without its stored number.
        """
        largest = groups.abs().amax(-1, keepdim=True)
        # A tensor, because a GPU multiplies by the inverse of a number.
        absmax = largest.new_full((), self.number_format.absmax)
        return torch.where(largest.isfinite(), self._scales_of(largest, absmax), math.nan)

    def _scales_of(self, largest: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
        """Return the scales of groups whose largest magnitudes are `largest`, float32 [..., 1].

        `absmax` [] is the largest number of the format.
        """
        if self.static and self.stored is None:
            raise FormatError(
                f"inputs are rounded to {self} by a number that was not read yet; load the checkpoint that "
                "stores it."
            )
        if self.scale == "e4m3":
            factor = largest.new_full((), self.stored or 0.0)
            scale = FORMATS["fp8-e4m3"].round((factor * (largest / absmax)).clamp(max=_E4M3_MAX))
            return scale.masked_fill(scale == 0, _INSTEAD_OF_ZERO) / factor
        if self.static:
            return torch.full_like(largest, self.stored or 0.0)
        if self.scale == "float32":
            return (largest / absmax).clamp(min=_SMALLEST)
        exponent = (largest.view(torch.int32) + _CARRY) >> 23
        exponent = (exponent - math.floor(math.log2(self.number_format.absmax))).clamp(1, 254)
        return (exponent << 23).view(torch.float32)

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
        data = {"format": self.format, "group_size": self.group_size, "scale": self.scale}
        data |= {"static": True} if self.static else {}
        return data if self.stored is None else {**data, "stored": self.stored}

    @classmethod
    def from_dict(cls, data: object) -> "ActivationScheme":
        """Parse the output of `to_dict`; raise `FormatError` for a missing, unknown or ill-typed field."""
        expected, optional = {"format", "group_size", "scale"}, {"static", "stored"}
        if not isinstance(data, Mapping) or not expected <= set(data) <= expected | optional:
            found = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise FormatError(
                f"the activations of a scheme have the fields {sorted(expected)}, and may have "
                f"{sorted(optional)}; found {found}."
            )
        return cls(**data)

    @property
    def granularity(self) -> str:
        """Return the unit that has its own scale: `tensor`, `token`, or group `g128`."""
        if self.group_size is not None:
            return f"g{self.group_size}"
        return "tensor" if self.static else "token"

    def __str__(self) -> str:
        scale = "" if self.scale == "float32" else f" {self.scale}"
        return f"{self.format} {self.granularity}{scale}"


def activations_named(name: str | None) -> ActivationScheme | None:
    """Return the activation scheme of `--activations name`; None for "none" and None."""
    if name is None or name == "none":
        return None
    preset = ACTIVATIONS.get(name)
    if preset is None:
        raise unknown_name("activations", name, ("none", *ACTIVATIONS))
    return ActivationScheme(preset.format, preset.group_size, preset.scale, preset.static)


def _is_scale(value: object) -> bool:
    return isinstance(value, float) and 0.0 < value < math.inf
