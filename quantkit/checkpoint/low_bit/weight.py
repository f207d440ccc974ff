"""Low-bit weight of a checkpoint: its stored parts, and the tensor they represent."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from quantkit.checkpoint.low_bit.grid import GridSpec, StoredGrid
from quantkit.checkpoint.tensors import Read, StoredTensor
from quantkit.errors import CheckpointError

#: Weights dequantized at a time.
_PIECE = 1 << 21
#: Scale dtypes that store powers of two as exponent plus 127.
POWERS_OF_TWO = ("F8_E8M0", "U8")
FLOATS = ("F32", "F16", "BF16")

START_AGAIN = "Start from the original checkpoint, or write this one again with the tool that made it"

Parts = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class Settings:
    """Quantization settings of a checkpoint: `method` is its quant_method, `values` the whole section.

    `where` names the section in messages; `stated` is False without a section.
    """

    method: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    where: str = "config.json, without a quantization_config,"
    stated: bool = False

    def integer(self, *path: str) -> int | None:
        """Return the positive integer at a path of keys; None if there is none."""
        value: Any = self.values
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value if type(value) is int and 0 < value < 1 << 31 else None


def weight_arguments(settings: Settings) -> list[Mapping[str, Any]]:
    """Return the `weights` arguments of compressed-tensors' config groups."""
    groups = settings.values.get("config_groups")
    found = groups.values() if isinstance(groups, Mapping) else ()
    weights = [group.get("weights") for group in found if isinstance(group, Mapping)]
    return [one for one in weights if isinstance(one, Mapping)]


@dataclass(frozen=True)
class LowBitWeight(ABC):
    """Stored parts of one weight, by role, and their grid.

    The rows of `low_bit_formats.FORMATS` create them.
    """

    parts: Parts
    spec: GridSpec

    @abstractmethod
    def read_rows(self, read: Read, start: int, stop: int) -> StoredGrid:
        """Read rows `[start, stop)`, numbered through all matrices."""

    def grid(self, read: Read, start: int, stop: int) -> StoredGrid:
        """Read rows `[start, stop)`, numbered through all matrices, and check their scales.

        Raises `CheckpointError` for NaN or infinity.
        """
        found = self.read_rows(read, start, stop)
        for role, tensor in (("scale", found.scales), ("bias", found.biases), ("zero", found.zeros)):
            if tensor is not None and not bool(torch.isfinite(tensor.float()).all()):
                part = self.parts.get(role) or self.parts["scale"]
                wrong(part, "it has a scale that is NaN or infinite; expected numbers")
        divisor = found.global_scale
        if divisor is not None and not bool((torch.isfinite(divisor) & (divisor != 0)).all()):
            wrong(self.parts["global_scale"], "it is zero, NaN or infinite; expected a number to divide by")
        return found


