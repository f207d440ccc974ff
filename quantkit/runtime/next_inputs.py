"""Inputs of a decoding step made from those of the step before.

transformers prepares each step anew, by some 40 small operations and a walk over the config, to add one
column to a mask and 1 to positions. The host needs longer for that than a GPU for a step of a 1B model. Here
the same tensors are advanced, once two steps have shown that they are then what transformers makes.
"""

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.runtime.cuda_graphs.capture import Inputs, outline, tensors_of
from quantkit.runtime.host_copy import HostCopy

#: Inputs that count tokens.
_POSITIONS = ("position_ids", "cache_position")
#: Steps in a row that have to be as foreseen.
_PROOFS = 2


class NextInputs:
    """The inputs of the steps of one generation: `advance` foresees them, `compare` checks what it foresees.

    It never `is_proved` for texts that grow longer than a window of attention, whose masks lose columns.
    """

    def __init__(self, config: Any, most: int | None) -> None:
        """For texts of up to `most` tokens, prompt included, None for any number; `config` is the model's."""
        text = config.get_text_config(decoder=True)
        windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
        is_bounded = most is not None and all(window is None or window >= most for window in windows)
        #: None while it is not known.
        self._is_right: bool | None = None if is_bounded else False
        self._last: Inputs | None = None
        self._proofs: list[HostCopy] = []

    @property
    def is_proved(self) -> bool:
        """Whether enough steps were as foreseen. Does not wait for the step that runs."""
        if self._is_right is None and len(self._proofs) == _PROOFS:
            self._is_right = all(bool(proof.get()) for proof in self._proofs)
        return self._is_right is True

    def compare(self, prepared: Inputs, length: int) -> None:
        """Take what transformers prepared for a step, and compare it with what would have been foreseen.

        `length` is the number of tokens of each text, with that which the step gets.
        """
        if self._is_right is False:
            return
        if self._last is not None:
            found = _advanced(self._last, prepared["input_ids"], length)
            if outline(found) != outline(prepared):
                self._is_right = False
                return
            pairs = zip(tensors_of(found), tensors_of(prepared), strict=True)
            self._proofs.append(HostCopy(torch.stack([(one == other).all() for one, other in pairs]).all()))
        self._last = prepared

    def advance(self, tokens: torch.Tensor, length: int) -> Inputs:
        """The inputs of the step that gets `tokens` int64 [B], of texts of `length` tokens with these."""
        assert self._last is not None
        self._last = _advanced(self._last, tokens[:, None], length)
        return self._last


def _advanced(inputs: Mapping[str, Any], tokens: torch.Tensor, length: int) -> Inputs:
    """The inputs of the step after that of `inputs`, which gets `tokens` [B, 1]; `inputs` do not change."""
    found = {name: _next(name, value, length) for name, value in inputs.items()}
    return found | {"input_ids": tokens}


def _next(name: str, value: Any, length: int) -> Any:
    if isinstance(value, Mapping):
        # Masks of each kind of layer.
        return {kind: _next(name, part, length) for kind, part in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    if name in _POSITIONS:
        return value + 1
    if name == "attention_mask" and value.ndim == 4 and length <= value.shape[-1]:
        # Of booleans or of numbers that are added to scores.
        mask = value.clone()
        mask[..., length - 1] = value.dtype == torch.bool
        return mask
    return value
