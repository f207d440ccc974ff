"""Graph passes over a traced step: match patterns, fuse operations into fewer kernels, fold constants."""
