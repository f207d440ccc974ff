"""Caches of keys and values: static ones for graphs, packed ones, and transformers' names for them."""
