"""Methods of vLLM's layers: what each creates, loads and computes.

All classes of vLLM that the plug-in needs are imported here, but for the base of its config.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from quantkit.errors import CheckpointError, UsageError
from quantkit.packing.names import Container
from quantkit.packing.schemes import Scheme
from quantkit.runtime.vllm.fused_linear import FusedLinear
from quantkit.runtime.vllm.routed_experts import LoadedExperts
from quantkit.runtime.vllm.shares import Range, Share

__all__ = [
    "LinearBase",
    "ParallelLMHead",
    "QuantkitEmbeddingMethod",
    "QuantkitExpertsMethod",
    "QuantkitLinearMethod",
    "RoutedExperts",
    "UnquantizedLinearMethod",
    "VocabParallelEmbedding",
]

#: Numbers of the matrices that vLLM calls by letters.
SHARDS = {"q": 0, "k": 1, "v": 2}
#: Modules of the checkpoint, and their schemes.
Schemes = Sequence[tuple[str, Scheme | None]]
#: Called before a tensor is loaded, when vLLM's model is built. Raises if the plug-in cannot load it all.
Check = Callable[[], None]


class QuantkitLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Linear of one or several packed matrices."""

    def __init__(self, linears: Schemes, container: Container, check: Check) -> None:
        super().__init__()
        self.linears, self.container, self.check = linears, container, check

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
        """Create the packed module, for the rows and columns of this rank."""
        ranks = output_size // sum(output_partition_sizes)
        first = layer.tp_rank * input_size_per_partition if input_size_per_partition < input_size else 0
        columns = (first, first + input_size_per_partition)
        rows = [
            _rows(size, ranks, layer.tp_rank, getattr(layer, "num_kv_head_replicas", 1) if number else 1)
            for number, size in enumerate(output_partition_sizes)
        ]
        if len(self.linears) == 1:
            rows = [_as_one_matrix(rows)]
        elif len(self.linears) != len(rows):
            raise UsageError(
                f"{self.linears[0][0]!r}: vLLM's {type(layer).__name__} is made of {len(rows)} matrices, and "
                f"the checkpoint has {len(self.linears)} for it. Load the model with quantkit.load."
            )
        shares = [
            Share(name, scheme and scheme.for_columns(input_size), (whole, input_size), cuts, columns)
            for (name, scheme), (whole, cuts) in zip(self.linears, rows, strict=True)
        ]
        _install(layer, FusedLinear(shares, self.container, params_dtype), self.check)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed.finish(layer.params_dtype)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = layer.packed(x, bias)
        return y


