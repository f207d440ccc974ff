"""Record a run: everything that determines its bytes, and the model part of its manifest."""

import json
import platform
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch

from quantkit.checkpoint.hub.repository import Located
from quantkit.checkpoint.model_record import Measured, ModelRecord
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.model.distributed import Ranks
from quantkit.quantization.blockwise.calibration import Calibration
from quantkit.quantization.distill.distillation import Distillation
from quantkit.quantization.plan import Plan
from quantkit.recipes.recipe import Recipe

#: Increase it with a change of code that changes the bytes of a run: `--resume` then refuses earlier runs.
REVISION = 1


def run_record(
    checkpoint: Checkpoint,
    recipe: Recipe,
    device: torch.device,
    max_shard_bytes: int,
    calibrated: Calibration | None,
    distilled: Distillation | None,
) -> dict[str, Any]:
    """Return the JSON values of everything that determines the written bytes."""
    return {
        **({} if calibrated is None else {"calibration": calibrated.to_dict()}),
        **({} if distilled is None else {"distillation": distilled.to_dict()}),
        "source": checkpoint.fingerprint(),
        "recipe": recipe.to_dict(),
        "device": device.type,
        "max_shard_bytes": max_shard_bytes,
        "revision": REVISION,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of all libraries that determine the written bytes."""
    from importlib.metadata import version

    from quantkit import __version__

    return {
        "quantkit": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def check_alike(ranks: Ranks, run: Mapping[str, Any], calibrated: Calibration | None) -> None:
    """Raise `UsageError` if there is no work for several ranks, or ranks have different settings."""
    if ranks.size > 1 and calibrated is None:
        raise UsageError(
            f"torchrun started {ranks.size} processes, which share a calibration, but no method of the "
            "recipe takes any data. Start quantkit without torchrun, or choose a method that does, such as "
            "--method gptq."
        )
    digests = {
        key: sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for key, value in run.items()
    }
    for rank, other in enumerate(ranks.all_gather(digests)):
        differing = sorted(key for key in digests.keys() | other.keys() if digests.get(key) != other.get(key))
        if differing:
            raise UsageError(
                f"ranks {ranks.number} and {rank} were not asked the same, or do not see the same files; "
                f"they differ in {', '.join(differing)}. Start all ranks with one command, on one host or on "
                "hosts that have the same files."
            )


def model_record(
    source: Located,
    planned: Plan,
    recipe: Recipe,
    measured: Mapping[str, Measured],
    calibrated: Calibration | None,
) -> ModelRecord:
    """Return the model part of the manifest of a run on `source`."""
    return ModelRecord(
        source=source.name,
        source_kind=source.kind,
        source_commit=source.commit,
        source_bytes=planned.source_bytes,
        container=planned.config.container,
        needs_quantkit=planned.not_portable,
        bits_per_weight=planned.bits_per_weight,
        versions=versions(),
        recipe=recipe.to_dict(),
        layers=planned.layer_records(measured),
        dense=_dense(planned, calibrated),
        seed=None if calibrated is None else calibrated.seed,
        calibration=None if calibrated is None else calibrated.samples.description,
    )


def _dense(planned: Plan, calibrated: Calibration | None) -> dict[str, str]:
    """Return the reason why each dense tensor is dense, and which of them differ from the source."""
    changed = frozenset[str]() if calibrated is None else calibrated.changed
    folded = ", changed: it has the scales of input features"
    return {name: reason + (folded if name in changed else "") for name, reason in planned.dense.items()}
