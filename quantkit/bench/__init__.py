"""Benchmarks of whole models: time to first token, decoding, memory, and latency under load."""
