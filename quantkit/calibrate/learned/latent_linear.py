"""Latent weights: the codes, scales and zero-points of a linear as numbers that gradients move.

A code is the one nearest to a latent number, in units of its scale. Scales are ratios to their first values,
rounded to the scale dtype whenever they are used. Gradients pass both roundings straight through (Bengio et
al., arXiv 1308.3432). So the gradient of a latent is that of its weight, times the scale. That of a scale is
the sum over its group of the gradients of weights, times their values in units of it.

Each latent stays within half a step of the values of its format. A weight that is far outside would otherwise
need many steps to come back, and its code would not change meanwhile.
"""

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Self

import torch

from quantkit.calibrate.linear_stats import Need
from quantkit.calibrate.steps import Step
from quantkit.packing.formats import NumberFormat
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor, dequantize_codes, plane_codes, spread, store_zero_points

#: Least and largest ratio of a scale to its first value.
LEAST_RATIO, LARGEST_RATIO = 0.125, 8.0
#: Values of the formats whose codes move by one distance at a learning rate of 1.
LEVELS = 4


def row_key(scheme: Scheme, columns: int) -> Hashable:
    """Return what linears have in common whose rows can be joined; None if rows share more than that."""
    shared = scheme.per_tensor or scheme.is_fitted or scheme.column_scale or scheme.group_rows > 1
    return None if shared else (scheme, columns)


