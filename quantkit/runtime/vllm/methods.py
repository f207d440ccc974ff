"""Quantization methods of vLLM's layers. This module imports the classes of these layers."""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from quantkit.errors import CheckpointError
from quantkit.packing.names import Container
from quantkit.runtime.serving.methods import PackedLinearMethod, PackedTableMethod, add_entry, loaded_experts
from quantkit.runtime.serving.routed_experts import LoadedExperts
from quantkit.runtime.serving.stored_schemes import Schemes

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


class QuantkitLinearMethod(PackedLinearMethod, LinearMethodBase):  # type: ignore[misc]
    """Quantization method of linears, which consist of one or several packed matrices."""


class QuantkitEmbeddingMethod(PackedTableMethod, QuantizeMethodBase):  # type: ignore[misc]
    """Quantization method of embeddings and heads, which may be tied."""

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Make the head `layer` use the packed matrix of the embedding `embed_tokens`; return `layer`.

        Raises `CheckpointError` if the embedding is dense.
        """
        if not isinstance(embed_tokens.quant_method, QuantkitEmbeddingMethod):
            raise CheckpointError(
                f"{self.name!r} is packed, but config.json ties its weight to the embedding, which is dense. "
                'Set "tie_word_embeddings": false in config.json, or quantize the model again.'
            )
        for entry in layer.packed.entries():
            delattr(layer, entry)
        layer.packed = embed_tokens.packed
        self.name, self.is_tied = embed_tokens.quant_method.name, True
        return layer


class QuantkitExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Quantization method of experts behind a router of vLLM."""

    def __init__(self, moe: Any, matrices: Schemes, container: Container) -> None:
        super().__init__(moe)
        self.matrices, self.container = matrices, container

    def maybe_roundup_sizes(self, hidden_size: int, between: int, *_: Any, **__: Any) -> tuple[int, int]:
        """Return `hidden_size` and `between` (intermediate size) as given: packed matrices are not padded."""
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
        """Create the packed module for this rank's experts, or its shard of each; vLLM calls this.

        Sizes are those of this rank, and `params_dtype` is the dtype of activations. Raises `UsageError` for
        experts that the plug-in does not support.
        """
        experts = loaded_experts(
            self.matrices,
            (num_experts, hidden_size, intermediate_size_per_partition),
            layer.activation.value,
            (self.moe.tp_rank, self.moe.tp_size),
            self.container,
            {
                "weights that are applied to the input": layer.apply_router_weight_on_input,
                "biases": self.moe.has_bias,
                "no gate": not self.moe.is_act_and_mul,
                f"the activation {layer.activation.value!r}": layer.activation.value
                not in LoadedExperts.ACTIVATIONS,
            },
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
                expert = layer._map_global_expert_id_to_local_expert_id(expert_id)
                if expert >= 0:
                    experts.load(shard_id, expert, entry.partition("_")[2], loaded_weight)
                return expert >= 0 if return_success else None

            add_entry(layer, name, dtype, load)

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
        """Return the weighted sums of experts [T, H] for x [T, H]; vLLM adds shared experts.

        Token t uses experts `topk_ids[t]` with weights `topk_weights[t]`, both [T, k].
        """
        ids = topk_ids.long()
        if layer.expert_map is not None:
            ids = layer.expert_map[ids].long()
            ids = torch.where(ids < 0, layer.packed.experts.num_experts, ids)
        y: torch.Tensor = layer.packed.experts(x, ids, topk_weights)
        return y
