"""Round merged linears again by methods that take calibration data.

The model with the adapter runs block by block, as in `quantize`. What the adapter leaves alone in blocks runs
as it is packed, so that Hessians are of the inputs that the merged checkpoint has. Methods that correct the
input error see the unrounded model with the adapter beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from quantkit.adapters.linears import OTHER_SCALE, Merged, MergedWeights
from quantkit.adapters.samples_again import read_again
from quantkit.calibrate.data.texts import Texts
from quantkit.calibrate.methods import METHODS, Method, method_named
from quantkit.checkpoint.model_record import ModelRecord
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import UsageError, first_of
from quantkit.model.blocks import Decoder
from quantkit.model.experts import DOWN
from quantkit.model.names import ExpertPart
from quantkit.model.structure import Structure
from quantkit.packing.activations import ActivationScheme
from quantkit.packing.schemes import Scheme
from quantkit.quantization.blockwise.block_tasks import BlockTasks, as_listed, weight_of, work_bytes
from quantkit.quantization.blockwise.calibration import Calibration
from quantkit.quantization.blockwise.pipeline import compute_dtype
from quantkit.quantization.requantize import kept_scale
from quantkit.quantization.task import Task
from quantkit.targets.packed_source import StoredMatrix


@dataclass(frozen=True)
class Repeated:
    """Linears with the methods that round them, and how those with data are calibrated.

    calibration  samples and tasks; None if no method takes data
    notes        which methods are others than before, and why; notes on the samples
    rescaled     modules whose global scale is fitted anew
    """

    linears: list[Merged]
    calibration: Calibration | None
    notes: tuple[str, ...]
    rescaled: frozenset[str] = frozenset()


def repeat_methods(
    found: Sequence[Merged],
    weights: MergedWeights,
    files: Checkpoint,
    structure: Structure,
    given: str | Texts | None,
) -> Repeated:
    """Give the linears `found` the methods that they had, as far as these can be repeated.

    `files` and `structure` are of the packed checkpoint. `given` are calibration texts in place of those that
    the manifest names. Raises `UsageError` for texts that no method takes.
    """
    wanted, reasons = dict[str, Method](), dict[str, str]()
    for one in found:
        if isinstance(one.tensor, StoredMatrix) and one.stored is not None:
            method, why = closest(one.stored, one.tensor.scheme)
            if method is not None and method.needs_data:
                wanted[one.module] = method
            if why is not None:
                reasons[one.module] = why
    if not wanted:
        if given is not None:
            raise UsageError(
                "calibration data was given, but no linear that the adapter changes was rounded by a method "
                "that takes any. Leave it out."
            )
        return Repeated(list(found), None, replacements(found, weights.record, files, reasons))
    merged = weights.with_adapter(found)
    decoder = Decoder(merged, weights.device, compute_dtype(merged, weights.device))
    read = read_again(merged, weights.record, files.directory, given, decoder.embedding_rows)
    if read.samples is None:
        why = f"whose data {read.why_not}; --calibration names other texts"
        also = {name: f"{reasons[name]}, and {why}" if name in reasons else why for name in wanted}
        return _without_data(found, weights.record, files, {**reasons, **also})
    parts = {one.name: decoder.expert_part(one.source) for one in found if one.part is not None}
    outside = {name for name in wanted if _block_of(name, decoder) is None}
    outside |= {one.module for one in found if one.name in parts and parts[one.name] is None} & wanted.keys()
    reasons |= dict.fromkeys(outside, "which takes inputs, and the model runs it in no block")
    if len(outside) == len(wanted):
        return _without_data(found, weights.record, files, reasons)
    linears = [
        replace(one, method=wanted[one.module]) if one.module in wanted.keys() - outside else one
        for one in found
    ]
    beside = read.samples.beside[0] if read.samples.beside else None
    decoder.check_runs(read.samples.tokens[:1], beside)
    stays = None
    if weights.original is not None:
        stays = Decoder(weights.view, weights.device, decoder.dtype)
        stays.check_runs(read.samples.tokens[:1], beside)
    inputs = _stored_inputs(linears, files)
    tasks = {
        one.name: _task(one, weights, inputs, merged)
        for one in linears
        if isinstance(one.tensor, StoredMatrix)
        and (one.part is None or parts[one.name] is not None)
        and _block_of(one.module, decoder) is not None
    }
    rounded = rounded_modules(weights.view, files, structure)
    blocks = _blocks(linears, tasks, parts, rounded, decoder, stays)
    size = work_bytes(blocks, read.samples, decoder.hidden_size)
    calibration = Calibration(read.samples, read.options.seed, decoder, blocks, size)
    notes = replacements(linears, weights.record, files, reasons)
    rescaled = frozenset(str(task.module) for task in tasks.values() if _is_rescaled(task))
    return Repeated(linears, calibration, (*notes, *read.samples.notes), rescaled)


def closest(stored: str, scheme: Scheme) -> tuple[Method | None, str | None]:
    """Return the method that comes closest to `stored` for some linears alone; None if there is none.

    Also returns the reason if it is another. Steps that scale inputs change other tensors, and training
    changes all of them.
    """
    if any(name not in METHODS for name in stored.split(",")):
        return None, "which this quantkit does not have"
    method = method_named(stored)
    why = None
    if method.distill is not None:
        why = "which trains all weights of a model together"
    elif method.input_scaling is not None:
        why = "which scales inputs by tensors that stay as they are"
    if method.alone is not None:
        method = method_named(method.alone)
    return (None if method.lacks(scheme) else method), why


def replacements(
    found: Sequence[Merged], record: ModelRecord, files: Checkpoint, reasons: Mapping[str, str]
) -> tuple[str, ...]:
    """Return a note for each change of methods, with its linears; `reasons` are by module."""
    notes = []
    if record.source is None:
        notes.append(f"{files.directory} has no manifest, so the methods that rounded it are not known")
    # Experts have many matrices of one name.
    changes: dict[tuple[str, str], dict[str, None]] = {}
    for one in found:
        if one.method is not None and one.method.name != one.stored:
            why = reasons.get(one.module)
            before = f"not by {one.stored}" if one.stored else "as the method before is not known"
            key = one.method.name, before if why is None else f"{before}, {why}"
            changes.setdefault(key, {})[one.module] = None
    for (after, why), modules in changes.items():
        notes.append(f"{first_of(list(modules))}: rounded by {after} now, {why}")
    return tuple(notes)


def rounded_modules(view: Checkpoint, files: Checkpoint, structure: Structure) -> dict[str, ActivationScheme]:
    """Return the activation scheme of each module of a packed checkpoint, with the number of static scales.

    Fused experts are one module, with the scheme of gate and up.
    """
    numbers: dict[str, list[float]] = {}
    schemes: dict[str, ActivationScheme] = {}
    for matrix in (one for one in view.tensors.values() if isinstance(one, StoredMatrix)):
        module, chosen = matrix.module, matrix.scheme.activations
        linear = structure.linears.get(module)
        if chosen is None or linear is None:
            continue
        if linear.kind == "experts":
            module, _, leaf = module.rpartition(".")
            if leaf == DOWN:
                continue
        schemes[module] = chosen
        if chosen.part is not None:
            stored = files.read(matrix.stored.part_name(matrix.name, chosen.part))
            numbers.setdefault(module, []).append(float(stored))
    return {
        module: one.bind(*numbers[module]) if module in numbers else one for module, one in schemes.items()
    }


def with_note(detail: Mapping[str, object], rescaled: bool) -> dict[str, object]:
    """Return the `detail` of a linear; its note says so if its global scale was fitted anew."""
    notes = [detail.get("note"), OTHER_SCALE if rescaled else None]
    return {**detail, "note": "; ".join(str(one) for one in notes if one is not None) or None}


def _without_data(
    found: Sequence[Merged], record: ModelRecord, files: Checkpoint, reasons: Mapping[str, str]
) -> Repeated:
    return Repeated(list(found), None, replacements(found, record, files, reasons))


def _block_of(module: str, decoder: Decoder) -> str | None:
    """Return the block that has `module`, which may be the lm_head; None without one."""
    if module == decoder.head_name:
        return module
    return next((name for name in decoder.block_names if f"{module}.".startswith(f"{name}.")), None)


def _stored_inputs(found: Sequence[Merged], files: Checkpoint) -> dict[str, dict[str, float]]:
    """Return the numbers of static input scales that are stored for each matrix, by module and matrix."""
    numbers: dict[str, dict[str, float]] = {}
    for one in found:
        matrix = one.tensor
        inputs = matrix.scheme.activations if isinstance(matrix, StoredMatrix) else None
        if isinstance(matrix, StoredMatrix) and inputs is not None and inputs.part is not None:
            stored = files.read(matrix.stored.part_name(matrix.name, inputs.part))
            numbers.setdefault(one.module, {})[one.name] = float(stored)
    return numbers


def _task(
    one: Merged, weights: MergedWeights, inputs: Mapping[str, Mapping[str, float]], merged: Checkpoint
) -> Task:
    """Return the task that rounds a packed matrix; it writes the tensors of the packed checkpoint."""
    matrix = one.tensor
    assert isinstance(matrix, StoredMatrix)
    parts = tuple(
        (part, TensorSpec(stored.name, stored.dtype, stored.shape)) for part, stored in matrix.parts.items()
    )
    scheme, shared, reach, own = matrix.scheme, None, float("inf"), None
    if one.module in inputs:
        assert scheme.activations is not None
        numbers = inputs[one.module]
        scheme = replace(scheme, activations=scheme.activations.bind(*numbers.values()))
        own = None if one.part is None else numbers[one.name]
    if "global_scale" in matrix.parts:
        largest = float(merged.read(one.source).abs().max())
        shared, reach = kept_scale(weights.packed(matrix), largest)
    outputs = tuple(spec for _, spec in parts)
    source = merged.tensors[one.source]
    return Task(
        *(source, outputs, one.module, scheme, one.method, parts),
        own_inputs=own,
        shared=shared,
        reach=reach,
    )


def _is_rescaled(task: Task) -> bool:
    scheme = task.scheme
    assert scheme is not None
    return scheme.global_scale and not (scheme.column_scale or scheme.is_fitted) and task.shared is None


def _blocks(
    linears: Sequence[Merged],
    tasks: Mapping[str, Task],
    parts: Mapping[str, ExpertPart | None],
    rounded: Mapping[str, ActivationScheme],
    decoder: Decoder,
    stays: Decoder | None,
) -> tuple[BlockTasks, ...]:
    """Return the tasks of each block up to the last one with a method that takes data, lm_head included.

    Parameters that the adapter does not change run as in `stays`, by default as in `decoder`.
    """
    names = decoder.block_names
    needing = {_block_of(name, decoder) for name, task in tasks.items() if task.needs_inputs}
    has_head = decoder.head_name in needing
    count = len(names) if has_head else 1 + max(at for at, name in enumerate(names) if name in needing)

    changed = dict.fromkeys(weight_of(one.module) if one.part is None else one.module for one in linears)
    owners = {name: _block_of(name, decoder) for name in (*tasks, *rounded, *changed)}

    def inside(block: str, named: Mapping[str, object]) -> dict[str, str]:
        """Return the modules or parameters of a block, by name inside it; "" is the block itself."""
        own = [name for name in named if owners[name] == block]
        return {name.removeprefix(block).removeprefix("."): name for name in own}

    def parts_of(block: str, own: Mapping[str, str]) -> dict[str, ExpertPart]:
        found = {name: parts.get(full) for name, full in own.items()}
        return {
            name: replace(part, parameter=part.parameter.removeprefix(f"{block}."))
            for name, part in found.items()
            if part is not None
        }

    blocks = []
    for at, block in enumerate(names[:count]):
        parameters = decoder.parameters(block)
        kept: dict[str, Callable[[], torch.Tensor]] = {}
        if stays is not None:
            own = inside(block, changed)
            untouched = (name for name in parameters if name not in own)
            kept = {name: partial(stays.parameter, f"{block}.{name}") for name in untouched}
        own = inside(block, tasks)
        of_experts = parts_of(block, own)
        blocks.append(
            BlockTasks(
                block,
                as_listed({name: tasks[full] for name, full in own.items()}, of_experts, parameters),
                at,
                of_experts,
                kept=kept,
                rounded={name: rounded[module] for name, module in inside(block, rounded).items()},
            )
        )
    if has_head:
        head = decoder.head_name
        assert head is not None
        blocks.append(BlockTasks(head, {head: tasks[head]}, is_head=True))
    return tuple(blocks)
