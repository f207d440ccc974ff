"""Linear layers with packed weights, and the base of modules with one packed matrix.

`replace.swap_modules` puts them into a model. `PackedLinear.forward` takes the first way that applies: one
product for several linears (`shared_input.py`), a launch plan (`kernels/eager.py`), or the operator
(`kernels/linear.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from quantkit.kernels.eager import KernelLayout, is_plain, planned
from quantkit.kernels.linear import autocast, autocast_dtype, check_features
from quantkit.kernels.lora.lora_linear import Lora, lora_parts
from quantkit.packing.names import Container
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime.packed_module import Matrix, PackedModule, PartSpec
from quantkit.runtime.parallel_plan import local

#: Attributes of a module by which something sees or replaces its calls.
_OBSERVERS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_hf_hook", "forward"
)  # fmt: skip


class JoinedLinears(Protocol):
    """Methods that a linear calls on its `SharedInput`, which computes all linears of the same x at once."""

    def product(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """Return y [..., N] of linear `index` for x [..., K]; None if the linear must compute y itself."""

    def drop(self) -> None:
        """Drop the kernel layouts that each hold the weights of all the linears."""


class PackedMatrix(PackedModule):
    """Module with one packed parameter, `weight` [rows, columns].

    scheme      result of `Scheme.for_columns(columns)`
    container   file format of the state dict, "compressed-tensors" or "quantkit"

    In compressed-tensors, the state dict has `weight_packed` int32 (the words), `weight_scale`,
    `weight_shape` int64 [2] and, if asymmetric, `weight_zero_point`. In quantkit, the words are `weight`.
    `Scheme.storage_shapes` has the shapes, `StoredFormat` the names and dtypes of float formats.
    """

    def __init__(self, columns: int, rows: int, scheme: Scheme, container: Container) -> None:
        super().__init__(container, {"weight": (scheme, columns)})
        self.rows, self.columns = rows, columns
        self.scheme = scheme
        self._register_parts(self.part_specs())

    def part_specs(self) -> dict[str, PartSpec]:
        shape = (self.rows, self.columns)
        stored = self._stored["weight"]
        return {
            stored.part_name("weight", part): PartSpec(
                part,
                stored,
                dtype,
                size,
                {1: size},
                part in self.scheme.cast_parts,
                {1: shape},
            )
            for part, (dtype, size) in stored.shapes(self.scheme.storage_shapes(shape)).items()
        }

    @property
    def words(self) -> torch.Tensor:
        """Return the words [N, words per row] as in a file; on meta if a kernel layout replaces them."""
        return self._words("weight")

    @property
    def matrix(self) -> Matrix:
        """Return the tensors of the weight, in the order in which kernels take them."""
        return Matrix.of(self._parts("weight"), self._schemes["weight"], self._columns["weight"])

    @property
    def packed(self) -> PackedTensor:
        """Return the weight, or this rank's shard of it, as a `PackedTensor`.

        Words that only the kernel layout has are restored from it.
        """
        return self._packed("weight", 0, self.matrix)

    def logical(self) -> dict[str, tuple[Scheme, tuple[int, int], int]]:
        return {"weight": (self.scheme, (self.rows, self.columns), 1)}

    def dense_weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {"weight": self.packed.dequantize(dtype)}


class PackedLinear(PackedMatrix):
    """Linear layer with packed W: y [..., N] = x [..., K] W^T + b; y has the dtype of x.

    The state dict has the parts of the packed matrix W [N, K] (see `PackedMatrix`) and `bias` [N], which has
    the dtype `bias_dtype`. If that is None, there is no bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: Scheme,
        container: Container,
        *,
        bias_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, scheme, container)
        self.in_features = in_features
        self.out_features = out_features
        self._words_key, self._scale_key = (entry.name for entry in self._entries["weight"][:2])
        #: Results of `token` by dtype of the scale, which a cast may change, and True on a GPU.
        self._tokens: dict[tuple[torch.dtype, bool], str] = {}
        #: The group of linears that share this input, and the index of this one in it.
        self._shared: tuple[JoinedLinears, int] | None = None
        bias = None if bias_dtype is None else torch.empty(out_features, dtype=bias_dtype)
        # The bias comes first, because model code, such as Swin V2's, takes the dtype of a module from its
        # first parameter.
        parts = dict(self._parameters)
        self._parameters.clear()
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self._parameters.update(parts)

    @classmethod
    def from_packed(
        cls, packed: PackedTensor, bias: torch.Tensor | None = None, container: Container = "quantkit"
    ) -> "PackedLinear":
        """Create a layer that owns the tensors of `packed` and `bias` [N], without copies.

        `container` determines the names and dtypes in its state dict.
        """
        rows, columns = packed.shape
        with torch.device("meta"):
            layer = cls(
                columns, rows, packed.scheme, container, bias_dtype=bias.dtype if bias is not None else None
            )
        shape = torch.tensor(packed.shape, dtype=torch.int64, device=packed.device)
        stored, parts = layer._stored["weight"], {**dict(packed.parts()), "shape": shape}
        for name, spec in layer.part_specs().items():
            tensor = stored.to_file(spec.part, parts[spec.part])
            # Keep buffers buffers.
            is_buffer = name in layer._buffers
            setattr(layer, name, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer

    @property
    def device(self) -> torch.device:
        """Return the device of the weight: that of its scales, as words may be on meta."""
        return self._local(self._scale_key).device

    @property
    def own_bias(self) -> torch.Tensor | None:
        """Return the bias [N], or this rank's shard of it; None without a bias."""
        return None if self._parameters["bias"] is None else self._local("bias")

    def build_kernel_layouts(self, dtype: torch.dtype) -> None:
        self.layout(dtype)

    def layout(self, dtype: torch.dtype) -> KernelLayout | None:
        """Return the kernel layout for activations of `dtype`, built on first use.

        None if kernels read the words as stored, or if no layout can be built now.
        """
        return self._layout("weight", 0, self.matrix, dtype)

    def _build(self, parameter: str, index: int, matrix: Matrix, dtype: torch.dtype) -> KernelLayout | None:
        layout = super()._build(parameter, index, matrix, dtype)
        # An embedding looks its rows up in the words, so they must stay.
        if self.table is None:
            self._free(parameter, [matrix], [layout])
        return layout

    def share(self, shared: JoinedLinears, index: int) -> None:
        """Make forward ask `shared` for y first; this linear has the index `index` in `shared`."""
        self._shared = shared, index

    def replace_layout(self, layout: KernelLayout) -> None:
        """Replace the kernel layout by `layout`, which has the same values at another address."""
        key = ("weight", 0, layout.dtype)
        assert key in self._layouts
        replaced, self._layouts[key] = self._layouts[key], layout
        freed = self._freed.get("weight")
        if freed is not None and freed.layouts == (replaced,):
            self._freed["weight"] = replace(freed, layouts=(layout,))

    def drop_kernel_layouts(self) -> None:
        super().drop_kernel_layouts()
        self._tokens.clear()
        if self._shared is not None:
            self._shared[0].drop()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has its own words, and layouts that are not joined.
        return {**super().__getstate__(), "_shared": None}

    def word_and_bias_parameters(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the parameters of words [N, words per row] and bias [N]; None for a missing one."""
        return self._parameters[self._words_key], self._parameters["bias"]

    def token(self) -> str:
        """Return the scheme as a string (`Scheme.token`), the form in which torch operators take it.

        The string includes the activation scheme if the kernels round x, as they do on a GPU.
        """
        scale = self._parameters[self._scale_key]
        on_gpu = scale is not None and scale.is_cuda
        token = None if scale is None else self._tokens.get((scale.dtype, on_gpu))
        if token is None:
            token = self.with_inputs("weight", self.matrix.scheme, on_gpu).token
            if scale is not None and not torch.compiler.is_compiling():
                self._tokens[scale.dtype, on_gpu] = token
        return token

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return y [..., N] of x [..., K]; `bias` [N], if given, is added instead of the layer's bias."""
        check_features(x, self._columns["weight"])
        if self._shared is not None and bias is None and not torch.is_grad_enabled():
            shared, index = self._shared
            y = shared.product(index, x)
            if y is not None:
                return y
        if bias is None:
            bias = local(self._parameters["bias"])
        x, bias = self.operand("weight", autocast(x)), None if bias is None else autocast(bias)
        if not torch.compiler.is_compiling() and is_plain(x):
            y = self._planned(x, bias)
            if y is not None:
                return y
        product: torch.Tensor = self._product("weight", 0, self.matrix, x, bias)
        return product

    def with_lora(
        self, x: torch.Tensor, lora: Lora, dropout: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> torch.Tensor | None:
        """Return y [..., N] = x W^T + b plus the output of `lora`, for x [..., K], in one operation.

        The LoRA's input is `dropout(x)`, or x if `dropout` is None. Returns None if layer and LoRA have to
        run separately: if inputs are rounded, `has_hooks(self)`, or the LoRA has another dtype than x.
        """
        check_features(x, self._columns["weight"])
        dtype = autocast_dtype(x)
        is_same = dtype is not None or lora.a.dtype == lora.b.dtype == x.dtype
        if not is_same or self.activations or has_hooks(self):
            return None
        x = x if dtype is None or dtype == x.dtype else x.to(dtype)
        bias = local(self._parameters["bias"])
        product = partial(lora_parts, lora=lora, dropout=dropout)
        bias = None if bias is None else autocast(bias)
        y: torch.Tensor | None = self._product("weight", 0, self.matrix, x, bias, product)
        return y

    def _planned(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return y [..., N] of x [..., K] and `bias` [N] by a launch plan: kernel launches prepared before.

        `is_plain(x)` must be true. None if no plan fits, if the kernel layout was not made from the present
        words, or if a parameter needs a gradient.
        """
        layout, owner = self._layouts.get(("weight", 0, x.dtype)), self._layout_owners.get("weight")
        if layout is None or owner is None or owner() is not local(self._parameters[self._words_key]):
            return None
        parameters = self._parameters.values()
        if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in parameters):
            return None
        return planned(layout, x, bias, self.token())

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scheme={self.scheme}"
        )


def has_hooks(module: nn.Module) -> bool:
    """Return True if a call of `module` runs hooks, its own or global ones, or a replaced forward."""
    of = vars(module)
    return (
        any(map(of.get, _OBSERVERS)) or bool(_has_any_global_hook())  # type: ignore[no-untyped-call]
    )
