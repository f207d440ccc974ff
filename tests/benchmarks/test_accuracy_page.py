"""The tables of docs/accuracy.md are what the stored figures say."""

from pathlib import Path
from types import ModuleType

import pytest


def test_the_committed_tables_are_what_the_script_writes(benchmark: ModuleType) -> None:
    text = benchmark.PAGE.read_text()
    assert benchmark.page(text) == text, "run python benchmarks/accuracy_page.py"


def test_every_table_of_the_page_is_stored_with_its_commands_machine_and_commits(
    benchmark: ModuleType,
) -> None:
    marks = [name for _, name, _ in benchmark.MARKED.findall(benchmark.PAGE.read_text())]
    assert set(benchmark.PARAGRAPHS) <= set(marks)
    marks = [name for name in marks if name not in benchmark.PARAGRAPHS]
    assert marks == [name for name in benchmark.TABLES if name in marks]
    guide = "".join(page.read_text() for page in (benchmark.ROOT / "docs" / "guide").glob("*.md"))
    assert all(f"<!-- generated: {name} -->" in guide for name in set(benchmark.TABLES) - set(marks))
    unmarked = benchmark.MARKED.sub("", benchmark.PAGE.read_text())
    assert not [line for line in unmarked.splitlines() if line.startswith("|")]
    for name, table in benchmark.TABLES.items():
        assert table["commands"] and table["machine"] and table["commits"], name
        assert all(len(row) == len(table["columns"]) for row in table["rows"]), name


def test_a_figure_that_was_typed_into_the_page_is_found(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "accuracy.md"
    other.write_text(benchmark.PAGE.read_text().replace("| 22.0016 |", "| 21.0016 |"))
    monkeypatch.setattr(benchmark, "PAGE", other)
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"accuracy\.md is not up to date: run python benchmarks/accu"):
        benchmark.main(["--check"])


def test_percentages_follow_from_the_table(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["int8", "mse", "0.10 / 0.20"], ["", "rotated", "0.05 / 0.30"]]
    monkeypatch.setitem(
        benchmark.TABLES, "it", {"columns": ["scheme", "method", "KL mean, books / docs"], "rows": rows}
    )
    before, after = (benchmark.divergences("it", "int8", method) for method in ("mse", "rotated"))
    assert (before, after) == ((0.10, 0.20), (0.05, 0.30))
    assert benchmark.changes(before, after) == (-50, 50)
    with pytest.raises(KeyError):
        benchmark.divergences("it", "int4")
