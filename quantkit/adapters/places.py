"""Tell where a checkpoint stores what a LoRA changes: matrices of fused experts, and small dense linears."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quantkit.checkpoint.lora_adapter import FusedParameters
from quantkit.checkpoint.source import Checkpoint
from quantkit.model.experts import find_spec, is_fused_experts
from quantkit.model.names import ExpertPart, expert_parts, model_names
from quantkit.model.structure import stored_model


@dataclass(frozen=True)
class Places:
    """Stored names of the parameters of a checkpoint's model, which is built on first use."""

    checkpoint: Checkpoint

    @cached_property
    def _model(self) -> Any:
        return stored_model(self.checkpoint)

    @cached_property
    def _stored(self) -> dict[str, str]:
        names = model_names(self._model, self.checkpoint.tensors)
        return {parameter: stored for stored, (parameter, fused) in names.items() if not fused}

    @cached_property
    def _matrices(self) -> dict[str, dict[tuple[int, int], tuple[str, ExpertPart]]]:
        found: dict[str, dict[tuple[int, int], tuple[str, ExpertPart]]] = {}
        for name, part in expert_parts(self._model, self.checkpoint.tensors).items():
            found.setdefault(part.parameter, {})[part.expert, part.part] = (name, part)
        return found

    def weight(self, module: str) -> str | None:
        """Return the stored name of the weight of `module`; None unless it is a single tensor."""
        return self._stored.get(f"{module}.weight")

    def matrices(self, parameter: str) -> Mapping[tuple[int, int], tuple[str, ExpertPart]]:
        """Return stored name and place of each matrix in a fused parameter, by expert and index in it."""
        return self._matrices.get(parameter, {})

    def fused(self) -> dict[str, FusedParameters]:
        """Return the parameters of all fused experts of the model, by module."""
        return {
            name: _parameters(module)
            for name, module in self._model.named_modules()
            if is_fused_experts(module)
        }


def _parameters(experts: Any) -> FusedParameters:
    names = tuple(name for name, _ in experts.named_parameters(recurse=False))
    spec = find_spec(experts)
    if isinstance(spec, str):
        return FusedParameters(len(experts.down_proj), dict.fromkeys(names, spec))
    # PEFT asks the module if its parameters are [E, K, N]. Some are, and do not say so.
    told = spec.transposed == bool(getattr(experts, "is_transposed", False))
    turned = f"{type(experts).__name__} stores its matrices transposed, which PEFT does not know"
    reasons = {
        name: "it is no matrix of the experts" if name not in spec.parameters else None if told else turned
        for name in names
    }
    return FusedParameters(len(experts.down_proj), reasons)
