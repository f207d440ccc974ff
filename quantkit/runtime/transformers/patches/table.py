"""All changes to what transformers, accelerate, PEFT and torch compute: why, and how to undo them.

Changes to the process add unique names, or a class that passes every config without a quantkit section to the
original. All others change attributes of one packed model, or of objects that only it refers to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.runtime.transformers.patches import (
    adapters,
    attention,
    generation,
    loading,
    parallel,
    process_groups,
    quantizers,
)


@dataclass(frozen=True)
class Patch:
    """Change to the process or to one model, with its reason and the versions of transformers.

    of           "process", or "model" if the change is to one packed model
    versions     versions of transformers for which the change was written
    undo         reverts the change
    is_applied   returns True if the change is active

    Both functions take the model, or None for a change to the process.
    """

    name: str
    of: Literal["process", "model"]
    changes: str
    reason: str
    versions: str
    undo: Callable[[Any], None]
    is_applied: Callable[[Any], bool]


def _process(undo: Callable[[], None], is_applied: Callable[[], bool]) -> dict[str, Any]:
    return {"of": "process", "undo": lambda _: undo(), "is_applied": lambda _: is_applied()}


PATCHES = (
    Patch(
        name="quantizers",
        changes='"quantkit" and "compressed-tensors" in the two tables of transformers.quantizers.auto',
        reason="from_pretrained finds the class for a quantization_config by its quant_method",
        versions=">=5.12,<6",
        **_process(quantizers.undo, quantizers.is_applied),
    ),
    Patch(
        name="attention",
        changes=f'"{attention.NAME}", "{attention.PROMPT}" in AttentionInterface and AttentionMaskInterface',
        reason="captured steps of packed models ask for the first, prompts on a CPU for the second",
        versions=">=5.12,<6",
        **_process(attention.undo, attention.is_applied),
    ),
    Patch(
        name="parallel styles",
        changes=f'names that begin with "{parallel.PREFIX}" in ALL_PARALLEL_STYLES',
        reason="parts of a packed matrix are divided as its scheme allows, not all along one axis",
        versions=">=5.17,<6",
        **_process(parallel.undo_styles, parallel.has_styles),
    ),
    Patch(
        name="process groups",
        changes="torch.distributed.destroy_process_group, to one that drops graphs of quantkit first",
        reason="NCCL waits for graphs that sum over ranks, for ever; only once such a graph is captured",
        versions=">=5.17,<6",
        **_process(process_groups.undo, process_groups.is_applied),
    ),
    Patch(
        name="adapters",
        changes="_create_new_module, _prepare_model, _maybe_include_all_linear_layers of PEFT, once imported",
        reason="LoRA goes on packed linears; PEFT knows those of each tool by its class, and has no table",
        versions=">=5.12,<6 with peft >=0.19",
        **_process(adapters.undo, adapters.is_applied),
    ),
    Patch(
        name="generation",
        of="model",
        changes="the class of the model, to one with its own forward, generate and get_compiled_call",
        reason="on one GPU a step of decoding is a CUDA graph with a static cache, without another call",
        versions=">=5.12,<6",
        undo=generation.undo,
        is_applied=generation.is_applied,
    ),
    Patch(
        name="parallel plan",
        of="model",
        changes="entries of the model's _tp_plan for parameters of its packed modules",
        reason="transformers' plan names no part of packed experts, and the styles of quantkit nowhere",
        versions=">=5.17,<6",
        undo=parallel.undo_plan,
        is_applied=parallel.has_plan,
    ),
    Patch(
        name="parallel forward",
        of="model",
        changes="forward of packed linears that tensor parallelism divides",
        reason="without gradients a share needs no DTensor around it, nor one around its sum",
        versions=">=5.17,<6",
        undo=parallel.undo_forwards,
        is_applied=parallel.has_forwards,
    ),
    Patch(
        name="initialization",
        of="model",
        changes="_is_hf_initialized of modules with packed children",
        reason="Mambas initialize a projection by its weight, loaded or not, and a packed one has none",
        versions=">=5.12,<6",
        undo=loading.initialize_again,
        is_applied=loading.skips_initializing,
    ),
    Patch(
        name="expert shapes",
        of="model",
        changes="MergeModulelist in the model's _weight_conversions",
        reason="save_pretrained drops the last dimension of scales with one group per row",
        versions=">=5.12,<5.22",
        undo=loading.split_as_before,
        is_applied=loading.keeps_expert_shapes,
    ),
    Patch(
        name="offloaded dtypes",
        of="model",
        changes="the dtype of packed parameters in accelerate's index of the model's files",
        reason="words that are read from a file would be cast to the model's dtype, which rounds them",
        versions=">=5.12,<5.17",
        undo=loading.cast_offloaded,
        is_applied=loading.keeps_offloaded_dtypes,
    ),
)
