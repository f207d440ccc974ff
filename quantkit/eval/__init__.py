"""Evaluate the loss of accuracy and the saved memory of quantized models."""