class LatentLinear:
    """Latent numbers of one linear, from its weight float32 [N, K] and its initial packed form.

    `numbers` are what can be trained, float32:

    codes         [planes, N, K], in codes with a zero-point, else in values of the format
    scale         ratios, in the stored shape of the scales
    zero_point    [N, groups], in codes
    column_scale  ratios, [K]

    `steps` are the units of learning rates, by name. That of codes is the distance of neighbouring values,
    times `LEVELS`^2 / L^2 for L values: on books-28m few values want larger steps than many do.
    """

    def __init__(self, weight: torch.Tensor, packed: PackedTensor) -> None:
        self.scheme, self.shape = packed.scheme, packed.shape
        scheme, codebook = packed.scheme, packed.part("codebook")
        trained = {"packed", "scale", "zero_point"}
        #: Parts of the packed form that are not trained, and those of which only a ratio is.
        self._parts = {part: tensor for part, tensor in packed.parts() if part not in trained}
        self._format: NumberFormat = scheme.format
        if codebook is not None:
            self._format = scheme.format.bind(codebook.tolist())  # type: ignore[attr-defined]
        #: The first scales, float32.
        self._base = packed.scale.to(torch.float32, copy=True)
        zero = packed.zero_points()
        # A minimum follows from its zero-point, and nothing searches it.
        assert not scheme.zero_point_type.is_minimum
        self.numbers = {"codes": torch.empty(0), "scale": torch.ones_like(self._base)}
        if zero is not None:
            self.numbers["zero_point"] = zero.to(torch.float32, copy=True)
        columns = self._parts.get("column_scale")
        if columns is not None:
            self.numbers["column_scale"] = torch.ones_like(columns, dtype=torch.float32)
        self.numbers["codes"] = self._first_latents(weight.float(), packed)
        lowest, highest = self._range()
        self.steps = {
            "codes": (highest - lowest) / (self._count() - 1) * (LEVELS / self._count()) ** 2,
            "scale": 1.0,
            "zero_point": 1.0,
            "column_scale": 1.0,
        }

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return these numbers with `function` applied to every tensor, such as a copy to another device."""
        found = copy.copy(self)
        found.numbers = {name: function(one) for name, one in self.numbers.items()}
        found._parts = {part: function(one) for part, one in self._parts.items()}
        found._base = function(self._base)
        return found

    @classmethod
    def joined(cls, linears: Sequence[Self]) -> Self:
        """Return one linear with the rows of all `linears`, which have one `row_key`.

        Its global scale is one per row, [N, 1].
        """
        found = copy.copy(linears[0])
        found.numbers = {
            name: torch.cat([one.numbers[name] for one in linears], 1 if name == "codes" else 0)
            for name in found.numbers
        }
        found._parts = {
            part: torch.cat([one._parts[part].view(1, 1).expand(one.shape[0], 1) for one in linears])
            for part in found._parts
        }
        found._base = torch.cat([one._base for one in linears])
        found.shape = (sum(one.shape[0] for one in linears), found.shape[1])
        return found

    def rows(self, start: int, stop: int) -> Self:
        """Return rows `start` to `stop`, those of one of the linears that were joined, as views."""
        found = copy.copy(self)
        found.numbers = {
            name: one[:, start:stop] if name == "codes" else one[start:stop]
            for name, one in self.numbers.items()
        }
        found._parts = {part: one[start : start + 1].view(1) for part, one in self._parts.items()}
        found._base = self._base[start:stop]
        found.shape = (stop - start, self.shape[1])
        return found

    @property
    def elements(self) -> int:
        """Return the number of latents."""
        return self.numbers["codes"].numel()

    def _count(self) -> int:
        return 2**self._format.bits if "zero_point" in self.numbers else len(self._format.numbers)

    def _range(self) -> tuple[float, float]:
        """Return the least and the largest value of a latent's grid."""
        if "zero_point" in self.numbers:
            return 0.0, float(2**self._format.bits - 1)
        return self._format.min, self._format.max

    def _first_latents(self, weight: torch.Tensor, packed: PackedTensor) -> torch.Tensor:
        """Return the first latents, float32 [planes, N, K]: the weight [N, K] in units of its scale.

        Where the packed code is not the nearest, the latent is the value of that code.
        """
        scheme, columns = self.scheme, weight.shape[1]
        scale, found = packed.group_scale(), []
        factors = packed.part("column_scale")
        if factors is not None:
            weight = weight / torch.where(factors == 0, 1.0, factors.float())
        rest = weight
        for plane, codes in enumerate(plane_codes(packed.codes(), scheme)):
            wide = spread(scale[:, plane :: scheme.planes], columns, scheme)
            units = rest / torch.where(wide == 0, 1.0, wide)
            values = codes.float() if "zero_point" in self.numbers else self._decode(codes)
            if "zero_point" in self.numbers:
                units = units + spread(self.numbers["zero_point"], columns, scheme)
            found.append(torch.where(self._encode(units) == codes, units, values))
            rest = rest - values * wide
        return self._clamped(torch.stack(found))

    def _encode(self, latents: torch.Tensor) -> torch.Tensor:
        if "zero_point" in self.numbers:
            return latents.round().clamp_(0, 2**self._format.bits - 1).to(torch.uint8)
        return self._format.encode(latents)

    def _decode(self, codes: torch.Tensor) -> torch.Tensor:
        return self._format.decode(codes)

    def _clamped(self, latents: torch.Tensor) -> torch.Tensor:
        lowest, highest = self._range()
        half = (highest - lowest) / (self._count() - 1) / 2
        return latents.clamp_(lowest - half, highest + half)

    def clamp(self) -> None:
        """Keep all numbers in their ranges; call it after each step."""
        self._clamped(self.numbers["codes"])
        self.numbers["scale"].clamp_(LEAST_RATIO, LARGEST_RATIO)
        if "column_scale" in self.numbers:
            self.numbers["column_scale"].clamp_(LEAST_RATIO, LARGEST_RATIO)

    def _stored_scale(self) -> torch.Tensor:
        """Return the scales rounded to the scale dtype, as they are stored, but in float32."""
        most = self.scheme.scale_type.max
        return self.scheme.scale_type.round((self._base * self.numbers["scale"]).clamp_(-most, most))

    def _group_scale(self) -> torch.Tensor:
        scale = self.scheme.row_scale(self._stored_scale(), self.shape[0])
        divisor = self._parts.get("global_scale")
        return scale if divisor is None else scale / divisor

    def _zero(self) -> torch.Tensor | None:
        if "zero_point" not in self.numbers:
            return None
        scheme = self.scheme
        return scheme.zero_point_type.round(
            self._format, self.numbers["zero_point"], scheme.scale_dtype
        ).float()

    def _columns(self) -> torch.Tensor | None:
        """Return the column scales as they are stored, [K]; None if the scheme has none."""
        first = self._parts.get("column_scale")
        return None if first is None else (first.float() * self.numbers["column_scale"]).to(first.dtype)

    def codes(self) -> torch.Tensor:
        """Return the codes, uint8 [N, K], all planes in one code."""
        bits, planes = self._format.bits, self.numbers["codes"]
        codes = self._encode(planes[0])
        for plane, latents in enumerate(planes[1:], 1):
            codes = codes | (self._encode(latents) << (plane * bits))
        return codes

    def values(self) -> torch.Tensor:
        """Return the weights for the current numbers, float32 [N, K], bit by bit those of `packed()`."""
        weights = dequantize_codes(
            self.codes(), self._group_scale(), self._zero(), self.scheme, self._parts.get("codebook")
        )
        columns = self._columns()
        return weights if columns is None else weights.mul_(columns.float())

    def gradients(self, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradients of `numbers` for the gradient of the weights, [N, K]."""
        scheme, (rows, columns) = self.scheme, self.shape
        gradient = gradient.float()
        scale, zero, factors = self._group_scale(), self._zero(), self._columns()
        found: dict[str, torch.Tensor] = {}
        if factors is not None:
            uncolumned = dequantize_codes(self.codes(), scale, zero, scheme, self._parts.get("codebook"))
            found["column_scale"] = (gradient * uncolumned).sum(0) * self._parts["column_scale"].float()
            gradient = gradient * factors.float()
        of_codes, of_scales = [], []
        shift = None if zero is None else spread(zero, columns, scheme)
        for plane, latents in enumerate(self.numbers["codes"]):
            codes = self._encode(latents)
            values = codes.float() if shift is not None else self._decode(codes)
            if shift is not None:
                values = values - shift
            of_codes.append(gradient * spread(scale[:, plane :: scheme.planes], columns, scheme))
            of_scales.append(self._sums(gradient * values))
        found["codes"] = torch.stack(of_codes)
        per_group = torch.stack(of_scales, dim=2).reshape(rows, -1)
        divisor = self._parts.get("global_scale")
        stored = self._per_stored(per_group if divisor is None else per_group / divisor)
        found["scale"] = stored * self._base
        if zero is not None:
            found["zero_point"] = -self._sums(of_codes[0])
        return found

    def _sums(self, wide: torch.Tensor) -> torch.Tensor:
        """Return sums over groups: [N, K] -> [N, groups]."""
        rows, columns = wide.shape
        size = self.scheme.group_columns(columns)
        if columns % size:
            wide = torch.nn.functional.pad(wide, (0, size - columns % size))
        return wide.reshape(rows, -1, size).sum(-1)

    def _per_stored(self, per_row: torch.Tensor) -> torch.Tensor:
        """Return sums over the rows that share a scale: [N, S] -> the stored shape of the scales."""
        scheme = self.scheme
        if scheme.per_tensor:
            return per_row.sum().reshape(1)
        if scheme.group_rows == 1:
            return per_row
        missing = -len(per_row) % scheme.group_rows
        padded = torch.nn.functional.pad(per_row, (0, 0, 0, missing))
        return padded.view(-1, scheme.group_rows, per_row.shape[1]).sum(1)

    def packed(self) -> PackedTensor:
        """Return the packed linear for the current numbers."""
        scheme, zero, columns = self.scheme, self._zero(), self._columns()
        parts = {
            **self._parts,
            "packed": scheme.pack(self.codes()),
            "scale": self._stored_scale().to(scheme.scale_dtype),
        }
        if zero is not None:
            parts["zero_point"] = store_zero_points(zero.to(scheme.zero_point_dtype), scheme)
        if columns is not None:
            parts["column_scale"] = columns
        return PackedTensor.from_parts(parts, scheme, self.shape)


@dataclass(frozen=True)
class EndToEnd(Step):
    """Train the codes, scales and zero-points of all linears together, against the original's logits."""

    @property
    def needs(self) -> Set[Need]:
        return frozenset({"logits"})

    def lacks(self, scheme: Scheme) -> Iterator[str]:
        return iter(())

    def __str__(self) -> str:
        return "learned end to end"
