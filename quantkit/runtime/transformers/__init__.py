"""Everything quantkit registers with transformers or changes in it. `patches/table.py` lists the changes."""
