"""Run what a run wrote before anything passes for finished, and store its logits of a fixed prompt.

`verification/prompt_logits.py` has the prompt and compares logits. Here is when a model is run: once all of
its files but manifest and config are there, and not where that may not fit in memory, as the model was
streamed.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from quantkit import memory
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.model_record import LayerRecord, float32_bytes
from quantkit.checkpoint.output.directory import OutputDirectory
from quantkit.errors import CheckpointError, EnvironmentProblem
from quantkit.files import size_text
from quantkit.quantization.plan import Plan
from quantkit.runtime.load import load_unfinished
from quantkit.verification.prompt_logits import KEY, PromptLogits, answer, bytes_to_run, record


def check_unfinished(
    output: OutputDirectory, planned: Plan, layers: Mapping[str, LayerRecord], device: torch.device
) -> tuple[dict[str, Any], str | None]:
    """What the manifest of `output`, in which config and manifest are missing, gets of the model's logits.

    Nothing, and why, where there is too little memory. `CheckpointError` if the model does not load or gives
    logits that are not finite, `EnvironmentProblem` if the memory did not suffice after all, `OutputError`
    where the lock is lost: what was run may then be another writer's.
    """
    directory = output.path
    why = _why_not(float32_bytes(planned.output_bytes, layers), device)
    if why is not None:
        return {}, why
    try:
        found = answer(lambda: load_unfinished(directory, planned.model_config, device), directory)
    except (CheckpointError, EnvironmentProblem) as error:
        output.lock.check()
        raise type(error)(
            f"the result does not run, and {directory} stays unfinished: {error} The same command with "
            "--resume tries again, with --resume --no-check it finishes without running the model."
        ) from error
    return {KEY: asdict(found)}, None


def check_finished(output: OutputDirectory, device: torch.device) -> str | None:
    """Store the logits of a finished checkpoint that has none; why not, where there is too little memory."""
    if PromptLogits.from_manifest(read_manifest(output.path)) is not None:
        return None
    why = _why_not(bytes_to_run(output.path), device)
    if why is None:
        record(output.path, device, output.lock)
    return why


def _why_not(needed: int, device: torch.device) -> str | None:
    # What quantizing has left in torch's cache counts as used.
    memory.trim_cache(device)
    free = memory.free_memory(device)
    if needed <= free:
        return None
    return f"that takes about {size_text(needed)} of memory, and {size_text(free)} is free"
