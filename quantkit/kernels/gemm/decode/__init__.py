"""`fused-gemv`: sliced-K GEMV and GEMM for up to 16 rows of x."""
