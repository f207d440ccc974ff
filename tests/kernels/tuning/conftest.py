"""A GPU that is not there, and tile tables for it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quantkit.kernels.problem import GPU_FEATURES, Gpu, Problem
from quantkit.kernels.registry import KERNELS, forget_tile_tables
from quantkit.kernels.tuning.store import save
from quantkit.kernels.tuning.tile_table import Entry, Key, TileTable
from quantkit.packing.schemes import scheme

#: Like none that a table ships for.
GPU = Gpu("Test GPU 3000", (9, 0), 130, 227 << 10)
VERSIONS = {"quantkit": "0.1.0", "torch": "2.11.0", "triton": "3.6.0"}


@pytest.fixture
def gpu() -> Gpu:
    return GPU


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("QUANTKIT_TILES", raising=False)
    forget_tile_tables()
    yield tmp_path
    forget_tile_tables()


@pytest.fixture
def ask() -> Callable[..., Problem]:
    def problem(
        name: str = "int4", m: int = 1, n: int = 4096, k: int = 4096, dtype: torch.dtype = torch.bfloat16
    ) -> Problem:
        return Problem(m, n, k, scheme(name), dtype, "cuda", GPU_FEATURES, None, GPU)

    return problem


@pytest.fixture
def store_table() -> Callable[[dict[Problem, Entry]], Path]:
    def store(entries: dict[Problem, Entry]) -> Path:
        table = TileTable(GPU, VERSIONS, {Key.of(problem): entry for problem, entry in entries.items()})
        path = save(table, KERNELS)
        forget_tile_tables()
        return path

    return store
