"""Registrations with transformers, and changes to it. `patches/table.py` lists them."""
