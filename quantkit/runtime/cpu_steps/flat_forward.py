"""Decoding on a CPU: the operations of a step are traced once and called one after the other for every token.

Python takes longer between them than they take, in a small model. `cpu_step` says what is left of a step.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from quantkit.model.architectures import is_fused_experts
from quantkit.runtime.cache.cache_name import renamed
from quantkit.runtime.cpu_steps.flat_step import flat
from quantkit.runtime.cuda_graphs.capture import Inputs, NotCaptured
from quantkit.runtime.cuda_graphs.decode import Captured, GraphedForward, why_not
from quantkit.runtime.fitness import modules_of
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.passes.fused_forward import rewritten_forward


class FlatForward(GraphedForward):
    """The forward of `model`, on a CPU, for one new token of each sequence, as a flat list of operations.

    Called as the model is. `forward` does so too within `generate`, before which it calls `renew`.
    """

    refusal = "decoding steps run module by module, which takes longer: %s"
    # The CPU would run a step that is one too many before it returns the text.
    defers = False

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._here = threading.local()

    @property
    def captures(self) -> bool:
        return bool(self._model.device.type == "cpu")

    def forward(self, *arguments: Any, **inputs: Any) -> Any:
        """The model's forward, with steps of `generate` as flat lists where they can be."""
        self._prepare()
        given = renamed(inputs)
        plain = arguments or not self._flat or getattr(self._thread, "plain", False)
        output = None if plain or why_not(given) is not None else self.step(given)
        return self.plain(*arguments, **inputs) if output is None else output

    def cache_for(self, tokens: int) -> Any:
        modules = modules_of(self._model)
        if any(isinstance(one, PackedExperts) or is_fused_experts(one) for one in modules):
            self._say("Python reads which experts are chosen")
            return None
        return super().cache_for(tokens)

    def generate(self, own: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """As of `GraphedForward`; `forward` has flat steps meanwhile, in this thread."""
        self.renew()
        with self._steps(True):
            return super().generate(own, *arguments, **options)

    def capture(self, step: Callable[[], Any], given: Inputs, rewind: Callable[[], None]) -> Captured:
        # What is traced is the model's own forward.
        with self._steps(False):
            run = rewritten_forward("decoding steps", flat, step, given, rewind)
        if run is step:
            # It would call this forward again, which has the lock.
            raise NotCaptured("what a step computes is not what torch sees of it")
        return None, run, []

    @contextmanager
    def _steps(self, flat: bool) -> Iterator[None]:
        """Whether `forward` has flat steps meanwhile, in this thread."""
        before = self._flat
        self._here.flat = flat
        try:
            yield
        finally:
            self._here.flat = before

    @property
    def _flat(self) -> bool:
        return getattr(self._here, "flat", False)
