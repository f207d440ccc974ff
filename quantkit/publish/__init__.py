"""Publish a packed checkpoint: its model card, and its upload to the hub."""
