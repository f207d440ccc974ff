"""Distill a packed model: train it end to end against the predictions of the original."""
