"""Add a LoRA to the weights of a checkpoint while they are read, so that no later step needs to know."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from quantkit.checkpoint.lora_adapter import LoraAdapter
from quantkit.checkpoint.source import Checkpoint


@dataclass(frozen=True, kw_only=True)
class MergedCheckpoint(Checkpoint):
    """Tensors of `base`, with the change of an adapter in those that it adapts.

    These are float32; names, shapes and dtypes in headers are those of `base`, which may be rotated.

    adapted  module in the adapter, by the name of the tensor that it changes
    """

    base: Checkpoint
    lora: LoraAdapter
    adapted: Mapping[str, str]

    @classmethod
    def of(cls, base: Checkpoint, lora: LoraAdapter, adapted: Mapping[str, str]) -> "MergedCheckpoint":
        """Return `base` with the changes of `lora` in the tensors `adapted`, modules by tensor name."""
        own = {name: getattr(base, name) for name in Checkpoint.__dataclass_fields__}
        return cls(**own, base=base, lora=lora, adapted=adapted)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        # Tensors may be read transposed here and not in `base`.
        weight = replace(self.base, tensors=self.tensors).read(name, start, stop)
        module = self.adapted.get(name)
        if module is None:
            return weight
        return weight.to(torch.float32) + self.lora.delta(module)[start:stop]

    def fingerprint(self, *, of_copies: bool = False) -> str:
        """Return the fingerprint of `base`, without the adapter."""
        return self.base.fingerprint(of_copies=of_copies)
