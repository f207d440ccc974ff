"""Run a distillation: write samples, train, and leave the result in a work file.

All ranks write samples and train; the first one alone writes files.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.output.directory import OutputDirectory
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.memory import free_share, trim_cache
from quantkit.model.distributed import Ranks, Record
from quantkit.packing.tensor import PackedTensor
from quantkit.progress import Progress
from quantkit.quantization.distill.build_student import build_student
from quantkit.quantization.distill.distillation import FACTS, RESULT, SAMPLES, STATES, Distillation
from quantkit.quantization.distill.own_samples import own_samples, without_loops
from quantkit.quantization.distill.pool import HELD_OUT, Pool
from quantkit.quantization.distill.residence import Residence
from quantkit.quantization.distill.student import Norm, Student
from quantkit.quantization.distill.training import Reached, Training, batch_of
from quantkit.quantization.distill.training_memory import Way, check_host, choose
from quantkit.quantization.task import Task

logger = logging.getLogger("quantkit.memory")

FORMAT = {"format": "pt"}
#: Least seconds between storing the state, and the part of the time that storing may take: that of an 8B has
#: 57 GB.
STATE_SECONDS, STATE_PART = 120.0, 0.05
#: Part of the time for writing samples.
SAMPLING = 0.2


@dataclass(frozen=True)
class Stored:
    """Progress that an earlier process of the run stored, as JSON values.

    samples   of the samples, the seconds that writing took and the number left out; None without them
    state     name of the file with the newest state; None without one
    detail    of that state: the point reached, the divergence before, micro-batch, and processes
    """

    samples: dict[str, Any] | None = None
    state: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)


def distill(
    one: Distillation | None,
    output: OutputDirectory | None,
    out: Path,
    progress: Progress | None,
    writing: Callable[[Any], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Write the work file with the trained linears and norms, unless it or all shards are done.

    None trains nothing. Only the first rank has an `output`, whose directory all see as `out`.

    `progress` is called on it with the steps done, all steps, and a text with the loss and the time left.
    The original model writes samples inside the context `writing(model)`.
    """
    if one is None:
        return
    found = one.ranks.broadcast(lambda: _stored(one, output))
    if found is None:
        return
    stored = Stored(**found)
    report: Progress = progress if progress and one.ranks.first else lambda done, total, label: None
    started, calibrated = time.monotonic(), one.calibrated
    decoder, tokens = calibrated.decoder, one.text.tokens
    if one.ranks.first:
        _say_if_idle(decoder.device, one.ranks)
    way = _way(one, stored)
    model = decoder.whole()
    if stored.samples is None:
        with writing(model):
            own, repeating = _write_samples(one, model, output, report)
    else:
        own = Checkpoint.of_files([out / SAMPLES]).read("tokens").long()
        repeating = stored.samples.get("repeating", 0)
        started -= stored.samples["seconds"]
    residence = Residence(decoder.device, way.on_host)
    student = build_student(
        model, decoder, calibrated.blocks, one.planned, one.linears, one.norms, out, residence
    )
    if way.compute_again:
        student.compute_again()
    pool = Pool.of(tokens, own, calibrated.seed)
    training = Training(student, pool, one.options, way.micro, one.ranks)
    if stored.state is not None:
        files = Checkpoint.of_files([out / stored.state])
        training.restore(files.read, files.tensors, Reached(**stored.detail["at"]))
    before: float = stored.detail["before"] if stored.detail else training.measure()
    earlier = stored.detail.get("processes", [])
    processes = earlier if earlier[-1:] == [one.ranks.size] else [*earlier, one.ranks.size]
    saved, pause = time.monotonic(), STATE_SECONDS

    def on_step(at: Reached) -> None:
        nonlocal saved, pause
        if at.total is None:
            return
        minutes, seconds = divmod(round(at.seconds_left), 60)
        left = f"{minutes}:{seconds:02} left"
        # The first reading of the loss comes after some steps.
        loss = "" if math.isnan(at.loss) else f"KL {at.loss:.4f}, "
        report(at.step, at.total, f"step {at.step} of {at.total}, {loss}{left}")
        begin = time.monotonic()
        if output is not None and at.step < at.total and begin - saved >= pause:
            _store(training, output, {"before": before, "processes": processes})
            saved = time.monotonic()
            pause = max(STATE_SECONDS, (saved - begin) / STATE_PART)

    training.run(lambda: one.seconds - (time.monotonic() - started), on_step)
    facts = {
        "kl_before": before,
        "kl_after": training.measure(),
        "steps": training.at.step,
        "tokens": training.at.step * training.batch * tokens.shape[1],
        "sequences": {
            "length": tokens.shape[1],
            "text": len(tokens),
            "own": len(own),
            "own_repeating": repeating,
            "own_chats": 0 if one.turn is None else one.turn.count(own),
        },
        "settings": {
            **asdict(one.options),
            **{"batch": training.batch, "micro_batch": way.micro, "processes": processes},
            "compiled": training.at.compiled,
        },
    }
    if output is not None:
        _write(one, student, output, facts)


