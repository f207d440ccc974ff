"""Distillation of a run: which linears and norms are trained, its work files, and what it leaves behind.

distill-samples   what the original model wrote itself
distill-state-N   the state of the training, stored from time to time in two files by turns
distilled         the packed linears and norms in their final form, from which shards copy them
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from quantkit.calibrate.data.samples import Samples
from quantkit.checkpoint.output.directory import OutputDirectory
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import UsageError
from quantkit.model.distributed import Ranks
from quantkit.model.tokenizer import tokenizer
from quantkit.quantization.blockwise.calibration import Calibration
from quantkit.quantization.blockwise.calibration_data import read_samples
from quantkit.quantization.distill.build_student import trained_name
from quantkit.quantization.distill.chat_turn import ChatTurn, chat_turn
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantization.distill.training import batch_of
from quantkit.quantization.distill.training_memory import Sizes
from quantkit.quantization.plan import Plan
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantization.task import Task

SAMPLES, RESULT = "distill-samples.safetensors", "distilled.safetensors"
STATES = ("distill-state-0.safetensors", "distill-state-1.safetensors")
#: Key of what the manifest says of a training, in the details of files.
FACTS = "distillation"
#: Most sequences of the calibration text: many more than calibration needs.
MOST_TEXT = 8192


@dataclass(frozen=True, eq=False)
class Distillation:
    """Linears, matrices of experts and norms to train, by name, their run, text, and `ranks` to share it.

    `turn` is the chat template of the model, None without one.
    """

    linears: Mapping[str, Task]
    norms: Mapping[str, Task]
    options: DistillOptions
    calibrated: Calibration
    planned: Plan
    text: Samples
    turn: ChatTurn | None
    sizes: Sizes
    ranks: Ranks

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        planned: Plan,
        calibrated: Calibration | None,
        asked: QuantizeOptions,
        ranks: Ranks,
    ) -> "Distillation | None":
        """Return the distillation of a plan; None if no method trains end to end.

        Raises `UsageError` for options without such a method, more ranks than a step has sequences, and
        models that predict no tokens.
        """
        options, linears = asked.distillation, _linears(calibrated)
        options.check_used(calibrated is not None and bool(linears))
        if calibrated is None or not linears:
            return None
        decoder = calibrated.decoder
        batch = batch_of(options, decoder.device)
        if ranks.size > batch:
            raise UsageError(
                f"torchrun started {ranks.size} processes, but a step of --method distill trains on {batch} "
                f"sequences, of which each process takes at least one. Start at most {batch}."
            )
        if decoder.head_name is None or decoder.config.get("is_encoder_decoder"):
            raise UsageError(
                "--method distill compares predictions of tokens from tokens alone, and models of type "
                f"{decoder.config.get('model_type')!r} make none. Take a method that learns block by block, "
                "such as --method signround."
            )
        dense = {
            task.source.name: task for shard in planned.shards for task in shard.tasks if task.scheme is None
        }
        vectors = [name for name, shape in decoder.shapes.items() if len(shape) == 1]
        stored = {name: decoder.stored_name(name) for name in vectors if name.endswith(".weight")}
        norms = {name: dense[one] for name, one in stored.items() if one in dense and options.norm_rate}
        more = replace(asked.calibration, samples=MOST_TEXT)
        text = read_samples(checkpoint, more, decoder.embedding_rows)
        sizes = Sizes.of(checkpoint, planned, text.tokens.shape[1], decoder.device)
        assert sizes is not None
        turn = chat_turn(tokenizer(checkpoint.directory), decoder.embedding_rows)
        return cls(linears, norms, options, calibrated, planned, text, turn, sizes, ranks)

    def bound(self, calibrated: Calibration, planned: Plan) -> "Distillation":
        """Return the distillation of the same run, once the scales of inputs are measured."""
        return replace(self, linears=_linears(calibrated), calibrated=calibrated, planned=planned)

    @property
    def seconds(self) -> float:
        """Return about how long writing samples and training take, if the time decides."""
        return self.options.seconds_of(sum(task.source.elements for task in self.linears.values()))

    @property
    def work_files(self) -> tuple[str, ...]:
        """Return the names of all work files."""
        return (SAMPLES, *STATES, RESULT)

    @property
    def specs(self) -> list[TensorSpec]:
        """Return the tensors of the result: all that calibration made, and the norms."""
        of_blocks = [
            task
            for block in self.calibrated.blocks
            for task in (*block.changed.values(), *block.tasks.values())
        ]
        tasks = [*of_blocks, *self.norms.values()]
        return list({spec.name: spec for task in tasks for spec in task.outputs}.values())

    @property
    def work_bytes(self) -> int:
        """Return about how many bytes the work files take: samples, two states, and the result."""
        samples = self.options.own_most * self.text.tokens.shape[1] * 4
        return samples + 2 * self.sizes.numbers + sum(spec.nbytes for spec in self.specs)

    def result(self, output: OutputDirectory) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Return the files from which shards copy tensors, and what their details have beside."""
        if not output.is_done(RESULT):
            return (), {}
        return (RESULT,), {FACTS: output.details(RESULT)[FACTS]}

    def facts(self, output: OutputDirectory) -> dict[str, Any]:
        """Return what the manifest says of the training, once all shards are done.

        The details of shards have it, which are there until the directory is finished.
        """
        found: dict[str, Any] = output.details(self.planned.shards[0].filename)[FACTS]
        return found

    def reasons(self, dense: Mapping[str, str]) -> dict[str, str]:
        """Return `dense`, the reasons why tensors are dense, with a word on those that are trained."""
        changed = {task.source.name for task in self.norms.values()}
        return {
            name: reason + (", changed: trained" if name in changed else "") for name, reason in dense.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything that the written bytes depend on."""
        return {**asdict(self.options), "text_sha256": self.text.digest}


def _linears(calibrated: Calibration | None) -> dict[str, Task]:
    """Return the linears and matrices of experts whose method trains, by name."""
    return {
        trained_name(block, name): task
        for block in (() if calibrated is None else calibrated.blocks)
        for name, task in block.tasks.items()
        if task.method is not None and task.method.distill
    }
