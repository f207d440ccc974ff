"""Temporary."""

from typing import Any
import torch
import torch.nn.functional as F
from quantkit.packing.tensor import dequantize_codes
from quantkit.packing.words import unpack

KernelLayout = Any


def build_layout(words: Any, scale: Any, zero_point: Any, scheme: Any) -> Any:
    return None


def linear_parts(
    x: Any, words: Any, scale: Any, zero_point: Any, bias: Any, scheme: Any, out_features: int, layout: Any
) -> Any:
    z = None if zero_point is None else unpack(zero_point.T.contiguous(), scheme.format.bits, out_features).T
    w = dequantize_codes(unpack(words, scheme.format.bits, x.shape[-1]), scale, z, scheme).to(x.dtype)
    return F.linear(x, w, bias)
