"""Names and dtypes of the parts of a packed parameter in a state dict and in a file.

A parameter `weight` becomes `weight_packed`, `weight_scale`, `weight_zero_point` and `weight_shape`, the
names of compressed-tensors. quantkit's own container keeps the name `weight` for the words. So transformers
without quantkit finds int32 words in place of the matrix, and stops with a shape mismatch. An unknown extra
name would only be warned about, and the layer would stay random.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Container = Literal["compressed-tensors", "quantkit"]

CONTAINERS: tuple[Container, ...] = ("compressed-tensors", "quantkit")

#: Scale of the keys or values of an attention layer, a part beside the linear that makes them.
KV_PARTS = {"k_proj": "k_scale", "v_proj": "v_scale"}

#: Begins the names of parts that hold numbers of the scales of inputs.
_OF_INPUTS = "input_"

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class StoredFormat:
    """Names and dtypes of the parts of a packed matrix in a file; the bytes are always the same.

    words_suffix        follows the parameter's name in the name of its words
    words_dtype         dtype of the words in the file
    scale_dtype         dtype of the scales in the file; None for their own dtype
    codes_per_element   codes per element of the words; None if unknown: the file then stores the shape
    """

    name: str
    words_suffix: str
    words_dtype: torch.dtype = torch.int32
    scale_dtype: torch.dtype | None = None
    codes_per_element: int | None = None

    def part_name(self, parameter: str, part: str) -> str:
        """Return the state-dict name of `part` of `parameter`, such as "weight_scale".

        Parts of inputs belong to the linear: "input_scale" for the parameter "weight".
        """
        if part.startswith(_OF_INPUTS) and parameter.endswith("weight"):
            return parameter.removesuffix("weight") + part
        return parameter + self._suffix(part)

    def parameter_name(self, name: str, part: str) -> str:
        """Return the name of the parameter whose `part` has `name`, the inverse of `part_name`."""
        if part.startswith(_OF_INPUTS) and not name.endswith(f"_{part}"):
            return name.removesuffix(part) + "weight"
        return name.removesuffix(self._suffix(part))

    def _suffix(self, part: str) -> str:
        return self.words_suffix if part == "packed" else f"_{part}"

    def shapes(self, storage: Shapes) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of each part as in a file; `storage` has them as in memory, by part.

        The part "shape" is left out if `codes_per_element` is known.
        """
        found = {}
        for part, (dtype, shape) in storage.items():
            shown = self._dtype(part, dtype)
            width = shape[-1] * dtype.itemsize // shown.itemsize
            if part != "shape" or self.codes_per_element is None:
                found[part] = (shown, (*shape[:-1], width))
        return found

    def to_file(self, part: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of a part viewed in the dtype of a file; shares its memory."""
        return _view(tensor, self._dtype(part, tensor.dtype))

    def from_file(self, part: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor of a part, read from a file, viewed in its `dtype` in memory.

        It shares the file's memory if it is aligned to that dtype.
        """
        return _view(tensor, dtype) if tensor.dtype == self._dtype(part, dtype) else tensor

    def _dtype(self, part: str, dtype: torch.dtype) -> torch.dtype:
        if part == "packed":
            return self.words_dtype
        return self.scale_dtype if part == "scale" and self.scale_dtype is not None else dtype


def _view(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype:
        return tensor
    # Bytes at an odd address cannot be viewed as words. torch.compile cannot trace the check.
    if not torch.compiler.is_compiling() and tensor.storage_offset() * tensor.itemsize % dtype.itemsize:
        tensor = tensor.clone()
    return tensor.view(dtype)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return True if a tensor starts at a multiple of 4 bytes, in memory and in its storage.

    Tensors mapped from a file may not.
    """
    begins = (tensor.storage_offset() * tensor.itemsize, 0 if tensor.is_meta else tensor.data_ptr())
    return all(begin % 4 == 0 for begin in begins)


#: Storage of words that compressed-tensors has no format for.
QUANTKIT = StoredFormat("quantkit", "")


def packed_parameters(
    names: Mapping[str, torch.dtype], formats: Iterable[StoredFormat]
) -> Iterator[tuple[str, StoredFormat]]:
    """Yield each packed parameter with its stored format, from the dtypes of tensors by name.

    A parameter is packed if it has scales, words of the right dtype, and a logical shape if its format has
    one.
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
