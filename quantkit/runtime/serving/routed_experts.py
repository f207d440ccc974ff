"""Packed experts as an engine loads them: a matrix of an expert at a time, cut for tensor parallelism."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from quantkit.checkpoint.compressed_tensors import stored_format
from quantkit.errors import CheckpointError, UsageError
from quantkit.model.experts import DOWN, GATE_UP, Activation, ExpertsSpec
from quantkit.packing.names import Container
from quantkit.packing.schemes import Scheme
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.serving.shares import Share

#: Parameter of `PackedExperts` and index of a matrix in it, by the engines' names of gate, up and down.
MATRICES: Mapping[str, tuple[str, int]] = {"w1": (GATE_UP, 0), "w3": (GATE_UP, 1), "w2": (DOWN, 0)}
#: Prefix of the names of the engine's parameters that load each matrix.
PREFIXES: Mapping[str, str] = {"w1": "w13_", "w3": "w13_", "w2": "w2_"}


class LoadedExperts(nn.Module):
    """Experts of one layer: `experts` computes; `load` fills it from tensors of a checkpoint.

    `matrices` are (parameter, scheme) of gate, up and down. `sizes` are (experts, H, I) of this rank, with
    hidden size H and intermediate size I. `rank` is (rank, number of ranks) among the ranks that divide I.
    `activation` is one of `ACTIVATIONS`, and `container` the file format of the checkpoint. Raises
    `UsageError` if a matrix is dense, or gate and up have different schemes.
    """

    #: Activations for which engines and `Activation.act` have the same name.
    ACTIVATIONS: ClassVar[frozenset[str]] = frozenset({"silu", "gelu", "gelu_tanh"})

    def __init__(
        self,
        matrices: Sequence[tuple[str, Scheme | None]],
        sizes: tuple[int, int, int],
        activation: str,
        rank: tuple[int, int],
        container: Container,
    ) -> None:
        super().__init__()
        count, hidden, between = sizes
        (name, first), (_, up), (down_name, down) = matrices
        if first is None or down is None or up != first:
            raise UsageError(
                f"{name!r} and {down_name!r}: the plug-in runs experts whose gate, up and down are all "
                "packed, gate and up in one scheme. Quantize the model again."
            )
        self._container: Container = container
        rows = (rank[0] * between, (rank[0] + 1) * between)
        whole = rank[1] * between
        of_first = Share(name, first.for_columns(hidden), (whole, hidden), (rows,), (0, hidden))
        of_down = Share(down_name, down.for_columns(whole), (hidden, whole), ((0, hidden),), rows)
        self._shares = {GATE_UP: of_first, DOWN: of_down}
        spec = ExpertsSpec(activation=Activation(act=activation))
        local_first, local_down = of_first.local_scheme, of_down.local_scheme
        assert local_first is not None and local_down is not None
        self.experts = PackedExperts(sizes, spec, None, local_first, local_down, container)
        self._missing = {
            (matrix, expert, entry)
            for matrix in MATRICES
            for expert in range(count)
            for entry, (part, _) in self._entries(matrix).items()
            if part != "shape"
        }

    def entries(self) -> dict[str, torch.dtype]:
        """Return the dtype of each stored tensor, by the name of the engine's parameter that loads it."""
        return {
            PREFIXES[matrix] + entry: dtype
            for matrix in MATRICES
            for entry, (_, dtype) in self._entries(matrix).items()
        }

    def _entries(self, matrix: str) -> dict[str, tuple[str, torch.dtype]]:
        """Return (part, dtype) of each stored tensor of `matrix`, by its name, such as "weight_scale"."""
        share = self._shares[MATRICES[matrix][0]]
        assert share.scheme is not None
        stored = stored_format(share.scheme, share.shape[1], self._container)
        shapes = stored.shapes(share.scheme.storage_shapes(share.shape))
        return {stored.part_name("weight", part): (part, dtype) for part, (dtype, _) in shapes.items()}

    def load(self, matrix: str, expert: int, entry: str, loaded: torch.Tensor) -> None:
        """Copy this rank's shard of `loaded`, a whole tensor of the checkpoint, to the packed experts.

        `loaded` is the tensor `entry` of `matrix` (w1, w2 or w3) of the expert with index `expert` on this
        rank. A stored shape is only checked. Raises `CheckpointError` for another dtype or shape.
        """
        parameter, half = MATRICES[matrix]
        share = self._shares[parameter]
        part = self._entries(matrix)[entry][0]
        self._missing.discard((matrix, expert, entry))
        if part == "shape":
            share.check_shape(loaded)
            return
        assert share.scheme is not None
        stored = stored_format(share.scheme, share.shape[1], self._container)
        dtype = share.scheme.storage_shapes(share.shape)[part][0]
        taken = share.read(part, loaded, self._container)
        halves = sum(name == parameter for name, _ in MATRICES.values())
        of_experts = getattr(self.experts, stored.part_name(parameter, part)).data
        stored.from_file(part, of_experts[expert].chunk(halves)[half], dtype).copy_(taken)

    def finish(self, dtype: torch.dtype) -> None:
        """Repack words for kernels with activations of `dtype`.

        Raises `CheckpointError` if tensors were not loaded.
        """
        if self._missing:
            matrix, expert, entry = min(self._missing)
            raise CheckpointError(
                f"{self._shares[MATRICES[matrix][0]].name}: {entry} of {matrix} of expert {expert} and "
                f"{len(self._missing) - 1} more are not in the checkpoint. Verify it: "
                "quantkit verify DIRECTORY."
            )
        self.experts.build_kernel_layouts(dtype)
