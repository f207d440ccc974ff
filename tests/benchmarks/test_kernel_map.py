"""docs/kernels.md shows which kernel the rules choose now."""

from types import ModuleType

import pytest

pytest.importorskip("triton")


def test_the_map_on_the_page_is_that_of_the_rules(benchmark: ModuleType) -> None:
    page = benchmark.PAGE.read_text()
    assert page == benchmark.with_map(page), "run python benchmarks/kernel_map.py --write"


def test_every_kernel_of_a_gpu_has_a_letter_and_a_row_in_the_table(benchmark: ModuleType) -> None:
    from quantkit.kernels.gemm.fused_kernels import FUSED_KERNELS

    assert {row.name for row in FUSED_KERNELS} == set(benchmark.LETTERS)
    page = benchmark.PAGE.read_text()
    assert all(f"\n| `{name}` | " in page for name in benchmark.LETTERS)
