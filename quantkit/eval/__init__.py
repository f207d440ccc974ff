"""Evaluate what quantizing cost in accuracy and saved in memory."""
