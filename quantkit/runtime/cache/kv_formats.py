"""Formats of a KV cache by name. Imports no torch, as `--help` shows them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit.packing.zero_points import ZeroPoint


@dataclass(frozen=True)
class KvFormat:
    """Scheme for keys and values: D features of one token and head are quantized as a row of a weight.

    `group_size` is the number of features that share a scale; None for one scale per row.
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
