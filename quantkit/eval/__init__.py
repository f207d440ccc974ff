"""Evaluation: what quantizing cost in accuracy and what it bought in memory."""
