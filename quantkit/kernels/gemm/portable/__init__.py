"""`tl.dot` kernels that run on any GPU with Triton: a GEMV and a GEMM with split-K."""
