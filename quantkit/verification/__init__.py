"""Verify a packed checkpoint: hashes of its files, and its logits for a fixed prompt."""
