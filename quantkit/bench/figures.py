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
    """The smallest of at least one value at or below which `percent` of them are: one that was measured."""
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

    `mode` is how the decoding steps ran: `eager`, `flat` or `cuda-graph`; in older files also `compiled`.
    `first_token` is in seconds; `prefill` and `decode` are tokens per second of all sequences together;
    `token_p50` and `token_p99` are seconds between two tokens of a sequence. `read_bandwidth` is bytes of
    weights per second, None where it is not known which are read; `joules` are per token that was decoded,
    None where no counter can be read.
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
    """Bytes in use before the model was loaded, once it had generated, and at most.

    Of a CPU the resident memory of the process, mapped files included; of a GPU what torch allocated there.
    """

    before: int
    steady: int
    peak: int


@dataclass(frozen=True)
class Machine:
    """The machine: the device and its name, CPU threads, the bytes per second it can read, and versions."""

    device: str
    name: str
    threads: int
    read_bandwidth: float
    quantkit: str
    torch: str
    transformers: str


@dataclass(frozen=True)
class Speed:
    """Figures of `bench` for one model; `weight_bytes` are those that one decoding step reads, if known."""

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
        """JSON-able form."""
        return asdict(self)


@dataclass(frozen=True)
class Load:
    """Latencies, in seconds, of requests that arrived at `rate` per second on average.

    `first_token` and `end_to_end` count from the arrival, waiting included; `token` is the mean of a request
    between its tokens. `served` is requests per second and `decode` tokens per second from the first arrival
    to the last token.
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
        """JSON-able form."""
        return asdict(self)


@dataclass(frozen=True)
class Benchmark:
    """Contents of a file of `bench`: speeds, or latencies under load; None for what it has not."""

    speed: tuple[Speed, ...] | None = None
    serving: tuple[Serving, ...] | None = None


VERSION = 1


def label_of(source: str) -> str:
    """Return the name of a model in tables: that of its directory, or its hub id."""
    path = Path(source)
    return path.resolve().name if path.is_dir() else source


def to_json(found: Sequence[Speed] | Sequence[Serving]) -> str:
    """The content of bench.json or serve.json."""
    key = "serving" if isinstance(found[0], Serving) else "speed"
    content = {"version": VERSION, key: [one.to_dict() for one in found]}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def read_benchmark(path: Path) -> Benchmark:
    """Read what `to_json` wrote; `UsageError` for any other file."""
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
