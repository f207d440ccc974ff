"""What other tools are given."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch


def test_data_is_the_texts_of_a_file_or_those_that_come_with_quantkit(
    benchmark: ModuleType, stories: Path, tmp_path: Path
) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("A cat sat. " * 300, "", "b")))
    data = benchmark.Data.of(str(file), 2)
    assert data.texts == ("A cat sat. " * 300, "b")
    rows = data.sequences(stories)
    assert [len(row) for row in rows] == [benchmark.LENGTH] * 2 and rows == data.sequences(stories)
    assert benchmark.Data.of(None, None).samples == benchmark.SAMPLES
    assert len(benchmark.Data.of(None, None).sequences(stories)) == benchmark.SAMPLES


def test_rounding_by_gguf_leaves_the_head_and_moves_linears(
    benchmark: ModuleType, stories: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    def coarse(weight: torch.Tensor) -> torch.Tensor:
        return weight.round()

    benchmark.rounded(stories, tmp_path / "out", coarse)
    before, after = (AutoModelForCausalLM.from_pretrained(one) for one in (stories, tmp_path / "out"))
    for name, weight in after.named_parameters():
        same = weight.equal(before.get_parameter(name))
        assert same == ("_proj" not in name), name
        assert same or weight.equal(weight.round())


def test_every_peer_has_a_label_of_its_own(benchmark: ModuleType) -> None:
    labels = [peer.label for peer in benchmark.PEERS]
    assert len(labels) == len(set(labels))


def test_a_peer_is_asked_by_a_part_of_its_label(benchmark: ModuleType) -> None:
    labels = [peer.label for peer in benchmark.wanted(["AUTO-round", "Q4_1"])]
    ends = ("W4A16", "W3A16", "W2A16", "W2A16, 200 steps")
    assert labels == ["llama.cpp Q4_1", *(f"auto-round, {end}" for end in ends)]
    assert list(benchmark.wanted([])) == list(benchmark.PEERS)


def test_the_command_writes_a_model_and_a_record_that_is_read_back(
    benchmark: ModuleType, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Path, int]] = []

    def make(model: Path, out: Path, data: object) -> object:
        seen.append((model, data.samples))
        # Some tools make a folder in the one that they are given.
        benchmark.rounded(model, out / "w4g128", torch.round)
        return benchmark.Made(4.25, None, "rounded")

    monkeypatch.setattr(benchmark, "PEERS", (benchmark.Peer("Round, 4", "torch", make),))
    benchmark.main([str(stories), str(tmp_path / "out"), "--peers", "round", "--samples", "3"])
    assert seen == [(stories, 3)]
    found = benchmark.Finished.stored(tmp_path / "out" / "Round--4" / "w4g128" / benchmark.RECORD)
    assert (found.label, found.made) == ("Round, 4", benchmark.Made(4.25, None, "rounded"))
    assert (found.directory / "config.json").exists() and found.seconds > 0
    versions = [benchmark.installed(name) for name in ("torch", "torch", "transformers")]
    assert found.note == "Round, 4: torch {} with torch {}, transformers {}; rounded".format(*versions)


def test_a_peer_that_is_not_here_is_named(
    benchmark: ModuleType, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "PEERS", (benchmark.Peer("Other", "not-installed", lambda *_: None),))
    with pytest.raises(SystemExit, match="Other: not-installed is not installed"):
        benchmark.main([str(stories), str(tmp_path), "--peers", "other"])
    with pytest.raises(SystemExit, match="no peer is called 'othre'; there are Other"):
        benchmark.main([str(stories), str(tmp_path), "--peers", "othre"])


def test_a_short_last_group_has_a_scale_of_its_own(benchmark: ModuleType, stories: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(stories)
    stored = weights = 0
    for name, weight in model.named_parameters():
        if "_proj" in name:
            for row in weight:
                groups = [row[start : start + 128] for start in range(0, len(row), 128)]
                stored += sum(3 * len(group) + 16 + 3 for group in groups)
                weights += len(row)
    assert benchmark.stored_bits(model, 3) == pytest.approx(stored / weights, rel=1e-12)
