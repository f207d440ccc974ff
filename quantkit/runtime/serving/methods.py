"""Quantization methods of serving engines: create, load and run packed layers.

The plug-in of an engine combines these classes with the engine's base classes.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quantkit.errors import UsageError
from quantkit.packing.names import Container
from quantkit.packing.schemes import Scheme
from quantkit.runtime.serving.fused_linear import FusedLinear
from quantkit.runtime.serving.routed_experts import LoadedExperts
from quantkit.runtime.serving.shares import Range, Share
from quantkit.runtime.serving.stored_schemes import Schemes, StoredSchemes

#: Index of a matrix in a fused linear, by the letter that engines use.
SHARDS = {"q": 0, "k": 1, "v": 2}


class PackedLinearMethod:
    """Mixin for `LinearMethodBase` of vLLM or SGLang that creates, loads and runs packed linears.

    The engine calls `create_weights`, then `process_weights_after_loading`, then `apply` in each forward. A
    layer of the engine may have several packed matrices, such as q, k and v.
    """

    def __init__(self, linears: Schemes, schemes: StoredSchemes) -> None:
        super().__init__()
        self.linears, self.schemes = linears, schemes
        self.dtype = torch.float32

    def rank_of(self, layer: Any) -> int:
        """Return the rank of this process in the tensor-parallel group of the layer."""
        rank: int = layer.tp_rank
        return rank

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Create the packed module for the rows and columns of this rank; the engine calls this.

        `input_size_per_partition` and `output_partition_sizes` are K and each N of this rank, `input_size`
        and `output_size` those of the whole layer. `params_dtype` is the dtype of activations. Raises
        `UsageError` if the checkpoint has another number of matrices for the layer.
        """
        self.dtype, rank = params_dtype, self.rank_of(layer)
        ranks = output_size // sum(output_partition_sizes)
        first = rank * input_size_per_partition if input_size_per_partition < input_size else 0
        columns = (first, first + input_size_per_partition)
        rows = [
            _rows(size, ranks, rank, getattr(layer, "num_kv_head_replicas", 1) if number else 1)
            for number, size in enumerate(output_partition_sizes)
        ]
        if len(self.linears) == 1:
            rows = [_as_one_matrix(rows)]
        elif len(self.linears) != len(rows):
            raise UsageError(
                f"{self.linears[0][0]!r}: the engine's {type(layer).__name__} is made of {len(rows)} "
                f"matrices, and the checkpoint has {len(self.linears)} for it. Load the model with "
                "quantkit.load."
            )
        shares = [
            Share(name, scheme and scheme.for_columns(input_size), (whole, input_size), cuts, columns)
            for (name, scheme), (whole, cuts) in zip(self.linears, rows, strict=True)
        ]
        _install(layer, FusedLinear(shares, self.schemes.container, params_dtype))

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed.finish(self.dtype)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = layer.packed(x, bias)
        return y


class PackedTableMethod:
    """Quantization method of an embedding or a head.

    is_head   True if the layer computes logits
    is_tied   True if embedding and head share the packed matrix
    """

    def __init__(
        self, name: str, scheme: Scheme, container: Container, is_head: bool, is_tied: bool = False
    ) -> None:
        super().__init__()
        self.name, self.scheme, self.container = name, scheme, container
        self.is_head, self.is_tied = is_head, is_tied
        self.dtype = torch.float32

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Create the packed module for this rank's rows of the vocabulary; the engine calls this.

        `input_size` is K, and `params_dtype` the dtype of activations. Raises `UsageError` for rows added to
        the vocabulary, and for a rank without rows.
        """
        self.dtype = params_dtype
        cut = (layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index)
        if layer.num_added_embeddings or cut[0] == cut[1]:
            what = (
                "rows that are added to the vocabulary"
                if layer.num_added_embeddings
                else "a rank without rows"
            )
            raise UsageError(
                f"{self.name!r} is packed, which has no {what}. Use fewer ranks and no such adapters, or "
                "quantize the model with a dense embedding and head."
            )
        shape = (layer.org_vocab_size, input_size)
        share = Share(self.name, self.scheme.for_columns(input_size), shape, (cut,), (0, input_size))
        _install(layer, FusedLinear([share], self.container, params_dtype))

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.is_tied:
            # The embedding looks its rows up in the words, so they stay beside the layout.
            layer.packed.blocks[0].table = self.name
        layer.packed.finish(self.dtype, layouts=self.is_head)

    def embedding(self, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        """Return the embedding rows of tokens `ids` int64 [...], dequantized to `self.dtype`: [..., K]."""
        matrix = layer.packed.blocks[0].packed
        rows: torch.Tensor = matrix.dequantize_rows(ids.reshape(-1), self.dtype)
        return rows.view(*ids.shape, -1)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [..., V] of x [..., K] plus `bias` [V]; logits of vocabulary padding are 0."""
        rows = layer.packed.blocks[0].out_features
        y: torch.Tensor = layer.packed(x, None if bias is None else bias[:rows])
        return F.pad(y, (0, layer.num_embeddings_per_partition - rows))