@dataclass(frozen=True, kw_only=True)
class LowBitTensor(StoredTensor):
    """Parameter represented by a low-bit weight, in the dtype of the model.

    `file` and `offset` are the place of the codes. `stored_module` is its module, as the file names it.
    """

    weight: LowBitWeight
    stored_in: str = "codes and scales"
    stored_module: str = ""

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all stored parts."""
        return sum(part.nbytes for part in self.weight.parts.values())

    @property
    def stored_as(self) -> str:
        """Return the name of the format."""
        return self.stored_in

    @property
    def grid_spec(self) -> GridSpec:
        """Return the grid of the weight."""
        return self.weight.spec

    def grid(self, read: Read, start: int, stop: int) -> StoredGrid:
        """Read codes and scales of rows `[start, stop)`, numbered through all matrices."""
        return self.weight.grid(read, start, stop)

    def values(self, read: Read, start: int, stop: int) -> torch.Tensor:
        """Read rows `[start, stop)`, dequantized in pieces in float32 and rounded once."""
        spec = self.weight.spec
        rows, columns = spec.shape
        step = max(1, _PIECE // columns)
        if spec.matrices is None:
            out = torch.empty(stop - start, columns, dtype=self.torch_dtype)
            for first in range(start, stop, step):
                last = min(first + step, stop)
                out[first - start : last - start] = self.weight.grid(read, first, last).values()
            return out
        out = torch.empty(stop - start, *self.shape[1:], dtype=self.torch_dtype)
        matrices = out.transpose(1, 2) if spec.transposed else out
        # Small matrices are read together, and large ones in pieces.
        together = max(1, step // rows)
        for matrix in range(start, stop, together):
            target = matrices[matrix - start : matrix - start + together]
            end = (matrix + len(target) - 1) * rows
            for first in range(0, rows, step):
                last = min(first + step, rows)
                found = self.weight.grid(read, matrix * rows + first, end + last)
                target[:, first:last] = found.values().view(len(target), last - first, columns)
        return out


def stored_module(tensor: StoredTensor) -> str:
    """Return the module of a weight, as its file names it."""
    stored = tensor.as_stored
    name = stored.stored_module if isinstance(stored, LowBitTensor) else ""
    return name or tensor.name.removesuffix(".weight")


def wrong(tensor: StoredTensor, problem: str, remedy: str = START_AGAIN) -> NoReturn:
    """Raise `CheckpointError` about the stored part `tensor`: the `problem` with it, and the remedy."""
    raise CheckpointError(
        f"{tensor.file}: tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}: {problem}. {remedy}."
    ) from None


def expect_shape(tensor: StoredTensor, shape: tuple[int, ...], because: str) -> None:
    """Raise `CheckpointError` unless `tensor` has `shape`, which follows from `because`."""
    if tensor.shape != shape:
        wrong(tensor, f"{because} needs {list(shape)}")


def as_matrix(tensor: StoredTensor) -> StoredTensor:
    """Return `tensor` with all dimensions but the last merged into rows."""
    return replace(tensor, shape=(math.prod(tensor.shape[:-1]), tensor.shape[-1]))


def as_bytes(tensor: StoredTensor) -> StoredTensor:
    """Return the bytes of `tensor`, in one dimension."""
    return replace(tensor, dtype="U8", shape=(tensor.nbytes,))


def flat(tensor: StoredTensor) -> StoredTensor:
    """Return `tensor` in one dimension."""
    return replace(tensor, shape=(tensor.elements,))


def powers_of_two(stored: torch.Tensor) -> torch.Tensor:
    """Return scales stored as exponents, as float8_e8m0fnu; 255 is NaN."""
    return stored.view(torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Blocks:
    """Weights that share each scale of a stored tensor of scales.

    grid     rows and columns of scales of one matrix
    size     rows and columns of weights that share a scale
    shared   True if all matrices share their scales
    """

    grid: tuple[int, int]
    size: tuple[int, int]
    shared: bool

    @classmethod
    def of(
        cls, codes: StoredTensor, shape: tuple[int, ...], scale: StoredTensor, wanted: Any = None
    ) -> "Blocks":
        """Derive the blocks from the shapes of a weight [..., N, K] and its scales.

        `wanted` is the block size in the config. Raises `CheckpointError` if the scales fit no blocks.
        """
        stored = scale.shape
        if scale.elements == 1:
            grid, matrices = (1, 1), 1
        elif len(stored) == len(shape):
            grid, matrices = (stored[-2], stored[-1]), math.prod(stored[:-2])
        elif len(stored) == len(shape) - 1:
            # One scale per row of each matrix, or one per matrix.
            grid, matrices = (stored[-1], 1), math.prod(stored[:-1])
        else:
            grid, matrices = (1, 1), scale.elements
        if len(shape) == 3 and len(stored) == 1:
            grid, matrices = (1, 1), scale.elements
        of_weight = math.prod(shape[:-2])
        sizes = wanted if _is_block(wanted) else (None, None)
        found = tuple(_side(n, count, want) for n, count, want in zip(shape[-2:], grid, sizes, strict=True))
        if matrices not in (1, of_weight) or None in found:
            wrong(scale, f"its scales fit no blocks of {codes.name!r} {list(shape)}")
        return cls(grid, (found[0] or 1, found[1] or 1), matrices == 1)

    def rows(self, read: Read, scale: StoredTensor, matrix_rows: int, start: int, stop: int) -> torch.Tensor:
        """Read the scales [R, G] of rows `[start, stop)` of a weight of matrices with `matrix_rows` rows."""
        numbers = torch.arange(start, stop)
        of_matrix = numbers // matrix_rows * (0 if self.shared else self.grid[0])
        wanted = of_matrix + numbers % matrix_rows // self.size[0]
        table = replace(scale, shape=(scale.elements // self.grid[1], self.grid[1]))
        low = int(wanted.min())
        # torch cannot index all 8-bit dtypes.
        found = read(table, low, int(wanted.max()) + 1)
        raw = found.view(torch.uint8) if found.element_size() == 1 else found
        return raw.index_select(0, wanted - low).view(found.dtype)


def _is_block(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(size) is int and 0 < size < 1 << 31 for size in value)
    )


def _side(size: int, count: int, wanted: int | None) -> int | None:
    """Return how many of `size` rows or columns share each of `count` scales; None if no number fits.

    `wanted`, the block size of the config, is taken if it gives `count` blocks.
    """
    if wanted is not None and -(-size // wanted) == count:
        return wanted
    if count == 1:
        return size
    if -(-size // 128) == count:
        return 128
    return size // count if size % count == 0 else None
