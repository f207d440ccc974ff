"""Tile tables: the kernel and tile measured fastest on a GPU, as JSON, one file per GPU.

Tables only make things faster: without one, rules choose. They are safe to delete.
"""
