"""Fragment layout of packed weights: repacking, and dequantizing codes in registers."""
