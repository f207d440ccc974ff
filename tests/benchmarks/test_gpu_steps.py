"""What `benchmarks/gpu_steps.py` makes of a step, and its table."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.fx import GraphModule

from quantkit.calibrate.methods import quantize_tensor
from quantkit.errors import UsageError
from quantkit.kernels.linear import linear
from quantkit.model.graphs import NotRecorded
from quantkit.model.trace import trace

pytest.importorskip("triton")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    found = importlib.import_module("gpu_steps")
    monkeypatch.setattr(found, "PRODUCTS", {"qkv": 48, "o": 32, "gate_up": 64, "down": 32})
    return found


def step(rows: list[int]) -> tuple[GraphModule, torch.Tensor]:
    """Products with weights of so many rows, each of the first columns of what the one before gives."""
    weights = [quantize_tensor(torch.randn(size, 32), "int4", group_size=32) for size in rows]
    x = torch.randn(1, 32)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        for weight in weights:
            x = linear(x, weight)[:, :32]
        return [x]

    return trace(run, [x]), x


def test_weights_are_brought_after_the_product_that_is_named(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this layer, or the next one; nothing of a layer that is not there."""
    found = []
    monkeypatch.setattr(benchmark, "_codes", lambda product: product.args[1][0])
    monkeypatch.setattr(
        benchmark, "bring", lambda codes, megabytes, branch: found.append((codes.shape[0], megabytes, branch))
    )
    waits: list[object] = []
    stream = type("Stream", (), {"wait_stream": lambda _, branch: waits.append(branch)})()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    module, x = step([48, 32, 64, 32] * 2)
    (expected,) = module(x)
    brings = [benchmark.Bring.parse(text) for text in ("qkv:o:9", "qkv:gate_up:1.5", "down:qkv:4")]
    (y,) = benchmark.with_branches(module, brings, "branch")(x)
    assert torch.equal(y, expected)
    of_layer = {(32, 9.0, "branch"), (64, 1.5, "branch")}
    assert set(found[:2]) == of_layer and found[2] == (48, 4.0, "branch") and set(found[3:]) == of_layer
    assert waits == ["branch"]


def test_nothing_is_waited_for_that_never_began(benchmark: ModuleType) -> None:
    module, x = step([48, 32, 64, 32])
    (expected,) = module(x)
    (y,) = benchmark.with_branches(module, [benchmark.Bring.parse("down:qkv:4")], None)(x)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("rows", [[], [48, 32, 64], [48, 32, 64, 32, 48], [32, 32, 64, 32]])
def test_steps_of_other_products_are_refused(benchmark: ModuleType, rows: list[int]) -> None:
    with pytest.raises(NotRecorded, match="of each layer"):
        benchmark.with_branches(step(rows)[0], [benchmark.Bring.parse("qkv:o:9")], None)


@pytest.mark.parametrize("text", ["qkv:o", "qkv:head:9", "qkv:o:0", "qkv:o:nan", "qkv:o:some"])
def test_what_cannot_be_brought_is_refused(benchmark: ModuleType, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        benchmark.Bring.parse(text)


def test_the_table_has_a_row_for_each_measurement(benchmark: ModuleType) -> None:
    rows = [
        benchmark.Row("bf16", "", 1, 4000.4, 120, 0.9),
        benchmark.Row("int4", "qkv:o:9", 16, 1000, 51.5, 0.52),
    ]
    assert benchmark.text(rows).splitlines()[2:] == [
        "| bf16 |  | 1 | 4000 | 120.0 | 90% |",
        "| int4 | qkv:o:9 | 16 | 1000 | 51.5 | 52% |",
    ]
