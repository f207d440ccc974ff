"""Checkpoints whose weights are low-bit already: a reader for each stored format, some rows at a time."""
