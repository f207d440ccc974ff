"""The names a packed parameter has in a state dict and in a file.

A parameter `weight` becomes `weight_packed`, `weight_scale`, `weight_zero_point` and `weight_shape`, the
vocabulary of compressed-tensors. In quantkit's own container the words keep the plain name `weight`:
transformers without quantkit then finds int32 words where it expects the matrix and stops with a shape
mismatch, where an unknown extra name would only have cost a warning and left the layer random.
"""

from typing import Literal

Container = Literal["compressed-tensors", "quantkit"]

CONTAINERS: tuple[Container, ...] = ("compressed-tensors", "quantkit")

_PACKED_SUFFIX: dict[Container, str] = {"compressed-tensors": "_packed", "quantkit": ""}


def part_name(parameter: str, part: str, container: Container) -> str:
    """State-dict name of `part` (packed, scale, zero_point or shape) of `parameter`."""
    suffix = _PACKED_SUFFIX[container] if part == "packed" else f"_{part}"
    return parameter + suffix
