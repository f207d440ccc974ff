"""Embeddings with packed weights, and linears tied to them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quantkit.errors import CheckpointError
from quantkit.kernels.problem import ACTIVATION_DTYPES
from quantkit.model.linears import Lookup
from quantkit.packing.names import Container
from quantkit.packing.schemes import Scheme
from quantkit.runtime.packed_linear import PackedLinear, PackedMatrix


class PackedEmbedding(PackedMatrix):
    """Embedding with a packed table [V, K]: looks up ids [...] and dequantizes their rows to [..., K].

    Results have `dtype`, which changes when the model is cast. There is no kernel layout: torch selects rows
    from the stored words.
    """

    def __init__(
        self,
        columns: int,
        rows: int,
        scheme: Scheme,
        container: Container,
        lookup: Lookup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(columns, rows, scheme, container)
        self.num_embeddings, self.embedding_dim = rows, columns
        # Computed here, because forward may be traced.
        self._factors = {one: lookup.factor_in(one) for one in ACTIVATION_DTYPES}
        self._factor = lookup.factor
        self.register_buffer("_of_dtype", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the rows that forward returns."""
        return self.get_buffer("_of_dtype").dtype

    def build_kernel_layouts(self, dtype: torch.dtype) -> None:
        """Do nothing: an embedding has no kernel layout, rows are selected from the stored words."""

    @property
    def lacks_layouts(self) -> bool:
        return False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.packed.dequantize_rows(ids.reshape(-1), self.dtype).view(*ids.shape, self.columns)
        factor = self._factors.get(self.dtype, self._factor)
        return rows if factor == 1 else rows * factor

    def restore_buffers(self, dense: nn.Module) -> None:
        """Create the buffers of `dense`, the dense form of this embedding, on the device of the words.

        A buffer has the factor by which forward multiplies rows.
        """
        for name, buffer in dense.named_buffers(recurse=False):
            dense._buffers[name] = torch.full_like(buffer, self._factor, device=self.words.device)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, scheme={self.scheme}"


def first_table(model: nn.Module) -> PackedEmbedding | None:
    """Return the packed embedding that comes before all other floating-point parameters of `model`, or None.

    transformers takes the dtype of the first such parameter for the model's dtype. In a packed embedding,
    that is the dtype of the scales, not of the activations.
    """
    for module in model.modules():
        if isinstance(module, PackedEmbedding):
            return module
        if any(one is not None and one.is_floating_point() for one in module._parameters.values()):
            return None
    return None


def activation_dtype(model: Any) -> torch.dtype:
    """Return the dtype of the activations of `model`."""
    table = first_table(model)
    dtype: torch.dtype = model.dtype if table is None else table.dtype
    return dtype


def tie_to_table(model: Any, head: str, table: str) -> None:
    """Let transformers tie each part of the packed linear `head` to the same part of the embedding `table`.

    Both are names of modules. transformers then loads, moves and saves one set of parameters, as for a dense
    tied weight. Raises `CheckpointError` if `head` is not a packed linear.
    """
    linear: Any = model.get_submodule(head)
    if not isinstance(linear, PackedLinear):
        raise CheckpointError(
            f"{table!r} is packed, and config.json ties the weight of {head!r} to it, which is no linear. "
            "Quantize the model again."
        )
    linear.table = table
    for name, buffer in list(linear.named_buffers(recurse=False)):
        # transformers ties parameters only, and the logical shape is stored with the table.
        linear.register_buffer(name, buffer, persistent=False)
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    entries = linear.part_specs().keys() & linear._parameters.keys()
    parts = {f"{head}.{entry}": f"{table}.{entry}" for entry in entries}
    model.all_tied_weights_keys = {**ties, **parts}


def tied_to(model: nn.Module, table: str) -> tuple[str, ...]:
    """Return the names of modules whose weight `model` ties to the weight of its embedding `table`."""
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    weight = f"{table}.weight"
    pairs = [*ties.items(), *((source, target) for target, source in ties.items())]
    return tuple(dict.fromkeys(a.removesuffix(".weight") for a, b in pairs if b == weight))


def tie_dense(model: Any) -> None:
    """Tie weights as the class of `model` does, after dense modules replaced packed ones.

    Overwrites `model.all_tied_weights_keys`.
    """
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    model.tie_weights()
