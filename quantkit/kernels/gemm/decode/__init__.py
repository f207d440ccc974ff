"""`fused-gemv`: GEMV and GEMM for up to 16 rows of x; the warps of a program divide K (sliced-K)."""
