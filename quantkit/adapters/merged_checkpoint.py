"""Add a LoRA to the weights of a checkpoint while they are read, so that no later step needs to know."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from quantkit.checkpoint.source import Checkpoint


@dataclass(frozen=True, kw_only=True)
class MergedCheckpoint(Checkpoint):
    """Tensors of `base`, with the change of an adapter in those that it adapts.

    These are float32; names, shapes and dtypes in headers are those of `base`, which may be rotated.

    deltas  functions that compute the change of a tensor [N, K], by its name
    """

    base: Checkpoint
    deltas: Mapping[str, Callable[[], torch.Tensor]]

    @classmethod
    def of(cls, base: Checkpoint, deltas: Mapping[str, Callable[[], torch.Tensor]]) -> "MergedCheckpoint":
        """Return `base` with the changes `deltas`, by the name of the tensor."""
        own = {name: getattr(base, name) for name in Checkpoint.__dataclass_fields__}
        return cls(**own, base=base, deltas=deltas)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        # Tensors may be read transposed here and not in `base`.
        weight = replace(self.base, tensors=self.tensors).read(name, start, stop)
        delta = self.deltas.get(name)
        if delta is None:
            return weight
        return weight.to(torch.float32) + delta()[start:stop]

    def fingerprint(self, *, of_copies: bool = False) -> str:
        """Return the fingerprint of `base`, without the adapter."""
        return self.base.fingerprint(of_copies=of_copies)
