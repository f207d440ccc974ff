"""Distillation of a run: which linears are trained, on what, and the work files in between.

distill-samples   what the original model wrote itself
distill-state-0   numbers and means of Adam, stored from time to time in two files by turns
distilled         the packed linears and norms in their final form, from which shards copy them
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.calibrate.latent_linear import LatentLinear
from quantkit.checkpoint.output.directory import OutputDirectory
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import UsageError
from quantkit.model.blocks import Decoder
from quantkit.model.distributed import Ranks
from quantkit.packing.tensor import PackedTensor
from quantkit.progress import Progress
from quantkit.quantization.blockwise.block_tasks import weight_of
from quantkit.quantization.blockwise.calibration import Calibration
from quantkit.quantization.blockwise.layer_quantizer import Solver, packed_of
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantization.distill.own_samples import own_samples
from quantkit.quantization.distill.student import Norm, Student
from quantkit.quantization.distill.training import Pool, Progressed, Training
from quantkit.quantization.plan import Plan
from quantkit.quantization.task import Task
from quantkit.workers import working

SAMPLES, RESULT = "distill-samples.safetensors", "distilled.safetensors"
STATES = ("distill-state-0.safetensors", "distill-state-1.safetensors")
FORMAT = {"format": "pt"}
#: Seconds between storing the state.
STATE_SECONDS = 120.0
#: Part of the time for writing samples.
SAMPLING = 0.2
#: Sequences that are held out to measure the divergence.
HELD_OUT = 16
#: Default time: seconds per weight, and the least.
SECONDS_PER_WEIGHT, LEAST_SECONDS = 600 / 100e6, 600.0
#: Note for a matrix whose method trains it, if the training does not cover it.
NOT_TRAINED = "it keeps the codes that it had before the training, which is not for experts"


@dataclass(frozen=True, eq=False)
class Distillation:
    """Linears to train by parameter, norms by parameter, and settings."""

    linears: Mapping[str, Task]
    norms: Mapping[str, Task]
    options: DistillOptions
    calibrated: Calibration
    planned: Plan

    @classmethod
    def of(
        cls, planned: Plan, calibrated: Calibration | None, options: DistillOptions, ranks: Ranks
    ) -> "Distillation | None":
        """Return the distillation of a plan; None if no method trains end to end.

        Raises `UsageError` for options without such a method, and for several ranks.
        """
        linears: dict[str, Task] = {}
        for block in () if calibrated is None else calibrated.blocks:
            for name, task in block.tasks.items():
                if task.method is not None and task.method.distill and name not in block.parts:
                    linears[f"{block.name}.{weight_of('' if block.is_head else name)}"] = task
        if calibrated is None or not linears:
            if options != DistillOptions():
                raise UsageError(
                    "a time or a number of steps is for methods that train, and no linear has one. Leave "
                    "it out, or choose --method distill."
                )
            return None
        if ranks.size > 1:
            raise UsageError(
                f"torchrun started {ranks.size} processes, and --method distill trains in one. Start "
                "quantkit without torchrun."
            )
        dense = {
            task.source.name: task for shard in planned.shards for task in shard.tasks if task.scheme is None
        }
        decoder = calibrated.decoder
        vectors = [
            name for name, shape in decoder.shapes.items() if len(shape) == 1 and name.endswith("weight")
        ]
        stored = {name: decoder.stored_name(name) for name in vectors if options.norm_rate}
        norms = {name: dense[one] for name, one in stored.items() if one in dense}
        return cls(linears, norms, options, calibrated, planned)

    @property
    def work_files(self) -> tuple[str, ...]:
        """Return the names of all work files."""
        return (SAMPLES, *STATES, RESULT)

    @property
    def specs(self) -> list[TensorSpec]:
        """Return the tensors of the result: all that calibration made, and norms."""
        tasks = [*self.calibrated_tasks, *self.norms.values()]
        return list({spec.name: spec for task in tasks for spec in task.outputs}.values())

    @property
    def calibrated_tasks(self) -> list[Task]:
        """Return the tasks of the work files of the calibration."""
        blocks = self.calibrated.blocks
        return [task for block in blocks for task in (*block.changed.values(), *block.tasks.values())]

    @property
    def work_bytes(self) -> int:
        """Return about how many bytes the work files take."""
        weights = sum(task.source.elements for task in self.linears.values())
        own = self.options.own_most * self.calibrated.samples.tokens.shape[1] * 4
        return own + 2 * 12 * weights + sum(spec.nbytes for spec in self.specs)

    @property
    def changed(self) -> frozenset[str]:
        """Return the dense tensors that are trained."""
        return frozenset(task.source.name for task in self.norms.values())

    def result(self, output: OutputDirectory) -> tuple[tuple[str, ...], dict[str, Any] | None]:
        """Return the files from which shards copy tensors, and what the manifest says of the training."""
        if not output.is_done(RESULT):
            return (), None
        return (RESULT,), output.details(RESULT)["distillation"]

    def reasons(self, dense: Mapping[str, str]) -> dict[str, str]:
        """Return the reasons why tensors are dense, and which of them are trained."""
        changed = self.changed
        return {
            name: reason + (", changed: trained" if name in changed else "") for name, reason in dense.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything that the written bytes depend on."""
        return vars(self.options)

    def seconds(self) -> float:
        """Return the time of the whole distillation."""
        weights = sum(task.source.elements for task in self.linears.values())
        return self.options.seconds or max(LEAST_SECONDS, SECONDS_PER_WEIGHT * weights)


