"""What `benchmarks/gpu_steps.py` makes of a step, and its table."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from quantkit.errors import UsageError
from quantkit.kernels.linear import OPERATOR

pytest.importorskip("triton")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("gpu_steps")


def step(products: int) -> GraphModule:
    """So many products, each of what the one before gives, whose codes are their numbers."""
    graph = Graph()
    x = graph.placeholder("x")
    for number in range(products):
        x = graph.call_function(OPERATOR, (x, [], [torch.tensor(number)], None, "int4", 1, ""))
    graph.output(x)
    return GraphModule(torch.nn.Module(), graph)


def test_weights_are_brought_after_the_product_that_is_named(benchmark: ModuleType) -> None:
    """Of this layer, or the next one; nothing of a layer that is not there, nor the head."""
    brings = [benchmark.Bring.parse(text) for text in ("qkv:o:9", "qkv:gate_up:1.5", "down:qkv:4")]
    graph = benchmark.with_branches(step(9), brings, None).graph
    found: list[tuple[Any, ...]] = []
    product = None
    for node in graph.nodes:
        if node.target is OPERATOR:
            product = int(node.args[2][0])
        elif node.op == "call_function" and node.args:
            codes, megabytes = node.args
            found.append((product, int(codes), megabytes))
    assert sorted(found) == [(0, 1, 9), (0, 2, 1.5), (3, 4, 4), (4, 5, 9), (4, 6, 1.5)]
    assert graph.output_node().prev.target.__name__ == "join"


def test_models_of_other_products_are_refused(benchmark: ModuleType) -> None:
    with pytest.raises(UsageError, match="a step has 7 products, not 4 a layer and one more"):
        benchmark.with_branches(step(7), [benchmark.Bring.parse("qkv:o:9")], None)


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
