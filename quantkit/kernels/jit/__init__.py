"""Compile kernels side by side and launch them without Triton's look-up."""
