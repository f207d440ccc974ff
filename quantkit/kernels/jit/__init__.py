"""Launch Triton kernels without Triton's lookup, and compile them in a pool of processes."""
