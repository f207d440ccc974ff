"""Read the static scales of an fp8 KV cache from a checkpoint: per layer one for keys, one for values."""

from dataclasses import dataclass
from typing import Any

import torch

from quantkit.packing.activations import activations_named
from quantkit.packing.names import KV_PARTS


@dataclass(frozen=True)
class StoredScale:
    """Static `scale` of keys or values [..., D] stored as e4m3, number = scale * code, as vLLM and SGLang do.

    Numbers beyond the calibrated range saturate.
    """

    scale: float

    def pack(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantize `states` [B, H, T, D] to bytes of e4m3: {"packed": uint8 [B, H, T, D]}."""
        rounds = activations_named("fp8-static")
        assert rounds is not None
        rounded = rounds.bind(self.scale).round(states.float()) / self.scale
        return {"packed": rounded.to(torch.float8_e4m3fn).view(torch.uint8)}

    def unpack(self, parts: dict[str, torch.Tensor], size: int, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize `parts`, the result of `pack`, to states [B, H, T, D] in `dtype`; D is `size`."""
        return (parts["packed"].view(torch.float8_e4m3fn).float() * self.scale).to(dtype)


def stored_scales(model: Any) -> dict[int, tuple[StoredScale, StoredScale]]:
    """Return {layer index: (scale of keys, scale of values)} of the layers of `model` that store both."""
    found = {}
    for module in model.modules():
        scales = [module._buffers.get(part) for part in KV_PARTS.values()]
        index = getattr(module, "layer_idx", None)
        if index is not None and all(scale is not None for scale in scales):
            keys, values = (StoredScale(float(scale)) for scale in scales if scale is not None)
            found[index] = keys, values
    return found
