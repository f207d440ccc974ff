"""Gated activations (GLU variants, arXiv 2002.05202) in one launch, and their references."""

from functools import lru_cache

import torch
from torch.nn import functional as F

from quantkit.kernels.jit.launcher import Launch, launch_features, launching_on, overlap

#: Columns per program.
GATED = 1024


def silu_gate_reference(x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute `gate` of kind "silu" by torch: `x`, `up` [..., N] -> [..., N]."""
    return F.silu(x) * up


def gelu_gate_reference(x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute `gate` of kind "gelu" (by tanh) by torch: `x`, `up` [..., N] -> [..., N]."""
    return F.gelu(x, approximate="tanh") * up


#: References by kind of gate.
GATE_REFERENCES = {"silu": silu_gate_reference, "gelu": gelu_gate_reference}


def gate(x: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """Return f(x) * up for `x` and `up` [..., N] of one dtype; f is SiLU or GELU by tanh, by `kind`."""
    columns = x.shape[-1]
    flat, flat_up = (part.reshape(-1, columns) for part in (x, up))
    if flat.stride(-1) != 1 or flat_up.stride(-1) != 1:
        flat, flat_up = flat.contiguous(), flat_up.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch = _gate_launch(len(flat), -(-columns // GATED), kind, launch_features(x.device))
    with launching_on(x.device):
        launch(flat, flat_up, y, flat.stride(0), flat_up.stride(0), columns)
    return y


@lru_cache(maxsize=256)
def _gate_launch(rows: int, parts: int, kind: str, features: frozenset[str]) -> Launch:
    """Build the launch for `rows` rows and `parts` programs per row."""
    from quantkit.kernels.ops.activation_kernel import gate

    return Launch(gate, (rows, parts), KIND=kind, B=GATED, **overlap(features), num_warps=4)
