"""`fused-wgmma`: warp-specialized WGMMA GEMM with stream-K, on Hopper."""
