"""Changes to other libraries, a file for each subject; `table.py` lists them with reason and undo."""
