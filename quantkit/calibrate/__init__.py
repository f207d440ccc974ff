"""Calibration: which scale, zero-point and codes a weight gets. Sees tensors only, never packed bytes."""
