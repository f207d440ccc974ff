"""Checkpoint directories: read lazily and without trust, written atomically, resumable."""