def distill(one: Distillation, output: OutputDirectory, progress: Progress | None) -> None:
    """Write the work file with the trained linears and norms, unless it or all shards are done."""
    if output.complete or output.is_done(RESULT):
        return
    if all(output.is_done(shard.filename) for shard in one.planned.shards):
        return
    started = time.monotonic()
    report: Progress = progress or (lambda done, total, label: None)
    decoder = one.calibrated.decoder
    model = decoder.whole()
    own = _own(one, model, output, report)
    student = _student(one, model, output)
    training = Training(student, _pool(one, own), one.options, decoder.embedding_rows)
    stored = (
        max((output.details(name)["step"], name) for name in STATES if output.is_done(name))
        if any(map(output.is_done, STATES))
        else None
    )
    before = training.measure() if stored is None else output.details(stored[1])["before"]
    if stored is not None:
        _restore(training, output, stored[1])
    saved = time.monotonic()

    def left() -> float:
        return max(0.0, one.seconds() - (time.monotonic() - started))

    def on_step(at: Progressed, took: float) -> None:
        nonlocal saved
        total = at.total or 0
        if total:
            seconds = (total - at.step) * took
            minutes, rest = divmod(round(seconds), 60)
            report(
                at.step,
                total,
                f"distilling, step {at.step} of {total}, KL {at.loss:.4f}, {minutes}:{rest:02} left",
            )
        if total and at.step < total and time.monotonic() - saved >= STATE_SECONDS:
            _store(training, output, before)
            saved = time.monotonic()

    training.run(left, on_step)
    _write(
        one, student, output, {"before": before, "after": training.measure(), **_facts(one, training, own)}
    )


def _facts(one: Distillation, training: Training, own: torch.Tensor) -> dict[str, Any]:
    length = one.calibrated.samples.tokens.shape[1]
    return {
        "steps": training.at.step,
        "tokens": training.at.step * training.batch * length,
        "own_samples": len(own),
        "text_samples": len(one.calibrated.samples.tokens),
        "length": length,
        **{
            key: value for key, value in vars(one.options).items() if key not in ("steps", "seconds", "batch")
        },
    }


