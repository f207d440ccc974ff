"""CUDA graphs of decoding steps and of prompts: launches captured once and replayed."""
