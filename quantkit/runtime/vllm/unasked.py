"""Pass the quantization config to layers that a model class of vLLM creates without one.

Mamba and Jamba create linears without a config, BLOOM its head, Mixtral its embedding. vLLM would take these
layers for dense: its loader raises a bare `AssertionError`, or leaves the packed tensors out.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.models.utils import PPMissingLayer, StageMissingLayer

from quantkit.runtime.serving.config import PackedConfig
from quantkit.runtime.vllm.methods import LinearBase, VocabParallelEmbedding

_CLASSES = (LinearBase, VocabParallelEmbedding)
_MISSING = (PPMissingLayer, StageMissingLayer)
#: Attribute of the functions that replace those of vLLM.
_OWN = "of_quantkit"


def ask_for_all_layers() -> None:
    """Patch vLLM in this process: pass quantkit's config to all linears, embeddings and heads.

    Replaces `__init__` of these layers, and `initialize_model`, which then raises `UsageError` for a packed
    matrix without a packed layer. A second call changes nothing. Other quantization methods are not affected.
    """
    for cls in _CLASSES:
        if not hasattr(cls.__init__, _OWN):
            cls.__init__ = _with_config(cls.__init__)
    if not hasattr(base_loader.initialize_model, _OWN):
        base_loader.initialize_model = _checked(base_loader.initialize_model)


def _with_config(init: Callable[..., None]) -> Callable[..., None]:
    """Return `init`, a layer's `__init__`, changed to use quantkit's config if the caller passes none."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def with_config(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        vllm = get_current_vllm_config_or_none()
        config = None if vllm is None else vllm.quant_config
        if isinstance(config, PackedConfig) and given.arguments.get("quant_config") is None:
            given.arguments["quant_config"] = config
        init(*given.args, **given.kwargs)

    setattr(with_config, _OWN, True)
    return with_config


def _checked(initialize_model: Callable[..., Any]) -> Callable[..., Any]:
    """Return `initialize_model`, changed to raise `UsageError` for a packed matrix without a packed layer."""

    @functools.wraps(initialize_model)
    def checked(vllm_config: Any, **kwargs: Any) -> Any:
        model, config = initialize_model(vllm_config, **kwargs), vllm_config.quant_config
        # A draft model has only some layers of the checkpoint; the whole model checks its tokens.
        is_draft = kwargs.get("model_config", vllm_config.model_config).runner_type == "draft"
        if isinstance(config, PackedConfig) and not is_draft:
            absent = {name for name, module in model.named_modules() if isinstance(module, _MISSING)}
            config.schemes.check_all_asked("vLLM", absent)
        return model

    setattr(checked, _OWN, True)
    return checked
