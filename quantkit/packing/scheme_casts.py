"""Schemes of packed modules after a cast or with rounded inputs, made before torch.compile traces a module.

torch.compile cannot trace the making of a scheme token, so `prepare` makes the tokens beforehand.
"""

from dataclasses import replace

import torch

from quantkit.packing.activations import ActivationScheme
from quantkit.packing.scale_types import SCALE_TYPES
from quantkit.packing.schemes import Scheme

#: Scheme after a cast of its scales, by scheme and scale dtype; with activations, by that of the weights too.
_CAST: dict[Scheme, dict[torch.dtype, Scheme]] = {}
_WITH_INPUTS: dict[tuple[Scheme, ActivationScheme], Scheme] = {}


def prepare(scheme: Scheme, activations: ActivationScheme | None = None) -> None:
    """Precompute the results of `with_scales` and `with_inputs` for a scheme of weights."""
    if scheme not in _CAST:
        _CAST[scheme] = {
            dtype: replace(scheme, scale_dtype=dtype)
            for dtype, scale in SCALE_TYPES.items()
            if scale.signed and not scale.relative
        }
    for prepared in (scheme, *_CAST[scheme].values()):
        _ = prepared.token
        if activations is not None:
            _WITH_INPUTS[prepared, activations] = replace(prepared, activations=activations)
            _ = _WITH_INPUTS[prepared, activations].token


def with_scales(scheme: Scheme, dtype: torch.dtype) -> Scheme:
    """Return the scheme with scales of `dtype`."""
    if dtype == scheme.scale_dtype:
        return scheme
    return _CAST[scheme].get(dtype) or replace(scheme, scale_dtype=dtype)


def with_inputs(scheme: Scheme, activations: ActivationScheme) -> Scheme:
    """Return a scheme of weights with `activations`."""
    return _WITH_INPUTS.get((scheme, activations)) or replace(scheme, activations=activations)
