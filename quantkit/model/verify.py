"""Verify a packed checkpoint: what was written is there, unchanged, complete, and runs."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.manifest import read_manifest, verify_files
from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.model.record import ModelRecord

#: Loads the model of argv[1] on the CPU and runs a forward; a fresh interpreter shares no state with ours.
_RELOAD = """
import sys, torch, quantkit
from transformers import logging
logging.set_verbosity_error()
logging.disable_progress_bar()
model = quantkit.load(sys.argv[1], device="cpu")
with torch.inference_mode():
    logits = model(torch.arange(1, 9)[None] % model.config.get_text_config().vocab_size).logits
assert torch.isfinite(logits).all(), "the logits are not finite"
"""


@dataclass(frozen=True)
class Check:
    """One check: what it looked at, in how many cases, and what it found wrong."""

    name: str
    detail: str
    problems: tuple[str, ...]


def verify(
    directory: Path, *, reload: bool = True, progress: Callable[[int, int, str], None] | None = None
) -> tuple[Check, ...]:
    """Run every check on `directory`; a check whose `problems` are empty passed.

    Files against the hashes of the manifest, headers and index against each other, every layer of the
    manifest against the tensors there are, and, with `reload`, loading and running the model in a fresh
    process. Raises `CheckpointError` when there is no manifest to verify against.
    """
    manifest = read_manifest(directory)
    total = sum(entry["size"] for entry in manifest["files"].values())
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total, "hashing")

    problems = verify_files(directory, manifest, advance)
    checks = [Check("files", f"{len(manifest['files'])} hashed", tuple(str(p) for p in problems))]
    try:
        checkpoint = Checkpoint.open(directory, strict=True)
        checks.append(Check("headers", f"{len(checkpoint.tensors)} tensors", ()))
        checks.append(_check_layers(checkpoint, ModelRecord.from_manifest(manifest)))
    except QuantkitError as error:
        return (*checks, Check("headers", "unreadable", (str(error),)))
    if reload:
        checks.append(_check_reload(directory))
    return tuple(checks)


def _check_layers(checkpoint: Checkpoint, record: ModelRecord) -> Check:
    """The model's own structure against the files: every linear has its tensors, in the config's scheme."""
    config = QuantizationConfig.from_dict(checkpoint.config.get("quantization_config", {}))
    problems = []
    for module, layer in record.layers.items():
        scheme = config.scheme_of(module)
        # Rows of one group are stored per channel whatever the group size: compare the format only.
        expected = None if layer.scheme is None else layer.scheme.split()[0]
        found = None if scheme is None else scheme.format.name
        if expected != found:
            problems.append(
                f"{module}: {found or 'dense'} in config.json, {expected or 'dense'} in the manifest"
            )
    return Check("layers", f"{len(record.layers)} linears", tuple(problems))


def _check_reload(directory: Path) -> Check:
    done = subprocess.run(
        [sys.executable, "-c", _RELOAD, str(directory)], capture_output=True, text=True, check=False
    )
    problems = () if done.returncode == 0 else (_last_line(done.stderr),)
    return Check("reload", "loads and runs in a fresh process" if not problems else "does not run", problems)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "the process ended without a message"
