"""Run a packed checkpoint: load it through transformers, generate, and serve its modules."""
