"""Kernels besides linears: norms, rotary embedding, activations, attention, KV append, argmax."""
