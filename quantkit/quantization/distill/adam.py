"""Adam (arXiv 1412.6980) whose means are bfloat16: they take 4 bytes of each number, not 8.

Both means move by at least 2 % of a gradient that differs much from them, which bfloat16 can hold. The
arithmetic is float32. Tensors are updated many at a time, as each launch of a GPU costs some microseconds.
"""

from collections.abc import Mapping

import torch

#: Decay of the means of gradients and of their squares, and the least divisor: gradients of codes are small.
BETAS, EPSILON = (0.9, 0.98), 1e-15


class Adam:
    """Means by name; `step` moves tensors, `state` and `restore` are for a resumed run."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self._dtype = dtype
        self._means: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step(
        self,
        numbers: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        rates: Mapping[str, float],
        count: int,
    ) -> None:
        """Move `numbers` (float32) with `gradients`, by name; it is step `count` from 1 on."""
        names = list(gradients)
        if not names:
            return
        for name in names:
            if name not in self._means:
                empty = torch.zeros_like(numbers[name], dtype=self._dtype)
                self._means[name] = empty, empty.clone()
        found = [gradients[name] for name in names]
        first, second = (
            [self._means[name][at].to(torch.float32, copy=True) for name in names] for at in (0, 1)
        )
        torch._foreach_lerp_(first, found, 1 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, found, found, 1 - BETAS[1])
        torch._foreach_copy_([self._means[name][0] for name in names], first)
        torch._foreach_copy_([self._means[name][1] for name in names], second)
        torch._foreach_div_(second, 1 - BETAS[1] ** count)
        torch._foreach_sqrt_(second)
        torch._foreach_add_(second, EPSILON)
        bias = 1 - BETAS[0] ** count
        torch._foreach_addcdiv_(
            [numbers[name] for name in names], first, second, [-rates[name] / bias for name in names]
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Return the means, by name."""
        return {
            f"{name}.mean{at}": mean for name, pair in self._means.items() for at, mean in enumerate(pair)
        }

    def restore(self, state: Mapping[str, torch.Tensor], numbers: Mapping[str, torch.Tensor]) -> None:
        """Go on from the `state` of an earlier Adam of the same `numbers`."""
        self._means = {
            name: (
                state[f"{name}.mean0"].to(one.device, self._dtype),
                state[f"{name}.mean1"].to(one.device, self._dtype),
            )
            for name, one in numbers.items()
            if f"{name}.mean0" in state
        }
