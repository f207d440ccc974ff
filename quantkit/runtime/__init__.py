"""Run a packed checkpoint: load it through transformers, generate text, and compute on packed weights."""
