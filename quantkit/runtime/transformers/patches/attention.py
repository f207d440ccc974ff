"""Register attention of quantkit under its own names in transformers.

`decode_attention` is for one new token on a GPU, `prompt_attention` for a prompt on a CPU. The configs of a
model have such a name only while a CUDA graph is captured, or a prompt runs. So other models, and what a
config saves, never change. The mask is made as for "sdpa".
"""

import inspect
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from quantkit.kernels.ops.attention import decode_attention, why_not
from quantkit.kernels.problem import device_features
from quantkit.runtime.cpu_steps import prompt_attention as prompts

#: Names in transformers' attention and mask functions: for one new token, and for a prompt on a CPU.
NAME, PROMPT = "quantkit_decode", "quantkit_prompt"
#: Attention that they replace, by `torch.nn.functional.scaled_dot_product_attention`.
SDPA = "sdpa"
#: Field of a config with the name of its implementation; the public setter would also change nested configs.
_FIELD = "_attn_implementation_internal"
#: Options of SDPA that `decode_attention` can ignore.
_UNUSED = frozenset({"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "sliding_window"})
_lock = threading.Lock()
#: Prompts that are running, by the id of a config that has the name `PROMPT`.
_running: Counter[int] = Counter()


def apply() -> None:
    """Register quantkit's attention in transformers; does nothing if already registered.

    The names `NAME` and `PROMPT` are added to transformers' attention functions and mask functions.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    for name, forward in ((NAME, attention_forward), (PROMPT, prompt_forward)):
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[SDPA])


def undo() -> None:
    """Remove quantkit's attention from transformers' attention functions and mask functions."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for registry in (AttentionInterface, AttentionMaskInterface):
        for name in (NAME, PROMPT):
            registry._global_mapping.pop(name, None)


def is_applied() -> bool:
    """Return True if quantkit's attention is registered in transformers' attention functions."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return NAME in ALL_ATTENTION_FUNCTIONS


def implementation_of(config: Any) -> str:
    """Return the name of the attention in `config`, with "sdpa" for those of quantkit that replace it."""
    name: str = config._attn_implementation
    return SDPA if name in (NAME, PROMPT) else name


@contextmanager
def decode_attention_in(model: nn.Module) -> Iterator[None]:
    """Context manager: `model` uses `decode_attention` instead of SDPA, if Triton is available.

    Models whose code contains "sdpa" are not changed, because their masks may depend on the name.
    """
    configs = _configs_of(model) if "triton" in device_features("cuda") and _accepts_any_name(model) else []
    apply()
    try:
        for config in configs:
            setattr(config, _FIELD, NAME)
        yield
    finally:
        for config in configs:
            setattr(config, _FIELD, SDPA)


@contextmanager
def prompt_attention_in(model: nn.Module) -> Iterator[None]:
    """Context manager: `model` uses `prompt_attention` instead of SDPA; several threads may be inside.

    Models whose code contains "sdpa" are not changed, because their masks may depend on the name.
    """
    apply()
    with _lock:
        configs = _configs_of(model, (SDPA, PROMPT)) if _accepts_any_name(model) else []
        _running.update(map(id, configs))
        for config in configs:
            setattr(config, _FIELD, PROMPT)
    try:
        yield
    finally:
        with _lock:
            _running.subtract(map(id, configs))
            for config in configs:
                if not _running[id(config)]:
                    del _running[id(config)]
                    setattr(config, _FIELD, SDPA)


def _configs_of(model: nn.Module, names: tuple[str, ...] = (SDPA,)) -> list[Any]:
    """Return the configs of modules of `model` whose attention implementation is one of `names`."""
    by_id = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in by_id.values() if getattr(config, _FIELD, None) in names]


def _accepts_any_name(model: nn.Module) -> bool:
    kinds: set[Any] = {type(module) for module in model.modules()}
    return not any(_compares_name(kind) for kind in kinds)


@lru_cache(maxsize=1024)
def _compares_name(kind: Any) -> bool:
    """Return True if the source code of a module class contains "sdpa", or cannot be read.

    Classes of sparse attention, for example, compare the name of the attention with it.
    """
    if kind.__module__.startswith("torch."):
        return False
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return True
    return f'"{SDPA}"' in source or f"'{SDPA}'" in source


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer of transformers; return ([B, T, H, V], None).

    `query` is [B, H, T, D], `key` [B, Hkv, L, D], `value` [B, Hkv, L, V], all of one float dtype. V is the
    size of a value head. The mask broadcasts to [B, H, T, L]. `scaling` is D**-0.5 by default. Calls SDPA for
    options or tensors that `decode_attention` does not support.
    """
    if _has_more_options(options) or why_not(query, key, value, attention_mask) is not None:
        return _sdpa(module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return decode_attention(query, key, value, attention_mask, scale), None


def prompt_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the causal attention of a layer of transformers; return ([B, T, H, V], None).

    Arguments are those of `attention_forward`. Calls SDPA if there is a mask, if the layer is not causal, and
    for options or tensors that `prompt_attention` does not support.
    """
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if (
        attention_mask is not None
        or not causal
        or _has_more_options(options)
        or prompts.why_not(query, key, value) is not None
    ):
        return _sdpa(module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return prompts.prompt_attention(query, key, value, scale), None


def _sdpa(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """Call transformers' SDPA, which returns ([B, T, H, V], None)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    result: tuple[torch.Tensor, None] = ALL_ATTENTION_FUNCTIONS[SDPA](*arguments, **options)
    return result


def _has_more_options(options: dict[str, Any]) -> bool:
    """Return True if an option is on that quantkit's attention lacks; False and None count as off."""
    unknown = [value for name, value in options.items() if name not in _UNUSED]
    return bool(options.get("dropout")) or any(value is not None and value is not False for value in unknown)
