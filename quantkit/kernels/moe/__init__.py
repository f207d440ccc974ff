"""Mixtures of experts: router, token permutation, grouped GEMM."""
