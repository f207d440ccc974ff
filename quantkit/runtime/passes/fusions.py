"""Chains of torch operations that one kernel replaces: a row for each, `FUSIONS`.

No model or module is named here. A chain is defined by its reference function in torch, which is traced like
the model. So anything that computes the same is found (`matcher`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from quantkit.kernels.lora import add_lora
from quantkit.kernels.moe import router
from quantkit.kernels.ops import activation, kv_append, rope
from quantkit.kernels.ops.embedding import embed, embed_reference, padded_embed_reference
from quantkit.kernels.ops.norm import (
    MOST_COLUMNS,
    add_rms_norm,
    rms_norm,
    rms_norm_gemma_reference,
    rms_norm_olmo_reference,
    rms_norm_reference,
)
from quantkit.runtime.passes.matcher import ANY

Shapes = Mapping[str, torch.Tensor]
_Sizes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Fusion:
    """Chain of operations to find, given as a function `reference`, and the kernel that replaces it.

    fast          called with the tensors of the reference, `options`, and the matched numbers in `numbers`
    shapes        example shape of each tensor; others match too. Its dtype is in `dtypes`, or of activations
    supports      returns True if `fast` handles given tensors and numbers
    constants     tensors that `fast` reads while earlier kernels may still run (PDL)
    passes_dtype  True if the reference and `fast` have an argument for the dtype of activations
    result_like   returns an example of the memory layout of results; None if they are contiguous
    """

    reference: Callable[..., Any]
    fast: Callable[..., Any]
    shapes: Mapping[str, tuple[int, ...]]
    supports: Callable[[Shapes, Mapping[str, float]], bool]
    numbers: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    constants: tuple[str, ...] = ()
    passes_dtype: bool = False
    result_like: Callable[[Shapes], torch.Tensor] | None = None


def _supports_rows(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    return inputs["ids"].numel() > 0


def _supports_norm(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    x, weight = inputs["x"], inputs["weight"]
    residual = inputs.get("residual", x)
    return (
        weight.dtype == x.dtype == residual.dtype
        and residual.shape == x.shape
        and weight.shape == x.shape[-1:]
        and x.shape[-1] <= MOST_COLUMNS
    )


def _supports_gate(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    x, up = inputs["x"], inputs["up"]
    return x.dtype == up.dtype and x.shape == up.shape and x.dim() > 0


def _supports_angles(x: torch.Tensor, inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    cos, sin = inputs["cos"], inputs["sin"]
    return (
        x.dtype == cos.dtype == sin.dtype
        and x.dim() == 4
        and x.shape[-1] == 2 * numbers["half"]
        and cos.shape == sin.shape
        and cos.shape[1:] == (1, *x.shape[2:])
        and cos.shape[0] in (1, x.shape[0])
    )


def _supports_positions(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    frequencies, positions = inputs["frequencies"], inputs["positions"]
    return (
        frequencies.dim() == 1
        and positions.dim() == 2
        and positions.numel() > 0
        and numbers.get("batch", len(positions)) == len(positions)
    )


def _supports_rotation(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    return _supports_angles(inputs["x"], inputs, numbers)


def _supports_keys(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    k, v, keys, values = (inputs[name] for name in ("k", "v", "keys", "values"))
    return (
        all(part.dim() == 4 for part in (k, v, keys, values))
        and k.shape[:3] == v.shape[:3]
        and k.shape[2] == numbers["tokens"]
        and keys.shape[:3] == values.shape[:3]
        and keys.shape[:2] == k.shape[:2]
        and (keys.shape[3], values.shape[3]) == (k.shape[3], v.shape[3])
        # Shape [1] in transformers 5.12.1, [] from 5.17 on.
        and inputs["cache_length"].shape in ((), (1,))
        and len({part.dtype for part in (k, v, keys, values)}) == 1
        and all(part.stride(-1) == 1 for part in (keys, values))
    )


def _supports_rotated_keys(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    q, k = inputs["q"], inputs["k"]
    return (
        _supports_keys(inputs, numbers)
        and all(_supports_angles(part, inputs, numbers) for part in (q, k))
        and (q.dtype, q.shape[0], q.shape[2]) == (k.dtype, k.shape[0], k.shape[2])
    )


def _supports_small(products: int, inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    x, weight = inputs["x"], inputs["weight"]
    return (
        x.dim() == weight.dim() == 2
        # The kernel reads it in place, before earlier kernels that might copy it have ended.
        and weight.stride(1) == 1
        and 0 < weight.shape[0] <= router.SMALL_ROWS
        and 0 < x.shape[0] * weight.shape[0] <= router.SMALL
        and 0 < x.shape[1] <= router.MOST_COLUMNS
        and x.shape[0] * weight.numel() <= products
    )


def _supports_wide(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    # float32 needs no conversion, so its reference would match any linear.
    return inputs["x"].dtype != torch.float32 and _supports_small(router.WIDE_PRODUCTS, inputs, numbers)


def _supports_logits(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    logits = inputs["logits"]
    return (
        logits.dim() == 2
        and logits.numel() > 0
        and logits.shape[1] <= router.MOST_EXPERTS
        and numbers["top_k"] <= router.MAX_TOP_K
    )


def _supports_scores(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    logits, bias = inputs["logits"], inputs["bias"]
    if not _supports_logits(inputs, numbers) or bias.shape != logits.shape[1:]:
        return False
    experts, groups, kept = logits.shape[1], int(numbers.get("groups", 1)), int(numbers.get("kept", 1))
    return (
        (numbers["tokens"], numbers["experts"]) == logits.shape
        and groups * numbers.get("each", experts) == experts
        # The kernel handles groups as blocks, and the kept groups must have at least top-k experts.
        and (groups == 1 or experts & (experts - 1) == 0)
        and experts // groups * kept >= numbers["top_k"]
    )


def _supports_lora(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    y, x, a, b = (inputs[name] for name in ("y", "x", "a", "b"))
    rank = a.shape[0]
    return (
        x.dtype == y.dtype
        and 0 < rank <= add_lora.MOST_RANK
        and 0 < y.shape[0] * rank <= add_lora.MOST_NUMBERS
        and (x.shape, a.shape) == ((*y.shape[:-1], x.shape[-1]), (rank, x.shape[-1]))
        and b.shape == (y.shape[-1], rank)
        and (a.stride(1), b.stride(1)) == (1, 1)
    )


def _supports_wide_lora(inputs: Shapes, numbers: Mapping[str, float]) -> bool:
    return inputs["x"].dtype != torch.float32 and _supports_lora(inputs, numbers)


def _lora_reference(reference: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda y, x, a, b: reference(y, x, a, b, ANY.factor)


def _padded_embed_reference(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return padded_embed_reference(ids, weight, ANY.padding)


def _add_norm_reference(reference: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        total = x + residual
        return total, reference(total, weight, ANY.eps)

    return add_norm


def _cos_sin_reference(reference: Callable[..., Any]) -> Callable[..., Any]:
    return lambda frequencies, positions, dtype: reference(frequencies, positions, ANY.scaling, dtype)


def _norm_reference(reference: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda x, weight: reference(x, weight, ANY.eps)


def _route_reference(reference: Callable[..., Any]) -> Callable[..., Any]:
    return lambda logits: reference(logits, ANY.top_k)


def _route_of_one_group_reference(logits: torch.Tensor, bias: torch.Tensor) -> Any:
    return router.route_deepseek_reference(logits, bias, ANY.top_k, ANY.factor, 1, 1)


def _route_of_groups_reference(logits: torch.Tensor, bias: torch.Tensor) -> Any:
    return router.route_deepseek_reference(logits, bias, ANY.top_k, ANY.factor, ANY.groups, ANY.kept)


def _norm(reference: Callable[..., Any], fast: Callable[..., Any], shapes: _Sizes, kind: str) -> Fusion:
    return Fusion(reference, fast, shapes, _supports_norm, ("eps",), {"kind": kind}, constants=("weight",))


def _fusions() -> Iterator[Fusion]:
    """Yield all fusions, longest chains first."""
    tokens, size = ANY.tokens, 2 * ANY.half
    angles: _Sizes = {"cos": (2, 1, tokens, size), "sin": (2, 1, tokens, size)}
    heads: _Sizes = {"q": (2, 4, tokens, size), "k": (2, 2, tokens, size), "v": (2, 2, tokens, 9)}
    cache: _Sizes = {"keys": (2, 2, 50, size), "values": (2, 2, 50, 9), "cache_length": ()}
    yield Fusion(
        rope.rotate_append_reference,
        rope.rotate_append,
        heads | angles | cache,
        _supports_rotated_keys,
        dtypes={"cache_length": torch.int64},
    )
    written = cache | {name: heads[name] for name in ("k", "v")}
    yield Fusion(
        kv_append.append_reference,
        kv_append.append,
        written,
        _supports_keys,
        dtypes={"cache_length": torch.int64},
    )
    yield Fusion(
        rope.rotate_reference,
        rope.rotate,
        {"x": (2, 4, tokens, size)} | angles,
        _supports_rotation,
        result_like=lambda inputs: rope.empty_heads(inputs["x"]),
    )
    turns: _Sizes = {"frequencies": (ANY.half,), "positions": (ANY.batch, tokens)}
    for turn in (rope.cos_sin_reference, rope.cos_sin_matmul_reference):
        yield Fusion(
            _cos_sin_reference(turn),
            rope.cos_sin,
            turns,
            _supports_positions,
            ("scaling",),
            dtypes={"frequencies": torch.float32, "positions": torch.int64},
            passes_dtype=True,
        )
    table: _Sizes = {"ids": (2, 3), "weight": (53, 20)}
    for embedding in (embed_reference, _padded_embed_reference):
        yield Fusion(embedding, embed, table, _supports_rows, dtypes={"ids": torch.int64})
    norms = {"llama": rms_norm_reference, "olmo": rms_norm_olmo_reference, "gemma": rms_norm_gemma_reference}
    x: _Sizes = {"x": (2, 3, 20)}
    weight: _Sizes = {"weight": (20,)}
    for kind, reference in norms.items():
        shapes = x | {"residual": (2, 3, 20)} | weight
        yield _norm(_add_norm_reference(reference), add_rms_norm, shapes, kind)
    for kind, reference in norms.items():
        yield _norm(_norm_reference(reference), rms_norm, x | weight, kind)
    lora: _Sizes = {"y": (ANY.batch, 1, ANY.width), "x": (ANY.batch, 1, ANY.columns)}
    lora |= {"a": (ANY.rank, ANY.columns), "b": (ANY.width, ANY.rank)}
    for add, takes, dtypes in (
        (add_lora.add_wide_lora_reference, _supports_wide_lora, dict.fromkeys("ab", torch.float32)),
        (add_lora.add_lora_reference, _supports_lora, {}),
    ):
        yield Fusion(_lora_reference(add), add_lora.add_lora, lora, takes, ("factor",), dtypes=dtypes)
    gates = {"silu": activation.silu_gate_reference, "gelu": activation.gelu_gate_reference}
    for kind, gate in gates.items():
        yield Fusion(gate, activation.gate, x | {"up": (2, 3, 20)}, _supports_gate, (), {"kind": kind})
    small: _Sizes = {"x": (3, 20), "weight": (7, 20)}
    for linear, takes, wide in (
        (router.wide_linear_reference, _supports_wide, True),
        (router.small_linear_reference, partial(_supports_small, router.SMALL_PRODUCTS), False),
    ):
        how = {"wide": wide}
        yield Fusion(linear, router.small_linear, small, takes, options=how, constants=("weight",))
    scores: _Sizes = {"logits": (tokens, ANY.experts), "bias": (ANY.experts,)}
    for route, more in (
        (_route_of_groups_reference, ("groups", "kept")),
        (_route_of_one_group_reference, ()),
    ):
        numbers = ("top_k", "factor", *more)
        yield Fusion(route, router.route, scores, _supports_scores, numbers, dtypes={"logits": torch.float32})
    logits: _Sizes = {"logits": (3, 73)}
    for route, options in router.ROUTERS:
        yield Fusion(_route_reference(route), router.route, logits, _supports_logits, ("top_k",), options)


FUSIONS = tuple(_fusions())
