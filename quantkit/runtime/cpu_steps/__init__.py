"""Decoding steps on a CPU: traced once, replayed as a flat list of operations."""
