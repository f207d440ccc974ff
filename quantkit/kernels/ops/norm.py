"""RMSNorm (arXiv 1910.07467), also of a sum, in one launch, and its references."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from quantkit.kernels.jit.launcher import Launch, launch_features, launching_on, overlap
from quantkit.kernels.layouts.shared_memory import next_power_of_2
from quantkit.kernels.ops.quantize_x import (
    BLOCK,
    FEW_ROWS,
    CodeOrder,
    blocks_of,
    code_options,
    empty_codes,
    rounding_of,
    rounding_options,
    scale_bits,
)
from quantkit.packing.activations import ActivationScheme

#: Largest N: a program keeps a row in registers.
MOST_COLUMNS = 32768
#: By kind of norm: True if values are rounded before they are multiplied by weights, and the offset added to
#: weights.
NORMS: dict[str, tuple[bool, float]] = {"llama": (True, 0.0), "olmo": (False, 0.0), "gemma": (False, 1.0)}


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return RMSNorm of `x` [..., N] as in Llama, by torch: weight * (x / RMS rounded to the dtype of `x`).

    `weight` is [N]. RMS = sqrt(mean(x^2) + eps) and x / RMS are computed in float32.
    """
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rms_norm_olmo_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return RMSNorm of `x` [..., N] as in OLMo, by torch: weight * x / RMS, rounded once at the end.

    `weight` is [N]; RMS = sqrt(mean(x^2) + eps). All is computed in float32, then rounded to the dtype of
    `x`.
    """
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide).to(x.dtype)


def rms_norm_gemma_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return RMSNorm of `x` [..., N] as in Gemma, by torch: (1 + weight) * x / RMS, rounded once at the end.

    `weight` is [N]; RMS = sqrt(mean(x^2) + eps). All is computed in float32, then rounded to the dtype of
    `x`.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).type_as(x)


#: References by kind of norm.
NORM_REFERENCES = {
    "llama": rms_norm_reference,
    "olmo": rms_norm_olmo_reference,
    "gemma": rms_norm_gemma_reference,
}


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, kind: str, late: bool = False, rounding: str = ""
) -> torch.Tensor:
    """Return RMSNorm(x) = x / sqrt(mean(x^2) + eps) * weight for `x` [..., N], in its shape and dtype.

        weight     [N], N at most `MOST_COLUMNS`
        kind       one of `NORMS`, such as "llama": where values are rounded, and what is added to weights
        late       if True, the next kernel may start only after the previous one has ended (PDL)
        rounding   if not "", the result is rounded to 8 bits and back, as inputs of linears are by the scheme
                   with this `Scheme.token`

    The previous kernel must not write `weight`, which is read while that kernel may still run (PDL).
    """
    return add_rms_norm(x, None, weight, eps, kind, late, rounding)[1]


def add_rms_norm(
    x: torch.Tensor,
    other: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    kind: str,
    late: bool = False,
    rounding: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return t = x + other and RMSNorm(t), [..., N] each; if `other` is None, RMSNorm(x) twice.

    `x` and `other` are [..., N], `weight` [N]. For `eps`, `kind`, `late` and `rounding` see `rms_norm`.
    """
    x, added, rows, strides = _operands(x, other)
    columns, adds = x.shape[-1], other is not None
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if adds else y
    scheme = rounding_of(rounding) if rounding else None
    unbound, features = None if scheme is None else scheme.unbound, launch_features(x.device)
    how = (x.numel() // columns, rows, columns, adds, (eps, kind), late)
    with launching_on(x.device):
        launch = _norm_launch(*how, unbound, None, x.dtype, features)
        launch(x, added, weight, total, y, *strides, weight.stride(0), scale_bits(scheme))
    return total, y


def norm_codes(
    x: torch.Tensor,
    other: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    kind: str,
    rounding: str,
    span: int,
    sums: bool,
    late: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return t = x + `other` [..., N] and RMSNorm(t) quantized to 8 bits: (t, codes, scales, sums).

        other          [..., N]; if None, t is x
        weight         [N]; `eps`, `kind` and `late` are those of `rms_norm`
        rounding       `Scheme.token` of a scheme that rounds inputs of linears: the norm is quantized like
                       them
        span, sums     fields of the `CodeOrder` in which codes are written

    Codes, scales and sums are the fields of a `QuantizedX`.
    """
    scheme, order = rounding_of(rounding), CodeOrder(span, sums)
    x, added, rows, strides = _operands(x, other)
    columns = x.shape[-1]
    total = x if other is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    found = empty_codes(x.numel() // columns, columns, scheme, order, x.device)
    how = (len(found.codes), rows, columns, other is not None, (eps, kind), late)
    launch = _norm_launch(*how, scheme.unbound, order, x.dtype, launch_features(x.device))
    with launching_on(x.device):
        launch(
            x, added, weight, total, found.codes, found.scales, found.sums_or_scales, *strides,
            weight.stride(0), found.stride, scale_bits(scheme),
        )  # fmt: skip
    return total, found.codes, found.scales, found.sums


class HeadNorms(NamedTuple):
    """RMSNorms of the heads of queries and keys, which models such as Qwen3 apply before rotary embedding.

    `q` and `k` are the weights [D] of the two norms, for heads of D features. `eps` and `kind` are those of
    `rms_norm`.
    """

    q: torch.Tensor
    k: torch.Tensor
    eps: float
    kind: str

    @property
    def how(self) -> tuple[float, str]:
        """Return (eps, kind), the constants for which kernels are compiled."""
        return self.eps, self.kind


def norm_options(how: tuple[float, str] | None) -> dict[str, Any]:
    """Return the constexprs EPS, ROUND and OFFSET of RMSNorm for `how`, (eps, kind).

    If `how` is None, for no norm, EPS is None.
    """
    eps, kind = how or (None, "llama")
    rounded, offset = NORMS[kind]
    return {"EPS": eps, "ROUND": rounded, "OFFSET": offset}


def _operands(
    x: torch.Tensor, other: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, int, tuple[int, int, int, int]]:
    """Return (x, other, rows, strides), by which a kernel addresses rows of `x` and `other` [..., N].

    `strides` are (outer, inner) of x, then of `other`: row r begins at element r // rows * outer + r % rows *
    inner. Both are copied if strides do not suffice. If `other` is None, x is returned in its place.
    """
    parts = [x] if other is None else [x, other]
    laid = [_rows(part) for part in parts]
    if laid[0][1] != laid[-1][1]:
        laid = [_rows(part.contiguous()) for part in parts]
    (x, rows, outer, inner), (added, _, o_outer, o_inner) = laid[0], laid[-1]
    return x, added, rows, (outer, inner, o_outer, o_inner)


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Return (x, rows, outer, inner), by which a kernel addresses rows of `x` [..., N], contiguous or not.

    Row r begins at element r // rows * outer + r % rows * inner. If no two strides address all rows, or
    columns are not contiguous, the x returned is a contiguous copy.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    merged: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    if len(merged) > 2:
        return x.contiguous(), 1, x.shape[-1], x.shape[-1]
    if len(merged) == 2:
        return x, merged[1][0], merged[0][1], merged[1][1]
    stride = merged[0][1] if merged else x.shape[-1]
    return x, 1, stride, stride


def _warps(rows: int, columns: int) -> int:
    """Return the number of warps of a program that normalizes one of `rows` rows of `columns` values.

    A thread has 8 values up to `FEW_ROWS` rows, beyond that 32: once the GPU is full, fewer warps sum
    faster. H200, 4096 rows of 4096: a norm that quantizes takes 26.6 us with 32 values and 32.4 with 8, a
    plain one 28.6 with either.
    """
    return min(16, max(1, columns // (256 if rows <= FEW_ROWS else 1024)))


@lru_cache(maxsize=256)
def _norm_launch(
    programs: int,
    rows: int,
    columns: int,
    add: bool,
    norm: tuple[float, str],
    late: bool,
    scheme: ActivationScheme | None,
    order: CodeOrder | None,
    dtype: torch.dtype,
    features: frozenset[str],
) -> Launch:
    """Build the launch of RMSNorm of x, for `programs` rows of `columns` values.

    The launch is given the strides `outer` and `inner`.

    rows       row r of x begins at element r // rows * outer + r % rows * inner
    add        True if the norm is of x plus another tensor
    norm       (eps, kind), as in `rms_norm`
    late       if True, the next kernel may start only after the previous one has ended (PDL)
    scheme     how the norm is rounded to 8 bits; None for no rounding
    order      if given, the norm is written as 8-bit codes in this order, not rounded to 8 bits and back
    dtype      dtype of x
    features   of the device (`device_features`)
    """
    from quantkit.kernels.ops.norm_kernel import rms_norm, rms_norm_codes

    if order is None or scheme is None:
        kernel, padded = rms_norm, next_power_of_2(columns if scheme is None else max(columns, BLOCK))
        options = {**rounding_options(scheme, features), "MOST": torch.finfo(dtype).max}
    else:
        kernel, padded = rms_norm_codes, next_power_of_2(blocks_of(columns) * BLOCK)
        options = code_options(scheme, columns, order, features)
    return Launch(
        kernel,
        (programs,),
        ROWS=rows,
        N=columns,
        NP=padded,
        ADD=add,
        LATE=late,
        **norm_options(norm),
        **options,
        **overlap(features),
        num_warps=_warps(programs, padded),
    )
