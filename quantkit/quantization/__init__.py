"""Quantize a checkpoint: plan it, calibrate, stream the tensors through packing, write."""
