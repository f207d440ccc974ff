"""`fused-small-m`: small-M GEMM with optional split-K, up to 32 rows of x."""
