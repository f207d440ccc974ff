"""What torch holds of a GPU's memory for reuse is given back where it is much."""

import pytest
import torch

from quantkit.model import memory


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
