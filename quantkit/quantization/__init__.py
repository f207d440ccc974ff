"""Quantize a checkpoint: plan it, calibrate, stream its tensors through quantization, write."""
