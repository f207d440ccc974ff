"""Kernels for y = x W^T: a folder for each, with the kernel, its launch and its launch configurations."""
