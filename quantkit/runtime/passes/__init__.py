"""Graph passes over a traced decoding step or prompt: fuse operations into fewer kernels, fold constants."""
