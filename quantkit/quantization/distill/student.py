"""Student: a second model beside the original, with the weights that its packed linears have now."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Self

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quantkit.calibrate.learned.latent_linear import LatentLinear
from quantkit.packing.activations import ActivationScheme
from quantkit.quantization.distill.residence import Residence
from quantkit.quantization.distill.trained_weights import Place, TrainedWeights


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

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return this weight with `function` applied to it, such as a copy to another device."""
        found = copy.copy(self)
        found.numbers = {name: function(one) for name, one in self.numbers.items()}
        return found

    def clamp(self) -> None:
        """Do nothing: any number is a weight."""


#: What is trained: a stack of linears or of matrices of experts, or a norm.
Trained = LatentLinear | Norm


@dataclass(frozen=True)
class Rows:
    """Rows `start` to `stop` of the stack of a name: those of one linear or matrix of experts."""

    stack: str
    start: int
    stop: int


class Student:
    """Original model, and a student that shares with it the weights in which they do not differ.

    model      the original, with all its weights
    trained    stacks of linears or of matrices of experts, and norms, by name, where they are between steps
    places     where their parts are in the model, by the same names
    rows       rows of each linear or matrix of experts in its stack, by name
    weights    the student's weights of them
    network    the student as a model
    residence  where `trained` is between steps
    """

    def __init__(
        self,
        model: Any,
        trained: Mapping[str, Trained],
        places: Mapping[str, tuple[Place, ...]],
        rows: Mapping[str, Rows],
        fixed: Mapping[str, torch.Tensor],
        activations: Mapping[str, ActivationScheme],
        residence: Residence,
        block_names: Sequence[str],
    ) -> None:
        """Build the student.

        `fixed` are weights that differ from the original's and are not trained, by parameter; of fused
        experts the whole parameter. `activations` say how modules round their inputs, by name. `block_names`
        are those of the decoder blocks.
        """
        self._block_names = block_names
        self.model, self.trained, self.places, self.residence = model, trained, places, residence
        self.rows = rows
        originals = dict(model.named_parameters(remove_duplicate=False))
        tensors = {
            place.parameter: torch.empty_like(originals[place.parameter])
            if place.part is None
            else fixed[place.parameter]
            for place in chain.from_iterable(places.values())
        }
        self.weights = TrainedWeights(tensors, places)
        self.network = _sharing_copy(model)
        for name, tensor in fixed.items():
            owner, _, last = name.rpartition(".")
            setattr(self.network.get_submodule(owner), last, nn.Parameter(tensor, requires_grad=False))
        self.weights.put_into(self.network)
        for name, scheme in activations.items():
            self.network.get_submodule(name).register_forward_pre_hook(_rounding(scheme))
        self.update()

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.residence.device

    @property
    def numbers(self) -> dict[str, torch.Tensor]:
        """Return everything that is trained, float32, as `NAME.KIND`."""
        return {
            f"{name}.{kind}": tensor
            for name, one in self.trained.items()
            for kind, tensor in one.numbers.items()
        }

    @contextmanager
    def at_work(self, names: Iterable[str]) -> Iterator[dict[str, Trained]]:
        """Context manager: yield what is trained under these names on the device, to be changed in place.

        At the end the student has the new weights.
        """
        here = {name: self.residence.fetch_all(self.trained[name]) for name in names}
        yield here
        for name, one in here.items():
            self.weights.write(name, one.values())
            self.residence.bring_all_back(self.trained[name], one)

    def update(self) -> None:
        """Set the student's weights to those of the numbers as they are."""
        for name, one in self.trained.items():
            self.weights.write(name, self.residence.fetch_all(one).values())

    def linear(self, name: str) -> LatentLinear:
        """Return a linear or matrix of experts, on the device."""
        rows = self.rows[name]
        stack = self.trained[rows.stack]
        assert isinstance(stack, LatentLinear)
        alone = (rows.start, rows.stop) == (0, stack.shape[0])
        return self.residence.fetch_all(stack if alone else stack.rows(rows.start, rows.stop))

    @property
    def blocks(self) -> list[nn.Module]:
        """Return the decoder blocks of the student and of the original."""
        return [
            model.get_submodule(name) for model in (self.network, self.model) for name in self._block_names
        ]

    def compute_again(self) -> None:
        """Keep only the inputs of blocks in a pass with gradients; the rest is computed twice."""
        for name in self._block_names:
            module = self.network.get_submodule(name)
            module.forward = partial(
                checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
            )

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the student's logits [B, T, V] for tokens int64 [B, T]."""
        found: torch.Tensor = self.network(input_ids=tokens, use_cache=False).logits
        return found

    @torch.no_grad()
    def target(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the original's logits [B, T, V] for `tokens`, int64 [B, T]."""
        found: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return found


def _sharing_copy(model: nn.Module) -> Any:
    """Return a copy of the modules of a model that shares its parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(one): one for one in tensors})


def _rounding(scheme: ActivationScheme) -> Any:
    """Return a hook that rounds the inputs of a module; gradients pass straight through."""

    def before(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return scheme.round(inputs[0]), *inputs[1:]

    return before
