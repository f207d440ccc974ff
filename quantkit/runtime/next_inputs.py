"""Compute the inputs of a decoding step from those of the step before.

transformers prepares each step anew: some 40 small operations and a walk over the config, to add one column
to a mask and 1 to positions. On the host that takes longer than a GPU needs for a step of a 1B model. Here
the tensors are advanced directly, after 2 steps have shown that both ways give equal inputs.
"""

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.runtime.cuda_graphs.capture import Inputs, outline, tensors_of
from quantkit.runtime.host_copy import HostCopy

#: Inputs that count tokens.
_POSITIONS = ("position_ids", "cache_position")
#: Successive steps that must be predicted right before predictions are used.
_PROOFS = 2


class NextInputs:
    """Predicts the inputs of each decoding step from those of the step before; `advance` returns them.

    In the first steps, `compare` checks predictions against transformers; `is_proved` becomes True when they
    agree. It stays False for generations without a maximum length, or longer than an attention window: there
    the mask drops old columns, which is not predicted.
    """

    def __init__(self, config: Any, most: int | None) -> None:
        """Create a predictor for generations of up to `most` tokens, prompt included; None means no limit.

        `config` is the config of the model.
        """
        text = config.get_text_config(decoder=True)
        windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
        is_bounded = most is not None and all(window is None or window >= most for window in windows)
        #: None while undecided.
        self._is_right: bool | None = None if is_bounded else False
        self._last: Inputs | None = None
        self._proofs: list[HostCopy] = []

    @property
    def is_proved(self) -> bool:
        """Return True if the first 2 predictions were right. Does not wait for the running step."""
        if self._is_right is None and len(self._proofs) == _PROOFS:
            self._is_right = all(bool(proof.get()) for proof in self._proofs)
        return self._is_right is True

    def compare(self, prepared: Inputs, length: int) -> None:
        """Compare the inputs that transformers `prepared` for a step with those predicted; keep `prepared`.

        `length` is the number of tokens of each text, including the token that the step receives.
        """
        if self._is_right is False:
            return
        if self._last is not None:
            predicted = _advanced(self._last, prepared["input_ids"], length)
            if outline(predicted) != outline(prepared):
                self._is_right = False
                return
            pairs = zip(tensors_of(predicted), tensors_of(prepared), strict=True)
            self._proofs.append(HostCopy(torch.stack([(one == exact).all() for one, exact in pairs]).all()))
        self._last = prepared

    def advance(self, tokens: torch.Tensor, length: int) -> Inputs:
        """Return the predicted inputs of the step that receives `tokens` [B] int64.

        `length` is the number of tokens of each text, `tokens` included.
        """
        assert self._last is not None
        self._last = _advanced(self._last, tokens[:, None], length)
        return self._last


def _advanced(inputs: Mapping[str, Any], tokens: torch.Tensor, length: int) -> Inputs:
    """Return the inputs of the step after `inputs`, with `tokens` [B, 1] int64; does not modify `inputs`.

    `length` is the number of tokens of each text, `tokens` included.
    """
    advanced = {name: _next(name, value, length) for name, value in inputs.items()}
    return advanced | {"input_ids": tokens}


def _next(name: str, value: Any, length: int) -> Any:
    if isinstance(value, Mapping):
        # One mask per kind of layer.
        return {kind: _next(name, part, length) for kind, part in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    if name in _POSITIONS:
        return value + 1
    if name == "attention_mask" and value.ndim == 4 and length <= value.shape[-1]:
        # The mask is boolean, or additive with 0 for visible.
        mask = value.clone()
        mask[..., length - 1] = value.dtype == torch.bool
        return mask
    return value
