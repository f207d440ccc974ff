"""Recognize modules that compute y = x W^T + b, and embeddings that look up rows.

Linears are `nn.Linear`, its subclasses, and `Conv1D`, which stores W^T. Subclasses of embeddings may multiply
rows by a factor. The computation decides, not the class: the module is tried on a tiny weight.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

#: By class and whether the weight is square: True if W is stored transposed, None for another function.
_tried: dict[tuple[type, bool], bool | None] = {}


def is_linear(module: nn.Module) -> bool:
    """Return True if `module` computes y = x W^T + b, with W [N, K], or stored [K, N] if `is_transposed`."""
    return _orientation(module) is not None


def is_transposed(module: nn.Module) -> bool:
    """Return True if `module` is a linear whose weight is stored as [K, N]."""
    return _orientation(module) is True


def matrix_shape(module: nn.Module) -> tuple[int, int]:
    """Return [N, K] of a linear."""
    weight: Any = module.weight
    rows, columns = weight.shape
    return (columns, rows) if is_transposed(module) else (rows, columns)


def transposed_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linears in `model` whose weight is stored as [K, N], with their names."""
    for name, module in model.named_modules():
        if is_transposed(module):
            yield name, module


def plain_linear(module: nn.Module) -> nn.Linear:
    """Return an `nn.Linear` on meta with the sizes, bias and dtype of a linear of another class."""
    rows, columns = matrix_shape(module)
    dtype = module.get_parameter("weight").dtype
    has_bias = module._parameters.get("bias") is not None
    return nn.Linear(columns, rows, bias=has_bias, device="meta", dtype=dtype)


def _orientation(module: nn.Module) -> bool | None:
    if type(module) is nn.Linear:
        return False
    weight = module._parameters.get("weight")
    others = {name for name, one in module._parameters.items() if one is not None} - {"weight", "bias"}
    if weight is None or weight.dim() != 2 or others or module._buffers or module._modules:
        return None
    key = type(module), weight.shape[0] == weight.shape[1]
    if key not in _tried:
        _tried[key] = _try(module, weight)
    return _tried[key]


def _try(module: nn.Module, weight: torch.Tensor) -> bool | None:
    """Run `module` on a tiny weight and compare: True if transposed, False if not, None if no linear."""
    first, second = weight.shape
    sizes = {first: 5, second: 5 if first == second else 3}
    # Loading runs under `torch.device("meta")`, but this needs numbers, from a generator of its own.
    with torch.device("cpu"), torch.no_grad():
        numbers = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        tiny = numbers(sizes[first], sizes[second])
        for transposed in (False, True):
            matrix = tiny.T if transposed else tiny
            rows, columns = matrix.shape
            has_bias = module._parameters.get("bias") is not None
            bias = numbers(rows) if has_bias else None
            one = copy.copy(module)
            # Size attributes, such as `in_features`, are set to those of the tiny weight.
            one.__dict__ = {
                name: sizes.get(value, value) if type(value) is int else value
                for name, value in module.__dict__.items()
            }
            one._parameters = {
                "weight": nn.Parameter(tiny),
                "bias": None if bias is None else nn.Parameter(bias),
            }
            x = numbers(2, 4, columns)
            try:
                y: Any = type(module).forward(one, x)
            except Exception:  # Another model's code, called with guessed sizes, may fail in any way.
                continue
            expected = F.linear(x, matrix, bias)
            same = isinstance(y, torch.Tensor) and y.shape == expected.shape
            if same and torch.allclose(y, expected, rtol=1e-4, atol=1e-4):
                return transposed
    return None


#: Attributes of subclasses that hold the factor as a Python number.
_FACTORS = ("scalar_embed_scale", "embed_scale")
#: Buffer with the same number.
_BUFFER = "embed_scale"


@dataclass(frozen=True)
class Lookup:
    """Factor of an embedding: rows [..., K] of its table are multiplied by it in their dtype.

    `is_rounded` if the factor is rounded to that dtype too, like a tensor; a Python number is not.
    """

    factor: float = 1.0
    is_rounded: bool = False

    def factor_in(self, dtype: torch.dtype) -> float:
        """Return the factor for rows of `dtype`, rounded to `dtype` if `is_rounded`."""
        return float(torch.tensor(self.factor, dtype=dtype, device="cpu")) if self.is_rounded else self.factor


def lookup_of(module: nn.Module) -> Lookup | None:
    """Return the factor of an embedding; None if `module` does more than multiply by a factor."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return None
    if type(module) is nn.Embedding:
        return Lookup()
    others = {name for name, one in module._parameters.items() if one is not None} - {"weight"}
    if others or module._modules or module._buffers.keys() - {_BUFFER}:
        return None
    numbers = [vars(module).get(name) for name in _FACTORS]
    factor = next((float(one) for one in numbers if isinstance(one, int | float)), 1.0)
    return next((one for one in (Lookup(factor), Lookup(factor, True)) if _computes(module, one)), None)


def _computes(module: nn.Module, lookup: Lookup) -> bool:
    """Return True if `module` with a tiny table computes exactly the function `lookup`."""
    # Loading runs under `torch.device("meta")`, but this needs numbers.
    with torch.device("cpu"), torch.no_grad():
        ids = torch.tensor([[2, 0], [1, 4]])
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            table = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
            one: Any = copy.copy(module)
            one.__dict__ = {**module.__dict__, "padding_idx": None, "num_embeddings": 5}
            one._parameters = {"weight": nn.Parameter(table, requires_grad=False)}
            # Not in the default dtype, which is the model's during loading.
            factor = torch.tensor(lookup.factor, dtype=torch.float32)
            one._buffers = dict.fromkeys(module._buffers, factor)
            try:
                found: Any = type(module).forward(one, ids)
            except Exception:  # Another model's code, called with a guessed size, may fail in any way.
                return False
            if not isinstance(found, torch.Tensor) or found.dtype != dtype:
                return False
            if not torch.equal(found, table[ids] * lookup.factor_in(dtype)):
                return False
    return True
