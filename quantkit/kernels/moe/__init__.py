"""Mixture of experts: router, sorting of tokens by expert (MoE permute), grouped GEMM and its activation."""
