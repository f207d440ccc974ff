"""The base of the modules that compute on packed weights."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import nn

from quantkit.checkpoint.compressed_tensors import stored_format
from quantkit.errors import KernelError
from quantkit.kernels.eager import KernelLayout
from quantkit.kernels.linear import build_layout, can_restore, linear_parts, restore_words
from quantkit.packing.names import Container, is_aligned
from quantkit.packing.schemes import SCALE_TYPES, Scheme
from quantkit.packing.tensor import PackedTensor

if TYPE_CHECKING:
    from quantkit.runtime.parallel_plan import TensorParallelPlan

_Layout = TypeVar("_Layout")


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
    #: Whether a cast of the model casts it.
    is_cast: bool
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

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        """The parts that are there even if the words were released."""
        return self.parts[1:]


@dataclass(frozen=True)
class _Entry:
    """A part that computing needs: its name in the state dict, and the dtype that computing sees it in."""

    name: str
    part: str
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _Released:
    """Words that are nowhere but in kernel layouts, one for each matrix of a parameter, with their scales.

    `placeholder` is the parameter that stands for them: it has their shape and dtype, and no memory.
    """

    placeholder: nn.Parameter
    layouts: tuple[KernelLayout, ...]
    scales: tuple[torch.Tensor, ...]
    scheme: Scheme
    shape: tuple[int, int]

    def words(self) -> torch.Tensor:
        """The words of all matrices, one above the other."""
        first = self.words_of(0)
        if len(self.layouts) == 1:
            return first
        words = first.new_empty(len(self.layouts), *first.shape)
        for index, one in enumerate(words):
            one.copy_(self.words_of(index) if index else first)
        return words.flatten(0, 1)

    def words_of(self, index: int) -> torch.Tensor:
        """Those of one matrix."""
        return restore_words(self.layouts[index], self.scheme, self.shape, self.scales[index])


class PackedModule(nn.Module):
    """What packed modules share: frozen storage, and kernel layouts that follow it.

    The words, scales and zero-points are parameters in the storage layout, with the names and dtypes that
    they have in a file, so the state dict is the checkpoint. Only to compute are they seen as the int32 words
    and scales that they are. The logical shape is a buffer: no cast and no tensor-parallel plan touches it.

    Where a kernel layout holds the same codes as the words, the words are released: their parameter is then
    on the meta device, so that whoever reads it gets an error and never wrong numbers. `stored_words` has
    them all the same, and so have state dicts and copies; what moves, casts or loads the module takes them
    back.
    """

    # Tensor parallelism in transformers hands the forward local shards instead of DTensors.
    _hf_quantized_needs_local_tp = True

    #: How the model may be divided among ranks, once it is known: see `quantkit.runtime.tensor_parallel`.
    tensor_parallel: "TensorParallelPlan | None" = None
    #: Whether it is called with the very tensor that the model hands it, not with one made of that.
    shares_x: bool = True

    def __init__(self, container: Container, schemes: Mapping[str, tuple[Scheme, int]]) -> None:
        """`schemes` are the effective scheme and the columns of each packed parameter."""
        super().__init__()
        self.container = container
        self._schemes = {parameter: scheme for parameter, (scheme, _) in schemes.items()}
        self._columns = {parameter: columns for parameter, (_, columns) in schemes.items()}
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
        #: What was built, or None, by parameter, what it is of that, and activation dtype.
        self._layouts: dict[tuple[str, int, torch.dtype], Any] = {}
        self._layout_owners: dict[str, weakref.ref[torch.Tensor]] = {}
        self._released: dict[str, _Released] = {}

    def part_specs(self) -> dict[str, PartSpec]:
        """The state-dict entries of packed matrices by name."""
        raise NotImplementedError

    def logical(self) -> dict[str, tuple[Scheme, tuple[int, int], int]]:
        """Scheme, [N, K] of a matrix, and how many lie one above the other, of each packed parameter."""
        raise NotImplementedError

    def dense_weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The parameters of the dense module that are packed here, by its names, in `dtype`."""
        raise NotImplementedError

    def build_kernel_layouts(self, dtype: torch.dtype) -> None:
        """Build what the kernels want for activations of `dtype` where the words are.

        A no-op for offloaded modules, whose words come anew for every forward.
        """
        raise NotImplementedError

    def drop_kernel_layouts(self) -> None:
        """Forget the kernel layouts; the next forward builds them again, each matrix its own.

        Words that were released are parameters again.
        """
        for parameter in tuple(self._released):
            if self.is_released(parameter):
                self._parameters[self._words_name(parameter)] = self._restored(parameter)
        self._released.clear()
        self._layouts.clear()
        self._layout_owners.clear()

    @property
    def lacks_layouts(self) -> bool:
        """Whether a move, a cast or new words dropped its layouts, and they can be built where it is."""
        if self._layout_owners:
            return False
        return not (self._words(next(iter(self._entries))).is_meta or _is_offloaded(self))

    def layout_addresses(self) -> Iterator[int]:
        """Where the kernel layouts lie, as long as they are the ones that there are."""
        for layout in self._layouts.values():
            if layout is not None:
                yield from (tensor.data_ptr() for tensor in layout.tensors)

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

    def keep_columns(self, parameter: str, columns: int) -> None:
        """From now on rows of `parameter` are `columns` long here: other ranks have the rest of each."""
        self._schemes[parameter] = self._schemes[parameter].for_columns(columns)
        self._columns[parameter] = columns
        _prepare_casts(self._schemes[parameter])
        self.drop_kernel_layouts()

    def _local(self, name: str) -> torch.Tensor:
        """A parameter, or what this rank has of one that tensor parallelism divides."""
        found: torch.Tensor = local(getattr(self, name))
        return found

    def is_released(self, parameter: str) -> bool:
        """Whether the words of `parameter` are in its kernel layouts only."""
        released = self._released.get(parameter)
        return released is not None and released.placeholder is self._words(parameter)

    def stored_words(self, parameter: str) -> torch.Tensor:
        """The words of `parameter` as a checkpoint has them, restored where they were released."""
        if not self.is_released(parameter):
            return self._words(parameter)
        released = self._released[parameter]
        shown = self._stored[parameter].to_file("packed", released.words())
        return shown.view(released.placeholder.shape)

    def _restored(self, parameter: str) -> nn.Parameter:
        with torch.inference_mode(False):
            return nn.Parameter(self.stored_words(parameter), requires_grad=False)

    def _release(
        self, parameter: str, matrices: Sequence[Matrix], layouts: Sequence[KernelLayout | None]
    ) -> None:
        """Let the words go if `layouts`, of all `matrices` of `parameter`, have them."""
        words = self._words(parameter)
        found = tuple(layout for layout in layouts if layout is not None and can_restore(layout))
        # What ranks divide is a tensor of another kind, of which transformers has the rest to gather.
        divided = self.tensor_parallel is not None or type(words) is not nn.Parameter
        if len(found) < len(layouts) or words.is_meta or divided:
            return
        with torch.inference_mode(False):
            placeholder = nn.Parameter(torch.empty_like(words, device="meta"), requires_grad=False)
        scales, first = tuple(matrix.stored[0] for matrix in matrices), matrices[0]
        self._released[parameter] = _Released(placeholder, found, scales, first.scheme, first.shape)
        self._parameters[self._words_name(parameter)] = placeholder
        self._layout_owners[parameter] = weakref.ref(placeholder)

    def _packed(self, parameter: str, index: int, matrix: Matrix) -> PackedTensor:
        """`matrix`, number `index` of `parameter`, with its words, restored where they were released."""
        if not self.is_released(parameter):
            return matrix.packed
        words = self._released[parameter].words_of(index)
        return PackedTensor((words, *matrix.stored), matrix.scheme, matrix.shape)

    def _words_name(self, parameter: str) -> str:
        return self._entries[parameter][0].name

    def _words(self, parameter: str) -> torch.Tensor:
        """The parameter that holds the words, or stands for those that were released."""
        return self._local(self._words_name(parameter))

    def _parts(self, parameter: str) -> tuple[torch.Tensor, ...]:
        """The parts that computing needs, as the scheme of `parameter` has and orders them: a rank's own."""
        stored = self._stored[parameter]
        return tuple(
            [
                stored.from_file(entry.part, self._local(entry.name), entry.dtype)
                for entry in self._entries[parameter]
            ]
        )

    def _layout(self, parameter: str, index: int, matrix: Matrix, dtype: torch.dtype) -> KernelLayout | None:
        """The layout of the matrix number `index` of `parameter`, built unless it is there and valid."""
        found = self._kept(parameter, index, dtype, lambda: self._build(parameter, index, matrix, dtype))
        if found is None and torch.compiler.is_compiling() and self.is_released(parameter):
            # One of another dtype has the words at least.
            return self._released[parameter].layouts[index]
        return found

    def _kept(
        self, parameter: str, index: int, dtype: torch.dtype, build: Callable[[], _Layout | None]
    ) -> _Layout | None:
        """What `build` made of number `index` of `parameter`, called unless that is there and valid."""
        words = self._words(parameter)
        owner = self._layout_owners.get(parameter)
        if owner is None or owner() is not words:
            # A layout costs more than one forward gains from it.
            if words.is_meta or _is_offloaded(self):
                return None
            self._layouts = {key: value for key, value in self._layouts.items() if key[0] != parameter}
            self._released.pop(parameter, None)
            self._layout_owners[parameter] = weakref.ref(words)
        key = (parameter, index, dtype)
        if key not in self._layouts:
            if torch.compiler.is_compiling():
                return None
            self._layouts[key] = build()
        found: _Layout | None = self._layouts[key]
        return found

    def _build(self, parameter: str, index: int, matrix: Matrix, dtype: torch.dtype) -> KernelLayout | None:
        return build_layout(self._packed(parameter, index, matrix), dtype)

    def _product(
        self, parameter: str, index: int, matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        layout = self._layout(parameter, index, matrix, x.dtype)
        parts = matrix.parts
        if parts[0].is_meta and layout is not None:
            parts = matrix.stored
            if layout.dtype != x.dtype:
                parts = (restore_words(layout, matrix.scheme, matrix.shape, parts[0]), *parts)
        elif parts[0].is_meta and not x.is_meta:
            raise KernelError(
                f"the words of {self._words_name(parameter)!r} are not in memory: they were never loaded, or "
                "are those of another module that released them; take them from its state_dict()."
            )
        return linear_parts(x, parts, bias, matrix.scheme, matrix.shape[0], layout)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Moves and casts keep the Parameter objects, so their identity does not give them away.
        self.drop_kernel_layouts()
        # Words may be shown as 8-bit floats, and are codes all the same. For scales of 8 bits, other dtypes
        # have not the range of e8m0 or not the digits of the factor that e4m3 comes with.
        small = any(scheme.scale_dtype.itemsize == 1 for scheme in self._schemes.values())
        specs = self.part_specs().items()
        kept = {id(getattr(self, name)) for name, spec in specs if small or not spec.is_cast}

        def keeping(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            keep = id(tensor) in kept and result.dtype != tensor.dtype
            return tensor.to(result.device) if keep else result

        super()._apply(keeping, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.drop_kernel_layouts()
        super()._load_from_state_dict(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        # accelerate sets it before it takes a module over, and is to find the words where it can take them.
        if name == "_old_forward":
            self.drop_kernel_layouts()
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for parameter in self._released:
            if self.is_released(parameter):
                words = self._restored(parameter)
                destination[prefix + self._words_name(parameter)] = words if keep_vars else words.detach()

    def __getstate__(self) -> dict[str, Any]:
        parameters = dict(self._parameters)
        for parameter in self._released:
            if self.is_released(parameter):
                parameters[self._words_name(parameter)] = self._restored(parameter)
        fresh: dict[str, Any] = {"_layouts": {}, "_layout_owners": {}, "_released": {}}
        return {**self.__dict__, "_parameters": parameters, **fresh}


def local(tensor: Any) -> Any:
    """What this rank has of a tensor that ranks divide; any other as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def _is_offloaded(module: nn.Module) -> bool:
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(h, "offload", False) for h in getattr(hook, "hooks", (hook,)))
