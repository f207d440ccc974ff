"""What counts as a finding of a sanitizer."""

import pytest

from .sanitize import FOUND, KERNEL, judged

LINES = KERNEL.read_text().splitlines()
DEF, DISPATCH = (
    next(i + 1 for i, line in enumerate(LINES) if text in line)
    for text in ("def wgmma_gemm(", "    if BN == ")
)
KNOWN = f"""\
..========= Error: Race reported between Read access at wgmma_gemm+0x100 in {KERNEL.name}:{DEF}
=========     and Write access at wgmma_gemm+0x58c0 in {KERNEL.name}:{DEF} [276 hazards]
=========     and Write access at wgmma_gemm+0x99e0 in {KERNEL.name}:{DISPATCH} [206 hazards]
=========
"""
OTHER = KNOWN.replace(f"{KERNEL.name}:{DISPATCH}", f"{KERNEL.name}:160")
ELSEWHERE = KNOWN.replace("at wgmma_gemm+0x58c0", "at tiled+0x58c0")


def said(*hazards: str) -> str:
    return (
        f"{''.join(hazards)}...\n3 passed in 1.0s\n== RACECHECK SUMMARY: {len(hazards)} hazards displayed\n"
    )


def test_nothing_is_found_where_only_tritons_own_table_is_raced_on() -> None:
    part = judged(FOUND, said(KNOWN, KNOWN))
    assert (part.status, part.findings, part.passed) == (0, 0, 3)
    assert judged(0, said()).status == 0


@pytest.mark.parametrize("hazard", [OTHER, ELSEWHERE])
def test_other_hazards_are_findings(hazard: str) -> None:
    part = judged(FOUND, said(KNOWN, hazard, KNOWN))
    assert (part.status, part.findings) == (FOUND, 1)


def test_failed_tests_and_tools_that_did_not_run_are_failures() -> None:
    assert judged(1, said(KNOWN)).status == 1
    assert judged(0, "3 passed in 1.0s").status == 1
    assert judged(0, "== RACECHECK SUMMARY: 0 hazards displayed").status == 1
