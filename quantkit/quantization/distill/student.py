"""Student: the original model with the weights that its packed linears have now."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from quantkit.calibrate.learned.latent_linear import LatentLinear
from quantkit.packing.activations import ActivationScheme


class Norm:
    """Weight of a norm, float32 [d], rounded to the dtype it is stored in when it is used."""

    def __init__(self, weight: torch.Tensor, stored: torch.dtype) -> None:
        self.numbers = {"norm": weight.float().clone()}
        self.steps = {"norm": 1.0}
        self._stored = stored

    @property
    def elements(self) -> int:
        return self.numbers["norm"].numel()

    def values(self) -> torch.Tensor:
        """Return a new tensor, float32 [d]."""
        return self.stored().to(torch.float32, copy=True)

    def stored(self) -> torch.Tensor:
        """Return the weight in its stored dtype."""
        return self.numbers["norm"].to(self._stored)

    def gradients(self, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"norm": gradient.float()}

    def clamp(self) -> None:
        """Do nothing: any number is a weight."""


@dataclass(frozen=True, eq=False)
class Student:
    """Original model, and what differs in the student, by the names of parameters.

    model        the original, with all its weights
    trained      linears and norms
    fixed        weights that are packed and not trained, in the dtype of the model
    activations  how modules round their inputs, by name
    """

    model: Any
    trained: Mapping[str, LatentLinear | Norm]
    fixed: Mapping[str, torch.Tensor]
    activations: Mapping[str, ActivationScheme]

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        found: torch.device = next(self.model.parameters()).device
        return found

    @property
    def numbers(self) -> dict[str, torch.Tensor]:
        """Return everything that is trained, float32, as `PARAMETER.KIND`."""
        return {
            f"{parameter}.{kind}": tensor
            for parameter, one in self.trained.items()
            for kind, tensor in one.numbers.items()
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the current weights of what is trained, by parameter: leaves that collect gradients."""
        dtypes = {name: one.dtype for name, one in self.model.named_parameters(remove_duplicate=False)}
        return {name: one.values().to(dtypes[name]).requires_grad_() for name, one in self.trained.items()}

    def logits(self, tokens: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the student's logits [B, T, V] for tokens int64 [B, T]."""
        given = {"input_ids": tokens, "use_cache": False}
        with _rounding(self.model, self.activations):
            output = functional_call(
                self.model, {**self.fixed, **weights}, args=(), kwargs=given, tie_weights=False
            )
        found: torch.Tensor = output.logits
        return found

    @torch.no_grad()
    def target(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the original's logits [B, T, V]."""
        found: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return found


@contextmanager
def _rounding(model: nn.Module, activations: Mapping[str, ActivationScheme]) -> Iterator[None]:
    """Context manager: modules round their inputs, and gradients pass straight through."""

    def hook(scheme: ActivationScheme) -> Any:
        def before(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return scheme.round(inputs[0]), *inputs[1:]

        return before

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(hook(scheme))
        for name, scheme in activations.items()
    ]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
