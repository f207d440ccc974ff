"""Packed replacements for the fused experts modules of transformers."""

from collections.abc import Iterator

import torch
from torch import nn

from quantkit.kernels.autograd import is_transformed
from quantkit.kernels.eager import KernelLayout
from quantkit.kernels.linear import autocast
from quantkit.kernels.moe.grouped_gemm import (
    ExpertsLayout,
    build_experts_layout,
    combine_experts,
    experts_linear,
    sort_tokens_by_expert,
)
from quantkit.kernels.problem import Problem
from quantkit.kernels.registry import warn_looped
from quantkit.model.architectures import DOWN, GATE_UP, FusedExperts
from quantkit.packing.names import Container
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime.packed_module import Matrix, PackedModule, PartSpec

#: Key of the layout of all matrices of a parameter together; single matrices have keys from 0 on.
_ALL = -1


class PackedExperts(PackedModule):
    """Fused experts with packed weights: `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I].

    Gate and up are separate packed matrices [I, H], stacked along N, as merging per-expert tensors leaves
    them. So a word of zero-points (packed along N) never holds rows of both. Entries of the state dict,
    container compressed-tensors: `gate_up_proj_packed` [E, 2I, W] int32, `_scale` [E, 2I, G], `_zero_point`
    [E, 2Z, G], `_shape` [E, 4]; `down_proj` has the same.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        act_fn: nn.Module,
        gate_up_scheme: Scheme,
        down_scheme: Scheme,
        container: Container,
    ) -> None:
        _, hidden, intermediate = sizes
        super().__init__(container, {GATE_UP: (gate_up_scheme, hidden), DOWN: (down_scheme, intermediate)})
        self.num_experts, self.hidden_dim, self.intermediate_dim = sizes
        self.act_fn = act_fn
        self.gate_up_scheme = gate_up_scheme
        self.down_scheme = down_scheme
        self._register_parts(self.part_specs())

    @classmethod
    def replacing(
        cls, experts: FusedExperts, gate_up_scheme: Scheme, down_scheme: Scheme, container: Container
    ) -> "PackedExperts":
        """Create an uninitialised replacement for `experts`; `why_not_packable` must return None."""
        count, hidden, intermediate = experts.down_proj.shape
        return cls(
            (count, hidden, intermediate),
            experts.act_fn,
            gate_up_scheme.for_columns(hidden),
            down_scheme.for_columns(intermediate),
            container,
        )

    def part_specs(self) -> dict[str, PartSpec]:
        return {
            name: spec
            for parameter, (scheme, matrix, halves) in self.logical().items()
            for name, spec in self._specs_of(parameter, scheme, matrix, halves).items()
        }

    def logical(self) -> dict[str, tuple[Scheme, tuple[int, int], int]]:
        gate_up, down = (self.intermediate_dim, self.hidden_dim), (self.hidden_dim, self.intermediate_dim)
        return {GATE_UP: (self.gate_up_scheme, gate_up, 2), DOWN: (self.down_scheme, down, 1)}

    def _specs_of(
        self, parameter: str, scheme: Scheme, matrix: tuple[int, int], halves: int
    ) -> dict[str, PartSpec]:
        count, stored = self.num_experts, self._stored[parameter]
        specs = {}
        for part, (dtype, size) in stored.shapes(scheme.storage_shapes(matrix)).items():
            fused = (count, halves * size[0], *size[1:])
            specs[stored.part_name(parameter, part)] = PartSpec(
                part,
                stored.part_name("", part),
                dtype,
                fused,
                {halves * count: size, 1: fused},
                part in scheme.cast_parts,
                {halves * count: matrix},
            )
        return specs

    def packed(self, parameter: str, expert: int) -> tuple[PackedTensor, ...]:
        """Return the matrices of one expert: (gate, up) for `gate_up_proj`, (down,) for `down_proj`."""
        return tuple(
            self._packed(parameter, index, matrix) for index, matrix in self._indexed(parameter, expert)
        )

    def dense_weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {
            parameter: torch.stack(
                [self._dense(parameter, expert, dtype) for expert in range(self.num_experts)]
            )
            for parameter in (GATE_UP, DOWN)
        }

    def _dense(self, parameter: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([packed.dequantize(dtype) for packed in self.packed(parameter, expert)])

    def build_kernel_layouts(self, dtype: torch.dtype) -> None:
        for parameter in (GATE_UP, DOWN):
            matrices = list(self._all_matrices(parameter))
            layouts = [self._layout(parameter, i, matrix, dtype) for i, matrix in enumerate(matrices)]
            if matrices:
                self._free(parameter, matrices, layouts)

    def is_grouped(self, dtype: torch.dtype) -> bool:
        """Return True if activations of `dtype` use grouped GEMMs, one launch for all experts."""
        return all(self._grouped_layout(parameter, dtype) is not None for parameter in (GATE_UP, DOWN))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the top-k experts, [T, H] in the dtype of `hidden_states` [T, H].

        `top_k_index` [T, k] integer and `top_k_weights` [T, k] come from the router. An index >= the number
        of experts means no expert, as in transformers.
        """
        x = autocast(hidden_states)
        gate_up = self._grouped_layout(GATE_UP, x.dtype)
        down = self._grouped_layout(DOWN, x.dtype)
        if gate_up is None or down is None or self._is_trained(hidden_states, top_k_weights):
            return self._one_by_one(hidden_states, top_k_index, top_k_weights)
        pairs = sort_tokens_by_expert(top_k_index, gate_up, down)
        gate, up = experts_linear(x, pairs, gate_up).chunk(2, -1)
        y = experts_linear(autocast(self.act_fn(gate) * up), pairs, down, chained=True)
        return combine_experts(y, top_k_index, top_k_weights, gate_up.experts).to(hidden_states.dtype)

    def _is_trained(self, x: torch.Tensor, weights: torch.Tensor) -> bool:
        """Return True, and warn, if x [T, H] or `weights` [T, k] need gradients.

        Only the loop over experts supports them."""
        trained = is_transformed(x) or (
            torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
        )
        if trained and not torch.compiler.is_compiling():
            shape = (self.intermediate_dim, self.hidden_dim)
            problem = Problem.on(x.device, x.shape[0], *shape, self.gate_up_scheme, x.dtype)
            warn_looped(
                problem, self.num_experts, "gradients are asked for; use torch.no_grad() if not needed"
            )
        return trained

    def _one_by_one(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
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
            gate, up = self._project(GATE_UP, expert, hidden_states[tokens])
            (down,) = self._project(DOWN, expert, self.act_fn(gate) * up)
            out.index_add_(0, tokens, (down * weights).to(out.dtype))
        return out

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_dim={self.hidden_dim}, "
            f"intermediate_dim={self.intermediate_dim}, gate_up={self.gate_up_scheme}, "
            f"down={self.down_scheme}"
        )

    def _grouped_layout(self, parameter: str, dtype: torch.dtype) -> ExpertsLayout | None:
        """Return the layout of all matrices of `parameter` for grouped GEMMs; None to loop over experts."""
        return self._cached(parameter, _ALL, dtype, lambda: self._build_grouped(parameter, dtype))

    def _build_grouped(self, parameter: str, dtype: torch.dtype) -> ExpertsLayout | None:
        weights = [self._packed(parameter, i, m) for i, m in enumerate(self._all_matrices(parameter))]
        halves = 2 if parameter == GATE_UP else 1
        return build_experts_layout(weights, len(weights) // halves, halves, dtype)

    def _layout(self, parameter: str, index: int, matrix: Matrix, dtype: torch.dtype) -> KernelLayout | None:
        grouped = self._grouped_layout(parameter, dtype)
        return super()._layout(parameter, index, matrix, dtype) if grouped is None else grouped.of(index)

    def _all_matrices(self, parameter: str) -> Iterator[Matrix]:
        # A tensor-parallel rank may hold only some of the experts.
        for expert in range(self._words(parameter).shape[0]):
            yield from self._matrices(parameter, expert)

    def _indexed(self, parameter: str, expert: int) -> Iterator[tuple[int, Matrix]]:
        """Enumerate the matrices of `expert` by their index among the matrices of all experts."""
        matrices = list(self._matrices(parameter, expert))
        return enumerate(matrices, start=len(matrices) * expert)

    def _matrices(self, parameter: str, expert: int) -> Iterator[Matrix]:
        scheme, columns, halves = (
            self._schemes[parameter],
            self._columns[parameter],
            1 + (parameter == GATE_UP),
        )
        # Parts without rows, such as column scales, are stacked per half as well.
        for parts in zip(*[part[expert].chunk(halves) for part in self._parts(parameter)], strict=True):
            yield Matrix.of(parts, scheme, columns)

    def _project(self, parameter: str, expert: int, x: torch.Tensor) -> list[torch.Tensor]:
        x = autocast(x)
        return [
            self._product(parameter, index, matrix, x) for index, matrix in self._indexed(parameter, expert)
        ]
