"""Dequantize rows of the weight, then multiply with the library's GEMM."""
