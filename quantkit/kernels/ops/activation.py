"""Gated activations (GLU variants, arXiv 2002.05202) in one launch, and their references."""

from functools import lru_cache

import torch
from torch.nn import functional as F

from quantkit.kernels.jit.launcher import Launch, launch_features, launching_on, overlap
from quantkit.kernels.layouts.shared_memory import next_power_of_2
from quantkit.kernels.ops.quantize_x import (
    CodeOrder,
    code_options,
    empty_codes,
    rounding_of,
    rounding_warps,
    scale_bits,
)
from quantkit.packing.activations import ActivationScheme

#: Columns per program.
GATED = 1024


def silu_gate_reference(x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(x) * up by torch: `x`, `up` [..., N] -> [..., N]."""
    return F.silu(x) * up


def gelu_gate_reference(x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return gelu(x) * up by torch, with the tanh approximation: `x`, `up` [..., N] -> [..., N]."""
    return F.gelu(x, approximate="tanh") * up


#: References by kind of gate.
GATE_REFERENCES = {"silu": silu_gate_reference, "gelu": gelu_gate_reference}


def gate(x: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """Return f(x) * up for `x` and `up` [..., N] of one dtype: a gated activation in one launch.

    f is SiLU for `kind` "silu", and GELU with the tanh approximation for "gelu".
    """
    flat, flat_up = _rows(x), _rows(up)
    columns = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch = _gate_launch(len(flat), -(-columns // GATED), kind, launch_features(x.device))
    with launching_on(x.device):
        launch(flat, flat_up, y, flat.stride(0), flat_up.stride(0), columns)
    return y


def gate_codes(
    x: torch.Tensor, up: torch.Tensor, kind: str, rounding: str, span: int, sums: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute f(x) * up [..., N] and quantize it to 8 bits in one launch: (codes, scales, sums of codes).

        kind        activation f: "silu", or "gelu" with the tanh approximation
        rounding    `Scheme.token` of the linears that read the result, which says how they round inputs
        span        codes of columns c and c + span / 2 are adjacent (`CodeOrder.span`)
        sums        True if sums of codes are needed; else that result is empty

    The results are the fields of a `QuantizedX`.
    """
    flat, flat_up = _rows(x), _rows(up)
    scheme, order, (m, columns) = rounding_of(rounding), CodeOrder(span, sums), flat.shape
    found = empty_codes(m, columns, scheme, order, x.device)
    width = found.codes.shape[1]
    block = next_power_of_2(width) if scheme.group_size is None else GATED
    features = launch_features(x.device)
    launch = _gate_codes_launch(m, -(-width // block), block, columns, kind, scheme.unbound, order, features)
    with launching_on(x.device):
        launch(
            flat, flat_up, found.codes, found.scales, found.sums_or_scales, flat.stride(0), flat_up.stride(0),
            columns, found.stride, scale_bits(scheme),
        )  # fmt: skip
    return found.codes, found.scales, found.sums


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [..., N] as [M, N] with column stride 1, without a copy if possible."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


@lru_cache(maxsize=256)
def _gate_launch(rows: int, programs: int, kind: str, features: frozenset[str]) -> Launch:
    """Build the launch of `gate` for `rows` rows, each computed by `programs` programs.

    `features` are those of the device (`device_features`).
    """
    from quantkit.kernels.ops.activation_kernel import gate

    return Launch(gate, (rows, programs), KIND=kind, B=GATED, **overlap(features), num_warps=4)


@lru_cache(maxsize=256)
def _gate_codes_launch(
    rows: int,
    programs: int,
    block: int,
    columns: int,
    kind: str,
    scheme: ActivationScheme,
    order: CodeOrder,
    features: frozenset[str],
) -> Launch:
    """Build the launch of `gate_codes` for `rows` rows, each by `programs` programs of `block` columns.

    `columns` is N, `scheme` says how x is rounded, `order` is the order of columns in the codes.

    `features` are those of the device (`device_features`).
    """
    from quantkit.kernels.ops.activation_kernel import gate_codes as kernel

    return Launch(
        kernel,
        (rows, programs),
        KIND=kind,
        B=block,
        **code_options(scheme, columns, order, features),
        **overlap(features),
        num_warps=max(4, rounding_warps(rows, block)),
    )
