"""Calibration data: sources, documents, and samples of tokens."""
