"""Verify a packed checkpoint: its files are unchanged and complete, and it runs."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.compressed_tensors import stored_formats
from quantkit.checkpoint.manifest import read_manifest, unlisted_files, verify_files, verify_manifest
from quantkit.checkpoint.model_record import ModelRecord
from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import QuantkitError, first_of
from quantkit.model.model_class import why_no_class
from quantkit.packing.names import packed_parameters
from quantkit.progress import Progress, counting
from quantkit.runtime.saved_model import NO_MANIFEST, is_saved, record_of
from quantkit.verification.against_source import compare_with_source
from quantkit.verification.prompt_logits import PromptLogits

#: Program that runs the model of argv[1] on the CPU in a fresh interpreter, which shares no state with this
#: one, and prints the differences of its logits. Its last line on stderr is the error.
_RELOAD = """
import json, sys
from pathlib import Path
from transformers import logging
from quantkit.verification.prompt_logits import compare
logging.set_verbosity_error()
logging.disable_progress_bar()
try:
    problems = compare(Path(sys.argv[1]))
except Exception as error:
    sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
print(json.dumps(problems))
"""


#: Most unlisted files named in a message.
_NAMED = 20


@dataclass(frozen=True)
class Check:
    """Result of one check: its subject, number of cases, and problems; `skipped` if it could not run."""

    name: str
    detail: str
    problems: tuple[str, ...]
    skipped: bool = False


def verify(
    directory: Path,
    *,
    reload: bool = True,
    against: str | Path | None = None,
    progress: Progress | None = None,
) -> tuple[Check, ...]:
    """Run every check on `directory`; a check without `problems` passed.

    Checks, in this order:

        files     sizes and hashes against the manifest
        headers   headers against the index and each other
        layers    layers of the manifest against config.json and the packed tensors
        reload    with `reload`: loading and running in a fresh process
        logits    with `reload`: logits for a fixed prompt against those stored at quantization
        values    with `against`: every weight against that of the source, which `convert` keeps

    Unreadable headers or an unreadable manifest end the checks. A directory by `save_pretrained` has no
    manifest: its files are not compared, and its logits only have to be finite. Raises `CheckpointError` if
    the directory is not a packed checkpoint.
    """
    compared = () if against is None else (_check_values(directory, against, progress),)
    if is_saved(directory):
        return (*_verify_saved(directory, reload), *compared)
    manifest = read_manifest(directory)
    total = sum(entry["size"] for entry in manifest["files"].values())
    advance = counting(total, progress)
    problems = verify_files(directory, manifest, lambda nbytes: advance(nbytes, "hashing"))
    problems += verify_manifest(directory)
    detail = f"{len(manifest['files'])} in the manifest"
    if unlisted := unlisted_files(directory, manifest):
        detail += f"; not in it, and not compared: {first_of(unlisted, _NAMED)}"
    checks = [Check("files", detail, tuple(map(str, problems)))]
    try:
        checkpoint = Checkpoint.open(directory, strict=True)
    except QuantkitError as error:
        return (*checks, Check("headers", "unreadable", (str(error),)))
    checks.append(Check("headers", f"{len(checkpoint.tensors)} tensors", ()))
    try:
        record = ModelRecord.from_manifest(manifest)
        checks.append(_check_layers(checkpoint, record))
        stored = PromptLogits.from_manifest(manifest)
    except QuantkitError as error:
        return (*checks, Check("layers", "unreadable", (str(error),)))
    reason = why_no_class(checkpoint.config, directory) if record.recipe.get("model_free") else None
    if reload and reason is not None:
        checks.append(Check("reload", reason, (), skipped=True))
    elif reload:
        checks += _check_reload(directory, stored)
    return (*checks, *compared)


def _check_values(directory: Path, against: str | Path, progress: Progress | None) -> Check:
    """Compare all weights with those of the source `against`."""
    try:
        compared = compare_with_source(directory, against, progress)
    except QuantkitError as error:
        return Check("values", f"against {against}", (str(error),))
    detail = f"{compared.tensors} tensors, {compared.packed} of them packed, against {against}"
    return Check("values", detail, compared.problems)


def _verify_saved(directory: Path, reload: bool) -> tuple[Check, ...]:
    checks = [Check("files", NO_MANIFEST, (), skipped=True)]
    try:
        checkpoint = Checkpoint.open(directory, strict=True)
        checks.append(Check("headers", f"{len(checkpoint.tensors)} tensors", ()))
        layers = record_of(checkpoint).layers
    except QuantkitError as error:
        return (*checks, Check("layers" if checks[1:] else "headers", "unreadable", (str(error),)))
    checks.append(Check("layers", f"{len(layers)} linears", ()))
    return (*checks, *(_check_reload(directory, None) if reload else ()))


def _check_layers(checkpoint: Checkpoint, record: ModelRecord) -> Check:
    """Compare the layers of the manifest with config.json, and count packed tensors."""
    config = QuantizationConfig.from_dict(checkpoint.config.get("quantization_config", {}))
    problems = []
    for module, layer in record.layers.items():
        scheme = config.scheme_of(module)
        # Rows of one group are stored per channel whatever the group size, so compare formats only.
        expected = None if layer.scheme is None else layer.scheme.partition(" ")[0]
        found = None if scheme is None else scheme.format.name
        if expected != found:
            problems.append(
                f"{module}: {found or 'dense'} in config.json, {expected or 'dense'} in the manifest"
            )
    recorded = sum(layer.matrices for layer in record.layers.values() if layer.scheme is not None)
    dtypes = {name: tensor.torch_dtype for name, tensor in checkpoint.tensors.items()}
    stored = sum(1 for _ in packed_parameters(dtypes, stored_formats(config.container)))
    if recorded != stored:
        problems.append(f"{stored} packed tensors in the files, {recorded} in the manifest")
    return Check("layers", f"{len(record.layers)} linears", tuple(problems))


def _check_reload(directory: Path, stored: PromptLogits | None) -> list[Check]:
    # -P: with -c, Python would import modules from the working directory, which may be the checkpoint.
    done = subprocess.run(
        [sys.executable, "-P", "-c", _RELOAD, str(directory)],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode == 0:
        problems = tuple(json.loads(done.stdout.splitlines()[-1]))
        tokens = "none stored at quantization" if stored is None else f"{len(stored.prompt)} tokens"
        return [
            Check("reload", "loads and runs in a fresh process", ()),
            Check("logits", tokens, problems),
        ]
    if done.returncode < 0:
        problem = f"the process was killed by signal {-done.returncode}; 9 often means too little memory"
    else:
        problem = (done.stderr.strip().splitlines() or ["the process ended without a message"])[-1]
    return [Check("reload", "does not load and run in a fresh process", (problem,))]
