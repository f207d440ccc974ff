"""Targets of `export`: a packed directory in the layouts of other tools, with the same values."""
