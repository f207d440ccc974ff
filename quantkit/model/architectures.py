"""Modules that can be packed, and families whose blocks are Llama's.

Packable are linears, and fused experts that compute down(act(gate) * up).
"""

import copy
from typing import Any, Protocol

import torch
from torch import nn

from quantkit.model.linears import is_linear

GATE_UP = "gate_up_proj"
DOWN = "down_proj"

#: Families whose blocks are Llama's. Norms multiply by their weight, and nothing stands between a norm or
#: linear and the linears that see its outputs, so scales of input features fold into it
#: (`quantization/blockwise/fold_scales.py`). Only linears and norms touch the residual stream, and values go
#: from v to o unchanged, so it can be rotated (`quantization/rotated_checkpoint.py`). Tests fold and rotate
#: each.
LLAMA_LIKE = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "phi3", "glm"),
        *("mixtral", "qwen2_moe", "qwen3_moe"),
    }
)


class FusedExperts(Protocol):
    """Fused experts modules of transformers that `PackedExperts` can replace."""

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    act_fn: nn.Module


def is_fused_experts(module: nn.Module) -> bool:
    """Return True if `module` has all its experts in two parameters, `gate_up_proj` and `down_proj`."""
    return all(module._parameters.get(name) is not None for name in (GATE_UP, DOWN))


def why_not_packable_experts(experts: nn.Module) -> str | None:
    """Return None if `PackedExperts` computes the same as `experts`, else the reason.

    `is_fused_experts(experts)` must be True. Works for modules on the meta device.
    """
    if set(experts._parameters) != {GATE_UP, DOWN} or experts._buffers:
        return f"{type(experts).__name__} has more than gate_up_proj and down_proj, for example biases"
    gate_up, down = experts._parameters[GATE_UP], experts._parameters[DOWN]
    assert gate_up is not None and down is not None
    if (
        gate_up.ndim != 3
        or down.ndim != 3
        or gate_up.shape != (down.shape[0], 2 * down.shape[2], down.shape[1])
    ):
        return (
            f"gate_up_proj {tuple(gate_up.shape)} and down_proj {tuple(down.shape)} of "
            f"{type(experts).__name__} are not [E, 2I, H] and [E, H, I]"
        )
    if not isinstance(getattr(experts, "act_fn", None), nn.Module):
        return f"{type(experts).__name__} has no act_fn"
    return _why_other_function(experts)


_probe_results: dict[tuple[type, type], str | None] = {}


def _why_other_function(experts: nn.Module) -> str | None:
    """Return None if `experts` computes down(act(gate) * up), tested on tiny weights, else the reason.

    Shapes do not tell: a model may interleave gate and up, clamp them, or normalize the result.
    """
    key = (type(experts), type(experts.act_fn))
    if key not in _probe_results:
        _probe_results[key] = _probe(experts)
    return _probe_results[key]


def _probe(experts: Any) -> str | None:
    count, hidden, intermediate, tokens = 3, 8, 6, 5
    reason = f"{type(experts).__name__} computes something else than down(act(gate) * up)"
    # Loading runs under `torch.device("meta")`, but the probe needs numbers, from its own generator.
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> torch.Tensor:
            # Large enough to reach the clamps of some models.
            return 4 * torch.randn(*shape, generator=generator, dtype=torch.float32)

        gate_up, down = numbers(count, 2 * intermediate, hidden), numbers(count, hidden, intermediate)
        x, weights = numbers(tokens, hidden), numbers(tokens, 2)
        index = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]])
        tiny = copy.copy(experts)
        tiny.__dict__ = {
            **experts.__dict__,
            "_parameters": {GATE_UP: nn.Parameter(gate_up), DOWN: nn.Parameter(down)},
            "num_experts": count,
            "hidden_dim": hidden,
            "hidden_size": hidden,
            "intermediate_dim": intermediate,
            "intermediate_size": intermediate,
        }
        # Take the eager function that transformers wraps to dispatch to grouped GEMMs.
        forward = getattr(type(experts).forward, "__wrapped__", type(experts).forward)
        try:
            actual = forward(tiny, x, index, weights)
        except Exception as error:  # another model's code, called with guessed sizes, may fail in any way
            return f"{reason} ({type(error).__name__}: {error})"
        expected = torch.zeros_like(x)
        for token in range(tokens):
            for slot, expert in enumerate(index[token].tolist()):
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                expected[token] += weights[token, slot] * (down[expert] @ (experts.act_fn(gate) * up))
    same = isinstance(actual, torch.Tensor) and actual.shape == expected.shape
    return None if same and torch.allclose(actual, expected, rtol=1e-3, atol=1e-2) else reason


def why_not_packable(module: nn.Module) -> str | None:
    """Return None if quantkit has a packed replacement for `module`, else the reason.

    Packable are linears, by what they compute, and fused experts that `PackedExperts` can replace. Works for
    modules on the meta device.
    """
    if is_linear(module):
        return None
    if not is_fused_experts(module):
        return f"{type(module).__name__} computes something else than x W^T + b"
    return why_not_packable_experts(module)
