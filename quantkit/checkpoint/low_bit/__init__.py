"""Read checkpoints with low-bit weights: a reader for each stored format, some rows at a time."""
