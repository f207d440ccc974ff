"""Results of an evaluation: every figure of one model and how it was measured, the content of eval.json.

`eval/evaluate.py` computes them, `report/eval_report.py` presents them.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from quantkit.eval.metrics import TextMetrics
from quantkit.eval.models import Versions
from quantkit.eval.own_text import SAMPLED, Written
from quantkit.eval.per_block import BlockLosses
from quantkit.eval.sizes import Sizes
from quantkit.eval.tasks import TaskMetrics
from quantkit.files import from_json

VERSION = 1


@dataclass(frozen=True)
class NoiseFloor:
    """Loss of the reference itself in another `dtype`, by text and task: smaller differences mean nothing."""

    dtype: str
    texts: Mapping[str, TextMetrics]
    tasks: tuple[TaskMetrics, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "dtype": self.dtype,
            "texts": {name: metrics.to_dict() for name, metrics in self.texts.items()},
            "tasks": [metrics.to_dict() for metrics in self.tasks],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "NoiseFloor":
        """Parse the output of `to_dict`, or that of older versions, which had no tasks."""
        return cls(data["dtype"], _texts(data["texts"]), _tasks(data.get("tasks", ())))


def _renamed(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a report with the names of fields now; older ones had bytes of files."""
    return {"nbytes" if name == "file_bytes" else name: value for name, value in sizes.items()}


def _texts(data: Mapping[str, Any]) -> dict[str, TextMetrics]:
    return {name: from_json(TextMetrics, metrics) for name, metrics in data.items()}


def _tasks(data: Iterable[Any]) -> tuple[TaskMetrics, ...]:
    return tuple(from_json(TaskMetrics, metrics) for metrics in data)


def _own_text(data: Mapping[str, Any]) -> dict[str, Written]:
    """Return what `data`, results of any version, have of texts that models wrote, by way."""
    found = data.get("own_text", {})
    # Older versions only sampled.
    if data.get("continuations") is not None:
        counts = {"model": data["continuations"], "original": data["reference_continuations"]}
        found = {SAMPLED: {**counts, "pairs": data.get("text_pairs", ())}}
    return {way: from_json(Written, one) for way, one in found.items()}


@dataclass(frozen=True)
class EvalReport:
    """Results of an evaluation; `to_json` is the content of eval.json.

    window, stride      used values, limited by the model's positions
    seconds             time of this model on the texts in this run
    reference_seconds   time of the reference so far, which other models may share
    reference_logits    largest number of bytes of reference logits on disk
    notes               texts for the user: deviations from the options
    own_text            what model and reference write from the same beginnings, by way: sampled and greedy
    """

    model: str
    against: str | None
    texts: Mapping[str, TextMetrics]
    sizes: Sizes
    reference_sizes: Sizes | None
    dtype: str
    window: int
    stride: int
    max_windows: int | None
    batch: int
    device: str
    versions: Versions
    seconds: float
    reference_seconds: float | None
    notes: tuple[str, ...] = ()
    label: str = ""
    noise_floor: NoiseFloor | None = None
    per_block: BlockLosses | None = None
    tasks: tuple[TaskMetrics, ...] = ()
    task_results: Mapping[str, Any] = field(default_factory=dict)
    reference_logits: int | None = None
    kv_cache: str | None = None
    own_text: Mapping[str, Written] = field(default_factory=dict)

    def __repr__(self) -> str:
        texts = (
            f"{name}: {one.nll:.4g} nats per token"
            + ("" if one.kl_mean is None else f", KL {one.kl_mean:.3g}")
            for name, one in self.texts.items()
        )
        tasks = (f"{one.task}: {one.accuracy:.1%}" for one in self.tasks)
        return f"EvalReport({self.label or self.model!r}, {'; '.join([*texts, *tasks])})"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, free of NaN and infinities."""
        reference = self.reference_sizes
        return {
            "version": VERSION,
            "model": self.model,
            "label": self.label,
            "format": self.sizes.format,
            "method": self.sizes.method,
            "against": self.against,
            "texts": {name: metrics.to_dict() for name, metrics in self.texts.items()},
            "bits_per_weight": {"linears": self.sizes.linears, "model": self.sizes.model},
            "bytes": {
                "model": self.sizes.nbytes,
                "reference": None if reference is None else reference.nbytes,
            },
            "reference_sizes": None if reference is None else {**vars(reference)},
            "noise_floor": None if self.noise_floor is None else self.noise_floor.to_dict(),
            "per_block": None if self.per_block is None else self.per_block.to_dict(),
            "own_text": {way: asdict(written) for way, written in self.own_text.items()},
            "tasks": [metrics.to_dict() for metrics in self.tasks],
            "task_results": dict(self.task_results),
            "dtype": self.dtype,
            "kv_cache": self.kv_cache,
            "window": self.window,
            "stride": self.stride,
            "max_windows": self.max_windows,
            "batch": self.batch,
            "device": self.device,
            "quantkit_version": self.versions.quantkit_version,
            "torch": self.versions.torch,
            "transformers": self.versions.transformers,
            "lm_eval": version("lm_eval") if self.task_results else None,
            "seconds": self.seconds,
            "reference_seconds": self.reference_seconds,
            "reference_logits_bytes": self.reference_logits,
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON text. A null perplexity overflowed a float64; `nll` is its logarithm."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "EvalReport":
        """Parse the output of `to_dict`, or that of older versions, without notes and the answers to tasks.

        Raises `KeyError`, `TypeError` or `ValueError` for anything else.
        """
        floor, blocks = data.get("noise_floor"), data.get("per_block")
        reference = data.get("reference_sizes")
        bits = (data["bits_per_weight"]["linears"], data["bits_per_weight"]["model"])
        return cls(
            model=data["model"],
            against=data["against"],
            texts=_texts(data["texts"]),
            sizes=Sizes(*bits, data["bytes"]["model"], data["format"], data["method"]),
            reference_sizes=None if reference is None else Sizes(**_renamed(reference)),
            dtype=data["dtype"],
            window=data["window"],
            stride=data["stride"],
            max_windows=data["max_windows"],
            batch=data["batch"],
            device=data["device"],
            versions=Versions(data["quantkit_version"], data["torch"], data["transformers"]),
            seconds=data["seconds"],
            reference_seconds=data["reference_seconds"],
            label=data["label"],
            noise_floor=None if floor is None else NoiseFloor.from_dict(floor),
            per_block=None if blocks is None else BlockLosses(dict(blocks["kl_mean"]), blocks["tokens"]),
            tasks=_tasks(data["tasks"]),
            kv_cache=data.get("kv_cache"),
            own_text=_own_text(data),
        )
