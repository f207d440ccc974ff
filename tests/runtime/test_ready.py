"""What is said of a packed model on a GPU before it computes."""

from types import SimpleNamespace

import torch

from quantkit.runtime import ready


def test_slow_products_are_said_once_with_their_reason(monkeypatch, caplog):
    monkeypatch.setattr(ready, "why_slow", lambda device: f"{device} has no Triton. Install one.")
    monkeypatch.setattr(ready, "device_features", lambda device: frozenset())
    ready._warn_once.cache_clear()
    model = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    ready._tell(model)
    ready._tell(model)
    assert [record.getMessage() for record in caplog.records] == [
        "packed products run slower than they could: cuda:0 has no Triton. Install one."
    ]
    assert caplog.records[0].levelname == "WARNING"
    ready._warn_once.cache_clear()


def test_nothing_is_said_where_the_fastest_kernels_run(monkeypatch, caplog):
    monkeypatch.setattr(ready, "why_slow", lambda device: None)
    monkeypatch.setattr(ready, "device_features", lambda device: frozenset({"triton"}))
    ready._tell(SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16))
    assert not caplog.records
