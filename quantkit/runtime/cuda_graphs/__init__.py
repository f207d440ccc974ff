"""CUDA graphs of decoding steps and of prompts."""
