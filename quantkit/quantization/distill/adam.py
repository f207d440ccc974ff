"""Adam (arXiv 1412.6980) whose means are bfloat16: they take 4 bytes of each number, not 8.

Both means move by at least 2 % of a gradient that differs much from them, which bfloat16 can hold. The
arithmetic is float32. Tensors are updated many at a time, as each launch of a GPU costs some microseconds.
"""

from collections.abc import Callable, Iterable, Mapping

import torch

from quantkit.quantization.distill.residence import Residence

#: Decay of the means of gradients and of their squares, and the least divisor: gradients of codes are small.
BETAS, EPSILON = (0.9, 0.98), 1e-15


class Adam:
    """Means by name, which stay at a residence; `state` and `restore` are for a resumed run."""

    def __init__(self, residence: Residence, dtype: torch.dtype = torch.bfloat16) -> None:
        self._residence, self._dtype = residence, dtype
        self._means: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step(
        self,
        numbers: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        rates: Mapping[str, float],
        count: int,
    ) -> None:
        """Move `numbers` (float32, on the device) with `gradients`, by name; it is step `count` from 1 on."""
        names, here = list(gradients), self._residence
        if not names:
            return
        for name in names:
            if name not in self._means:
                empty = torch.zeros_like(numbers[name], dtype=self._dtype)
                self._means[name] = here.keep(empty), here.keep(empty.clone())
        found = [gradients[name] for name in names]
        means = [[here.fetch(self._means[name][at]) for name in names] for at in (0, 1)]
        first, second = ([one.to(torch.float32, copy=True) for one in some] for some in means)
        torch._foreach_lerp_(first, found, 1 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, found, found, 1 - BETAS[1])
        torch._foreach_copy_(means[0], first)
        torch._foreach_copy_(means[1], second)
        for at, some in enumerate(means):
            for name, one in zip(names, some, strict=True):
                here.bring_back(self._means[name][at], one)
        del means
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

    def restore(self, read: Callable[[str], torch.Tensor], names: Iterable[str]) -> None:
        """Go on from the state of an earlier Adam of the numbers `names`, whose tensors `read` reads."""
        here = self._residence

        def kept(name: str) -> torch.Tensor:
            return here.keep(read(name).to(here.device, self._dtype))

        self._means = {name: (kept(f"{name}.mean0"), kept(f"{name}.mean1")) for name in names}
