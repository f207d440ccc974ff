"""Number formats, schemes and packing: numbers <-> bytes. Knows no methods, kernels or files."""
