"""Tiny models to quantize, and text to calibrate on."""

from ..tiny.fixtures import few_scales, prompt, small_rows, text

__all__ = ["few_scales", "prompt", "small_rows", "text"]
