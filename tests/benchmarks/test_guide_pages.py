"""Figures of README.md and docs are what the stored results say, and stand nowhere else."""

import re
from pathlib import Path
from types import ModuleType

import pytest

#: A number with a unit of what is measured. Whole numbers of GB name machines.
MEASURED = re.compile(
    r"\b\d+\.\d+ ?(GB|MB|kB|%|nats|bits?|µs|us|ms|s|times|tokens/s)(?!\w)"
    r"|\b\d[\d,]* ?(tokens/s|µs|ms)(?!\w)|\b\d+(\.\d+)?x(?![\w.])"
)
#: Thresholds that a page advises, which nobody measured.
ADVICE = {"above 95 %"}


def prose(text: str, marked: re.Pattern[str]) -> str:
    """A page without its generated parts and without code."""
    text = marked.sub("", text)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def test_the_committed_pages_are_what_the_script_writes(benchmark: ModuleType) -> None:
    for path in benchmark.PAGES:
        text = path.read_text()
        assert benchmark.page(text) == text, f"{path.name}: run python benchmarks/guide_pages.py"


def test_every_part_is_on_a_page(benchmark: ModuleType) -> None:
    marks = {found[2] for path in benchmark.PAGES for found in benchmark.MARKED.finditer(path.read_text())}
    assert marks - {"classes"} == set(benchmark.PARTS)


def test_every_type_of_gguf_is_in_one_table_and_in_no_other_list(benchmark: ModuleType) -> None:
    rows = [line.strip("| ").split(" | ") for line in benchmark.gguf_types().splitlines()[2:]]
    names = [name for row in rows for name in row[0].split(", ")]
    assert sorted(names) == sorted(row.name for row in benchmark.BLOCK_TYPES.values())
    kept = {row[0]: row[2:] for row in rows}
    assert kept["Q4_1"][0] == "int4 with minimums, groups of 32, float16 scales"
    assert kept["Q8_0"][1] == "int8, int7, int6" and kept["MXFP4"][0].endswith("e8m0 scales")
    text = (benchmark.ROOT / "docs" / "cli.md").read_text()
    assert not [name for name in names if "_" in name and re.search(rf"\b{name}\b", text)]


def test_no_figure_is_typed_into_a_page(benchmark: ModuleType) -> None:
    for path in benchmark.PAGES:
        text = prose(path.read_text(), benchmark.MARKED)
        assert not [found[0] for found in MEASURED.finditer(text)], path.name


def test_no_figure_is_typed_into_another_page(benchmark: ModuleType) -> None:
    for path in sorted((benchmark.ROOT / "docs").glob("*.md")):
        if path.name == "performance.md":  # Written as a whole from what is stored.
            continue
        # Bits per weight follow from a format.
        text = re.sub(r"\d+(\.\d+)? bits?\b", "", prose(path.read_text(), benchmark.MARKED))
        assert not [found[0] for found in MEASURED.finditer(text)], path.name


def test_a_typed_figure_is_found() -> None:
    for text in ("it takes 5.7 GB", "1,234 tokens/s", "twice, 2.1x as fast", "0.02 nats"):
        assert MEASURED.search(text)
    for text in ("an 80 GB GPU", "transformers 5.24", "128x128", "--bits-per-weight 4.5"):
        assert not MEASURED.search(text)


def test_a_page_that_differs_is_named(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "choosing.md"
    other.write_text("<!-- generated: fits -->\n| another table |\n")
    monkeypatch.setattr(benchmark, "PAGES", (other,))
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"choosing\.md is not up to date: run python benchmarks/guide"):
        benchmark.main(["--check"])
    benchmark.main([])
    benchmark.main(["--check"])
    assert "Llama-3.1-70B-Instruct" in other.read_text()
