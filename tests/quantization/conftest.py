"""Tiny models to quantize, and text to calibrate on."""

import pytest

from ..tiny.fixtures import few_scales, prompt, small_rows, text

__all__ = ["few_scales", "prompt", "small_rows", "text"]


@pytest.fixture
def few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge is compared on two windows of a text."""
    monkeypatch.setattr("quantkit.eval.adapted.MOST_WINDOWS", 2)
    monkeypatch.setattr("quantkit.eval.adapted.FEW_WINDOWS", 2)
