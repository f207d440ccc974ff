"""The base of the modules that compute on packed weights."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from quantkit.checkpoint.compressed_tensors import stored_format
from quantkit.kernels.linear import KernelLayout, build_layout, linear_parts
from quantkit.packing.names import Container, is_aligned
from quantkit.packing.schemes import CAST_PARTS, SCALE_TYPES, Scheme
from quantkit.packing.tensor import PackedTensor


@dataclass(frozen=True)
class PartSpec:
    """What a checkpoint must hold for one state-dict entry of a packed module.

    `part` is called as the parameter and `suffix` after it. `dtype` and `shape` are those of the entry.
    `stored` maps a number of stored tensors to the shape that each of them then has: fused experts are
    filled either by one tensor per expert and projection or by a single fused one.
    """

    part: str
    suffix: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: Mapping[int, tuple[int, ...]]
    #: Logical [N, K] of one stored matrix, by number of stored tensors.
    logical: Mapping[int, tuple[int, int]]


#: What schemes become when a cast of the model casts their scales. Made with the modules, because
#: torch.compile cannot trace what makes a scheme's token.
_CAST: dict[Scheme, dict[torch.dtype, Scheme]] = {}


def _prepare_casts(scheme: Scheme) -> None:
    if scheme not in _CAST:
        _CAST[scheme] = {
            dtype: replace(scheme, scale_dtype=dtype)
            for dtype, scale in SCALE_TYPES.items()
            if scale.signed and not scale.relative
        }
    for prepared in (scheme, *_CAST[scheme].values()):
        _ = prepared.token


@dataclass(frozen=True)
class Matrix:
    """One packed matrix [N, K] in a module's parameters: the parts that the scheme they have now names."""

    parts: tuple[torch.Tensor, ...]
    scheme: Scheme
    shape: tuple[int, int]

    @classmethod
    def of(cls, parts: tuple[torch.Tensor, ...], scheme: Scheme, columns: int) -> "Matrix":
        words, scale = parts[0], parts[1]
        # A cast of the model casts the scales too. The words say how many rows there are: a
        # tensor-parallel rank has a shard of them.
        if scale.dtype != scheme.scale_dtype:
            scheme = _CAST[scheme].get(scale.dtype) or replace(scheme, scale_dtype=scale.dtype)
        return cls(parts, scheme, (words.shape[0], columns))

    @property
    def packed(self) -> PackedTensor:
        """The matrix as a `PackedTensor` on the same storage."""
        return PackedTensor(self.parts, self.scheme, self.shape)


@dataclass(frozen=True)
class _Entry:
    """A part that computing needs: its name in the state dict, and the dtype that computing sees it in."""

    name: str
    part: str
    dtype: torch.dtype


class PackedModule(nn.Module):
    """What packed modules share: frozen storage, and kernel layouts that follow it.

    The words, scales and zero-points are parameters in the storage layout, with the names and dtypes that
    they have in a file, so the state dict is the checkpoint. Only to compute are they seen as the int32 words
    and scales that they are. The logical shape is a buffer: no cast and no tensor-parallel plan touches it.
    """

    # Tensor parallelism in transformers hands the forward local shards instead of DTensors.
    _hf_quantized_needs_local_tp = True

    def __init__(self, container: Container, schemes: Mapping[str, tuple[Scheme, int]]) -> None:
        """`schemes` are the effective scheme and the columns of each packed parameter."""
        super().__init__()
        self.container = container
        self._schemes = {parameter: scheme for parameter, (scheme, _) in schemes.items()}
        for scheme in self._schemes.values():
            _prepare_casts(scheme)
        self._stored = {
            parameter: stored_format(scheme, columns, container)
            for parameter, (scheme, columns) in schemes.items()
        }
        self._entries = {
            parameter: tuple(
                _Entry(self._stored[parameter].part_name(parameter, part), part, dtype)
                for part, (dtype, _) in scheme.storage_shapes((1, 1)).items()
                if part in scheme.part_names
            )
            for parameter, scheme in self._schemes.items()
        }
        self._layouts: dict[tuple[str, int, torch.dtype], KernelLayout | None] = {}
        self._layout_owners: dict[str, weakref.ref[torch.Tensor]] = {}

    def part_specs(self) -> dict[str, PartSpec]:
        """The state-dict entries of packed matrices by name."""
        raise NotImplementedError

    def build_kernel_layouts(self, dtype: torch.dtype) -> None:
        """Build what the kernels want for activations of `dtype` where the words are.

        A no-op for offloaded modules, whose words come anew for every forward.
        """
        raise NotImplementedError

    def drop_kernel_layouts(self) -> None:
        """Forget the kernel layouts; the next forward builds them again."""
        self._layouts.clear()
        self._layout_owners.clear()

    def _register_parts(self, specs: Mapping[str, PartSpec]) -> None:
        for name, spec in specs.items():
            empty = torch.empty(spec.shape, dtype=spec.dtype)
            if spec.part == "shape":
                self.register_buffer(name, empty)
            else:
                self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def align(self) -> None:
        """Copy the words that begin between two words of memory, as those of a mapped file may."""
        for parameter in self._entries:
            words = self._words(parameter)
            if not is_aligned(words):
                words.data = words.data.clone()

    def _words(self, parameter: str) -> torch.Tensor:
        """The words as they are in the state dict."""
        words: torch.Tensor = getattr(self, self._entries[parameter][0].name)
        return words

    def _parts(self, parameter: str) -> tuple[torch.Tensor, ...]:
        """The parts that computing needs, as the scheme of `parameter` has and orders them."""
        stored = self._stored[parameter]
        return tuple(
            [
                stored.from_file(entry.part, getattr(self, entry.name), entry.dtype)
                for entry in self._entries[parameter]
            ]
        )

    def _layout(self, parameter: str, index: int, matrix: Matrix, dtype: torch.dtype) -> KernelLayout | None:
        """The layout of the matrix number `index` of `parameter`, built unless it is there and valid."""
        words = self._words(parameter)
        owner = self._layout_owners.get(parameter)
        if owner is None or owner() is not words:
            # A layout costs more than one forward gains from it.
            if words.is_meta or _is_offloaded(self):
                return None
            self._layouts = {key: value for key, value in self._layouts.items() if key[0] != parameter}
            self._layout_owners[parameter] = weakref.ref(words)
        key = (parameter, index, dtype)
        if key not in self._layouts:
            if torch.compiler.is_compiling():
                return None
            self._layouts[key] = build_layout(matrix.packed, dtype)
        return self._layouts[key]

    def _product(
        self, parameter: str, index: int, matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear_parts(
            x,
            matrix.parts,
            bias,
            matrix.scheme,
            matrix.shape[0],
            self._layout(parameter, index, matrix, x.dtype),
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Moves and casts keep the Parameter objects, so their identity does not give them away.
        self.drop_kernel_layouts()
        # Words may be shown as 8-bit floats, and are codes all the same. For scales of 8 bits, other dtypes
        # have not the range of e8m0 or not the digits of the factor that e4m3 comes with.
        small = any(scheme.scale_dtype.itemsize == 1 for scheme in self._schemes.values())
        specs = self.part_specs().items()
        kept = {id(getattr(self, name)) for name, spec in specs if small or spec.part not in CAST_PARTS}

        def keeping(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            keep = id(tensor) in kept and result.dtype != tensor.dtype
            return tensor.to(result.device) if keep else result

        super()._apply(keeping, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.drop_kernel_layouts()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_layouts": {}, "_layout_owners": {}}


def _is_offloaded(module: nn.Module) -> bool:
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(h, "offload", False) for h in getattr(hook, "hooks", (hook,)))
