"""Prompts too long for a CUDA graph: a forward with fused kernels for each length, launched kernel by kernel.

Computing takes the GPU longer than launching takes the host, so a graph would gain nothing. Fusion does:
fewer kernels read and write less memory.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.runtime.cuda_graphs.capture import Inputs, NotCaptured, cloned, copy_tensors
from quantkit.runtime.passes.fused_forward import fused_forward, warn_unchanged

#: Largest batch size times padded length. Keys and values are in memory twice until they are copied.
FUSED_TOKENS = 32768
#: Shapes remembered after one prompt, until they come again; also the most forwards that are kept.
SHAPES = 64


class Recurring:
    """Set of keys, such as shapes of prompts, that came once: it tells which keys come again."""

    def __init__(self) -> None:
        self._once: OrderedDict[Any, None] = OrderedDict()

    def comes_again(self, key: Any) -> bool:
        """Return True if `key` came before, and forget it; otherwise remember it and return False."""
        if key in self._once:
            del self._once[key]
            return True
        self._once[key] = None
        if len(self._once) > SHAPES:
            self._once.popitem(last=False)
        return False


@dataclass(frozen=True, eq=False)
class _FusedPrompt:
    """Forward with fused kernels for prompts of one shape, and the tensors that it reads."""

    inputs: Inputs
    run: Callable[[], Any]

    def __call__(self, padded: Inputs) -> Any:
        """Return the output for padded inputs; its tensors are not overwritten later."""
        copy_tensors(padded, self.inputs)
        return self.run()


class LongPrompts:
    """Forwards with fused kernels for long prompts of a model, one for each padded shape.

    `forward` runs the model on padded inputs. The first prompt of a shape runs without fusion. At the second,
    the forward is traced, fused and checked, which takes several times as long. Once a forward cannot be
    fused, or lacks memory, all later prompts run without fusion. Only one thread at a time runs here.
    """

    def __init__(self, forward: Callable[[Inputs], Any]) -> None:
        self._forward = forward
        self._lock = threading.Lock()
        self._recurring = Recurring()
        self._prompts: OrderedDict[Any, _FusedPrompt] = OrderedDict()
        self._is_off = False

    def run(self, key: Any, padded: Inputs, copied: Callable[[Any], Any]) -> Any:
        """Run the fused forward on `padded`; return `copied(output)`.

        Returns None if the caller must run the model. `key` is the shapes of `padded`. `copied` copies the
        output to the caller's cache; if it raises, it must leave that cache unchanged.
        """
        # With a mask, attention takes longer than all that fusion saves.
        if self._is_off or padded["attention_mask"] is not None:
            return None
        try:
            with self._lock:
                prompt = self._prompt_of(key, padded)
                output = None if prompt is None else prompt(padded)
            return None if output is None else copied(output)
        except torch.OutOfMemoryError:
            self._turn_off()
            warn_unchanged("long prompts", "there was too little memory for one with fused launches")
        return None

    def _prompt_of(self, key: Any, padded: Inputs) -> _FusedPrompt | None:
        """Return the fused forward for inputs with this `key`; None if there is none.

        If the key came once before, the forward is made now, from `padded`.
        """
        if key in self._prompts:
            self._prompts.move_to_end(key)
        elif self._recurring.comes_again(key):
            self._fuse(key, padded)
        return self._prompts.get(key)

    def _fuse(self, key: Any, padded: Inputs) -> None:
        """Fuse a forward for prompts like `padded` and keep it for `key`; turn fusion off if that fails."""
        static = cloned(padded)

        def forward() -> Any:
            return self._forward(static)

        run = forward
        try:
            run = fused_forward("long prompts", forward, static)
        except NotCaptured as error:
            warn_unchanged("long prompts", str(error))
        if run is forward:
            self._turn_off()
            return
        self._prompts[key] = _FusedPrompt(static, run)
        if len(self._prompts) > SHAPES:
            self._prompts.popitem(last=False)

    def _turn_off(self) -> None:
        """Run all later prompts without fusion, and free the forwards that were kept."""
        self._is_off = True
        self._prompts.clear()
