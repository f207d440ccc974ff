"""The fragment layout of packed weights, its repacking, and how codes in registers become floats."""
