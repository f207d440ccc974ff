"""KV caches: static ones for CUDA graphs, quantized ones, and the name of the argument in transformers."""
