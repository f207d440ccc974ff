"""Plug-in for SGLang: packed linears, embeddings and experts on quantkit's kernels."""
