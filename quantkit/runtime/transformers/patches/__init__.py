"""Changes to other libraries, one file per subject; `table.py` lists them with reason and undo."""
