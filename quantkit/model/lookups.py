"""Embeddings that look rows of a table up: `nn.Embedding`, and subclasses that multiply the rows by a factor.

What a module computes decides, not its class: it is tried on a tiny table.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: Attributes of subclasses that hold the factor as a number of Python.
_FACTORS = ("scalar_embed_scale", "embed_scale")
#: Their buffer with the same number.
_BUFFER = "embed_scale"


@dataclass(frozen=True)
class Lookup:
    """What a module makes of rows [..., K] of its table: `rows * factor`, in the dtype of the rows.

    `is_rounded` if the factor has that dtype too, as a tensor has; a number of Python is not rounded.
    """

    factor: float = 1.0
    is_rounded: bool = False

    def factor_in(self, dtype: torch.dtype) -> float:
        """Return the factor of rows of `dtype`."""
        return float(torch.tensor(self.factor, dtype=dtype, device="cpu")) if self.is_rounded else self.factor


def lookup_of(module: nn.Module) -> Lookup | None:
    """Return what `module` makes of the rows of its table; None for anything but a factor."""
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
    """Return True if `module` computes what `lookup` says of a tiny table, to the bit."""
    # Loading runs under `torch.device("meta")`, but this needs numbers.
    with torch.device("cpu"), torch.no_grad():
        ids = torch.tensor([[2, 0], [1, 4]])
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            table = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
            one: Any = copy.copy(module)
            one.__dict__ = {**module.__dict__, "padding_idx": None, "num_embeddings": 5}
            one._parameters = {"weight": nn.Parameter(table, requires_grad=False)}
            one._buffers = {name: torch.tensor(lookup.factor) for name in module._buffers}
            try:
                found: Any = type(module).forward(one, ids)
            except Exception:  # Another model's code, called with a guessed size, may fail in any way.
                return False
            if not isinstance(found, torch.Tensor) or found.dtype != dtype:
                return False
            if not torch.equal(found, table[ids] * lookup.factor_in(dtype)):
                return False
    return True
