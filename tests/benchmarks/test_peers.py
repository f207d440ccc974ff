"""What other tools are given."""

import json
from pathlib import Path
from types import ModuleType

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
