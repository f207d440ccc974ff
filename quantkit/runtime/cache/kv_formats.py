"""Formats of a KV cache by name. Imports no torch, as `--help` shows them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit import meant

if TYPE_CHECKING:
    from quantkit.packing.zero_points import ZeroPoint


@dataclass(frozen=True)
class KvFormat:
    """Quantization of keys and values: the D features of a token and head are one row of a weight.

    format       name of a number format
    group_size   features that share a scale; None for one scale per row
    zero_point   kind of zero-points, such as "none" or "float"
    """

    format: str
    group_size: int | None
    zero_point: "ZeroPoint" = "none"


#: docs/accuracy.md has what each costs.
KV_FORMATS: dict[str, KvFormat] = {
    "int8": KvFormat("int8", 64),
    "fp8": KvFormat("fp8-e4m3", None),
    "int4": KvFormat("int4", 32, "float"),
}
meant.KV_FORMATS.give(KV_FORMATS)
