"""What torch holds of a GPU's memory for reuse is given back where it is much."""

import pytest
import torch

from quantkit import memory
from quantkit.errors import EnvironmentProblem
from quantkit.memory import in_pieces


@pytest.mark.parametrize(
    ("device", "reserved", "allocated", "expected"),
    [
        ("cuda", 12 << 30, 6 << 30, 1),
        ("cuda", 7 << 30, 6 << 30, 0),
        ("cuda", 6 << 30, 6 << 30, 0),
        ("cpu", 12 << 30, 6 << 30, 0),
    ],
)
def test_the_cache_is_trimmed_beyond_its_limit(
    device: str, reserved: int, allocated: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    memory.trim_cache(torch.device(device))
    assert len(emptied) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_back_what_was_freed() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    held = torch.empty(memory.IDLE_BYTES + (64 << 20), dtype=torch.uint8, device=device)
    del held
    memory.trim_cache(device)
    assert torch.cuda.memory_reserved(device) == before


def test_a_gpu_with_too_little_memory_is_named_before_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 6_000_000_000)
    device = torch.device("cuda")
    memory.say_if_short(6_000_000_000 + memory.CONTEXT_BYTES, device, calibrated=True)
    memory.say_if_short(8_000_000_000, torch.device("cpu"), calibrated=True)
    assert not caplog.messages
    memory.say_if_short(8_000_000_000, device, calibrated=True)
    memory.say_if_short(8_000_000_000, device, calibrated=False)
    with_data, without = caplog.messages
    assert "takes up to 8.00 GB of GPU memory, and cuda has 6.00 GB free beside its context" in with_data
    assert "--calibration-length" in with_data and "--method mse" in with_data
    assert "--calibration-length" not in without
    assert with_data.endswith("or use --device cpu.") and without.endswith("or use --device cpu.")


@pytest.mark.parametrize(
    ("rows", "unit", "pieces"), [(9, 1, [3, 2, 2, 2]), (40, 16, [16, 16, 8]), (8, 16, None)]
)
def test_rows_are_halved_between_blocks(rows: int, unit: int, pieces: list[int] | None) -> None:
    """As long as the GPU has too little memory for more than so many."""

    def run(part: torch.Tensor) -> int:
        if pieces is None or len(part) > max(3, unit):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return len(part)

    if pieces is None:
        with pytest.raises(EnvironmentProblem, match="'w', even 16 rows at a time"):
            in_pieces(run, [torch.ones(rows, 2)], "'w'", unit)
    else:
        assert in_pieces(run, [torch.ones(rows, 2)], "'w'", unit) == pieces
