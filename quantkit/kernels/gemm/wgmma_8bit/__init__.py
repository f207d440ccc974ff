"""`fused-wgmma-8bit`: WGMMA GEMM of 8-bit operands, for inputs that a scheme rounds, on Hopper."""