class QuantkitEmbeddingMethod(QuantizeMethodBase):  # type: ignore[misc]
    """Packed embedding or head, which may be tied."""

    def __init__(self, name: str, scheme: Scheme, container: Container, check: Check) -> None:
        super().__init__()
        self.name, self.scheme, self.container, self.check = name, scheme, container, check

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
        """Create the packed module, for the rows of the vocabulary that this rank has."""
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
        _install(layer, FusedLinear([share], self.container, params_dtype), self.check)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Let the head use the matrix of the embedding."""
        if not isinstance(embed_tokens.quant_method, QuantkitEmbeddingMethod):
            raise CheckpointError(
                f"{self.name!r} is packed, but config.json ties its weight to the embedding, which is dense. "
                'Set "tie_word_embeddings": false in config.json, or quantize the model again.'
            )
        for entry in layer.packed.entries():
            delattr(layer, entry)
        layer.packed = embed_tokens.packed
        # The embedding looks its rows up in the words, so they stay.
        layer.packed.blocks[0].table = embed_tokens.quant_method.name
        return layer

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed.finish(layer.params_dtype, layouts=isinstance(layer, ParallelLMHead))

    def embedding(self, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows [..., K] of `ids`, int64 [...]."""
        matrix = layer.packed.blocks[0].packed
        rows: torch.Tensor = matrix.dequantize_rows(ids.reshape(-1), layer.params_dtype)
        return rows.view(*ids.shape, -1)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [..., V] of x [..., K]; those of rows that only pad the vocabulary are 0."""
        rows = layer.packed.blocks[0].out_features
        y: torch.Tensor = layer.packed(x, None if bias is None else bias[:rows])
        return F.pad(y, (0, layer.num_embeddings_per_partition - rows))


class QuantkitExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Packed experts behind a router of vLLM."""

    def __init__(self, moe: Any, matrices: Schemes, container: Container, check: Check) -> None:
        super().__init__(moe)
        self.matrices, self.container, self.check = matrices, container, check

    def maybe_roundup_sizes(self, hidden_size: int, between: int, *_: Any, **__: Any) -> tuple[int, int]:
        """Return the sizes as they are: packed matrices are not padded."""
        return hidden_size, between

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Create the packed module, for the experts, or the part of each, that this rank has."""
        unfit = {
            "weights that are applied to the input": layer.apply_router_weight_on_input,
            "biases": self.moe.has_bias,
            "no gate": not self.moe.is_act_and_mul,
            f"the activation {layer.activation.value!r}": layer.activation.value
            not in LoadedExperts.ACTIVATIONS,
        }
        for what, there in unfit.items():
            if there:
                raise UsageError(
                    f"{self.matrices[0][0]!r}: quantkit's plug-in has no experts with {what}. Load the model "
                    "with quantkit.load."
                )
        experts = LoadedExperts(
            self.matrices,
            (num_experts, hidden_size, intermediate_size_per_partition),
            layer.activation.value,
            (self.moe.tp_rank, self.moe.tp_size),
            self.container,
        )
        layer.packed = experts
        for name, dtype in experts.entries().items():

            def load(
                param: nn.Parameter,
                loaded_weight: torch.Tensor,
                weight_name: str,
                shard_id: str,
                expert_id: int,
                return_success: bool = False,
                *,
                entry: str = name,
            ) -> bool | None:
                self.check()
                expert = layer._map_global_expert_id_to_local_expert_id(expert_id)
                if expert >= 0:
                    experts.load(shard_id, expert, entry.partition("_")[2], loaded_weight)
                return expert >= 0 if return_success else None

            _add_entry(layer, name, dtype, load)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None: activations are not quantized."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed.finish(layer.params_dtype)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """Return the weighted sum of the experts `topk_ids` [T, k] of x [T, H]; vLLM adds shared experts."""
        ids = topk_ids.long()
        if layer.expert_map is not None:
            ids = layer.expert_map[ids].long()
            ids = torch.where(ids < 0, layer.packed.experts.num_experts, ids)
        y: torch.Tensor = layer.packed.experts(x, ids, topk_weights)
        return y


def _rows(size: int, ranks: int, rank: int, replicas: int) -> tuple[int, tuple[Range, ...]]:
    """Return N of a stored matrix of which each rank has `size` rows, and those of `rank`.

    `replicas` ranks have the same rows, where there are fewer heads than ranks.
    """
    first = rank // replicas * size if ranks > 1 else 0
    return max(1, ranks // replicas) * size, ((first, first + size),)


def _as_one_matrix(rows: Sequence[tuple[int, tuple[Range, ...]]]) -> tuple[int, tuple[Range, ...]]:
    """Return the same for matrices that the file holds as one."""
    above = accumulate((whole for whole, _ in rows), initial=0)
    cuts = [(start + first, stop + first) for first, (_, ((start, stop),)) in zip(above, rows, strict=False)]
    if all(stop == start for (_, stop), (start, _) in pairwise(cuts)):
        cuts = [(cuts[0][0], cuts[-1][1])]
    return sum(whole for whole, _ in rows), tuple(cuts)


def _install(layer: Any, packed: FusedLinear, check: Check) -> None:
    """Give `layer` the module `packed`, which vLLM loads by parameters of `layer`."""
    layer.packed = packed
    for name, dtype in packed.entries().items():

        def load(param: nn.Parameter, loaded: torch.Tensor, shard: Any = None, *, entry: str = name) -> None:
            check()
            packed.load(SHARDS.get(shard, shard or 0), entry, loaded)

        parameter = _add_entry(layer, name, dtype, load)
        if len(packed.shares) == 1 and packed.has_rows(name):
            # vLLM permutes rows of some matrices, such as Falcon's of q, k and v, by this attribute.
            parameter.output_dim = 0


def _add_entry(layer: Any, name: str, dtype: torch.dtype, load: Any) -> Any:
    """Give `layer` an empty parameter, for vLLM to find the loader of tensor `name` by."""
    parameter: Any = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
    parameter.weight_loader = load
    layer.register_parameter(name, parameter)
    return parameter
