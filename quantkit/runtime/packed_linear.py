"""Which modules of a model have a packed stand-in, and the one for linear layers."""

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from quantkit.kernels.eager import KernelLayout, is_plain, planned
from quantkit.kernels.linear import autocast, check_features
from quantkit.packing.names import Container
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime.packed_module import Matrix, PackedModule, PartSpec, local


class SharesInput(Protocol):
    """Linears with one input, such as `SharedInput`, as one of them sees them."""

    def product(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """What the linear of this `index` computes of x [..., K], or None if it has to do so itself."""

    def drop(self) -> None:
        """Forget the layouts."""


class PackedLinear(PackedModule):
    """A linear layer, y [..., N] = x [..., K] W^T + b, with W packed.

    `scheme` is the effective one, `Scheme.for_columns(in_features)`. Entries of the state dict, for the
    container compressed-tensors: `weight_packed` int32, `weight_scale`, `weight_zero_point` int32 when
    asymmetric, `weight_shape` int64 [2], and `bias` [N]; see `Scheme.storage_shapes`. In the container
    quantkit the words are called `weight`. The float formats of compressed-tensors have other names and
    dtypes for the same bytes; see `StoredFormat`.
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
        super().__init__(container, {"weight": (scheme, in_features)})
        self.in_features = in_features
        self.out_features = out_features
        self.scheme = scheme
        self._words_key, self._scale_key = (entry.name for entry in self._entries["weight"][:2])
        #: By the dtype of the scale, which a cast of the model may change.
        self._tokens: dict[torch.dtype, str] = {}
        #: The linears that this one shares its input with, and which of them it is.
        self._shared: tuple[SharesInput, int] | None = None
        self._register_parts(self.part_specs())
        bias = None if bias_dtype is None else torch.empty(out_features, dtype=bias_dtype)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @classmethod
    def from_packed(
        cls, packed: PackedTensor, bias: torch.Tensor | None = None, container: Container = "quantkit"
    ) -> "PackedLinear":
        """A layer that owns the tensors of `packed` and `bias` ([N]), without copying them."""
        rows, columns = packed.shape
        with torch.device("meta"):
            layer = cls(
                columns, rows, packed.scheme, container, bias_dtype=bias.dtype if bias is not None else None
            )
        shape = torch.tensor(packed.shape, dtype=torch.int64, device=packed.device)
        stored, found = layer._stored["weight"], {**dict(packed.parts()), "shape": shape}
        for name, spec in layer.part_specs().items():
            tensor = stored.to_file(spec.part, found[spec.part])
            # A buffer where the layer has one.
            is_buffer = name in layer._buffers
            setattr(layer, name, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer

    def part_specs(self) -> dict[str, PartSpec]:
        shape = (self.out_features, self.in_features)
        stored = self._stored["weight"]
        return {
            stored.part_name("weight", part): PartSpec(
                part,
                stored.part_name("", part),
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
        """The parameter that holds the codes, or stands for them where they were released."""
        return self._words("weight")

    @property
    def matrix(self) -> Matrix:
        """The weight as kernels see it."""
        return Matrix.of(self._parts("weight"), self._schemes["weight"], self._columns["weight"])

    @property
    def own_bias(self) -> torch.Tensor | None:
        """The bias, or a rank's share of it."""
        return None if self._parameters["bias"] is None else self._local("bias")

    @property
    def packed(self) -> PackedTensor:
        """The weight as a `PackedTensor` on the parameters' storage or restored words; a rank's share."""
        return self._packed("weight", 0, self.matrix)

    def logical(self) -> dict[str, tuple[Scheme, tuple[int, int], int]]:
        return {"weight": (self.scheme, (self.out_features, self.in_features), 1)}

    def dense_weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {"weight": self.packed.dequantize(dtype)}

    def build_kernel_layouts(self, dtype: torch.dtype) -> None:
        self.layout(dtype)

    def layout(self, dtype: torch.dtype) -> KernelLayout | None:
        """The kernel layout for activations of `dtype`, built unless it is there; None for none."""
        return self._layout("weight", 0, self.matrix, dtype)

    def _build(self, parameter: str, index: int, matrix: Matrix, dtype: torch.dtype) -> KernelLayout | None:
        layout = super()._build(parameter, index, matrix, dtype)
        self._release(parameter, [matrix], [layout])
        return layout

    def share(self, shared: SharesInput, index: int) -> None:
        """Be number `index` of those that share an input."""
        self._shared = shared, index

    def replace_layout(self, layout: KernelLayout) -> None:
        """Take `layout` for the one that is there, which it is a copy of."""
        key = ("weight", 0, layout.dtype)
        assert key in self._layouts
        replaced, self._layouts[key] = self._layouts[key], layout
        released = self._released.get("weight")
        if released is not None and released.layouts == (replaced,):
            self._released["weight"] = replace(released, layouts=(layout,))

    def drop_kernel_layouts(self) -> None:
        super().drop_kernel_layouts()
        self._tokens.clear()
        if self._shared is not None:
            self._shared[0].drop()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no layouts that could be joined, and words of its own.
        return {**super().__getstate__(), "_shared": None}

    def held(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The parameters of the words and of the bias, as they are."""
        return self._parameters[self._words_key], self._parameters["bias"]

    def token(self) -> str:
        """The token of the scheme that the weight has now."""
        scale = self._parameters[self._scale_key]
        found = None if scale is None else self._tokens.get(scale.dtype)
        if found is None:
            found = self.matrix.scheme.token
            if scale is not None and not torch.compiler.is_compiling():
                self._tokens[scale.dtype] = found
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        check_features(x, self._columns["weight"])
        if self._shared is not None and not torch.is_grad_enabled():
            shared, index = self._shared
            y = shared.product(index, x)
            if y is not None:
                return y
        bias: torch.Tensor | None = local(self._parameters["bias"])
        x, bias = autocast(x), None if bias is None else autocast(bias)
        if not torch.compiler.is_compiling() and is_plain(x):
            y = self._planned(x, bias)
            if y is not None:
                return y
        return self._product("weight", 0, self.matrix, x, bias)

    def _planned(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The product by a plan of the layout, where that is there and valid, and nothing is trained."""
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
