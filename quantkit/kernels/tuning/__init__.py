"""Tile tables, the search that fills them, and how kernels are timed."""
