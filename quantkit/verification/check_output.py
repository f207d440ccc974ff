"""Run a new checkpoint before it counts as finished, and store its logits for a fixed prompt.

The model runs once all files except manifest and config exist. It does not run if it may exceed the free
memory: quantizing streams the model, running does not. `prompt_logits.py` has the prompt and the comparison.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from quantkit import memory
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.model_record import ModelRecord, float32_bytes
from quantkit.checkpoint.output.directory import OutputDirectory
from quantkit.checkpoint.safetensors_header import read_header
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, EnvironmentProblem
from quantkit.files import size_text
from quantkit.model.model_class import why_no_class
from quantkit.quantization.plan import Plan
from quantkit.runtime.load import load_unfinished
from quantkit.verification.prompt_logits import (
    KEY,
    PromptLogits,
    TakesNoText,
    bytes_to_run,
    record,
    run_prompt,
)
from quantkit.verification.readers import check_written


def finish_checked(
    output: OutputDirectory,
    weight_map: Mapping[str, str],
    output_bytes: int,
    config: Mapping[str, Any],
    side_files: Sequence[Path],
    model: ModelRecord,
    device: torch.device | None,
    before: Callable[[], None],
    **more: Any,
) -> str | None:
    """Finish `output` with `model` and `more` in the manifest; return why its model was not run, or None.

    `before` checks the written files. Then the model runs on `device` (None: it does not), and its logits are
    stored. It does not run with too little memory, or if it takes no text. Raises `OutputError` if shards are
    missing, names collide, the lock is lost or the disk fails. Raises `CheckpointError` if a side file cannot
    be read, the model does not load, or its logits are not finite. Raises `EnvironmentProblem` if memory ran
    out after all.
    """
    directory = output.path
    unchecked = None

    def check() -> dict[str, Any]:
        nonlocal unchecked
        before()
        if device is None:
            return {}
        unchecked = why_no_class(config, directory)
        unchecked = unchecked or _why_not(float32_bytes(output_bytes, model.layers), device)
        if unchecked is not None:
            return {}
        try:
            logits = run_prompt(lambda: load_unfinished(directory, config, device), directory)
        except TakesNoText as found:
            unchecked = str(found)
            return {}
        except (CheckpointError, EnvironmentProblem) as error:
            # Another writer may have changed the files.
            output.lock.check()
            raise type(error)(
                f"the result does not run, and {directory} stays unfinished: {error} The same command with "
                "--resume tries again, with --resume --no-check it finishes without running the model."
            ) from error
        return {KEY: asdict(logits)}

    output.finish(weight_map, output_bytes, config, side_files, {**model.to_dict(), **more}, check)
    return unchecked


def check_headers_of(output: OutputDirectory, planned: Plan, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` unless the class of `planned` loads the tensors written to `output`.

    Reads headers. Without such a class, they are compared with those of the source `checkpoint`.
    """
    files = [output.path / shard.filename for shard in planned.shards]
    tensors = {name: one for file in files for name, one in read_header(file).items()}
    check_written(planned, checkpoint, tensors)


def check_finished(output: OutputDirectory, device: torch.device) -> str | None:
    """Run the finished checkpoint in `output` and store its prompt logits, unless it has them.

    Returns the reason if it was not run: too little memory, no class in transformers, or a model that takes
    no text. None if the logits are stored.
    """
    if PromptLogits.from_manifest(read_manifest(output.path)) is not None:
        return None
    reason = why_no_class(Checkpoint.open(output.path).config, output.path)
    reason = reason or _why_not(bytes_to_run(output.path), device)
    if reason is not None:
        return reason
    try:
        record(output.path, device, output.lock)
    except TakesNoText as found:
        return str(found)
    return None


def _why_not(needed: int, device: torch.device) -> str | None:
    # Tensors in torch's cache would count as used memory.
    memory.trim_cache(device)
    free = memory.free_memory(device)
    if needed <= free:
        return None
    return f"that takes about {size_text(needed)} of memory, and {size_text(free)} is free"
