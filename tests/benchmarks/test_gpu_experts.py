"""The tables of `benchmarks/gpu_experts.py`."""

from types import ModuleType


def test_tables_have_a_column_per_number_of_tokens(benchmark: ModuleType) -> None:
    rows = [
        benchmark.Row("small", "int4 grouped", 1, 12.34),
        benchmark.Row("small", "int4 grouped", 4, 20.0),
        benchmark.Row("small", "dense eager", 4, None, "OutOfMemoryError"),
    ]
    assert benchmark.table(rows, [1, 4]).strip().splitlines() == [
        "small, us",
        "",
        "| | T=1 | T=4 |",
        "|---|---|---|",
        "| int4 grouped | 12.3 | 20.0 |",
        "| dense eager |  |  |",
    ]
