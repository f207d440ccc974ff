"""Build the student of a run: the original model, with the packed linears that calibration made."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from quantkit.calibrate.learned.latent_linear import LatentLinear
from quantkit.checkpoint.source import Checkpoint
from quantkit.model.blocks import Decoder
from quantkit.model.distributed import Ranks
from quantkit.model.experts import DOWN
from quantkit.packing.activations import ActivationScheme
from quantkit.quantization.blockwise.block_tasks import BlockTasks, weight_of
from quantkit.quantization.blockwise.layer_quantizer import Solver, packed_of
from quantkit.quantization.distill.residence import Residence
from quantkit.quantization.distill.stacks import Stacks
from quantkit.quantization.distill.student import Norm, Student
from quantkit.quantization.distill.trained_weights import Place
from quantkit.quantization.plan import Plan
from quantkit.quantization.task import Task
from quantkit.workers import working


def trained_name(block: BlockTasks, name: str) -> str:
    """Return the name that a student has for `name`, a linear of `block` or a matrix of its experts.

    That is, with the name of the block, the parameter of a linear, and the name of a matrix as it is.
    """
    inside = "weight" if block.is_head else name if name in block.parts else weight_of(name)
    return f"{block.name}.{inside}"


def build_student(
    model: Any,
    decoder: Decoder,
    blocks: tuple[BlockTasks, ...],
    planned: Plan,
    linears: Mapping[str, Task],
    norms: Mapping[str, Task],
    directory: Path,
    residence: Residence,
) -> Student:
    """Build a student of `model`, the original with all weights.

    `linears`, which may be matrices of experts, and `norms` are trained, by name. What else is packed has the
    weights that it will have. Dense tensors that calibration changed are as work files in `directory` say.
    """
    stacks = Stacks(residence)
    fixed: dict[str, torch.Tensor] = {}
    activations: dict[str, ActivationScheme] = {}
    originals = dict(model.named_parameters(remove_duplicate=False))
    calibrated = set()
    for block in blocks:
        stored = Checkpoint.of_files([directory / block.filename]) if block.tasks else None
        for name, task in block.tasks.items():
            assert stored is not None and task.scheme is not None
            calibrated.add(task.source.name)
            packed = packed_of(stored, task).to(decoder.device)
            place = _place(block, name)
            if task.scheme.activations is not None and not _is_inside(place):
                activations[place.parameter.rpartition(".")[0]] = task.scheme.activations
            if place.part is not None and place.parameter not in fixed:
                fixed[place.parameter] = originals[place.parameter].detach().clone()
            known = trained_name(block, name)
            if known in linears:
                stacks.add(known, LatentLinear(decoder.read(task.source.name), packed), place)
            elif place.part is None:
                fixed[place.parameter] = packed.dequantize(decoder.dtype)
            else:
                place.of(fixed[place.parameter]).copy_(packed.dequantize(decoder.dtype))
        for parameter, task in block.changed.items():
            assert stored is not None
            tensor = stored.read(task.outputs[0].name)
            fixed[f"{block.name}.{parameter}"] = tensor.to(decoder.device, decoder.dtype)
    stacks.close()
    fixed |= _with_tied(_packed_later(planned, calibrated, decoder), originals, {*fixed, *stacks.rows})
    for parameter, task in norms.items():
        weight = fixed.pop(parameter, None)
        if weight is None:
            weight = decoder.read(task.source.name)
        stacks.add_norm(parameter, Norm(weight, task.outputs[0].torch_dtype))
    names = [name for name in decoder.block_names if not decoder.block(name).is_linear]
    return Student(model, stacks.trained, stacks.places, stacks.rows, fixed, activations, residence, names)


def _place(block: BlockTasks, name: str) -> Place:
    """Return where a task of `block` is in the model."""
    part = block.parts.get(name)
    if part is None:
        return Place(trained_name(block, name))
    return Place(f"{block.name}.{part.parameter}", part)


def _is_inside(place: Place) -> bool:
    """Return True if the inputs of a matrix arise inside of fused experts, where nothing rounds them."""
    return place.part is not None and place.parameter.rpartition(".")[2] == DOWN


def _with_tied(
    packed: dict[str, torch.Tensor], originals: Mapping[str, torch.Tensor], others: Collection[str]
) -> dict[str, torch.Tensor]:
    """Add the names that share a parameter of the original with one of `packed`, without `others`."""
    names = {id(originals[name]): name for name in packed}
    tied = {name: names[id(one)] for name, one in originals.items() if id(one) in names}
    return {name: packed[of] for name, of in tied.items() if name in packed or name not in others}


def _packed_later(planned: Plan, calibrated: set[str], decoder: Decoder) -> dict[str, torch.Tensor]:
    """Return the weights of what is packed without calibration, such as an embedding, by parameter."""
    tasks = {
        task.source.name: task
        for shard in planned.shards
        for task in shard.tasks
        if task.scheme is not None and task.method is not None and task.source.name not in calibrated
    }
    found: dict[str, torch.Tensor] = {}
    with working(1, "quantize") as workers:
        solver = Solver(decoder.read, decoder.device, workers, 1, Ranks())
        for parameter in decoder.shapes:
            task = tasks.get(decoder.stored_name(parameter) or "")
            if task is not None:
                packed = solver.solve({parameter: task}, {})[parameter].packed
                found[parameter] = packed.dequantize(decoder.dtype)
    return found
