"""Caches that are filled at once against layers one by one: in Triton's interpreter, for real on a GPU."""

from collections.abc import Callable

import pytest
import torch

from quantkit.kernels.ops import kv_append

from ...support.compare import assert_close

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


#: Keys [B, 3, T, D] that lie in different ways.
LAID: dict[str, Callable[..., torch.Tensor]] = {
    "contiguous": lambda b, t, d, dtype: numbers(b, 3, t, d, dtype=dtype),
    "by token": lambda b, t, d, dtype: numbers(b, t, 3, d, dtype=dtype).transpose(1, 2),
    "of more tokens": lambda b, t, d, dtype: numbers(b, 3, t + 7, d, dtype=dtype)[:, :, :t],
    "part of a product": lambda b, t, d, dtype: numbers(b, t, 9, d, dtype=dtype)[:, :, 3:6].transpose(1, 2),
    "by feature": lambda b, t, d, dtype: numbers(b, 3, d, t, dtype=dtype).transpose(2, 3),
    "at odd bytes": lambda b, t, d, dtype: numbers(b, 3, t, d + 1, dtype=dtype)[..., 1:],
}


@pytest.fixture(autouse=True)
def _found(by_address: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    entry = kv_append._entry

    def found(*tensors: torch.Tensor) -> tuple[int, ...]:
        by_address.extend(tensors)
        return entry(*tensors)

    monkeypatch.setattr(kv_append, "_entry", found)


@pytest.mark.parametrize("clear", [False, True], ids=["used", "new"])
@pytest.mark.parametrize("tokens", [1, 5, 33, 70])
def test_caches_get_all_states_and_zeros(tokens: int, clear: bool) -> None:
    """Of several shapes, dtypes and layouts at once, none of which is written beyond its end."""
    rooms, states, expected = [], [], []
    for size, dtype in ((16, torch.float32), (20, torch.float16), (12, torch.bfloat16), (5, torch.float32)):
        for laid in LAID.values():
            part = laid(2, tokens, size, dtype)
            around = torch.full((2 + 2, 3, 70, size), float("nan"), dtype=dtype, device=DEVICE)
            rooms.append(around[1:-1])
            states.append(part)
            wanted = around.clone()
            if clear:
                wanted[1:-1] = 0
            wanted[1:-1, :, :tokens] = part
            expected.append((around, wanted))
    kv_append.fill(rooms, states, clear)
    for around, wanted in expected:
        assert_close(around, wanted, rtol=0, atol=0, equal_nan=True)
    for around, _ in expected:
        around[1:-1] = float("nan")
    kv_append.fill_reference(rooms, states, clear)
    for around, wanted in expected:
        assert_close(around, wanted, rtol=0, atol=0, equal_nan=True)


def test_most_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's keys and values are, in all layouts that models have."""
    launched: list[int] = []
    real = kv_append._fill_launch
    monkeypatch.setattr(kv_append, "_fill_launch", lambda *sizes: launched.append(sizes[0]) or real(*sizes))
    monkeypatch.setattr(kv_append, "fill_reference", None)
    kinds = list(LAID)[:4]
    states = [LAID[kind](1, 6, 64, torch.float16) for kind in kinds]
    kv_append.fill([numbers(1, 3, 8, 64, dtype=torch.float16) for _ in kinds], states, True)
    assert launched == [len(kinds)]


def test_each_device_has_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, str]] = []

    def launch(tensors: int, *_: int) -> Callable[..., None]:
        return lambda table, *_: launched.append((tensors, table.device.type))

    monkeypatch.setattr(kv_append, "_fill_launch", launch)
    rooms = [torch.zeros(1, 2, 8, 16, device=device) for device in (DEVICE, "meta", DEVICE)]
    kv_append.fill(rooms, [room[:, :, :5].clone() for room in rooms], True)
    assert launched == [(2, DEVICE), (1, "meta")]
