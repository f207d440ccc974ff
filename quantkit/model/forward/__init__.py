"""Forward passes of a model that is not in memory as a whole: they wait before each block."""
