"""Packed weights for fused experts: the experts of a mixture-of-experts layer, in transformers one module."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quantkit.kernels.autograd import is_transformed
from quantkit.kernels.eager import KernelLayout
from quantkit.kernels.linear import autocast
from quantkit.kernels.lora.lora_linear import Lora
from quantkit.kernels.moe.expert_activation import activate_experts
from quantkit.kernels.moe.experts_lora import ExpertsLora, lora_of_pairs
from quantkit.kernels.moe.grouped_gemm import (
    ExpertsLayout,
    build_experts_layout,
    combine_experts,
    experts_linear,
    sort_tokens_by_expert,
)
from quantkit.kernels.problem import Problem
from quantkit.kernels.registry import warn_looped
from quantkit.model.experts import ACTIVATIONS, DOWN, MATRICES, Activation, ExpertsSpec, spec_of
from quantkit.packing.names import Container
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime.packed_module import Matrix, PackedModule, PartSpec

#: Name of each activation in `activate_experts`, by its name in `FUNCTIONS` or its module class.
_KINDS: dict[Any, str] = {"silu": "silu", "gelu_tanh": "gelu", nn.SiLU: "silu"}
#: Index, in keys of layouts, for all matrices of a parameter together; single matrices count from 0.
_ALL = -1

#: LoRA of each parameter that has some, by its name in the dense module.
Loras = Mapping[str, Sequence[ExpertsLora]]


class PackedExperts(PackedModule):
    """E experts with packed weights: `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I].

    H is the hidden size, I the intermediate size. Experts without gate have `up_proj` [E, I, H]. `spec`
    describes what the dense module computes. Gate and up are packed separately, then stacked along N:
    zero-points are packed along N, and no word should have zero-points of both.

    State dict in the container compressed-tensors: `gate_up_proj_packed` int32 [E, 2I, words per row],
    `gate_up_proj_scale` [E, 2I, groups], `gate_up_proj_zero_point` [E, 2Z, groups] and `gate_up_proj_shape`
    [E, 4]. Z is I / zero-points per word. `down_proj` has the same for one matrix. Biases are dense:
    `gate_up_proj_bias` [E, 2I], `down_proj_bias` [E, H].
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        spec: ExpertsSpec,
        act_fn: nn.Module | None,
        first_scheme: Scheme,
        down_scheme: Scheme,
        container: Container,
        bias_dtype: torch.dtype | None = None,
    ) -> None:
        _, hidden, intermediate = sizes
        super().__init__(container, {spec.first: (first_scheme, hidden), DOWN: (down_scheme, intermediate)})
        self.num_experts, self.hidden_dim, self.intermediate_dim = sizes
        self.spec = spec
        #: What the dense module says of itself, which PEFT reads. Some transposed ones do not say so.
        self.is_transposed = False
        self.act_fn = act_fn
        self.first_scheme = first_scheme
        self.down_scheme = down_scheme
        self._register_parts(self.part_specs())
        if bias_dtype is not None:
            for parameter, (_, (rows, _), count) in self.logical().items():
                bias = torch.empty(self.num_experts, count * rows, dtype=bias_dtype)
                self.register_parameter(f"{parameter}_bias", nn.Parameter(bias, requires_grad=False))

    @classmethod
    def replacing(
        cls, experts: Any, first_scheme: Scheme, down_scheme: Scheme, container: Container
    ) -> "PackedExperts":
        """Create an uninitialized replacement of dense `experts`, for which `spec_of` returns a spec.

        `first_scheme` is for the first product, gate and up, `down_scheme` for the second. Parts have the
        names of `container` in the state dict.
        """
        spec = spec_of(experts)
        count, hidden, intermediate = spec.sizes(experts.down_proj.shape)
        packed = cls(
            (count, hidden, intermediate),
            spec,
            getattr(experts, "act_fn", None),
            first_scheme.for_columns(hidden),
            down_scheme.for_columns(intermediate),
            container,
            experts.down_proj_bias.dtype if spec.biased else None,
        )
        packed.is_transposed = bool(getattr(experts, "is_transposed", False))
        return packed

    def part_specs(self) -> dict[str, PartSpec]:
        return {
            name: spec
            for parameter, (scheme, matrix, halves) in self.logical().items()
            for name, spec in self._specs_of(parameter, scheme, matrix, halves).items()
        }

    def logical(self) -> dict[str, tuple[Scheme, tuple[int, int], int]]:
        first, down = (self.intermediate_dim, self.hidden_dim), (self.hidden_dim, self.intermediate_dim)
        count = len(MATRICES[self.spec.first])
        return {self.spec.first: (self.first_scheme, first, count), DOWN: (self.down_scheme, down, 1)}

    def _specs_of(
        self, parameter: str, scheme: Scheme, matrix: tuple[int, int], halves: int
    ) -> dict[str, PartSpec]:
        count, stored = self.num_experts, self._stored[parameter]
        specs = {}
        for part, (dtype, size) in stored.shapes(scheme.storage_shapes(matrix)).items():
            fused = (count, halves * size[0], *size[1:])
            specs[stored.part_name(parameter, part)] = PartSpec(
                part,
                stored,
                dtype,
                fused,
                {halves * count: size, 1: fused},
                part in scheme.cast_parts,
                {halves * count: matrix},
            )
        return specs

    def packed(self, parameter: str, expert: int) -> tuple[PackedTensor, ...]:
        """Return the matrices of `expert` in `parameter`, which has its name in the dense module.

        They are (gate, up) for "gate_up_proj", (up,) for "up_proj" and (down,) for "down_proj".
        """
        return tuple(
            self._packed(parameter, index, matrix) for index, matrix in self._indexed(parameter, expert)
        )

    def dense_weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {
            parameter: torch.stack(
                [self._dense(parameter, expert, dtype) for expert in range(self.num_experts)]
            )
            for parameter in self.spec.parameters
        }

    def _dense(self, parameter: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the slice of one expert in `parameter` of the dense module, dequantized to `dtype`."""
        matrices = [packed.dequantize(dtype) for packed in self.packed(parameter, expert)]
        return self.spec.joined(matrices)

    def build_kernel_layouts(self, dtype: torch.dtype) -> None:
        for parameter in self.spec.parameters:
            matrices = list(self._all_matrices(parameter))
            layouts = [self._layout(parameter, i, matrix, dtype) for i, matrix in enumerate(matrices)]
            if matrices:
                self._free(parameter, matrices, layouts)

    def is_grouped(self, dtype: torch.dtype) -> bool:
        """Return True if activations of `dtype` use grouped GEMMs, one launch for all experts."""
        return all(self._grouped_layout(parameter, dtype) is not None for parameter in self.spec.parameters)

    def forward(self, *call: torch.Tensor, loras: Loras | None = None) -> torch.Tensor:
        """Return the weighted sum of each token's top-k experts, [T, H] in the dtype of `hidden_states`.

        Arguments are `hidden_states` [T, H], `top_k_index` [T, k] integer and `top_k_weights` [T, k]. Index E
        or more means no expert, as in transformers. If `ExpertsSpec.routed` is False, the only argument and
        the result have T rows for each expert in turn, [E * T, H]. `loras` are added to the products.
        """
        loras = loras or {}
        hidden_states, top_k_index, top_k_weights = self.spec.as_routed(call, self.num_experts)
        x = autocast(hidden_states)
        first = self._grouped_layout(self.spec.first, x.dtype)
        down = self._grouped_layout(DOWN, x.dtype)
        factors = [one for of in loras.values() for lora in of for one in (lora.a, lora.b)]
        if first is None or down is None or self._is_trained(hidden_states, top_k_weights, *factors):
            return self._one_by_one(hidden_states, top_k_index, top_k_weights, loras)
        pairs = sort_tokens_by_expert(top_k_index, first, down)
        y = experts_linear(self.rounded(self.spec.first, x), pairs, first)
        if loras.get(self.spec.first):
            y = self._with_loras(loras[self.spec.first], y, x, top_k_index)
        between = autocast(self._activated(y, top_k_index))
        y = experts_linear(self.rounded(DOWN, between), pairs, down, chained=True)
        y = lora_of_pairs(loras.get(DOWN, ()), y, between, top_k_index)
        bias = self._bias(DOWN) if self.spec.biased else None
        return combine_experts(y, top_k_index, top_k_weights, first.experts, bias).to(hidden_states.dtype)

    def _with_loras(
        self, loras: Sequence[ExpertsLora], y: torch.Tensor, x: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """Return `y` [P, 2I], products of gate and up of x [T, H], plus those of `loras`."""
        if self.spec.interleaved:
            # Gate and up alternate in the rows of B, and are side by side in y.
            rows = [torch.cat(list(self.spec.split(lora.b, self.spec.first, 0))) for lora in loras]
            loras = [lora._replace(b=b) for lora, b in zip(loras, rows, strict=True)]
        return lora_of_pairs(loras, y, x, index)

    def _activated(self, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the activation [P, I] of `y`, products of gate and up [P, 2I], or of up alone [P, I].

        P is T * k. Row p of y is of expert `index.flatten()[p]`, for `index` [T, k] integer.
        """
        spec, of = self.spec, self.spec.activation
        bias = self._bias(spec.first) if spec.biased else None
        kind = self._kind()
        if kind is not None:
            limit = None if math.isinf(of.limit) else of.limit
            return activate_experts(y, index, bias, kind, limit, of.alpha, spec.interleaved)
        products = y.chunk(len(MATRICES[spec.first]), -1)
        if bias is not None:
            # Rows without an expert are undefined, with any bias.
            rows = bias[index.flatten().clamp(0, self.num_experts - 1)].to(y.dtype)
            biases = spec.split(rows, spec.first)
            products = tuple(product + one for product, one in zip(products, biases, strict=True))
        return of(self.act_fn, *products)

    def _kind(self) -> str | None:
        """Return the name of the activation in `activate_experts`; None if torch operations compute it."""
        of, kernel = self.spec.activation, ACTIVATIONS[self.spec.activation.formula].kernel
        if kernel != "act":
            return kernel
        if of == Activation(act=of.act) and not self.spec.biased:
            # Passes over a traced step fuse this activation into the product.
            return None
        return _KINDS.get(of.act or "") or _KINDS.get(type(self.act_fn))

    def _bias(self, parameter: str) -> torch.Tensor:
        bias: torch.Tensor = self._local(f"{parameter}_bias")
        return bias

    def _is_trained(self, x: torch.Tensor, *others: torch.Tensor) -> bool:
        """Return True, and warn, if x [T, H] or `others`, such as weights [T, k], need gradients.

        Only the loop over experts supports gradients.
        """
        trained = is_transformed(x) or (
            torch.is_grad_enabled() and any(one.requires_grad for one in (x, *others))
        )
        if trained and not torch.compiler.is_compiling():
            shape = (self.intermediate_dim, self.hidden_dim)
            problem = Problem.on(x.device, x.shape[0], *shape, self.first_scheme, x.dtype)
            warn_looped(
                problem, self.num_experts, "gradients are asked for; use torch.no_grad() if not needed"
            )
        return trained

    def _one_by_one(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        loras: Loras | None = None,
    ) -> torch.Tensor:
        of_expert = {name: [lora.by_expert() for lora in of] for name, of in (loras or {}).items()}
        first, last = ([*zip(*of_expert.get(name, ()), strict=True)] for name in (self.spec.first, DOWN))
        out = torch.zeros_like(hidden_states)
        top_k = top_k_index.shape[1]
        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)
        # The only synchronisation with the device in this layer.
        counts = torch.bincount(chosen, minlength=self.num_experts)[: self.num_experts].tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            pairs = order[start : start + count]
            start += count
            tokens = pairs // top_k
            weights = top_k_weights[tokens, pairs % top_k, None]
            products = self._project(self.spec.first, expert, hidden_states[tokens], first)
            (down,) = self._project(DOWN, expert, self.spec.activation(self.act_fn, *products), last)
            out.index_add_(0, tokens, (down * weights).to(out.dtype))
        return out

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_dim={self.hidden_dim}, "
            f"intermediate_dim={self.intermediate_dim}, {self.spec.first}={self.first_scheme}, "
            f"down_proj={self.down_scheme}, {self.spec.activation.formula}"
        )

    def _grouped_layout(self, parameter: str, dtype: torch.dtype) -> ExpertsLayout | None:
        """Return the layout of all matrices of `parameter` for grouped GEMMs; None to loop over experts."""
        return self._cached(parameter, _ALL, dtype, lambda: self._build_grouped(parameter, dtype))

    def _build_grouped(self, parameter: str, dtype: torch.dtype) -> ExpertsLayout | None:
        weights = [self._packed(parameter, i, m) for i, m in enumerate(self._all_matrices(parameter))]
        halves = len(MATRICES[parameter])
        return build_experts_layout(weights, len(weights) // halves, halves, dtype)

    def _layout(self, parameter: str, index: int, matrix: Matrix, dtype: torch.dtype) -> KernelLayout | None:
        grouped = self._grouped_layout(parameter, dtype)
        return super()._layout(parameter, index, matrix, dtype) if grouped is None else grouped.of(index)

    def _all_matrices(self, parameter: str) -> Iterator[Matrix]:
        # A tensor-parallel rank may hold only some of the experts.
        for expert in range(self._words(parameter).shape[0]):
            yield from self._matrices(parameter, expert)

    def _indexed(self, parameter: str, expert: int) -> Iterator[tuple[int, Matrix]]:
        """Yield (index, matrix) for each matrix of `expert` in `parameter`.

        The index counts the matrices of all experts: 2 for each in "gate_up_proj", else 1.
        """
        matrices = list(self._matrices(parameter, expert))
        return enumerate(matrices, start=len(matrices) * expert)

    def _matrices(self, parameter: str, expert: int) -> Iterator[Matrix]:
        scheme, columns = self._schemes[parameter], self._columns[parameter]
        halves = len(MATRICES[parameter])
        # Parts without rows, such as column scales, are stacked per half as well.
        for parts in zip(*[part[expert].chunk(halves) for part in self._parts(parameter)], strict=True):
            yield Matrix.of(parts, scheme, columns)

    def _project(
        self, parameter: str, expert: int, x: torch.Tensor, loras: Sequence[Sequence[Lora]]
    ) -> list[torch.Tensor]:
        """Return x W^T + bias [T, N] for x [T, K] and each matrix of `expert` in `parameter`.

        The outputs of `loras[expert]` are added; no LoRA at all is an empty list.
        """
        operand = self.operand(parameter, autocast(x))
        biases: Sequence[torch.Tensor | None] = [None] * len(MATRICES[parameter])
        if self.spec.biased:
            biases = self.spec.split(self._bias(parameter)[expert].to(operand.dtype), parameter)
        products: list[torch.Tensor] = [
            self._product(parameter, index, matrix, operand, None if bias is None else bias.contiguous())
            for (index, matrix), bias in zip(self._indexed(parameter, expert), biases, strict=True)
        ]
        for lora in loras[expert] if loras else ():
            added = self.spec.split(lora.output(x), parameter)
            products = [(y + one).to(y.dtype) for y, one in zip(products, added, strict=True)]
        return products