def loaded_experts(
    matrices: Schemes,
    sizes: tuple[int, int, int],
    activation: str,
    rank: tuple[int, int],
    container: Container,
    unfit: Mapping[str, bool],
) -> LoadedExperts:
    """Return `LoadedExperts(matrices, sizes, activation, rank, container)` if the layer is supported.

    `unfit` maps each property that the plug-in does not support to True if the layer has it. Raises
    `UsageError` if one is True.
    """
    for what, there in unfit.items():
        if there:
            raise UsageError(
                f"{matrices[0][0]!r}: quantkit's plug-in has no experts with {what}. Load the model with "
                "quantkit.load."
            )
    return LoadedExperts(matrices, sizes, activation, rank, container)


def _rows(size: int, ranks: int, rank: int, replicas: int) -> tuple[int, tuple[Range, ...]]:
    """Return (N of a stored matrix, ((start, stop),): the range of rows that `rank` of `ranks` loads).

    Each rank loads `size` rows. Groups of `replicas` successive ranks load the same rows, if there are fewer
    heads than ranks.
    """
    first = rank // replicas * size if ranks > 1 else 0
    return max(1, ranks // replicas) * size, ((first, first + size),)


def _as_one_matrix(rows: Sequence[tuple[int, tuple[Range, ...]]]) -> tuple[int, tuple[Range, ...]]:
    """Return N and this rank's row ranges (start, stop) of a stored matrix that joins matrices along N.

    `rows` has (N, ranges of rows) of each of these matrices. Ranges returned count rows of the joined matrix;
    if all are adjacent, they become one range.
    """
    above = accumulate((whole for whole, _ in rows), initial=0)
    cuts = [(start + first, stop + first) for first, (_, ((start, stop),)) in zip(above, rows, strict=False)]
    if all(stop == start for (_, stop), (start, _) in pairwise(cuts)):
        cuts = [(cuts[0][0], cuts[-1][1])]
    return sum(whole for whole, _ in rows), tuple(cuts)


def _install(layer: Any, packed: FusedLinear) -> None:
    """Add the module `packed` to `layer`, and an empty parameter for each stored tensor.

    The engine loads a tensor by the `weight_loader` of its parameter, which copies it to `packed`.
    """
    layer.packed = packed
    for name, dtype in packed.entries().items():

        def load(param: nn.Parameter, loaded: torch.Tensor, shard: Any = None, *, entry: str = name) -> None:
            packed.load(SHARDS.get(shard, shard or 0), entry, loaded)

        parameter = add_entry(layer, name, dtype, load)
        if len(packed.shares) == 1 and packed.has_rows(name):
            # vLLM permutes rows of some matrices, such as Falcon's of q, k and v, by this attribute.
            parameter.output_dim = 0


def add_entry(layer: Any, name: str, dtype: torch.dtype, load: Any) -> Any:
    """Add an empty parameter `name` of `dtype` to `layer`; its loader is `load`, for the engine to call."""
    parameter: Any = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
    parameter.weight_loader = load
    layer.register_parameter(name, parameter)
    return parameter
