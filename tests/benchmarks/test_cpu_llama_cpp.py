"""What `benchmarks/cpu_llama_cpp.py` prints, without llama.cpp."""

import sys
from types import ModuleType

import pytest


def test_a_row_has_both_figures_with_their_ranges(benchmark: ModuleType) -> None:
    row = benchmark.Row("generate", 2, 40.04, 39.0, 41.0, 0.8, 1.2, 1.1, 1.3, 2.5)
    assert str(row) == "| generate | 2 | 40.0 (39.0 to 41.0) | 0.80 | 1.20 (1.10 to 1.30) | 2.50 |"


def test_without_llama_cpp_it_says_what_to_install(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(sys, "argv", ["cpu_llama_cpp.py", "packed", "model.gguf"])
    with pytest.raises(SystemExit, match="pip install llama-cpp-python, which needs gcc and cmake"):
        benchmark.main()
