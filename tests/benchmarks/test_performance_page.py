"""docs/performance.md is what the stored runs say."""

import json
from pathlib import Path
from types import ModuleType

import pytest


def test_the_committed_page_is_what_the_script_writes(benchmark: ModuleType) -> None:
    assert benchmark.PAGE.read_text() == benchmark.page(), "run python benchmarks/performance_page.py"


def test_a_file_that_differs_is_named(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "performance.md"
    other.write_text(benchmark.page().replace("1.00", "0.99"))
    monkeypatch.setattr(benchmark, "PAGE", other)
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"performance\.md is not up to date: run python benchmarks/perf"):
        benchmark.main(["--check"])


def test_every_stored_run_is_shown_with_its_command_machine_and_commit(benchmark: ModuleType) -> None:
    page = benchmark.page()
    for path in benchmark.RESULTS.glob("*.json"):
        of_file = json.loads(path.read_text())
        run = of_file.get("runs", [of_file])[0]
        assert run["command"].startswith("python benchmarks/") and f"`{run['command']}`" in page, path
        assert "torch" in (about := run.get("machine") or run["about"]), path
        assert about.removeprefix("NVIDIA ") in page
        # A section uses it, besides the list at the end.
        assert page.count(path.name) > 1, path


def test_a_layer_is_the_sum_of_its_linears(benchmark: ModuleType) -> None:
    rows = [benchmark.Row("int4", shape, 1, us, 1.0, 4.0, 8) for shape, us in (("a", 2.0), ("b", 3.0))]
    rows += [benchmark.Row("int8", "a", 1, 5.0, 1.0, 4.0, 8)]
    run = benchmark.total(benchmark.Run("", {"a": (1, 1), "b": (1, 1)}, rows), ("a", "b"))
    # int8 was not timed on b.
    assert run.rows == [benchmark.Row("int4", "layer", 1, 5.0, 2.0, 8.0, 16)]
