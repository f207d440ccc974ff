"""Prove a packed checkpoint: hashes of its files, and its logits of a fixed prompt."""
