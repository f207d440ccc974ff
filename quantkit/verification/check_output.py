"""Run a new checkpoint before it counts as finished, and store its logits for a fixed prompt.

The model runs once all files except manifest and config exist. It does not run if it may exceed the free
memory: quantizing streams the model, running does not. `prompt_logits.py` has the prompt and the comparison.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from quantkit import memory
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.model_record import LayerRecord, float32_bytes
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


def check_unfinished(
    output: OutputDirectory,
    config: Mapping[str, Any],
    output_bytes: int,
    layers: Mapping[str, LayerRecord],
    device: torch.device,
) -> tuple[dict[str, Any], str | None]:
    """Return the manifest entry with the logits of `output`, which lacks config and manifest, and None.

    `config` is the config.json that it will have, `output_bytes` are those of its tensors.
    With too little memory, or if the model takes no text: an empty entry and the reason. Raises
    `CheckpointError` if the model does not load or its logits are not finite, and `EnvironmentProblem` if
    memory ran out after all. Raises `OutputError` if the lock is lost, because another writer may have
    changed the files.
    """
    directory = output.path
    reason = why_no_class(config, directory)
    reason = reason or _why_not(float32_bytes(output_bytes, layers), device)
    if reason is not None:
        return {}, reason
    try:
        logits = run_prompt(lambda: load_unfinished(directory, config, device), directory)
    except TakesNoText as found:
        return {}, str(found)
    except (CheckpointError, EnvironmentProblem) as error:
        output.lock.check()
        raise type(error)(
            f"the result does not run, and {directory} stays unfinished: {error} The same command with "
            "--resume tries again, with --resume --no-check it finishes without running the model."
        ) from error
    return {KEY: asdict(logits)}, None


def check_headers_of(output: OutputDirectory, planned: Plan, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` unless the written files pass `check_written`."""
    files = [output.path / shard.filename for shard in planned.shards]
    tensors = {name: one for file in files for name, one in read_header(file).items()}
    check_written(planned, checkpoint, tensors)


def check_finished(output: OutputDirectory, device: torch.device) -> str | None:
    """Store the logits of a finished checkpoint without any; return a reason if memory is too small."""
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
