"""Tile tables: which row and tile was measured fastest on a GPU, as JSON, one file per GPU.

A table only ever makes things faster: without one, rules choose. It is safe to delete.
"""
