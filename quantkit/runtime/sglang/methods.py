"""Quantization methods of SGLang's layers.

This module imports all classes of SGLang except the base of its config.
"""

from typing import Any

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.base_config import (
    FusedMoEMethodBase,
    LinearMethodBase,
    QuantizeMethodBase,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from quantkit.errors import UsageError
from quantkit.packing.names import Container
from quantkit.runtime.serving.methods import PackedLinearMethod, PackedTableMethod, add_entry, loaded_experts
from quantkit.runtime.serving.stored_schemes import Schemes, StoredSchemes

__all__ = [
    "DenseLinearMethod",
    "FusedMoE",
    "LinearBase",
    "ParallelLMHead",
    "QuantkitEmbeddingMethod",
    "QuantkitExpertsMethod",
    "QuantkitLinearMethod",
    "VocabParallelEmbedding",
]


class DenseLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """SGLang's method for dense linears, which also checks that every packed matrix has a packed layer.

    SGLang only logs tensors that its model lacks, and leaves parameters uninitialised.
    """

    def __init__(self, schemes: StoredSchemes) -> None:
        super().__init__()
        self._schemes = schemes

    def process_weights_after_loading(self, layer: Any) -> None:
        self._schemes.check_all_asked("SGLang")
        super().process_weights_after_loading(layer)


class QuantkitLinearMethod(PackedLinearMethod, LinearMethodBase):  # type: ignore[misc]
    """Quantization method of linears, which consist of one or several packed matrices."""

    def rank_of(self, layer: Any) -> int:
        """Return the rank of this process in the tensor-parallel group of `layer`.

        Raises `UsageError` if SGLang divides q among other ranks than k and v, which the plug-in cannot load.
        """
        if getattr(layer, "kv_tp_group", layer.tp_group) is not layer.tp_group:
            raise UsageError(
                f"{self.linears[0][0]!r}: SGLang divides q and k, v among different ranks, which quantkit's "
                "plug-in does not. Use as many ranks for attention as for the rest."
            )
        rank: int = get_group_rank_size(layer.tp_group)[0]
        return rank

    def process_weights_after_loading(self, layer: Any) -> None:
        self.schemes.check_all_asked("SGLang")
        super().process_weights_after_loading(layer)


class QuantkitEmbeddingMethod(PackedTableMethod, QuantizeMethodBase):  # type: ignore[misc]
    """Quantization method of embeddings and heads."""


class QuantkitExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Quantization method of experts behind a router of SGLang."""

    def __init__(self, matrices: Schemes, container: Container) -> None:
        super().__init__()
        self.matrices, self.container = matrices, container

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Any,
        with_bias: bool = False,
        **_: Any,
    ) -> None:
        """Create the packed module for this rank's experts, or its shard of each; SGLang calls this.

        Sizes are those of this rank, and `params_dtype` is the dtype of activations. Raises `UsageError` for
        experts that the plug-in does not support.
        """
        runner = layer.moe_runner_config
        factors = (runner.gemm1_alpha, runner.gemm1_beta, runner.gemm1_clamp_limit, runner.swiglu_limit)
        experts = loaded_experts(
            self.matrices,
            (num_experts, hidden_size, intermediate_size_per_partition),
            runner.activation,
            (layer.moe_tp_rank, layer.moe_tp_size),
            self.container,
            {
                "weights that are applied to the input": runner.apply_router_weight_on_input,
                "biases": with_bias,
                "no gate": not runner.is_gated,
                # SGLang's `gelu` is the tanh approximation or not, by the device.
                f"the activation {runner.activation!r}": runner.activation != "silu",
                "limits or factors of the activation": any(one is not None for one in factors),
                "a factor of their sum": runner.routed_scaling_factor not in (None, 1.0),
                "shared experts among them": bool(runner.num_fused_shared_experts),
                "outputs that are not added up": runner.no_combine,
            },
        )
        layer.packed = experts

        def load(
            param: Any, loaded_weight: torch.Tensor, weight_name: str, shard_id: str, expert_id: int
        ) -> None:
            entry = weight_name.rpartition(".")[2].partition("_")[2]
            experts.load(shard_id, expert_id, entry, loaded_weight)

        # SGLang's loader finds out which experts this rank has, and calls this for each.
        layer._weight_loader_impl = load
        for name, dtype in experts.entries().items():
            add_entry(layer, name, dtype, weight_loader)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Do nothing: `apply` needs none of SGLang's runners."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed.finish(layer.params_dtype)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Return the weighted sums of experts [T, H] for `dispatch_output.hidden_states` [T, H].

        `topk_ids` [T, k] chooses the experts; -1 is an expert of another rank, which adds nothing here.
        """
        weights, ids = dispatch_output.topk_output.topk_weights, dispatch_output.topk_output.topk_ids.long()
        ids = torch.where(ids < 0, layer.packed.experts.num_experts, ids)
        y = layer.packed.experts(dispatch_output.hidden_states, ids, weights)
        return StandardCombineInput(hidden_states=y)
