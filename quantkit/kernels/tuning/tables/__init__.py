"""Tile tables: the kernel and tile measured fastest on a GPU, as JSON, one file per GPU.

Tables only make things faster: without one, rules choose. They are safe to delete.
To ship one, copy the file that `quantkit tune` wrote to the user's cache here, under the same name.
"""