def _stored(one: Distillation, output: OutputDirectory | None) -> dict[str, Any] | None:
    """Return the fields of `Stored` on the first rank, whose `output` it is; None if all is done."""
    assert output is not None
    if output.complete or output.is_done(RESULT):
        return None
    if all(output.is_done(shard.filename) for shard in one.planned.shards):
        return None
    samples = output.details(SAMPLES) if output.is_done(SAMPLES) else None
    states = _states(output)
    return asdict(Stored(samples, states[-1], output.details(states[-1])) if states else Stored(samples))


def _say_if_idle(device: torch.device, ranks: Ranks) -> None:
    """Say how to train on all GPUs of this host if some of them have no process."""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if count > ranks.on_host:
        logger.warning(
            "the training uses %d of the %d GPUs here; to use all, run the same command by torchrun "
            "--nproc-per-node %d -m quantkit, with --resume where it has begun to write",
            ranks.on_host,
            count,
            count,
        )


def _way(one: Distillation, stored: Stored) -> Way:
    """Return the way to train that fits the free memory of all ranks, and say which it is.

    A resumed run keeps the micro-batch of its state.
    """
    device, sizes, ranks = one.calibrated.decoder.device, one.sizes, one.ranks
    # What the calibration cached fits few of the tensors of a training.
    trim_cache(device)
    shares = [free_share(of, ranks.on_host) for of in (device, torch.device("cpu"))]
    free, on_host = map(min, zip(*ranks.all_gather(shares), strict=True))
    share = -(-batch_of(one.options, device) // ranks.size)
    way = choose(sizes, share, free, stored.detail.get("micro"))
    check_host(way, sizes, on_host, ranks.on_host, device, free)
    if ranks.first:
        level = logging.WARNING if way.on_host or way.compute_again else logging.INFO
        logger.log(level, way.text(sizes, free, device))
    return way


def _write_samples(
    one: Distillation, model: Any, output: OutputDirectory | None, report: Progress
) -> tuple[torch.Tensor, int]:
    """Return what the original writes, int64 [P, T], and how many loops were left out; store both.

    Ranks take turns with the batches. Each of them gets all.
    """
    tokens, options, ranks = one.text.tokens, one.options, one.ranks
    if not options.own or not model.can_generate():
        return tokens[:0], 0
    most, limit = options.own_most, SAMPLING * one.seconds
    if options.steps is not None:
        batch = batch_of(options, one.calibrated.decoder.device)
        most, limit = min(most, HELD_OUT + round(options.steps * batch * options.own)), float("inf")
    started, found, count, repeating = time.monotonic(), list[torch.Tensor](), 0, 0
    numbers = itertools.count(ranks.number, ranks.size)
    batches = own_samples(model, tokens, tokens.shape[1], one.calibrated.seed, one.turn, numbers, most)
    for turn, samples in enumerate(batches, 1):
        kept = without_loops(samples)
        mine = Record({"tokens": kept}, {"repeating": len(samples) - len(kept)})
        for record in ranks.gather_records([mine], kept.device):
            found.append(record.tensors["tokens"])
            repeating += record.facts["repeating"]
        count = min(most, sum(map(len, found)))
        report(count, most, f"the original writes samples, {count} of at most {most}")
        took = time.monotonic() - started
        # Some models write nothing but loops. The time of the first rank counts for all.
        if count == most or repeating >= most or ranks.all_gather(took + took / turn > limit)[0]:
            break
    own = torch.cat(found)[:most]
    if ranks.first and repeating > len(own):
        logger.warning(
            "most samples that the original wrote repeat themselves: %d were left out, and the training "
            "takes the other %d beside the calibration text",
            repeating,
            len(own),
        )
    # Files hold no empty tensors; without samples a resumed run lets the original write again.
    if output is not None and len(own):
        with output.shard(SAMPLES, [TensorSpec("tokens", "I32", tuple(own.shape))], FORMAT) as file:
            file.detail.update(seconds=time.monotonic() - started, repeating=repeating)
            file.write("tokens", own.int())
    return own, repeating


def _store(training: Training, output: OutputDirectory, beside: dict[str, Any]) -> None:
    """Store the state of a training, and `beside` it fields of `Stored.detail`; remove an earlier one."""
    old = _states(output)
    # Two are there after an interruption between the writing of one and the removal of the other.
    for name in old[:-1]:
        output.discard(name)
    name = next(name for name in STATES if name not in old[-1:])
    state = training.state()
    with output.shard(name, [TensorSpec.of(key, one) for key, one in state.items()], FORMAT) as file:
        file.detail.update(beside, at=asdict(training.at), micro=training.micro)
        for key, one in state.items():
            file.write(key, one.cpu())
    for other in old[-1:]:
        output.discard(other)


def _states(output: OutputDirectory) -> list[str]:
    """Return the names of the states that are stored, the newest last."""
    done = [name for name in STATES if output.is_done(name)]
    return sorted(done, key=lambda name: output.details(name)["at"]["step"])


def _write(one: Distillation, student: Student, output: OutputDirectory, facts: dict[str, Any]) -> None:
    """Write what was trained, and all else of the work files of the calibration as it is, to one work file.

    `facts` are more JSON values for its record.
    """
    student.residence.wait()
    filenames = one.calibrated.quantized_files
    files = Checkpoint.of_files([output.path / name for name in filenames])
    layers: dict[str, Any] = {}
    for filename in filenames:
        layers |= output.details(filename)["layers"]
    trained: dict[str, torch.Tensor] = {}
    errors = dict.fromkeys((str(task.module) for task in one.linears.values()), 0.0)
    for name, task in one.linears.items():
        packed = student.linear(name).packed()
        trained |= _parts(packed, task)
        of_weights = one.calibrated.decoder.read(task.source.name).float() - packed.dequantize()
        errors[str(task.module)] += float(of_weights.double().square().sum())
    for module, error in errors.items():
        # Errors of outputs are those of the codes before the training.
        kept = {key: value for key, value in layers[module].items() if key not in ("output", "block_error")}
        layers[module] = {**kept, "squared": [error, layers[module]["squared"][1]]}
    for name, task in one.norms.items():
        norm = student.trained[name]
        assert isinstance(norm, Norm)
        trained[task.outputs[0].name] = norm.stored().cpu()
    with output.shard(RESULT, one.specs, FORMAT) as file:
        file.detail.update({"layers": layers, FACTS: facts})
        for spec in one.specs:
            file.write(spec.name, trained[spec.name] if spec.name in trained else files.read(spec.name))


def _parts(packed: PackedTensor, task: Task) -> dict[str, torch.Tensor]:
    """Return the stored tensors of a packed linear, by name."""
    found, known = {}, task.known
    for part, spec in task.parts:
        tensor = known[part] if part in known else packed.part(part)
        assert tensor is not None
        found[spec.name] = tensor.cpu().view(spec.torch_dtype)
    return found
