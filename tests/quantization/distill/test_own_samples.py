"""Samples that the original writes: how many at a time, and models without keys and values."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from quantkit.checkpoint.manifest import read_manifest
from quantkit.quantization.distill import own_samples
from quantkit.quantization.distill.chat_turn import ChatTurn
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantization.distill.own_samples import UNKNOWN_BYTES, row_bytes, sample_bytes, without_loops
from quantkit.quantizing import quantize
from quantkit.runtime.cache import static_cache
from quantkit.runtime.cuda_graphs import decode

from ...tiny.calibrated import data, write


def model_of(config: Any) -> Any:
    """A stand-in for a model in bfloat16."""
    return SimpleNamespace(config=config, parameters=lambda: iter([torch.zeros(1, dtype=torch.bfloat16)]))


def test_keys_and_values_of_a_token() -> None:
    llama = transformers.LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8
    )
    assert row_bytes(model_of(llama)) == UNKNOWN_BYTES == 2 * 32 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("total", "free", "room"),
    [(80, 79, 20), (16, 14, 4), (80, 20, 10), (80, 1, 80 / 4 / 32), (0, 0, 0)],
)
def test_samples_take_a_part_of_a_gpu_that_is_free(
    monkeypatch: pytest.MonkeyPatch, total: int, free: int, room: float
) -> None:
    facts = SimpleNamespace(total_memory=total << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(own_samples, "free_memory", lambda device: free << 30)
    assert own_samples._room(torch.device("cuda")) == int(room * 2**30)


def test_on_a_gpu_a_sample_has_the_caches_of_graphs_too() -> None:
    assert own_samples.CACHES["cuda"] == (decode.GRAPHS + 1, static_cache.BUCKET)
    model = model_of(transformers.LlamaConfig(num_hidden_layers=2))
    of_token, of_logits = row_bytes(model), 16 * 32000
    assert sample_bytes(model, 300, "cpu") == 300 * of_token + of_logits
    assert sample_bytes(model, 300, "cuda") == 3 * 512 * of_token + of_logits
    assert sample_bytes(model, 512, "cuda") == 3 * 512 * of_token + of_logits


def test_at_least_one_sample_is_written_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def continued(_: Any, beginnings: torch.Tensor, length: int, *__: Any) -> torch.Tensor:
        counts.append(len(beginnings))
        return beginnings.repeat(1, length)[:, :length]

    monkeypatch.setattr(own_samples, "continued", continued)
    model, windows = model_of(transformers.LlamaConfig(num_hidden_layers=2)), torch.zeros(2, 50).long()
    # A sample has 20 tokens of 2 x 2 layers x 4096 keys and values in 16 bits, and logits.
    one = 20 * 2 * 2 * 4096 * 2 + 16 * 32000
    for room, most in ((0, 1000), (one, 1000), (3 * one, 1000), (1 << 40, 1000), (1 << 40, 5)):
        monkeypatch.setattr(own_samples, "_room", lambda device, room=room: room)
        next(own_samples.own_samples(model, windows, 20, 0, None, itertools.count(), most))
    assert counts == [1, 1, 3, own_samples.MOST_SAMPLES["cpu"], 5]


def test_samples_that_repeat_themselves_are_left_out() -> None:
    fresh = torch.arange(100)
    # Of 47 runs of four tokens in the second half 47 - 5, 47 - 10 and 47 - 9 come again: at most 37.6 may.
    loops = [torch.arange(period).repeat(100)[:100] for period in (5, 10, 9)]
    ending, ended = torch.cat([fresh[:50], loops[0][:50]]), torch.cat([loops[0][:50], fresh[:50]])
    rows = torch.stack([loops[0], fresh, loops[1], loops[2], ending, ended])
    assert torch.equal(without_loops(rows), torch.stack([fresh, loops[1], ended]))
    assert without_loops(rows[:1]).shape == (0, 100)
    # Too short for a run.
    assert torch.equal(without_loops(rows[:, :3]), rows[:, :3])


@pytest.mark.parametrize("name", ["Rwkv", "Mamba", "DeepseekV3"])
def test_configs_that_do_not_tell(name: str) -> None:
    assert row_bytes(model_of(getattr(transformers, f"{name}Config")())) == UNKNOWN_BYTES


def test_batches_of_a_chat_model_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[torch.Tensor, int, float]] = []

    def continued(_: Any, beginnings: torch.Tensor, length: int, seed: int, min_p: float) -> torch.Tensor:
        calls.append((beginnings, length, min_p))
        more = torch.full((len(beginnings), length - beginnings.shape[1]), 7)
        return torch.cat([beginnings, more], 1)

    monkeypatch.setattr(own_samples, "continued", continued)
    model = SimpleNamespace(
        config=transformers.LlamaConfig(), parameters=lambda: iter([torch.zeros(1, dtype=torch.bfloat16)])
    )
    openings = (torch.tensor([[1, 2, 3, 50], [1, 2, 3, 51]]), torch.tensor([[1, 2, 3, 60, 61]]))
    turn = ChatTurn(torch.tensor([1, 2, 3]), torch.tensor([4, 5]), openings)
    windows = torch.arange(100, 400).view(2, 150)
    batches = own_samples.own_samples(model, windows, 20, 0, turn, itertools.count(), 1 << 20)
    found = [next(batches) for _ in range(7)]
    assert all(one.shape[1] == 20 for one in found)
    # Of the sizes 8, 16 and 32 only the first leaves room in 20 tokens; of 1, 4, 16 and 64 all but the last.
    sizes = [(beginnings.shape[1], length, min_p) for beginnings, length, min_p in calls]
    chat = [(3, 11, 0.05), (13, 20, 0.05)]
    assert sizes == [
        *[(4, 20, 0.05), (1, 20, 0.0), *chat],
        *[(5, 20, 0.05), (4, 20, 0.0), *chat],
        (4, 20, 0.05),
    ]
    assert set(found[0][:, 3].tolist()) == {50, 51} and found[3][0].tolist() == [1, 2, 3, 60, 61, *[7] * 15]
    # Another batch of the same openings draws others of them.
    assert not torch.equal(found[0], found[6])
    for number in (0, 2, 3, 5, 6):
        assert turn.count(found[number]) == len(found[number]) > 0
    for number in (2, 5):
        assert found[number][0].tolist() == [1, 2, 3, *[7] * 8, 4, 5, *[7] * 7]
    for number in (1, 4):
        assert turn.count(found[number]) == 0 and found[number].min() >= 7
    # A batch is the same whichever came before it.
    later = own_samples.own_samples(model, windows, 20, 0, turn, iter([6]), 1 << 20)
    assert torch.equal(next(later), found[6])


def test_few_samples_are_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_samples, "continued", lambda _, rows, *__: rows)
    monkeypatch.setattr(own_samples, "_room", lambda device: 1 << 40)
    model = model_of(transformers.LlamaConfig(num_hidden_layers=2))
    turn = ChatTurn(torch.tensor([1, 2, 3]), torch.tensor([4, 5]), (torch.tensor([[1, 2, 3, 50]]),))
    batches = own_samples.own_samples(model, torch.zeros(2, 90).long(), 60, 0, turn, itertools.count(), 10)
    assert [len(next(batches)) for _ in range(3)] == [4, 4, 4]


def test_kinds_that_have_no_room_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_samples, "continued", lambda _, rows, *__: rows)
    model = model_of(transformers.LlamaConfig(num_hidden_layers=2))
    turn = ChatTurn(torch.tensor([1, 2, 3]), torch.tensor([4, 5]), (torch.tensor([[1, 2, 3, 50]]),))
    windows = torch.arange(100, 400).view(2, 150)
    for length, kinds in ((12, [4, 1, 4, 4]), (4, [1, 1, 1, 1])):
        batches = own_samples.own_samples(model, windows, length, 0, turn, itertools.count(), 1 << 20)
        assert [next(batches).shape[1] for _ in range(4)] == kinds


def test_a_model_without_attention_writes_samples(tmp_path: Path) -> None:
    source = write(tmp_path / "in", "rwkv")
    options = DistillOptions(steps=2, batch=2)
    given = {"format": "int2", "group_size": 16, "method": "mse,distill", "device": "cpu", "check": False}
    quantize(source, tmp_path / "out", calibration=data(None), distillation=options, **given)
    assert read_manifest(tmp_path / "out")["distillation"]["sequences"]["own"] > 0
