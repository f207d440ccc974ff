"""Base class of modules with packed weights: quantized codes in int32 words, scales and zero-points.

A kernel layout is the weight in the order in which a kernel reads it. If the layout can restore the words,
the words are freed: their parameter is then a meta tensor, so reading it raises an error.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import nn

from quantkit.checkpoint.compressed_tensors import stored_format
from quantkit.errors import KernelError
from quantkit.kernels.eager import KernelLayout
from quantkit.kernels.gemm.cpu_int8 import is_int8_product
from quantkit.kernels.linear import linear_parts, restore_words
from quantkit.kernels.problem import ACTIVATION_DTYPES
from quantkit.kernels.weight_layouts import build_layout, can_restore
from quantkit.packing.activations import ActivationScheme
from quantkit.packing.names import Container, StoredFormat, is_aligned
from quantkit.packing.scheme_casts import prepare, with_inputs, with_scales
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime.parallel_plan import TensorParallelPlan, local

_Layout = TypeVar("_Layout")


@dataclass(frozen=True)
class PartSpec:
    """Expected dtype and shape of a state-dict entry, which is one part of a parameter of a packed module.

    part      such as "packed" (the words) or "scale"; `format.part_name` gives its name in files
    stored    shape of each tensor, by the number of tensors in which a file stores the entry
    is_cast   True if a cast of the model, such as `model.half()`, may change the dtype
    logical   shape [N, K] of each stored matrix before packing, by the number of stored tensors

    Words of gate and up of 8 experts may be `stored` as {1: (8, 1024, 256), 16: (512, 256)}: fused or not.
    """

    part: str
    format: StoredFormat
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: Mapping[int, tuple[int, ...]]
    is_cast: bool
    logical: Mapping[int, tuple[int, int]]

    def parameter(self, name: str) -> str:
        """Return the parameter whose part is called `name` in a state dict: "weight" for "weight_scale"."""
        return self.format.parameter_name(name, self.part)


@dataclass(frozen=True)
class Matrix:
    """Packed matrix [N, K]; `parts` are its tensors (words, scales, ...) in the order `scheme.part_names`."""

    parts: tuple[torch.Tensor, ...]
    scheme: Scheme
    shape: tuple[int, int]

    @classmethod
    def of(cls, parts: tuple[torch.Tensor, ...], scheme: Scheme, columns: int) -> "Matrix":
        words, scale = parts[0], parts[1]
        # A cast of the model also casts the scales. N is that of the words: a tensor-parallel rank has only
        # a shard of them.
        return cls(parts, with_scales(scheme, scale.dtype), (words.shape[0], columns))

    @property
    def packed(self) -> PackedTensor:
        """Return the matrix as a `PackedTensor`, without copying its tensors."""
        return PackedTensor(self.parts, self.scheme, self.shape)

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        """Return all parts except the words."""
        return self.parts[1:]


@dataclass(frozen=True)
class _Entry:
    """Part that kernels read: its name in the state dict, and the dtype in which kernels read it."""

    name: str
    part: str
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class FreedWeight:
    """Packed weight of one or several matrices of `shape` [N, K], whose words were freed.

    placeholder   meta parameter in place of the words, with their shape and dtype
    layouts       kernel layout of each matrix, which can restore its words; `scales` has its scales
    """

    placeholder: nn.Parameter
    layouts: tuple[KernelLayout, ...]
    scales: tuple[torch.Tensor, ...]
    scheme: Scheme
    shape: tuple[int, int]

    def words(self) -> torch.Tensor:
        """Return the restored words of all matrices, stacked along N: int32 [matrices * N, words per row]."""
        first = self.words_of(0)
        if len(self.layouts) == 1:
            return first
        words = first.new_empty(len(self.layouts), *first.shape)
        for index, one in enumerate(words):
            one.copy_(self.words_of(index) if index else first)
        return words.flatten(0, 1)

    def words_of(self, index: int) -> torch.Tensor:
        """Return the restored words of matrix `index`: int32 [N, words per row]."""
        return restore_words(self.layouts[index], self.scheme, self.shape, self.scales[index])


class PackedModule(nn.Module):
    """Base of modules with packed weights: parameters as in a file, and kernel layouts made of them.

    Words, scales and zero-points are parameters with the names and dtypes of the file, so the state dict is
    the checkpoint. The shape [N, K] is a buffer, which no cast and no tensor-parallel plan changes.

        words parameter --build--> kernel layout     words freed, parameter on meta
        words parameter <-restore- kernel layout     stored_words, state_dict, copies; moves, casts, loading

    tensor_parallel  plan of the model; None if the model is not divided among ranks
    table            name of the embedding whose parameters this module has, if they are tied, else None
    shares_x         True if forward receives the very tensor that the model passes, not one made from it
    """

    # Makes tensor parallelism of transformers pass local shards to forward, not DTensors.
    _hf_quantized_needs_local_tp = True

    tensor_parallel: TensorParallelPlan | None = None
    table: str | None = None
    shares_x: bool = True

    def __init__(self, container: Container, schemes: Mapping[str, tuple[Scheme, int]]) -> None:
        """Create a module for files of `container`; `schemes`: (`scheme.for_columns(K)`, K) by parameter."""
        super().__init__()
        self.container = container
        self._schemes = {parameter: scheme.of_weights for parameter, (scheme, _) in schemes.items()}
        self._activations = {parameter: scheme.activations for parameter, (scheme, _) in schemes.items()}
        #: Static activation schemes with the stored number, by parameter; read on first use.
        self._bound: dict[str, ActivationScheme] = {}
        #: Parameters whose kernels round inputs on a CPU too; on a GPU all kernels do.
        self._int8 = {parameter for parameter, (scheme, _) in schemes.items() if is_int8_product(scheme)}
        self._columns = {parameter: columns for parameter, (_, columns) in schemes.items()}
        for parameter, scheme in self._schemes.items():
            prepare(scheme, self._activations[parameter])
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
        #: Kernel layouts, or None, by (parameter, matrix index, activation dtype).
        self._layouts: dict[tuple[str, int, torch.dtype], Any] = {}
        self._layout_owners: dict[str, weakref.ref[torch.Tensor]] = {}
        self._freed: dict[str, FreedWeight] = {}

    def part_specs(self) -> dict[str, PartSpec]:
        """Return the expected state-dict entries of packed parameters, by name."""
        raise NotImplementedError

    def logical(self) -> dict[str, tuple[Scheme, tuple[int, int], int]]:
        """Return (scheme, (N, K) of one matrix, number of matrices stacked along N) by packed parameter."""
        raise NotImplementedError

    def dense_weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return dequantized weights in `dtype`, by the parameter names of the dense module."""
        raise NotImplementedError

    def build_kernel_layouts(self, dtype: torch.dtype) -> None:
        """Build the kernel layouts for activations of `dtype`; does nothing if the module is offloaded."""
        raise NotImplementedError

    def drop_kernel_layouts(self) -> None:
        """Drop the kernel layouts and restore freed words; the next forward builds layouts again.

        Layouts that join the weights of several modules are built again only by `make_ready`.
        """
        for parameter in tuple(self._freed):
            if self.is_freed(parameter):
                self._parameters[self._words_name(parameter)] = self._restored(parameter)
        self._freed.clear()
        self._layouts.clear()
        self._layout_owners.clear()
        self._bound.clear()

    @property
    def lacks_layouts(self) -> bool:
        """Return True if there are words but no layouts, as after a move, cast or load."""
        if self._layout_owners:
            return False
        return not (self._words(next(iter(self._entries))).is_meta or _is_offloaded(self))

    def layout_refs(self) -> list["weakref.ref[Any]"]:
        """Return weak references to the kernel layouts; lists of them are equal until one is replaced."""
        return [weakref.ref(layout) for layout in self._layouts.values() if layout is not None]

    def _register_parts(self, specs: Mapping[str, PartSpec]) -> None:
        """Register the parameters `specs`, uninitialized: floats of 16 or 32 bits first, words last.

        Models take a module's dtype and device from its first parameter. Words, which are integers and on the
        meta device once they are freed, would give wrong ones.
        """

        def rank(item: tuple[str, PartSpec]) -> tuple[bool, bool]:
            return item[1].part == "packed", item[1].dtype not in ACTIVATION_DTYPES

        for name, spec in sorted(specs.items(), key=rank):
            empty = torch.empty(spec.shape, dtype=spec.dtype)
            if spec.part == "shape":
                self.register_buffer(name, empty)
            else:
                self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def align(self) -> None:
        """Copy words that do not start at a multiple of 4 bytes; those of a memory-mapped file may not."""
        for parameter in self._entries:
            words = self._words(parameter)
            if not is_aligned(words):
                words.data = words.data.clone()

    def keep_columns(self, parameter: str, columns: int) -> None:
        """Set K of `parameter` to `columns`, the number in this rank's shard, and drop all kernel layouts."""
        self._schemes[parameter] = self._schemes[parameter].for_columns(columns)
        self._columns[parameter] = columns
        prepare(self._schemes[parameter], self._activations[parameter])
        self.drop_kernel_layouts()

    def _local(self, name: str) -> torch.Tensor:
        """Return the parameter `name`, or this rank's shard of it under tensor parallelism."""
        tensor: torch.Tensor = local(getattr(self, name))
        return tensor

    def is_freed(self, parameter: str) -> bool:
        """Return True if the words of `parameter` exist only in its kernel layouts."""
        freed = self._freed.get(parameter)
        return freed is not None and freed.placeholder is self._words(parameter)

    def stored_words(self, parameter: str) -> torch.Tensor:
        """Return the words of `parameter` as in a checkpoint, [..., N, words per row]; restored if freed."""
        if not self.is_freed(parameter):
            return self._words(parameter)
        freed = self._freed[parameter]
        shown = self._stored[parameter].to_file("packed", freed.words())
        return shown.view(freed.placeholder.shape)

    def _restored(self, parameter: str) -> nn.Parameter:
        with torch.inference_mode(False):
            return nn.Parameter(self.stored_words(parameter), requires_grad=False)

    def _free(
        self, parameter: str, matrices: Sequence[Matrix], layouts: Sequence[KernelLayout | None]
    ) -> None:
        """Replace the words of `parameter` by a meta tensor if each of its `layouts` can restore them."""
        words = self._words(parameter)
        restorable = tuple(layout for layout in layouts if layout is not None and can_restore(layout))
        # Words divided among ranks stay: transformers gathers the shards of other ranks from the DTensor.
        divided = self.tensor_parallel is not None or type(words) is not nn.Parameter
        if len(restorable) < len(layouts) or words.is_meta or divided:
            return
        with torch.inference_mode(False):
            placeholder = nn.Parameter(torch.empty_like(words, device="meta"), requires_grad=False)
        scales, first = tuple(matrix.stored[0] for matrix in matrices), matrices[0]
        self._freed[parameter] = FreedWeight(placeholder, restorable, scales, first.scheme, first.shape)
        self._parameters[self._words_name(parameter)] = placeholder
        self._layout_owners[parameter] = weakref.ref(placeholder)

    def _packed(self, parameter: str, index: int, matrix: Matrix) -> PackedTensor:
        """Return `matrix`, number `index` of `parameter`, as a `PackedTensor`; freed words are restored."""
        if not self.is_freed(parameter):
            return matrix.packed
        words = self._freed[parameter].words_of(index)
        return PackedTensor((words, *matrix.stored), matrix.scheme, matrix.shape)

    def _words_name(self, parameter: str) -> str:
        return self._entries[parameter][0].name

    def _words(self, parameter: str) -> torch.Tensor:
        """Return the words of `parameter`, [..., N, words per row]; a meta tensor if they are freed."""
        return self._local(self._words_name(parameter))

    def _parts(self, parameter: str) -> tuple[torch.Tensor, ...]:
        """Return this rank's tensors of `parameter` in the dtypes and order in which kernels take them."""
        stored = self._stored[parameter]
        return tuple(
            [
                stored.from_file(entry.part, self._local(entry.name), entry.dtype)
                for entry in self._entries[parameter]
            ]
        )

    def _layout(self, parameter: str, index: int, matrix: Matrix, dtype: torch.dtype) -> KernelLayout | None:
        """Return the kernel layout of `matrix`, number `index` of `parameter`; built on first use.

        None if kernels read words as stored, or if no layout can be built now (see `_cached`).
        """
        layout = self._cached(parameter, index, dtype, lambda: self._build(parameter, index, matrix, dtype))
        if layout is None and torch.compiler.is_compiling() and self.is_freed(parameter):
            # The words can be restored from a layout for another dtype too.
            return self._freed[parameter].layouts[index]
        return layout

    def _cached(
        self, parameter: str, index: int, dtype: torch.dtype, build: Callable[[], _Layout | None]
    ) -> _Layout | None:
        """Return the cached result of `build` for matrix `index` of `parameter` and activations of `dtype`.

        Calls `build` on first use, but returns None under torch.compile or if words are offloaded or on meta.
        """
        words = self._words(parameter)
        owner = self._layout_owners.get(parameter)
        if owner is None or owner() is not words:
            # Offloaded words are new in each forward; building a layout costs more than one forward gains.
            if words.is_meta or _is_offloaded(self):
                return None
            self._layouts = {key: value for key, value in self._layouts.items() if key[0] != parameter}
            self._freed.pop(parameter, None)
            self._layout_owners[parameter] = weakref.ref(words)
        key = (parameter, index, dtype)
        if key not in self._layouts:
            if torch.compiler.is_compiling():
                return None
            self._layouts[key] = build()
        layout: _Layout | None = self._layouts[key]
        return layout

    @property
    def activations(self) -> tuple[ActivationScheme, ...]:
        """Return the activation schemes of packed parameters; empty if inputs are not rounded."""
        return tuple(scheme for scheme in self._activations.values() if scheme is not None)

    def rounded(self, parameter: str, x: torch.Tensor) -> torch.Tensor:
        """Return inputs `x` [..., K] of `parameter`, rounded by its activation scheme, if it has one."""
        scheme = self.inputs_of(parameter)
        return x if scheme is None else scheme.round(x)

    def inputs_of(self, parameter: str) -> ActivationScheme | None:
        """Return how inputs of `parameter` are rounded (with the scale, if static); None if they are not."""
        scheme = self._bound.get(parameter) or self._activations[parameter]
        if scheme is None or scheme.part is None or scheme.stored is not None:
            return scheme
        stored = self._local(self._stored[parameter].part_name(parameter, scheme.part))
        if stored.is_meta:
            return scheme
        bound = self._bound[parameter] = scheme.bind(*stored.flatten().tolist())
        prepare(self._schemes[parameter], bound)
        return bound

    def operand(self, parameter: str, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [..., K] as kernels of `parameter` take it: rounded, unless they round it themselves."""
        return x if x.is_cuda or parameter in self._int8 else self.rounded(parameter, x)

    def with_inputs(self, parameter: str, scheme: Scheme, on_gpu: bool) -> Scheme:
        """Return the weight `scheme` of `parameter`, plus its activation scheme if kernels round inputs x.

        Kernels round x on a GPU, and for int8 products on a CPU too. Otherwise `operand` rounds x.
        """
        activations = self.inputs_of(parameter)
        if activations is None or not (on_gpu or parameter in self._int8):
            return scheme
        return with_inputs(scheme, activations)

    def _build(self, parameter: str, index: int, matrix: Matrix, dtype: torch.dtype) -> KernelLayout | None:
        packed = self._packed(parameter, index, matrix)
        rounding = self.with_inputs(parameter, matrix.scheme, packed.words.is_cuda).activations
        return build_layout(packed, dtype, rounding)

    def _product(
        self,
        parameter: str,
        index: int,
        matrix: Matrix,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        product: Callable[..., Any] = linear_parts,
    ) -> Any:
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
        scheme = self.with_inputs(parameter, matrix.scheme, x.is_cuda)
        return product(x, parts, bias, scheme, matrix.shape[0], layout)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # `_cached` compares Parameter objects, which moves and casts keep.
        self.drop_kernel_layouts()
        # Words may be stored as 8-bit floats but are codes: no cast. 8-bit scales keep their dtype too,
        # because other dtypes lack the range of e8m0 or the digits of the factor of e4m3.
        small = any(scheme.scale_dtype.itemsize == 1 for scheme in self._schemes.values())
        specs = self.part_specs().items()
        uncast = {id(getattr(self, name)) for name, spec in specs if small or not spec.is_cast}

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            keep = id(tensor) in uncast and result.dtype != tensor.dtype
            return tensor.to(result.device) if keep else result

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.drop_kernel_layouts()
        super()._load_from_state_dict(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        # accelerate sets this before it takes over a module; it must find the words to offload them.
        if name == "_old_forward":
            self.drop_kernel_layouts()
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for parameter in self._freed:
            if self.is_freed(parameter):
                words = self._restored(parameter)
                destination[prefix + self._words_name(parameter)] = words if keep_vars else words.detach()

    def __getstate__(self) -> dict[str, Any]:
        parameters = dict(self._parameters)
        for parameter in self._freed:
            if self.is_freed(parameter):
                parameters[self._words_name(parameter)] = self._restored(parameter)
        fresh: dict[str, Any] = {"_layouts": {}, "_layout_owners": {}, "_freed": {}}
        return {**self.__dict__, "_parameters": parameters, **fresh}


def _is_offloaded(module: nn.Module) -> bool:
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(h, "offload", False) for h in getattr(hook, "hooks", (hook,)))
