"""The library's FP8 product with scales of blocks, of a weight that is unpacked to rows first."""
