"""Build the student of a run: the original model, with the packed linears that calibration made."""

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.calibrate.learned.latent_linear import LatentLinear
from quantkit.checkpoint.output.work_files import WorkFiles
from quantkit.checkpoint.source import Checkpoint
from quantkit.model.blocks import Decoder
from quantkit.model.distributed import Ranks
from quantkit.packing.activations import ActivationScheme
from quantkit.quantization.blockwise.block_tasks import BlockTasks, weight_of
from quantkit.quantization.blockwise.layer_quantizer import Solver, packed_of
from quantkit.quantization.distill.student import Norm, Student
from quantkit.quantization.plan import Plan
from quantkit.quantization.task import Task
from quantkit.workers import working


def parameter_of(block: BlockTasks, name: str) -> str:
    """Return the weight in the model of a linear, by its name in `block.tasks`."""
    inside = "weight" if block.is_head else weight_of(name)
    return f"{block.name}.{inside}"


def build_student(
    model: Any,
    decoder: Decoder,
    blocks: tuple[BlockTasks, ...],
    planned: Plan,
    linears: Mapping[str, Task],
    norms: Mapping[str, Task],
    files: WorkFiles,
) -> Student:
    """Build a student of `model`, the original with all weights.

    `linears` and `norms` are trained, by parameter. What else is packed has the weights that it will have,
    and dense tensors that calibration changed are as it left them in `files`.
    """
    trained: dict[str, LatentLinear | Norm] = {}
    fixed: dict[str, torch.Tensor] = {}
    activations: dict[str, ActivationScheme] = {}
    originals = dict(model.named_parameters(remove_duplicate=False))
    calibrated = set()
    for block in blocks:
        stored = Checkpoint.of_files([files.path / block.filename]) if block.tasks else None
        for name, task in block.tasks.items():
            assert stored is not None and task.scheme is not None
            calibrated.add(task.source.name)
            packed = packed_of(stored, task).to(decoder.device)
            part = block.parts.get(name)
            if part is not None:
                whole = f"{block.name}.{part.parameter}"
                fused = fixed.setdefault(whole, originals[whole].detach().clone())
                part.of(fused).copy_(packed.dequantize(decoder.dtype))
                continue
            parameter = parameter_of(block, name)
            if task.scheme.activations is not None:
                activations[parameter.rpartition(".")[0]] = task.scheme.activations
            if parameter in linears:
                trained[parameter] = LatentLinear(decoder.read(task.source.name), packed)
            else:
                fixed[parameter] = packed.dequantize(decoder.dtype)
        for parameter, task in block.changed.items():
            assert stored is not None
            tensor = stored.read(task.outputs[0].name)
            fixed[f"{block.name}.{parameter}"] = tensor.to(decoder.device, decoder.dtype)
    fixed |= _packed_later(planned, calibrated, decoder)
    for parameter, task in norms.items():
        weight = fixed.pop(parameter, None)
        if weight is None:
            weight = decoder.read(task.source.name)
        trained[parameter] = Norm(weight, task.outputs[0].torch_dtype)
    return Student(model, trained, fixed, activations)


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
