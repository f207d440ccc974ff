"""Whole models: what their parameters are, quantizing, the transformers plug-in, loading, generation."""
