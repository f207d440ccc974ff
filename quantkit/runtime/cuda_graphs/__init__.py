"""Decoding steps and prompts as CUDA graphs."""
