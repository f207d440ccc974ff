"""Graph passes over a traced step: find patterns, fuse operations into fewer kernels, fold constants."""
