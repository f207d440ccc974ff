"""Keep the static scales that a converted source stores: of the inputs of linears, of keys and of values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from quantkit.checkpoint.low_bit.static_scales import WEIGHTS_ALONE
from quantkit.checkpoint.low_bit.weight import stored_module
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, first_of
from quantkit.model.structure import Structure
from quantkit.packing.activations import ActivationScheme
from quantkit.packing.names import KV_PARTS
from quantkit.quantization.plan import Plan
from quantkit.quantization.plan_warnings import fused_sets
from quantkit.quantization.task import Task
from quantkit.recipes.recipe import Fate


@dataclass(frozen=True)
class KeptScales:
    """Static scales of a source, by module of the model.

    inputs    activation scheme of a linear, with the stored number; of experts, with the widest of theirs
    states    scale of the keys or values that k_proj or v_proj computes
    experts   stored number of the inputs of each matrix of experts, by the name of its weight
    dynamic   packed linears whose inputs the source rounds by dynamic scales, which are not kept
    """

    inputs: Mapping[str, ActivationScheme]
    states: Mapping[str, float]
    experts: Mapping[str, float] = field(default_factory=dict)
    dynamic: tuple[str, ...] = ()

    def with_activations(self, fates: Mapping[str, Fate]) -> dict[str, Fate]:
        """Return `fates` whose schemes also round the inputs, without the stored numbers, as in a recipe."""
        changed = dict(fates)
        for module, scheme in self.inputs.items():
            weights = fates[module].scheme
            assert weights is not None, "only packed linears keep the scales of their inputs"
            changed[module] = replace(fates[module], scheme=replace(weights, activations=scheme.unbound))
        return changed

    def bind(self, planned: Plan) -> Plan:
        """Return `planned` with the stored numbers of all scales of inputs, keys and values in its tasks."""
        return replace(
            planned,
            shards=tuple(
                replace(shard, tasks=tuple(self._bound(task) for task in shard.tasks))
                for shard in planned.shards
            ),
        )

    def _bound(self, task: Task) -> Task:
        module, scheme = task.module, task.scheme
        if module is None or scheme is None:
            return task
        if module in self.inputs:
            own = self.experts.get(task.source.name)
            task = replace(task, scheme=replace(scheme, activations=self.inputs[module]), own_inputs=own)
        return task if task.kv_part is None else replace(task, kv_scale=self.states[module])

    def notes(self) -> Iterator[str]:
        """Yield notes on linears that engines fuse, and on experts, with different scales of inputs."""
        apart = [members for members in fused_sets(self.inputs) if len(set(members.values())) > 1]
        if apart:
            more = f" and of {len(apart) - 1} more sets" if len(apart) > 1 else ""
            yield (
                f"the static input scales of {', '.join(apart[0])}{more} differ. quantkit keeps each; "
                "engines fuse these linears and take one scale for all."
            )
        if len(set(self.experts.values())) > 1:
            yield (
                "quantkit keeps the static input scales of each expert. It rounds the inputs of all experts "
                "of a layer by the largest, as vLLM does."
            )


def kept_scales(checkpoint: Checkpoint, structure: Structure, fates: Mapping[str, Fate]) -> KeptScales:
    """Read the static scales of a low-bit source whose linears have `fates`.

    Raises `CheckpointError` with the name of a scale that is missing, no positive finite number, or that the
    result cannot hold.
    """
    stored, read = checkpoint.activations, checkpoint.read_stored
    inputs, experts = dict[str, ActivationScheme](), dict[str, float]()
    used, dynamic = list[str](), list[str]()
    for name, linear in structure.linears.items():
        numbers: list[float] = []
        for tensor in (checkpoint.tensors.get(f"{one}.weight") for one in linear.stored):
            spec = None if tensor is None else tensor.grid_spec
            if fates[name].scheme is None or tensor is None or spec is None:
                continue
            if (found := stored.of_inputs(stored_module(tensor), spec.format)) is None:
                if stored.is_dynamic(stored_module(tensor), spec.format):
                    dynamic.append(name)
                continue
            scheme, scale = found
            numbers.append(scale.value(read))
            inputs[name] = scheme.bind(*numbers)
            experts |= {tensor.name: numbers[-1]} if linear.kind == "experts" else {}
            used.append(scale.tensor.name)
        if 0 < len(numbers) < len(linear.stored):
            raise CheckpointError(
                f"{len(numbers)} of the {len(linear.stored)} matrices of {name!r} have static scales of "
                f"inputs; expected one of each. {WEIGHTS_ALONE}."
            )
    states, names = _states(checkpoint, structure, fates)
    if left := stored.unused([*used, *names], read):
        raise CheckpointError(
            f"{left[0].file}: tensor {first_of(repr(one.name) for one in left)} is a scale or zero-point of "
            "activations that the packed linears cannot store; expected static scales of the inputs of "
            f"linears, of keys and of values. {WEIGHTS_ALONE}."
        )
    return KeptScales(inputs, states, experts, tuple(dict.fromkeys(dynamic)))


def _states(
    checkpoint: Checkpoint, structure: Structure, fates: Mapping[str, Fate]
) -> tuple[dict[str, float], list[str]]:
    """Return the scales of keys and values by module, and the names of their tensors.

    Either all attention layers have both, or none has any.
    """
    stored = checkpoint.activations
    layers: dict[str, str] = {}
    for name, linear in structure.linears.items():
        parent, _, leaf = name.rpartition(".")
        if leaf in KV_PARTS:
            layers[parent] = stored_module(checkpoint.tensors[f"{linear.stored[0]}.weight"]).rpartition(".")[
                0
            ]
    found = {parent: stored.of_states(attention) for parent, attention in layers.items()}
    if not any(scale for pair in found.values() for scale in pair):
        return {}, []
    states, names = dict[str, float](), []
    for parent, pair in found.items():
        stored.check_states(layers[parent])
        for leaf, scale in zip(KV_PARTS, pair, strict=True):
            module = f"{parent}.{leaf}"
            if scale is None:
                stored.raise_missing(f"{layers[parent]}.{leaf[0]}_scale", "stores scales of keys and values")
            if module not in fates or fates[module].scheme is None:
                raise CheckpointError(
                    f"tensor {scale.tensor.name!r} is stored beside {module!r}, which is not packed; "
                    f"expected packed k_proj and v_proj in each layer. {WEIGHTS_ALONE}."
                )
            states[module] = scale.value(checkpoint.read_stored)
            names.append(scale.tensor.name)
    return states, names
