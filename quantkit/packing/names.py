"""The names and dtypes that the parts of a packed parameter have in a state dict and in a file.

A parameter `weight` becomes `weight_packed`, `weight_scale`, `weight_zero_point` and `weight_shape`, the
vocabulary of compressed-tensors. In quantkit's own container the words keep the plain name `weight`. So
transformers without quantkit finds int32 words where it expects the matrix, and stops with a shape mismatch.
An unknown extra name would only cost a warning and leave the layer random.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Container = Literal["compressed-tensors", "quantkit"]

CONTAINERS: tuple[Container, ...] = ("compressed-tensors", "quantkit")

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class StoredFormat:
    """Names and dtypes under which a file shows the parts of a packed matrix: the bytes are the same.

    `words_suffix` follows the parameter's name in the name of its words, and `words_dtype` is what their
    bytes are shown as. `scale_dtype` is what scales are shown as, None for their own. `codes_per_element` is
    how many codes an element of the words holds. It is None if that does not say how many there are: the
    logical shape is then stored beside them.
    """

    name: str
    words_suffix: str
    words_dtype: torch.dtype = torch.int32
    scale_dtype: torch.dtype | None = None
    codes_per_element: int | None = None

    def part_name(self, parameter: str, part: str) -> str:
        """State-dict name of `part` (packed, scale, zero_point, global_scale or shape) of `parameter`."""
        return parameter + (self.words_suffix if part == "packed" else f"_{part}")

    def shapes(self, storage: Shapes) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each part in a file, given those that `Scheme.storage_shapes` says."""
        found = {}
        for part, (dtype, shape) in storage.items():
            shown = self._dtype(part, dtype)
            width = shape[-1] * dtype.itemsize // shown.itemsize
            if part != "shape" or self.codes_per_element is None:
                found[part] = (shown, (*shape[:-1], width))
        return found

    def to_file(self, part: str, tensor: torch.Tensor) -> torch.Tensor:
        """A part as it is in a file; shares its memory."""
        return _view(tensor, self._dtype(part, tensor.dtype))

    def from_file(self, part: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A part as a file has it, as the `dtype` that it has in memory; shares the file's where it can."""
        return _view(tensor, dtype) if tensor.dtype == self._dtype(part, dtype) else tensor

    def _dtype(self, part: str, dtype: torch.dtype) -> torch.dtype:
        if part == "packed":
            return self.words_dtype
        return self.scale_dtype if part == "scale" and self.scale_dtype is not None else dtype


def _view(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype:
        return tensor
    # Bytes that begin between two words cannot be seen as words. torch.compile cannot ask where they begin.
    if not torch.compiler.is_compiling() and tensor.storage_offset() * tensor.itemsize % dtype.itemsize:
        tensor = tensor.clone()
    return tensor.view(dtype)


def is_aligned(tensor: torch.Tensor, size: int = 4) -> bool:
    """Return True if a tensor begins where a word of `size` bytes can, in memory and in its storage.

    What is mapped from a file need not.
    """
    begins = (tensor.storage_offset() * tensor.itemsize, 0 if tensor.is_meta else tensor.data_ptr())
    return all(begin % size == 0 for begin in begins)


#: What quantkit stores where compressed-tensors has no words for it.
QUANTKIT = StoredFormat("quantkit", "")


def packed_parameters(
    names: Mapping[str, torch.dtype], formats: Iterable[StoredFormat]
) -> Iterator[tuple[str, StoredFormat]]:
    """The packed parameters among tensors, given by name with their dtype, and how each is stored.

    Packed is what has scales, words of the right dtype, and a logical shape if its format has one.
    """
    candidates = tuple(formats)
    for name in names:
        parameter = name.removesuffix("_scale")
        if parameter == name:
            continue
        shape = f"{parameter}_shape" in names
        for stored in candidates:
            words = names.get(stored.part_name(parameter, "packed"))
            if words == stored.words_dtype and (shape or stored.codes_per_element is not None):
                yield parameter, stored
                break
