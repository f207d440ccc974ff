"""Checkpoint directories: read lazily and mistrustfully, written atomically, resumable."""
