"""Calibration: choose scales, zero-points and codes of weights. Works on tensors, never on packed bytes."""
