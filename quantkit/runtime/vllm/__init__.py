"""Plug-in for vLLM: packed linears, embeddings and experts on quantkit's kernels."""
