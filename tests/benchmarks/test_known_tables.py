"""Tables of models from 8 bits to 1 show every stored row."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def test_every_row_of_a_known_model_is_shown(benchmark: ModuleType) -> None:
    assert benchmark.KNOWN
    for name in benchmark.KNOWN:
        runs = benchmark.runs_of(name)
        lines = [line.strip("| ").split(" | ") for line in benchmark.known(name).splitlines()[2:]]
        labels = [line[0] for line in lines]
        assert sorted(labels) == sorted({row["label"] for run in runs for row in run["rows"]} | {"original"})
        bits = [float(line[1]) for line in lines[:-1]]
        assert bits == sorted(bits, reverse=True)
        text = benchmark.known_how(name).replace("\n", " ")
        assert all(f"`{run['command']}`" in text and run["model"] == runs[0]["model"] for run in runs)
        notes = benchmark.known_notes(name)
        for note in (note for run in runs for note in run["notes"]):
            label, _, said = note.partition(": ")
            assert said in notes or label in labels, note


def test_runs_of_a_model_have_the_same_original_and_the_same_row(benchmark: ModuleType) -> None:
    for name in benchmark.KNOWN:
        first, *others = benchmark.runs_of(name)
        texts = {text: one["reference_perplexity"] for text, one in first["rows"][0]["texts"].items()}
        # Peers may be of another version.
        measured = {row["label"]: row for row in first["rows"] if row["stored_as"] != row["label"]}
        for run in others:
            for row in run["rows"]:
                for text, one in row["texts"].items():
                    assert one["reference_perplexity"] == pytest.approx(texts[text], rel=1e-6), row["label"]
                    if row["label"] in measured:
                        before = measured[row["label"]]["texts"][text]
                        assert one["kl_mean"] == pytest.approx(before["kl_mean"], rel=1e-3), row["label"]


def test_what_a_run_lacks_and_another_has_is_not_said_to_be_missing(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        {
            "rows": [{"label": "int4"}],
            "notes": ["int4: slow", "int3: not run", "int2: not run", "Tool, 4: failed", "Other: failed"],
        },
        {"rows": [{"label": "int3"}, {"label": "Tool, 4"}], "notes": ["int4: not run", "Tool, 4: tool 1.2"]},
    ]
    monkeypatch.setattr(benchmark, "runs_of", lambda name: runs)
    assert benchmark.known_notes("any").splitlines() == [
        "- rows not run: int2",
        "- int4: slow",
        "- Other: failed",
        "- Tool, 4: tool 1.2",
    ]


def run_of(model: str, sizes: dict[str, int], rates: dict[str, list[int]]) -> dict[str, Any]:
    """What `known_speed.py` stores, with batches of 1 and 16."""
    rows = [
        {
            "label": label,
            "bytes": size,
            "decode": [
                {"batch": batch, "median": median, "mode": "cuda-graph"}
                for batch, median in zip((1, 16), rates[label], strict=False)
            ],
        }
        for label, size in sizes.items()
    ]
    return {
        "command": f"python benchmarks/known_speed.py {model}",
        "machine": "a GPU",
        "model": model,
        "prompt": 128,
        "new_tokens": 64,
        "rows": rows,
    }


def test_speed_is_shown_beside_the_original_and_what_did_not_run_is_empty(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    assert benchmark.known_speed() == "No run is stored." and benchmark.known_speed_how() == "None."
    (tmp_path / "known-speed").mkdir()
    sizes = {"original": 2_000_000, "int4": 500_000}
    large = run_of("large", {"original": 3_000_000}, {"original": [7, 8]})
    small = run_of("small", sizes, {"original": [100, 1000], "int4": [250]})
    # Another run of a model, with an original of its own.
    more = {"original": 2_000_000, "int2": 250_000, "int8": 1_000_000}
    again = run_of("small", more, {"original": [50, 500], "int8": [100, 400], "int2": [200, 2000]})
    for name, run in (("a", large), ("b", again), ("c", small)):
        (tmp_path / "known-speed" / f"{name}.json").write_text(json.dumps(run))
    assert benchmark.known_speed().splitlines() == [
        "| model | format | size | of original | "
        "tokens/s, batch 1 | of original | tokens/s, batch 16 | of original |",
        "|---|---|---|---|---|---|---|---|",
        "| small | int8 | 1.0 MB | 0.50x | 100 | 2.00x | 400 | 0.80x |",
        "| small | int4 | 0.5 MB | 0.25x | 250 | 2.50x | | |",
        "| small | int2 | 0.2 MB | 0.12x | 200 | 4.00x | 2,000 | 4.00x |",
        "| small | original | 2.0 MB | 1.00x | 100 | 1.00x | 1,000 | 1.00x |",
        "| large | original | 3.0 MB | 1.00x | 7 | 1.00x | 8 | 1.00x |",
    ]
    how = benchmark.known_speed_how().replace("\n", " ")
    assert "small: 64 tokens after 128, greedy, in mode cuda-graph." in how
    assert how.endswith("By `python benchmarks/known_speed.py large` on a GPU.")
