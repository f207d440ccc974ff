"""Figures of repeated measurements, and their JSON."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import UsageError
from quantkit.files import from_json, os_error_text


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements, with the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that is not below `percent` percent of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True)
class Percentiles:
    """The 50th, 90th and 99th percentile."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        """Return the percentiles of at least one value."""
        return cls(*(percentile(values, percent) for percent in (50, 90, 99)))


@dataclass(frozen=True)
class Cell:
    """Times of generating from `batch` prompts of `prompt` tokens each.

    mode               how decoding steps ran: `eager`, `flat` or `cuda-graph`; in older files also `compiled`
    first_token        seconds
    prefill, decode    tokens per second of all sequences together
    token_p50, token_p99   seconds between two tokens of a sequence
    read_bandwidth     bytes of weights per second, None if it is unknown which are read
    joules             per decoded token, None without an energy counter
    """

    batch: int
    prompt: int
    mode: str
    first_token: Spread
    prefill: Spread
    token_p50: float
    token_p99: float
    decode: Spread
    read_bandwidth: float | None
    joules: float | None


@dataclass(frozen=True)
class Memory:
    """Bytes in use: `before` the model was loaded, `steady` after it generated, and the `peak`.

    On a CPU the resident memory of the process, mapped files included; on a GPU torch's allocations.
    """

    before: int
    steady: int
    peak: int


@dataclass(frozen=True)
class Machine:
    """Device and its name, CPU threads, measured read bandwidth in bytes per second, and versions."""

    device: str
    name: str
    threads: int
    read_bandwidth: float
    quantkit: str
    torch: str
    transformers: str


@dataclass(frozen=True)
class Speed:
    """Figures of `bench` for one model, one of `cells` for each batch size, prompt length and mode.

    `file_bytes` are those of its tensors, `weight_bytes` are read by one decoding step, None if unknown.
    `prompts` says where prompts come from, `repeats` how many generations count, each of `new_tokens` tokens.
    """

    label: str
    model: str
    format: str
    dtype: str
    file_bytes: int
    load_seconds: float
    weight_bytes: int | None
    memory: Memory
    machine: Machine
    cells: tuple[Cell, ...]
    new_tokens: int
    repeats: int
    prompts: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Load:
    """Latencies in seconds of requests that arrived at `rate` per second on average.

    `first_token` and `end_to_end` count from the arrival, waiting included; `token` is a request's mean time
    between its tokens. `served` is requests per second, and `decode` tokens per second, from the first
    arrival to the last token.
    """

    rate: float
    first_token: Percentiles
    token: Percentiles
    end_to_end: Percentiles
    served: float
    decode: float


@dataclass(frozen=True)
class Serving:
    """Figures of `bench --serve-like` for one model."""

    label: str
    model: str
    format: str
    dtype: str
    attention: str
    machine: Machine
    loads: tuple[Load, ...]
    requests: int
    seed: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Benchmark:
    """Contents of a file of `bench`: speeds, or latencies under load; the other is None."""

    speed: tuple[Speed, ...] | None = None
    serving: tuple[Serving, ...] | None = None


VERSION = 1


def label_of(source: str) -> str:
    """Return the label of a model in tables: the name of its directory, or its hub id."""
    path = Path(source)
    return path.resolve().name if path.is_dir() else source


def to_json(found: Sequence[Speed] | Sequence[Serving]) -> str:
    """Return the content of bench.json or serve.json."""
    key = "serving" if isinstance(found[0], Serving) else "speed"
    content = {"version": VERSION, key: [one.to_dict() for one in found]}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def read_benchmark(path: Path) -> Benchmark:
    """Parse the output of `to_json`; raise `UsageError` for any other file."""
    try:
        data = json.loads(path.read_bytes())
        if data["version"] != VERSION:
            raise KeyError("version")
        found = from_json(Benchmark, data)
        if found == Benchmark():
            raise KeyError("speed")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {os_error_text(error)}. Check the path.") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"{path} is not what `quantkit bench --json` writes ({type(error).__name__}: {error}). Give that "
            "file."
        ) from error
    return found