def _pool(one: Distillation, own: torch.Tensor) -> Pool:
    text = one.calibrated.samples.tokens
    kept = own if len(own) > 2 * HELD_OUT else text
    held = kept[: min(HELD_OUT, max(1, len(kept) // 8))]
    if kept is own:
        return Pool(text, own[len(held) :], held, one.calibrated.seed)
    return Pool(text[len(held) :] if len(text) > 1 else text, own, held, one.calibrated.seed)


def _own(one: Distillation, model: Any, output: OutputDirectory, report: Progress) -> torch.Tensor:
    """Return the samples that the model writes, int64 [P, T]; from their work file if it is there."""
    tokens, options = one.calibrated.samples.tokens, one.options
    if output.is_done(SAMPLES):
        return Checkpoint.of_files([output.path / SAMPLES]).read("tokens").long()
    most = options.own_most
    if options.steps is not None:
        kind = one.calibrated.decoder.device.type
        from quantkit.quantization.distill.training import BATCH

        most = min(most, HELD_OUT + round(options.steps * (options.batch or BATCH[kind]) * options.own))
    started, found, count = time.monotonic(), [], 0
    limit = SAMPLING * one.seconds() if options.steps is None else float("inf")
    if options.own and model.can_generate():
        for batch in own_samples(model, tokens, tokens.shape[1], one.calibrated.seed):
            found.append(batch)
            count += len(batch)
            passed = time.monotonic() - started
            report(min(count, most), most, f"the original writes samples, {count} of {most}")
            if count >= most or passed * (1 + 1 / len(found)) > limit:
                break
    own = torch.cat(found)[:most] if found else tokens[:0]
    if not len(own):
        return own
    with output.shard(SAMPLES, [TensorSpec("tokens", "I32", tuple(own.shape))], FORMAT) as file:
        file.write("tokens", own.int())
    return own


def _student(one: Distillation, model: Any, output: OutputDirectory) -> Student:
    decoder = one.calibrated.decoder
    trained: dict[str, LatentLinear | Norm] = {}
    fixed: dict[str, torch.Tensor] = {}
    activations = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    seen = set()
    for block in one.calibrated.blocks:
        if not block.tasks:
            continue
        files = Checkpoint.of_files([output.path / block.filename])
        for name, task in block.tasks.items():
            seen.add(task.source.name)
            packed = packed_of(files, task).to(decoder.device)
            part = block.parts.get(name)
            if part is not None:
                whole = f"{block.name}.{part.parameter}"
                fused = fixed.setdefault(whole, parameters[whole].detach().clone())
                part.of(fused).copy_(packed.dequantize(decoder.dtype))
                continue
            parameter = f"{block.name}.{weight_of('' if block.is_head else name)}"
            _rounds(activations, parameter, task)
            if parameter in one.linears:
                weight = decoder.read(task.source.name)
                trained[parameter] = LatentLinear(weight, packed)
            else:
                fixed[parameter] = packed.dequantize(decoder.dtype)
        for parameter, task in block.changed.items():
            fixed[f"{block.name}.{parameter}"] = files.read(task.outputs[0].name).to(
                decoder.device, decoder.dtype
            )
    fixed |= _rest(one, seen, decoder)
    for parameter, task in one.norms.items():
        weight = fixed.pop(parameter, None)
        weight = decoder.read(task.source.name) if weight is None else weight
        trained[parameter] = Norm(weight, task.outputs[0].torch_dtype)
    return Student(model, trained, fixed, activations)


def _rounds(activations: dict[str, Any], parameter: str, task: Task) -> None:
    if task.scheme is not None and task.scheme.activations is not None:
        activations[parameter.rpartition(".")[0]] = task.scheme.activations


def _rest(one: Distillation, seen: set[str], decoder: Decoder) -> dict[str, torch.Tensor]:
    """Return the weights of what is packed later, without data: such as an embedding."""
    found: dict[str, torch.Tensor] = {}
    rest = {
        task.source.name: task
        for shard in one.planned.shards
        for task in shard.tasks
        if task.scheme is not None and task.source.name not in seen
    }
    with working(1, "quantize") as workers:
        solver = Solver(decoder.read, decoder.device, workers, 1, Ranks())
        for parameter in decoder.shapes:
            task = rest.get(decoder.stored_name(parameter) or "")
            if task is not None and task.method is not None:
                packed = solver.solve({parameter: task}, {})[parameter].packed
                found[parameter] = packed.dequantize(decoder.dtype)
    return found


def _store(training: Training, output: OutputDirectory, before: float) -> None:
    old = [name for name in STATES if output.is_done(name)]
    name = next(name for name in STATES if name not in old)
    state = training.state()
    specs = [TensorSpec.of(key, tensor) for key, tensor in state.items()]
    with output.shard(name, specs, FORMAT) as file:
        file.detail.update(
            step=training.at.step, total=training.at.total, loss=training.at.loss, before=before
        )
        for key, tensor in state.items():
            file.write(key, tensor.cpu())
    for other in old:
        output.discard(other)


def _restore(training: Training, output: OutputDirectory, name: str) -> None:
    detail, files = output.details(name), Checkpoint.of_files([output.path / name])
    at = Progressed(detail["step"], detail["total"], detail["loss"])
    training.restore({key: files.read(key) for key in files.tensors}, at)


def _write(one: Distillation, student: Student, output: OutputDirectory, facts: dict[str, Any]) -> None:
    """Write the result: what was trained, and all else of the work files as it is."""
    filenames = [name for name in one.calibrated.quantized_files]
    files = Checkpoint.of_files([output.path / name for name in filenames])
    layers: dict[str, Any] = {}
    for filename in filenames:
        layers |= output.details(filename)["layers"]
    trained: dict[str, torch.Tensor] = {}
    for parameter, task in one.linears.items():
        linear = student.trained[parameter]
        assert isinstance(linear, LatentLinear) and task.module is not None
        packed = linear.packed()
        trained |= _stored(packed, task)
        weight = one.calibrated.decoder.read(task.source.name).float()
        error = float((weight - packed.dequantize()).double().square().sum())
        known = layers[task.module]
        layers[task.module] = {
            **{key: value for key, value in known.items() if key not in ("output", "block_error")},
            "squared": [error, known["squared"][1]],
        }
    for parameter, task in one.norms.items():
        norm = student.trained[parameter]
        assert isinstance(norm, Norm)
        trained[task.outputs[0].name] = norm.stored().cpu()
    for module, text in _untrained(one):
        known = layers[module]
        layers[module] = {**known, "note": "; ".join(filter(None, (known.get("note"), text)))}
    with output.shard(RESULT, one.specs, FORMAT) as file:
        file.detail.update(layers=layers, distillation=facts)
        for spec in one.specs:
            file.write(spec.name, trained[spec.name] if spec.name in trained else files.read(spec.name))


def _stored(packed: PackedTensor, task: Task) -> dict[str, torch.Tensor]:
    found = {}
    for part, spec in task.parts:
        tensor = torch.tensor(task.source.shape) if part == "shape" else packed.part(part)
        assert tensor is not None
        found[spec.name] = tensor.cpu().view(spec.torch_dtype)
    return found


def _untrained(one: Distillation) -> list[tuple[str, str]]:
    found = {}
    for block in one.calibrated.blocks:
        for name, task in block.tasks.items():
            if name in block.parts and task.method is not None and task.method.distill:
                assert task.module is not None
                found[task.module] = NOT_TRAINED
    return list(found.items())
