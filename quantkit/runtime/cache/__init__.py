"""KV caches: static caches for CUDA graphs, quantized caches, and the argument name in transformers."""
