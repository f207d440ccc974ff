"""Decode on a CPU from a list of operations: trace a step once, and run the list for every later token.

A step is a forward of one new token per sequence. In a small model, Python takes longer between operations
than the operations take; the list saves most of this time (`flat_step.py`).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from quantkit.model.experts import is_fused_experts
from quantkit.runtime.cache.cache_name import renamed
from quantkit.runtime.cpu_steps.flat_step import flat
from quantkit.runtime.cpu_steps.mapped_memory import mapped_memory
from quantkit.runtime.cpu_steps.prompt_attention import FEWEST
from quantkit.runtime.cuda_graphs import refusals
from quantkit.runtime.cuda_graphs.capture import Inputs, NotCaptured
from quantkit.runtime.cuda_graphs.decode import CapturedStep, GraphedForward, why_not
from quantkit.runtime.fitness import modules_of
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.passes.fused_forward import rewritten_forward
from quantkit.runtime.transformers.patches.attention import prompt_attention_in


class FlatForward(GraphedForward):
    """Forward of `model` on a CPU that runs steps of one new token per sequence from a list of operations.

    Call it like the model. Inside `generate`, `forward` does the same; elsewhere it is the model's forward.
    Prompts of some hundred tokens in 16-bit dtypes run with `prompt_attention`.
    """

    refusal = "decoding steps run module by module, which takes longer: %s"
    # False, because a CPU would finish a surplus step before it returns the text.
    defers = False

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._generating = threading.local()

    @property
    def captures(self) -> bool:
        return bool(self._model.device.type == "cpu")

    def forward(self, *arguments: Any, **inputs: Any) -> Any:
        """Run the model's forward; inside `generate`, run steps from a list of operations if possible."""
        self._prepare()
        call = renamed(inputs)
        plain = arguments or not self._flat or getattr(self._thread, "plain", False)
        output = None if plain or why_not(call) is not None else self.step(call)
        if output is not None:
            return output
        tokens = call.get("input_ids", arguments[0] if arguments else None)
        is_prompt = tokens is not None and tokens.shape[-1] >= FEWEST
        if not is_prompt:
            return self.plain(*arguments, **inputs)
        with prompt_attention_in(self._model), mapped_memory():
            return self.plain(*arguments, **inputs)

    def cache_for(self, tokens: int) -> Any:
        modules = modules_of(self._model)
        if any(isinstance(one, PackedExperts) or is_fused_experts(one) for one in modules):
            self._refuse(refusals.EXPERTS.because())
            return None
        return super().cache_for(tokens)

    def generate(self, own: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call `own`, the model's `generate`; inside, `forward` runs steps from lists of operations."""
        self.renew()
        with self._steps(True):
            return super().generate(own, *arguments, **options)

    def capture_step(
        self, step: Callable[[], Any], inputs: Inputs, rewind: Callable[[], None]
    ) -> CapturedStep:
        # Trace the model's own forward.
        with self._steps(False):
            run = rewritten_forward("decoding steps", flat, step, inputs, rewind)
        if run is step:
            # Tracing would call this forward again and wait for its own lock.
            raise NotCaptured(refusals.UNSEEN.because())
        return None, run, []

    @contextmanager
    def _steps(self, flat: bool) -> Iterator[None]:
        """Context manager: on this thread, `forward` runs steps from lists of operations if `flat`."""
        before = self._flat
        self._generating.flat = flat
        try:
            yield
        finally:
            self._generating.flat = before

    @property
    def _flat(self) -> bool:
        return getattr(self._generating, "flat", False)
