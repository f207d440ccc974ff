"""docs/quality.png shows the stored figures."""

from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("matplotlib")


def test_the_committed_plot_shows_the_stored_figures(benchmark: ModuleType) -> None:
    assert benchmark.drawn(benchmark.PLOT) == benchmark.figures(), "run python benchmarks/quality_plot.py"


def test_a_plot_of_other_figures_is_found(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "quality.png"
    benchmark.draw(other)
    assert benchmark.drawn(other) == benchmark.figures()
    monkeypatch.setattr(benchmark, "PLOT", other)
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    monkeypatch.setattr(benchmark, "figures", lambda: "{}")
    with pytest.raises(SystemExit, match=r"quality\.png is not up to date: run python benchmarks/quality"):
        benchmark.main(["--check"])
