"""Kernels: y = x W^T on packed tensors. Nothing here knows how the codes were chosen."""
