"""Mixture of experts: router, MoE permute (sort tokens by expert), grouped GEMM."""
