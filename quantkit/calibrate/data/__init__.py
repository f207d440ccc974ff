"""Calibration texts: where they come from, documents, samples of tokens."""
