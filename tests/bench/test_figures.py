"""Figures: percentiles, spreads, and that JSON gives back what went in."""

from dataclasses import replace
from pathlib import Path

import pytest

from quantkit.bench.figures import (
    Benchmark,
    Cell,
    Load,
    Machine,
    Memory,
    Percentiles,
    Serving,
    Speed,
    Spread,
    label_of,
    percentile,
    read_benchmark,
    to_json,
)
from quantkit.errors import UsageError
from quantkit.report.bench_report import speed_table, write_serving, write_speed

MACHINE = Machine("cpu", "a CPU", 2, 1e10, "0.1.0", "2.13.0", "5.23.0")


def a_cell(batch: int, prompt: int, mode: str = "eager") -> Cell:
    first = Spread(0.1 * prompt, 0.09 * prompt, 0.2 * prompt)
    return Cell(batch, prompt, mode, first, Spread(9, 8, 10), 0.01, 0.02, Spread(99, 98, 101), 2e9, None)


SPEED = Speed(
    "int4",
    "out/int4",
    "int4 g128 bfloat16",
    "bfloat16",
    1000,
    0.5,
    900,
    Memory(10, 20, 30),
    MACHINE,
    (a_cell(1, 8), a_cell(4, 8), a_cell(1, 16), replace(a_cell(4, 16), read_bandwidth=None, joules=0.25)),
    32,
    5,
    "random tokens, seed 0",
    ("prompts of 512 tokens were left out",),
)
SERVING = Serving(
    "int4",
    "out/int4",
    "int4 g128 bfloat16",
    "bfloat16",
    "sdpa",
    MACHINE,
    (Load(1.0, Percentiles(1, 2, 3), Percentiles(4, 5, 6), Percentiles(7, 8, 9), 0.9, 30.0),),
    8,
    0,
    (16, 256),
    (8, 64),
)


def test_percentile_is_a_measured_value() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (1, 50, 90, 99, 99.5, 100)] == [
        1,
        50,
        90,
        99,
        100,
        100,
    ]
    assert percentile([7.0], 1) == percentile([7.0], 99) == 7
    # The definition, looked up one by one.
    for count in range(1, 12):
        some = [float(value * value) for value in range(count)]
        for percent in (1, 33, 50, 90, 99):
            expected = min(v for v in some if sum(w <= v for w in some) >= percent / 100 * count)
            assert percentile(some, percent) == expected


def test_a_directory_is_labelled_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert label_of(str(tmp_path)) == label_of(".") == tmp_path.name
    assert label_of("org/name") == "org/name"


def test_a_spread_is_median_least_and_most() -> None:
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)


def test_json_gives_back_what_went_in(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(to_json([SPEED, replace(SPEED, weight_bytes=None)]))
    assert read_benchmark(path) == Benchmark(speed=(SPEED, replace(SPEED, weight_bytes=None)))
    path.write_text(to_json([SERVING]))
    assert read_benchmark(path) == Benchmark(serving=(SERVING,))


def test_a_file_with_the_mode_that_there_was_is_read(tmp_path: Path) -> None:
    """`bench` once also measured steps that torch.compile had fused."""
    path = tmp_path / "bench.json"
    cells = tuple(a_cell(1, 8, mode) for mode in ("eager", "cuda-graph", "compiled"))
    path.write_text(to_json([replace(SPEED, cells=cells)]))
    found = read_benchmark(path).speed
    assert found is not None and found[0].cells == cells
    assert [row[1] for row in speed_table(found).rows] == ["eager", "cuda-graph", "compiled"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"version": 2, "speed": []}', "version"),
        ('{"version": 1}', "'speed'"),
        ('{"version": 1, "speed": [{"cells": []}]}', "'memory'"),
        ('{"version": 1, "serving": [3]}', "3 is no Serving"),
        (to_json([SERVING]).replace('"p50": 1', '"p50": "1"'), "p50 is '1'"),
        (to_json([SERVING]).replace('"p50": 1', '"p50": true'), "p50 is True"),
        (to_json([SERVING]).replace('"p50": 1', '"p50": NaN'), "p50 is nan"),
        (to_json([SERVING]).replace('"p50": 1', '"p50": 1' + 400 * "0"), "p50 is 1000"),
        (to_json([SPEED]).replace('"batch": 1', '"batch": 1.5'), "batch is 1.5"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="is not what `quantkit bench --json` writes") as raised:
        read_benchmark(path)
    assert message in str(raised.value)
    with pytest.raises(UsageError, match="Check the path"):
        read_benchmark(tmp_path / "none.json")


def test_the_table_of_speed_has_a_row_per_cell() -> None:
    rows = speed_table([SPEED]).rows
    assert rows[0] == [
        *("int4", "eager", "1", "8", "800 (720 to 1,600)", "9", "10 ms", "20 ms"),
        *("99 (98 to 101)", "2.00 GB/s", "20%", "-"),
    ]
    assert rows[3][-3:] == ["-", "-", "0.25"]


def test_an_original_adds_a_column_of_multiples_in_the_same_mode() -> None:
    slow = replace(SPEED.cells[0], decode=Spread(33, 30, 40))
    table = speed_table([SPEED, replace(SPEED, label="MODEL", format="dense", cells=(slow,))])
    at = table.headings.index("of original")
    assert [row[at] for row in table.rows] == ["3x", "-", "-", "-", "1x"]
    assert "of original" not in speed_table([SPEED, SPEED]).headings


def test_energy_that_nobody_measured_has_no_column() -> None:
    assert "J/token" in speed_table([SPEED]).headings
    assert "J/token" not in speed_table([replace(SPEED, cells=SPEED.cells[:2])]).headings


def test_one_batch_is_drawn_as_bars(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = replace(SPEED, cells=SPEED.cells[:1])
    page = write_speed(tmp_path, [one, replace(one, label="other")], ["quantkit", "bench"])[1].read_text()
    # The figures stand beside the bars.
    assert page.count("<!-- 99 -->") == 2 and page.count("<!-- 800 -->") >= 2
    assert "<title>Speed and memory of int4 beside other</title>" in page


def test_reports_are_written_with_their_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    graph = replace(SPEED, label="fp6", cells=(*SPEED.cells, a_cell(1, 8, "cuda-graph")))
    names = {path.name for path in write_speed(tmp_path, [SPEED, graph], ["quantkit", "bench", "a b"])}
    page = (tmp_path / "bench.md").read_text()
    for heading in ("weights per step", "weights read"):
        assert heading in page and f"{heading.capitalize()}: " in page
    names |= {path.name for path in write_serving(tmp_path, [SERVING], ["quantkit", "bench"])}
    assert names == {
        *("bench.md", "bench.html", "bench.json", "throughput.png", "first-token.png", "memory.png"),
        *("serve.md", "serve.html", "serve.json", "load.png"),
    }
    text = (tmp_path / "bench.md").read_text()
    assert "quantkit bench 'a b'" in text
    assert "5 repetitions of 32 new tokens; prompts: random tokens, seed 0; activations in bfloat16." in text
    assert "a CPU (cpu, 2 threads), which reads 10.00 GB/s; quantkit 0.1.0" in text
    assert "- int4: prompts of 512 tokens were left out" in text
    assert read_benchmark(tmp_path / "bench.json").speed == (SPEED, graph)
    assert "8 requests per rate, seed 0; prompts of 16 to 256 tokens" in (tmp_path / "serve.md").read_text()
